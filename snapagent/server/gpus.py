"""The daemon's GPUs: made ready at its start, and the node's cache filled after restores.

One thread sees to both; while it fills the cache it has others to help.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from snapagent import api
from snapagent.errors import GpuUnavailable
from snapagent.gpu.arena import SLOT_BYTES
from snapagent.memory.warming import warm_external, warm_threads
from snapagent.precedence import Precedence
from snapagent.restore import exact_name
from snapstore import SnapError, SnapshotId

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from snapagent.gpu.engine import GpuEngine
    from snapagent.gpu.owned import GpuMemory
    from snapagent.restore import RestoreResult
    from snapagent.server.stores import Stores

__all__ = ["DaemonGpus"]


_END_S_MAX: Final = 30.0
"""After that the store does not answer, and nothing of what is left needs to end in order."""


_AHEAD_S: Final = 60.0
_BEHIND_S: Final = 5.0
"""Where captures and restores never cease, the cache is filled a twelfth of the time all the same:
it makes the restores that follow shorter."""


class _Restored(NamedTuple):
    """What to have in the cache."""

    store: str
    integrity: str | None
    name: str
    """Of the snapshot by its id, since names move."""


class DaemonGpus:
    """What the daemon does for GPUs beside its jobs. Thread-safe.

    On a machine without a driver it does nothing.
    """

    def __init__(
        self, gpus: GpuMemory, stores: Stores, *, prepare: bool, say: Callable[[str], None]
    ) -> None:
        """Prepare; nothing is begun before `start`.

        Args:
            gpus: Of the broker, which is closed after this.
            stores: Where restored snapshots come from; closed after this.
            prepare: Whether to make at once what each GPU needs.
            say: Told what could not be done.
        """
        self._gpus = gpus
        self._stores = stores
        self._prepare = prepare
        self._say = say
        self._jobs = Precedence(ahead_s=_AHEAD_S, behind_s=_BEHIND_S)
        self._lock = threading.Lock()
        self._waiting: set[_Restored] = set()
        self._queue: queue.SimpleQueue[_Restored | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapagent-gpus", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for what is being made or fetched at the moment, unless the store hangs."""
        self._stop.set()
        self._queue.put(None)
        self._thread.join(_END_S_MAX)

    def job(self) -> AbstractContextManager[None]:
        """Let the filling of the cache wait for a capture or restore, for a `with` block."""
        return self._jobs.taken()

    def restored(self, store: str, integrity: str | None, done: RestoreResult) -> None:
        """Let the cache have what a restore filled GPUs with, unless it has all of that."""
        sources = done.external_sources
        if done.gpu_bottleneck is None or not (sources["store"] or sources["cache"]):
            return
        name = exact_name(done.name, SnapshotId.parse(done.snapshot))
        one = _Restored(store, integrity, name)
        with self._lock:
            if one in self._waiting:
                return
            self._waiting.add(one)
        self._queue.put(one)

    def describe(self) -> api.GpusStatus | None:
        """Tell what there is; None if no driver was needed yet, or there is none."""
        driver, engines = self._gpus.loaded, self._gpus.engines
        if driver is None:
            return None
        made = {engine.gpu.device.uuid: engine for engine in engines.made}
        with self._lock:
            waiting = len(self._waiting)
        return api.GpusStatus(
            gpus=[
                _gpu_status(device.uuid, device.name, made.get(device.uuid))
                for device in driver.devices
            ],
            registered_bytes=engines.registered.locked_bytes,
            registered_bytes_max=engines.registered.budget_bytes,
            warming=waiting,
        )

    def _run(self) -> None:
        if self._prepare:
            try:
                self._gpus.engines.prepare(self._gpus.driver)
            except GpuUnavailable:
                pass  # Most nodes have none, and need none.
            except SnapError as error:
                self._say(f"GPUs are not ready, the first restore tries again: {error}")
        while (one := self._queue.get()) is not None and not self._stop.is_set():
            try:
                self._warm(one)
            except SnapError as error:
                self._say(f"the node's cache has not all of {one.name}: {error}")
            finally:
                with self._lock:
                    self._waiting.discard(one)

    def _warm(self, one: _Restored) -> None:
        with self._stores.use(one.store, one.integrity) as store:
            if store.cache is not None and store.cache.has_decoded:
                warm_external(
                    store.snapshot(one.name),
                    self._gpus,
                    threads=warm_threads(store.options),
                    precedence=self._jobs,
                    stop=self._stop,
                )


def _gpu_status(uuid: str, model: str, engine: GpuEngine | None) -> api.GpuStatus:
    fill = engine.last_fill if engine is not None else None
    return api.GpuStatus(
        uuid=uuid,
        model=model,
        ready=engine is not None,
        workers=engine.stream.workers if engine is not None else 0,
        pinned_bytes=engine.stream.arena.slots * SLOT_BYTES if engine is not None else 0,
        hashes=engine is not None and engine.hasher is not None,
        without_kernels=(engine.without_kernels or None) if engine is not None else None,
        last_fill_bottleneck=fill.bottleneck if fill is not None else None,
    )
