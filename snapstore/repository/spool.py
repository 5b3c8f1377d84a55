"""Rows grouped by key when they may not fit into memory: a bucket sort with a temporary file.

Chunks and frames of a whole store are counted this way: add what each snapshot has, then walk the
buckets, in which all rows of a key are together. Keys are digests or begin with one, so they fill
the buckets evenly by themselves.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from typing import IO, TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from snapstore.errors import BackendError, OutOfSpace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapstore.format.tables import U64, Mask, Rows

__all__ = ["KeySpool", "begins_of", "temporary_file_errors"]

ROW_DTYPE = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("bytes", "<u8"), ("size", "<u4"), ("group", "<u4")]
)
"""A key of 128 bits; bytes that add up; the size of what the key names; who has it."""

_BUCKETS = 256
_BUCKET_SHIFT = 56
_SORT_COPIES = 4
"""What sorting a table takes, in tables: itself, its parts, the order and the result."""


class KeySpool:
    """Takes rows in any order and gives them back sorted, bucket by bucket. Used by one thread.

    Costs O(n log n) for n rows. Rows of one call with the same key and group become one. Memory
    stays within the budget as long as a 256th of all rows does; beyond it rows wait in an
    anonymous temporary file, at 32 bytes each.
    """

    def __init__(self, *, memory_bytes: int) -> None:
        self._pending_bytes_max = memory_bytes // _SORT_COPIES
        self._pending: list[Rows] = []
        self._pending_bytes = 0
        self._runs: list[list[tuple[int, int]]] = [[] for _ in range(_BUCKETS)]
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(
        self,
        high: U64,
        low: U64,
        *,
        counted: npt.NDArray[np.unsignedinteger],
        sizes: npt.NDArray[np.unsignedinteger],
        groups: npt.NDArray[np.integer],
    ) -> None:
        """Add rows; all arrays have one element a row.

        Raises:
            OutOfSpace: The temporary file does not fit.
        """
        rows = np.zeros(len(high), ROW_DTYPE)
        rows["high"], rows["low"] = high, low
        rows["bytes"], rows["size"], rows["group"] = counted, sizes, groups
        rows = _sorted(rows)
        begins = np.flatnonzero(begins_of(rows, with_group=True))
        if len(begins) < len(rows):
            sums = np.add.reduceat(rows["bytes"], begins)
            rows = rows[begins]
            rows["bytes"] = sums
        self._pending.append(rows)
        self._pending_bytes += rows.nbytes
        if self._pending_bytes > self._pending_bytes_max:
            self._spill()

    def buckets(self) -> Iterator[Rows]:
        """Give all rows, sorted by key and then by group, no key in two tables.

        A key and group may still be there several times, from several calls of `add`.
        """
        if self._file is None:
            yield _sorted(self._take_pending())
            return
        self._spill()
        for runs in self._runs:
            with temporary_file_errors():
                parts = [self._read(self._file, offset, size) for offset, size in runs]
            if parts:
                yield _sorted(np.concatenate(parts))

    def _take_pending(self) -> Rows:
        table: Rows = np.concatenate([np.zeros(0, ROW_DTYPE), *self._pending])
        self._pending, self._pending_bytes = [], 0
        return table

    def _spill(self) -> None:
        """Move what waits in memory to the file, one run a bucket."""
        with temporary_file_errors():
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `__exit__`
            rows = self._take_pending()
            rows = rows[np.argsort(rows["high"] >> np.uint64(_BUCKET_SHIFT), kind="stable")]
            buckets = (rows["high"] >> np.uint64(_BUCKET_SHIFT)).astype(np.int64)
            ends = np.searchsorted(buckets, np.arange(1, _BUCKETS + 1)).tolist()
            offset = self._file.seek(0, 2)
            self._file.write(rows.tobytes())
            first = 0
            for bucket, end in enumerate(ends):
                if end > first:
                    at = offset + first * ROW_DTYPE.itemsize
                    self._runs[bucket].append((at, (end - first) * ROW_DTYPE.itemsize))
                first = end

    @staticmethod
    def _read(file: IO[bytes], offset: int, size_bytes: int) -> Rows:
        file.seek(offset)
        return np.frombuffer(file.read(size_bytes), ROW_DTYPE)


def begins_of(rows: Rows, *, with_group: bool = False) -> Mask:
    """Which sorted rows are the first of their key, or of their key and group."""
    begins = np.ones(len(rows), np.bool_)
    columns = ("high", "low", "group") if with_group else ("high", "low")
    begins[1:] = False
    for name in columns:
        begins[1:] |= rows[name][1:] != rows[name][:-1]
    return begins


@contextlib.contextmanager
def temporary_file_errors() -> Iterator[None]:
    """Let a temporary file that cannot be written say so as an error of this library."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        raise (OutOfSpace if is_full else BackendError)(
            f"cannot write a temporary file in {tempfile.gettempdir()!r}: {error.strerror}",
            next_step="make room there, or let TMPDIR name another directory",
        ) from error


def _sorted(rows: Rows) -> Rows:
    """Sort by key and group. Eight bytes nearly always decide; what ties there is sorted again."""
    high = np.ascontiguousarray(rows["high"])
    order = np.argsort(high)
    high = high[order]
    equal_to_next = high[1:] == high[:-1]
    tied = np.zeros(len(rows), np.bool_)
    tied[1:] |= equal_to_next
    tied[:-1] |= equal_to_next
    if tied.any():
        # Ties are runs in the order by the first bytes; a sort by all keeps these runs in place.
        some = rows[order[tied]]
        order[tied] = order[tied][np.lexsort((some["group"], some["low"], some["high"]))]
    table: Rows = rows[order]
    return table
