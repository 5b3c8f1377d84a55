"""Memory of one GPU into a snapshot: hashed there, so that only what the store lacks comes over.

The workload has released the memory, so nothing changes it meanwhile. What it hashes to on the GPU
is believed where the store has such chunks; of what comes over, one chunk in each 12 MiB is hashed
again on the way into the store, or all if that is asked for (`FileWriter.write_hashed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from snapagent.gpu.capture_source import CaptureLanes, DeviceSource
from snapagent.gpu.checking import zero_digests
from snapstore import DEVICE_CHUNK_BYTES, HashedChunks
from snapstore.clock import SystemClock

if TYPE_CHECKING:
    import threading

    from snapagent.gpu.arena import PinnedArena
    from snapagent.gpu.driver import Gpu
    from snapagent.gpu.hashing import PieceHasher
    from snapstore import ChunkSource, FileWriter

__all__ = ["CaptureReport", "GpuCapture"]


@dataclass(slots=True)
class CaptureReport:
    """What storing one region did.

    Attributes:
        bytes: Of the region.
        copied_bytes: That came over to the processor.
        hash_s: What hashing on the GPU took.
        seconds: All of it, until everything is in the hands of the writer.
    """

    bytes: int = 0
    copied_bytes: int = 0
    hash_s: float = 0.0
    seconds: float = 0.0


class GpuCapture:
    """Stores memory of one GPU. Thread-safe; a context manager."""

    def __init__(
        self,
        gpu: Gpu,
        arena: PinnedArena,
        hasher: PieceHasher | None,
        *,
        check_all: bool = False,
    ) -> None:
        """Prepare.

        Args:
            gpu: Which; all three stay open for as long as this is used.
            arena: Slots near it, for what comes over.
            hasher: Hashes on it; without one all bytes come over.
            check_all: See `FileWriter.write_hashed`.
        """
        self._check_all = check_all
        self._hasher = hasher
        self._clock = SystemClock()
        self._lanes = CaptureLanes(gpu, arena, hasher)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the streams back. Idempotent."""
        self._lanes.close()

    def store(
        self, address: int, length: int, file: FileWriter, *, stop: threading.Event
    ) -> CaptureReport:
        """Write memory, the whole of an allocation, into a file of class `device`.

        Returns when the memory is not needed any more; the file is still open.

        Raises:
            Interrupted: `stop` was set.
            SnapError: The writing failed, or the driver.
        """
        begin = self._clock.monotonic_s()
        report = CaptureReport(bytes=length)
        source = DeviceSource(self._lanes, address, stop)
        if self._hasher is None:
            _store_bytes(length, file, source)
            report.copied_bytes = length
        else:
            chunks = _hashed(self._hasher, address, length)
            report.hash_s = self._clock.monotonic_s() - begin
            totals = file.write_hashed(chunks, source, check_all=self._check_all)
            report.copied_bytes = totals.loaded_bytes
        report.seconds = self._clock.monotonic_s() - begin
        return report


def _store_bytes(length: int, file: FileWriter, source: ChunkSource) -> None:
    while file.size_bytes < length:
        left = length - file.size_bytes
        with file.buffer() as room, room[:left] as view:
            count = view.nbytes
            source.load(file.size_bytes, count, view)
        file.advance(count)


def _hashed(hasher: PieceHasher, address: int, length: int) -> HashedChunks:
    """Hash an allocation on its grid, and find the zeros by what they hash to."""
    offsets = np.arange(0, length, DEVICE_CHUNK_BYTES, dtype=np.int64)
    lengths = np.minimum(DEVICE_CHUNK_BYTES, length - offsets)
    digests = hasher.digests(address + offsets, lengths)
    zeros = (digests == zero_digests(lengths)).all(axis=1)
    return HashedChunks(lengths=lengths, ids=digests, zeros=zeros)
