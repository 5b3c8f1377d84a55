"""Between a store and the memory of GPUs: the seam, and the simplest way across it.

`SimpleDeviceIO` copies from and to memory that is not page-locked, which is slow and needs nothing.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from snapagent.gpu.driver import address_of
from snapagent.gpu.stream import StreamReport
from snapagent.memory.buffers import BUFFER_BYTES
from snapstore.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapagent.gpu.driver import Driver, Gpu
    from snapagent.memory.buffers import FillBuffers
    from snapagent.memory.lent import LentRegion
    from snapstore import FileWriter, SnapshotFile

__all__ = ["DeviceIO", "DeviceIOs", "FillWork", "SimpleDeviceIO"]

_PART_BYTES = 32 << 20
assert _PART_BYTES <= BUFFER_BYTES, "a part is read into one buffer"


class FillWork(NamedTuple):
    """A region of a GPU, and the file of a snapshot that has its bytes."""

    region: LentRegion
    file: SnapshotFile


class DeviceIO(Protocol):
    """Moves bytes between a store and the memory of one GPU, for one restore or capture."""

    def fill(
        self,
        work: Sequence[FillWork],
        *,
        stop: threading.Event,
        region_done: Callable[[FillWork], None],
        progress: Callable[[int], None],
    ) -> StreamReport:
        """Fill regions. Returns when all are filled, or soon after `stop` was set.

        Every byte is written, zeros as well: device memory is not known to be zeros.

        Args:
            work: All regions of this GPU.
            stop: Set by others when the restore has failed.
            region_done: Told of each region when all of it is there and was checked; on any thread.
            progress: Told of bytes of data that are in their place; on any thread.

        Returns:
            Where the bytes came from, and what took the time.

        Raises:
            IntegrityError: Data are damaged; nothing of that is told to be done.
            GpuFailed: The GPU failed.
            BackendError: The storage did.
        """

    def store(self, region: LentRegion, file: FileWriter, *, stop: threading.Event) -> None:
        """Store a region; several threads may do so at once. Discards the file if it is stopped.

        Raises:
            GpuFailed: The GPU failed.
            BackendError: The storage did.
        """

    def close(self) -> None:
        """Give back what it has; nobody fills or stores any more. Idempotent."""


class SimpleDeviceIO:
    """Copies through memory that is not page-locked, one region after the other."""

    def __init__(self, gpu: Gpu, buffers: FillBuffers | None = None) -> None:
        """Take over an opened GPU; `buffers` are only needed to fill."""
        self._gpu = gpu
        self._buffers = buffers

    def fill(
        self,
        work: Sequence[FillWork],
        *,
        stop: threading.Event,
        region_done: Callable[[FillWork], None],
        progress: Callable[[int], None],
    ) -> StreamReport:
        """Fill regions; see `DeviceIO`."""
        report = StreamReport(self._gpu.device.uuid, threads=1)
        clock = SystemClock()
        begin_s = clock.monotonic_s()
        for one in work:
            with self._gpu.mapped(one.region.fd, one.region.length) as address:
                self._fill(one, address, stop, progress, report)
            if stop.is_set():
                break
            region_done(one)
        report.seconds = clock.monotonic_s() - begin_s
        return report

    def _fill(
        self,
        one: FillWork,
        address: int,
        stop: threading.Event,
        progress: Callable[[int], None],
        report: StreamReport,
    ) -> None:
        gpu, clock = self._gpu, SystemClock()
        assert self._buffers is not None, "given to those who fill"
        stream = gpu.stream_create()
        with contextlib.ExitStack() as stack:
            stack.callback(gpu.stream_destroy, stream)
            # Whatever happens, nothing may be under way when the memory is unmapped.
            stack.callback(gpu.stream_synchronize, stream)
            for extent in one.file.ranges(about_bytes=_PART_BYTES):
                if extent.is_zeros:
                    gpu.fill(address + extent.offset, 0, extent.length, stream)
                    report.zero_bytes += extent.length
                    continue
                end = extent.offset + extent.length
                for offset in range(extent.offset, end, BUFFER_BYTES):
                    if stop.is_set():
                        return
                    length = min(BUFFER_BYTES, end - offset)
                    with self._buffers.borrow() as buffer, buffer[:length] as view:
                        begin_s = clock.monotonic_s()
                        one.file.read_into(offset, view, streaming=True)
                        read_s = clock.monotonic_s()
                        gpu.copy_in(address + offset, address_of(view), length, stream)
                        gpu.stream_synchronize(stream)
                        report.read_s += read_s - begin_s
                        report.wait_s += clock.monotonic_s() - read_s
                    report.bytes += length
                    progress(length)

    def store(self, region: LentRegion, file: FileWriter, *, stop: threading.Event) -> None:
        """Store a region; see `DeviceIO`."""
        gpu = self._gpu
        with gpu.mapped(region.fd, region.length) as address:
            stream = gpu.stream_create()
            try:
                while file.size_bytes < region.length:
                    if stop.is_set():
                        file.discard()
                        return
                    done = file.size_bytes
                    with file.buffer() as room, room[: region.length - done] as view:
                        count = view.nbytes
                        gpu.copy_out(address_of(view), address + done, count, stream)
                        gpu.stream_synchronize(stream)
                    file.advance(count)
            finally:
                gpu.stream_destroy(stream)

    def close(self) -> None:
        """Let go of the GPU."""
        self._gpu.close()


class DeviceIOs:
    """One for each GPU, made when first needed. A context manager. Thread-safe."""

    def __init__(self, driver: Callable[[], Driver], make: Callable[[Gpu], DeviceIO]) -> None:
        """Prepare; the driver is not asked for yet."""
        self._driver = driver
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[str, DeviceIO] = {}

    def of(self, uuid: str) -> DeviceIO:
        """Return that of a GPU.

        Raises:
            GpuUnavailable: There is no such GPU.
            GpuFailed: It cannot be used.
        """
        with self._lock:
            found = self._made.get(uuid)
            if found is None:
                driver = self._driver()
                found = self._make(driver.open(driver.device(uuid).ordinal))
                self._made[uuid] = found
            return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            made, self._made = self._made, {}
        for one in made.values():
            one.close()
