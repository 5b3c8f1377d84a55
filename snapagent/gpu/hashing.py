"""BLAKE3 of pieces of a GPU's memory, computed where they are."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from snapagent.gpu.driver import U32, U64, memory_at
from snapagent.gpu.hash_plan import VALUE_BYTES, HashPlan, batches, plan_hashes
from snapstore.units import align_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapagent.gpu.driver import Gpu

__all__ = ["PIECE_BYTES_MAX", "JoinedPiece", "PieceHasher", "device_buffer"]

_LEAVES_MAX: Final = 1 << 20
"""Hashed by one launch: a gibibyte, which keeps the largest GPU busy for half a millisecond, so
that what a launch costs by itself does not matter."""
_PIECES_MAX: Final = 1 << 15
PIECE_BYTES_MAX: Final = _LEAVES_MAX * 1024
_LEVELS_MAX: Final = 21
_TABLES_BYTES: Final = 16 * _PIECES_MAX + 4 * _LEVELS_MAX * (_PIECES_MAX + 1)
_WORK_BYTES: Final = (_LEAVES_MAX * VALUE_BYTES, (_LEAVES_MAX + _PIECES_MAX) // 2 * VALUE_BYTES)
_THREADS: Final = 128

Numbers = npt.NDArray[np.int64]


class JoinedPiece(NamedTuple):
    """Memory that is hashed together with other: of the device, or page-locked of the host."""

    address: int
    length: int
    is_on_host: bool = False


class PieceHasher:
    """Hashes memory of one GPU. Thread-safe: one caller at a time, others wait.

    A context manager. It takes 55 MB of the GPU's memory and 4 MB of page-locked memory, whatever
    is hashed.
    """

    def __init__(self, gpu: Gpu, code: bytes) -> None:
        """Load the kernels.

        Args:
            gpu: Stays open for as long as this is used.
            code: Of the kernels, as `load_kernels` gives it.
        """
        self._gpu = gpu
        self._lock = threading.Lock()
        self._uploaded: HashPlan | None = None
        """Whose tables the device has."""
        with contextlib.ExitStack() as stack:
            module = gpu.module_load(code)
            stack.callback(gpu.module_unload, module)
            self._leaf_values = gpu.module_function(module, "leaf_values")
            self._join_values = gpu.module_function(module, "join_values")
            self._stream = gpu.stream_create()
            stack.callback(gpu.stream_destroy, self._stream)
            self._tables = stack.enter_context(device_buffer(gpu, _TABLES_BYTES))
            self._work = [stack.enter_context(device_buffer(gpu, size)) for size in _WORK_BYTES]
            self._staging = gpu.host_alloc(_TABLES_BYTES)
            stack.callback(gpu.host_free, self._staging)
            self._staged = np.frombuffer(memory_at(self._staging, _TABLES_BYTES), np.uint8)
            stack.callback(gpu.stream_synchronize, self._stream)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        with self._lock:
            self._stack.close()

    def digests(self, addresses: Numbers, lengths: Numbers) -> npt.NDArray[np.uint8]:
        """Hash pieces of memory, each of 1 byte to 1 GiB; returns a row of 32 bytes for each.

        Whatever writes that memory must have been waited for.

        Raises:
            GpuFailed: The driver failed.
        """
        found = np.empty((len(lengths), VALUE_BYTES), np.uint8)
        begun: slice | None = None
        with self._lock:
            for some in batches(lengths, leaves_max=_LEAVES_MAX, pieces_max=_PIECES_MAX):
                # Planned while the GPU is busy with the batch before.
                plan = plan_hashes(addresses[some], lengths[some])
                if begun is not None:
                    self._finish(found[begun])
                self._begin(plan)
                begun = some
            if begun is not None:
                self._finish(found[begun])
        return found

    def joined_digest(self, pieces: Sequence[JoinedPiece], room: int) -> bytes:
        """Hash pieces as if they were one, of at most 1 GiB, and return its digest.

        Args:
            pieces: In order.
            room: Address of device memory for all of them, to which they are copied: that costs
                the device a tenth of what hashing does. Undefined afterwards.

        Raises:
            GpuFailed: The driver failed.
        """
        gpu = self._gpu
        found = np.empty((1, VALUE_BYTES), np.uint8)
        with self._lock:
            end = room
            for piece in pieces:
                if piece.is_on_host:
                    gpu.copy_in(end, piece.address, piece.length, self._stream, is_locked=True)
                else:
                    gpu.copy_within(end, piece.address, piece.length, self._stream)
                end += piece.length
            self._begin(_plan_of_one(room, end - room))
            self._finish(found)
        return found.tobytes()

    def _begin(self, plan: HashPlan) -> None:
        gpu, stream = self._gpu, self._stream
        if plan is not self._uploaded:
            self._staged[: len(plan.tables)] = plan.tables
            gpu.copy_in(self._tables, self._staging, len(plan.tables), stream, is_locked=True)
            self._uploaded = plan
        pieces = U32(plan.pieces)
        for number, level in enumerate(plan.levels):
            first, values = U64(self._tables + level.first), U64(self._work[number % 2])
            arguments: list[U32 | U64]
            if number == 0:
                addresses = U64(self._tables + plan.addresses)
                lengths = U64(self._tables + plan.lengths)
                function = self._leaf_values
                arguments = [addresses, lengths, first, pieces, values]
            else:
                below = U64(self._work[(number - 1) % 2])
                first_below = U64(self._tables + plan.levels[number - 1].first)
                function = self._join_values
                arguments = [below, first_below, first, pieces, values]
            blocks = -(-level.values // _THREADS)
            gpu.launch(function, (blocks, 1, 1), (_THREADS, 1, 1), arguments, stream)
        last = self._work[(len(plan.levels) - 1) % 2]
        # The tables have been read long before this is written over them.
        gpu.copy_out(self._staging, last, plan.pieces * VALUE_BYTES, stream, is_locked=True)

    def _finish(self, into: npt.NDArray[np.uint8]) -> None:
        self._gpu.stream_synchronize(self._stream)
        into[:] = self._staged[: into.nbytes].reshape(into.shape)


@functools.lru_cache(maxsize=8)
def _plan_of_one(address: int, length: int) -> HashPlan:
    """Plan as for any pieces; kept, since packs that are full are equally long."""
    return plan_hashes(np.array([address], np.int64), np.array([length], np.int64))


@contextlib.contextmanager
def device_buffer(gpu: Gpu, size_bytes: int) -> Iterator[int]:
    """Lend the address of device memory of at least that size; its content is undefined."""
    ordinal = gpu.device.ordinal
    length = align_up(size_bytes, gpu.driver.granularity(ordinal))
    fd = gpu.driver.make_memory_file(ordinal, length)
    try:
        with gpu.mapped(fd, length) as address:
            yield address
    finally:
        os.close(fd)
