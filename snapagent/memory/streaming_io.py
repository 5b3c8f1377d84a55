"""Memory of GPUs through the engines of the agent: as fast as the bus, hashed on the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from snapagent.errors import GpuFailed
from snapagent.gpu.registered import CachedBytes
from snapagent.gpu.stream import StreamTarget
from snapagent.memory.device_io import SimpleDeviceIO
from snapstore.errors import Interrupted

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from snapagent.gpu.driver import Gpu
    from snapagent.gpu.engine import GpuEngines
    from snapagent.gpu.stream import StreamReport
    from snapagent.memory.buffers import FillBuffers
    from snapagent.memory.device_io import DeviceIO, FillWork
    from snapagent.memory.lent import LentRegion
    from snapagent.precedence import Precedence
    from snapstore import FileWriter, SnapshotFile

__all__ = ["OpenCached", "StreamingDeviceIO", "make_device_io"]

OpenCached = Callable[["SnapshotFile"], contextlib.AbstractContextManager[CachedBytes]]
"""Opens a file of a snapshot in the node's cache."""


def make_device_io(
    gpu: Gpu,
    engines: GpuEngines,
    buffers: FillBuffers | None = None,
    cached: OpenCached | None = None,
    precedence: Precedence | None = None,
) -> DeviceIO:
    """Take over an opened GPU; without what an engine needs, the simplest way still works.

    Args:
        gpu: Which.
        engines: Of the agent.
        buffers: Needed to fill without an engine.
        cached: See `StreamingDeviceIO`.
        precedence: What filling gives way to.
    """
    try:
        return StreamingDeviceIO(gpu, engines, cached, precedence)
    except GpuFailed:
        # The system does not lock pages, or the GPU has no room for the little that it takes.
        return SimpleDeviceIO(gpu, buffers)


class StreamingDeviceIO:
    """A `DeviceIO` that uses what the agent keeps of a GPU."""

    def __init__(
        self,
        gpu: Gpu,
        engines: GpuEngines,
        cached: OpenCached | None = None,
        precedence: Precedence | None = None,
    ) -> None:
        """Take over an opened GPU.

        Args:
            gpu: Which.
            engines: Have what it needs, or make it now.
            cached: Opens a file of a snapshot in the node's cache, if there is one.
            precedence: What filling gives way to.
        """
        self._gpu = gpu
        self._engines = engines
        self._engine = engines.of(gpu)
        self._cached = cached
        self._precedence = precedence

    def fill(
        self,
        work: Sequence[FillWork],
        *,
        stop: threading.Event,
        region_done: Callable[[FillWork], None],
        progress: Callable[[int], None],
    ) -> StreamReport:
        """Fill regions; see `DeviceIO`."""
        with contextlib.ExitStack() as stack:
            targets: list[StreamTarget] = []
            kept: list[CachedBytes | None] = []
            for one in work:
                mapped = self._engine.gpu.mapped(one.region.fd, one.region.length)
                target = StreamTarget(one.file.entry.rank, one.file, stack.enter_context(mapped))
                cached = None
                if self._cached is not None:
                    cached = stack.enter_context(self._cached(one.file))
                    lent = stack.enter_context(self._engines.registered.lend(cached))
                    ready = cached if cached.fd >= 0 else None
                    target = target._replace(source=lent, ready=ready)
                targets.append(target)
                kept.append(cached)

            def fill(numbers: Sequence[int]) -> StreamReport:
                return self._engine.stream.fill(
                    [targets[number] for number in numbers],
                    stop=stop,
                    target_done=lambda at: region_done(work[numbers[at]]),
                    progress=progress,
                    precedence=self._precedence,
                )

            report = fill(range(len(targets)))
            suspects, report.suspects = report.suspects, []
            if suspects:
                for number in suspects:
                    self._forget(kept[number])
                    targets[number] = targets[number]._replace(source=None, ready=None)
                report.add(fill(suspects))
            self._engine.last_fill = report
            return report

    def _forget(self, cached: CachedBytes | None) -> None:
        """Let nobody have what is damaged in the cache."""
        if cached is not None:
            self._engines.registered.drop(cached)
            cached.discard()

    def store(self, region: LentRegion, file: FileWriter, *, stop: threading.Event) -> None:
        """Store a region; see `DeviceIO`."""
        with self._engine.gpu.mapped(region.fd, region.length) as address:
            try:
                self._engine.last_capture = self._engine.capture.store(
                    address, region.length, file, stop=stop
                )
            except Interrupted:
                if not stop.is_set():
                    raise
                file.discard()

    def close(self) -> None:
        """Let go of the GPU; the engine keeps it."""
        self._gpu.close()
