"""External memory out of a snapshot, beside CRIU: regions are filled by many threads.

Each thread reads a part into a buffer that it uses again, checks it, and writes it into the file of
the region. That costs a copy and is faster all the same than reading into a mapping of the region:
a page that is written as a whole need not be zeroed, nor be faulted in. Large pages cannot be
written like that and are mapped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from snapagent.errors import AgentError
from snapagent.memory.buffers import BUFFER_BYTES
from snapagent.memory.device_io import DeviceIOs, FillWork
from snapagent.memory.placement import HOST, from_placement
from snapagent.memory.streaming_io import make_device_io
from snapagent.precedence import Precedence
from snapstore.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapagent.gpu.driver import Gpu
    from snapagent.gpu.stream import StreamReport
    from snapagent.memory.device_io import DeviceIO
    from snapagent.memory.lent import Admissions, AdmittedSession, LentRegion
    from snapagent.memory.placement import Rank, SessionPlace
    from snapstore import CachedFile, Snapshot, SnapshotFile

__all__ = ["RegionFill", "read_places"]

_PART_BYTES = 32 << 20
"""Long, since frames on both sides of a cut are read apart and copied: with 8 MiB that is a third
of the processor time."""
assert _PART_BYTES * 3 // 2 <= BUFFER_BYTES, "as long as a range can be"
_WRITE_BYTES = 1 << 20
"""Written at a time, so that a failure elsewhere is noticed soon."""


def read_places(snapshot: Snapshot) -> list[tuple[Rank, SessionPlace]]:
    """Read what external memory a snapshot has, and of which rank.

    Raises:
        AgentError: It says what cannot be.
        IntegrityError: It is damaged.
    """
    found: list[tuple[Rank, SessionPlace]] = []
    for rank in snapshot.ranks():
        of = f"rank {rank.number} of snapshot {snapshot.id.short}"
        found += [(rank.number, place) for place in from_placement(rank.meta.placement, of=of)]
    if len({place.session for _, place in found}) < len(found):
        raise AgentError(
            f"two ranks of snapshot {snapshot.id.short} have memory of the same process",
            next_step="the snapshot is damaged or hostile: restore another one",
        )
    for _, place in found:
        for region in place.regions:
            entry = snapshot.entry(region.file)
            if not entry.is_file or entry.size_bytes != region.length:
                raise AgentError(
                    f"{region.file} of snapshot {snapshot.id.short} is not the {region.length} "
                    f"bytes of region {region.region}",
                    next_step="the snapshot is damaged or hostile: restore another one",
                )
    return found


@dataclass(slots=True)
class _Open:
    """A session that is being filled."""

    session: AdmittedSession
    left: int


@dataclass(slots=True)
class _OnGpu:
    """Regions of one GPU that are to be filled, and where each belongs."""

    uuid: str
    work: list[FillWork]
    homes: dict[int, _Open]
    """By the descriptor of a region."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a region to be filled."""

    order: int
    offset: int
    length: int
    file: SnapshotFile
    kept: CachedFile | None
    region: LentRegion
    home: _Open

    @property
    def is_cached(self) -> bool:
        """Whether all of it is in the node's cache."""
        return self.kept is not None and self.kept.filled(self.offset, self.length)


class RegionFill:
    """Fills the memory of admitted sessions. A context manager: leaving it early gives up.

    Beside what the store holds, memory is that of the buffers, which all restores share.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        admissions: Admissions,
        *,
        threads: int,
        on_error: Callable[[BaseException], None],
        device_io: Callable[[Gpu], DeviceIO] | None = None,
        precedence: Precedence | None = None,
    ) -> None:
        """Prepare.

        Args:
            snapshot: Where the bytes are.
            admissions: What to fill; each session is told when it is whole.
            threads: How many.
            on_error: Gets the first error, on some thread.
            device_io: Makes what fills memory of a GPU; by default the agent's engines.
            precedence: What it gives way to.
        """
        self._snapshot = snapshot
        gpus, buffers = admissions.gpus, admissions.buffers
        cache = snapshot.node_cache
        cached = cache.file if cache is not None and cache.has_decoded else None
        self._precedence = precedence or Precedence()
        self._device_ios = DeviceIOs(
            lambda: gpus.driver,
            device_io
            or (lambda gpu: make_device_io(gpu, gpus.engines, buffers, cached, self._precedence)),
        )
        self._cached = cached
        self._host_sources = {"store": 0, "cache": 0, "registered": 0}
        self._kept = contextlib.ExitStack()
        """Files of the node's cache that memory of the host is filled from."""
        self.gpu_fills: list[StreamReport] = []
        """What was done for each GPU that is whole."""
        self._on_gpus: dict[str, _OnGpu] = {}
        self._sessions = list(admissions.sessions)
        self._buffers = admissions.buffers
        self._threads_wanted = threads
        self._on_error = on_error
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._over = threading.Event()
        self._parts: list[_Part] = []
        self._sessions_left = len(self._sessions)
        self._gpus_left = 0
        self._workers: list[threading.Thread] = []
        self._planner = threading.Thread(target=self._plan, name="snapagent-external")
        self.total_bytes = sum(one.length for each in self._sessions for one in each.regions)
        self.done_bytes = 0
        """Of data; parts that are known to be zeros stay holes and do not count."""
        self.ended_s: float | None = None
        """When all sessions were whole, by the monotonic clock."""

    def __enter__(self) -> Self:
        """Begin; returns at once."""
        self._planner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._planner.join()
        for worker in self._workers:
            worker.join()
        self._device_ios.__exit__()
        self._kept.close()
        for session in self._sessions:
            session.close_regions()

    @property
    def sources(self) -> dict[str, int]:
        """Bytes of data by where they came from, of what is whole: see `RestoreResult`."""
        with self._lock:
            found = dict(self._host_sources)
            for fill in self.gpu_fills:
                found["store"] += fill.store_bytes
                found["cache"] += fill.ready_bytes
                found["registered"] += fill.direct_bytes
            return found

    @property
    def gpu_bottleneck(self) -> str | None:
        """Which step the slowest GPU waited for; none without any."""
        with self._lock:
            slowest = max(self.gpu_fills, key=lambda fill: fill.seconds, default=None)
        return slowest.bottleneck if slowest is not None else None

    def wait_filled(self, timeout_s: float | None = None) -> bool:
        """Wait until all sessions are whole; returns whether they are."""
        return self._over.wait(timeout_s)

    def _plan(self) -> None:
        """Divide everything into parts; neighbours in the store are read one after the other."""
        try:
            parts: list[_Part] = []
            cached = self._cached
            for session in self._sessions:
                home = _Open(session, 0)
                for place, region in zip(session.place.regions, session.regions, strict=True):
                    if self._stop.is_set():
                        return
                    file = self._snapshot.open(place.file)
                    if region.device != HOST:
                        self._add_on_gpu(region, file, home)
                        continue
                    kept = self._kept.enter_context(cached(file)) if cached else None
                    more = _divide(file, kept, region, home)
                    home.left += len(more)
                    parts += more
                if not home.left:
                    self._session_filled(home)
            parts.sort(key=lambda part: -part.order)
            self._parts = parts
            self._gpus_left = len(self._on_gpus)
            for on_gpu in self._on_gpus.values():
                worker = threading.Thread(
                    target=self._fill_gpu, args=(on_gpu,), name="snapagent-fill-gpu"
                )
                self._workers.append(worker)
                worker.start()
            for number in range(min(self._threads_wanted, len(parts))):
                worker = threading.Thread(target=self._work, name=f"snapagent-fill-{number}")
                self._workers.append(worker)
                worker.start()
            self._check_over()
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            self._failed(error)

    def _add_on_gpu(self, region: LentRegion, file: SnapshotFile, home: _Open) -> None:
        on_gpu = self._on_gpus.setdefault(region.device, _OnGpu(region.device, [], {}))
        on_gpu.work.append(FillWork(region, file))
        on_gpu.homes[region.fd] = home
        home.left += 1

    def _fill_gpu(self, on_gpu: _OnGpu) -> None:
        try:
            report = self._device_ios.of(on_gpu.uuid).fill(
                on_gpu.work,
                stop=self._stop,
                region_done=lambda one: self._one_done(on_gpu.homes[one.region.fd]),
                progress=self._count,
            )
            with self._lock:
                self.gpu_fills.append(report)
                self._gpus_left -= 1
            self._check_over()
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            self._failed(error)

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._precedence.give_way(self._stop.is_set)
                with self._lock:
                    if not self._parts:
                        return
                    part = self._parts.pop()
                with self._buffers.borrow() as buffer:
                    if not self._stop.is_set():
                        self._fill(part, buffer)
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            self._failed(error)

    def _fill(self, part: _Part, buffer: memoryview) -> None:
        source = "cache" if part.is_cached else "store"
        if part.region.huge:
            _fill_mapped(part)
        else:
            with buffer[: part.length] as view:
                part.file.read_into(part.offset, view, streaming=True)
                self._write(part, view)
        self._count(part.length)
        with self._lock:
            self._host_sources[source] += part.length
        self._one_done(part.home)

    def _count(self, length: int) -> None:
        with self._lock:
            self.done_bytes += length

    def _one_done(self, home: _Open) -> None:
        with self._lock:
            home.left -= 1
            is_whole = not home.left
        if is_whole:
            self._session_filled(home)
            self._check_over()

    def _write(self, part: _Part, data: memoryview) -> None:
        done = 0
        while done < part.length and not self._stop.is_set():
            with data[done : done + _WRITE_BYTES] as piece:
                done += os.pwrite(part.region.fd, piece, part.offset + done)

    def _session_filled(self, home: _Open) -> None:
        if not self._stop.is_set():
            home.session.filled()
            with self._lock:
                self._sessions_left -= 1

    def _check_over(self) -> None:
        with self._lock:
            # Only when it can be told, too, what was done for GPUs.
            is_over = not self._sessions_left and not self._gpus_left
            if is_over and self.ended_s is None:
                self.ended_s = SystemClock().monotonic_s()
                self._over.set()

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()
        self._on_error(error)


def _divide(
    file: SnapshotFile, kept: CachedFile | None, region: LentRegion, home: _Open
) -> list[_Part]:
    parts: list[_Part] = []
    for one in file.ranges(about_bytes=_PART_BYTES):
        if one.is_zeros:
            continue
        parts += [
            _Part(
                one.order,
                offset,
                min(BUFFER_BYTES, one.offset + one.length - offset),
                file,
                kept,
                region,
                home,
            )
            for offset in range(one.offset, one.offset + one.length, BUFFER_BYTES)
        ]
    return parts


@contextlib.contextmanager
def _mapped(fd: int, length: int) -> Iterator[memoryview]:
    mapped = mmap.mmap(fd, length)
    with memoryview(mapped) as view:
        yield view
    # After an error its traceback still has views of it: then it goes when that does.
    mapped.close()


def _fill_mapped(part: _Part) -> None:
    with (
        _mapped(part.region.fd, part.region.length) as view,
        view[part.offset : part.offset + part.length] as into,
    ):
        part.file.read_into(part.offset, into, streaming=True)
