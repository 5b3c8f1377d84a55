"""External memory into a snapshot that is being written, beside CRIU: by several threads."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, NamedTuple, Self

from snapagent.errors import AgentError
from snapagent.memory.device_io import DeviceIOs
from snapagent.memory.placement import DIRECTORY, HOST, RegionPlace, SessionPlace, placement_of
from snapagent.memory.streaming_io import make_device_io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from snapagent.gpu.driver import Gpu
    from snapagent.memory.device_io import DeviceIO
    from snapagent.memory.lent import FrozenSession, LentRegion
    from snapagent.memory.placement import Rank
    from snapstore import SnapshotWriter

__all__ = ["RegionStreams"]

_FILE_MODE = 0o600


class _Work(NamedTuple):
    """One region to be stored."""

    rank: Rank
    path: str
    region: LentRegion


class RegionStreams:
    """Stores the memory of frozen sessions. A context manager; leaving it thaws them.

    What the threads hold is the writer's: it gives the buffers, and its budget holds them back.
    """

    def __init__(
        self,
        writer: SnapshotWriter,
        sessions: Sequence[FrozenSession],
        *,
        threads: int,
        on_error: Callable[[BaseException], None],
        device_io: Callable[[Gpu], DeviceIO] | None = None,
    ) -> None:
        """Prepare.

        Args:
            writer: Of the snapshot.
            sessions: What to store; they are thawed by this.
            threads: How many at most.
            on_error: Gets an error, on some thread.
            device_io: Makes what stores memory of a GPU; by default the agent's engines.
        """
        self._writer = writer
        self._sessions = list(sessions)
        self._on_error = on_error
        self._device_ios = DeviceIOs(
            lambda: self._sessions[0].gpus.driver, device_io or self._make_device_io
        )
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._work = [
            _Work(session.rank, _path(number, region), region)
            for number, session in enumerate(self._sessions)
            for region in session.regions
        ]
        self._left = iter(sorted(self._work, key=lambda one: -one.region.length))
        count = min(threads, writer.files_in_place, len(self._work))
        self._threads = [
            threading.Thread(target=self._run, name=f"snapagent-external-{number}")
            for number in range(count)
        ]
        self.size_bytes = sum(one.region.length for one in self._work)
        """Of all regions, the parts that are holes as well."""

    def __enter__(self) -> Self:
        """Begin; returns at once."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.wait()
        self._device_ios.__exit__()
        self.thaw()

    def wait(self) -> None:
        """Wait until all of it is stored, or something failed; `on_error` was told what."""
        for thread in self._threads:
            thread.join()

    def thaw(self) -> None:
        """Let the workloads have their memory again, once nobody reads it any more. Idempotent."""
        for session in self._sessions:
            session.thaw()

    def placements(self) -> Mapping[Rank, Mapping[str, object]]:
        """Say of each rank where its memory was."""
        places: dict[Rank, list[SessionPlace]] = {}
        for number, session in enumerate(self._sessions):
            regions = tuple(
                RegionPlace(
                    region=region.number,
                    order=order,
                    address=region.address,
                    length=region.length,
                    huge=region.huge,
                    file=_path(number, region),
                    device=region.device,
                )
                for order, region in enumerate(session.regions)
            )
            place = SessionPlace(session=session.session, regions=regions)
            places.setdefault(session.rank, []).append(place)
        return {rank: placement_of(sessions) for rank, sessions in places.items() if sessions}

    def _make_device_io(self, gpu: Gpu) -> DeviceIO:
        return make_device_io(gpu, self._sessions[0].gpus.engines)

    def _run(self) -> None:
        try:
            for one in self._each():
                self._store(one)
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits for CRIU
            self._stop.set()
            self._on_error(error)

    def _each(self) -> Iterator[_Work]:
        while not self._stop.is_set():
            with self._lock:
                one = next(self._left, None)
            if one is None:
                return
            yield one

    def _store(self, one: _Work) -> None:
        region = one.region
        data_class = "tensors" if region.device == HOST else "device"
        with self._writer.open_file(
            one.rank, one.path, data_class=data_class, mode=_FILE_MODE
        ) as file:
            if region.device != HOST:
                self._device_ios.of(region.device).store(region, file, stop=self._stop)
                return
            while file.size_bytes < region.length:
                if self._stop.is_set():
                    file.discard()
                    return
                left = region.length - file.size_bytes
                with file.buffer() as room, room[:left] as view:
                    count = os.preadv(region.fd, [view], file.size_bytes)
                if count <= 0:
                    raise AgentError(f"region {region.number} ends at {file.size_bytes} bytes")
                file.advance(count)


def _path(session: int, region: LentRegion) -> str:
    return f"{DIRECTORY}/{session}-{region.number}.mem"
