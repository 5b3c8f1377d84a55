"""Binary tables: fixed-size little-endian rows, checked without a Python step per row.

Shared by the modules of packs, indexes, rank manifests and layouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format import limits

if TYPE_CHECKING:
    from snapstore.units import BytesLike

__all__ = [
    "STREAM_DTYPE",
    "U64",
    "Mask",
    "Rows",
    "as_rows",
    "check_runs",
    "column",
    "first_words",
    "id_words",
    "order_of_ids",
    "refuse",
    "refuse_over",
]

Rows = npt.NDArray[np.void]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

ID_WORDS = 4

STREAM_DTYPE = np.dtype([("first", "<u8"), ("count", "<u8"), ("length", "<u8")])
"""One row of `STRM`: which extents or segments a stream owns, and how long it is."""

assert STREAM_DTYPE.itemsize == limits.STREAM_ROW_BYTES


def as_rows(data: BytesLike, dtype: np.dtype[np.void], *, what: str, rows_max: int) -> Rows:
    """See a section as rows, without copying it.

    Raises:
        Malformed: The length is no multiple of the row size.
        LimitExceeded: It has more rows than allowed.
    """
    count, rest = divmod(len(data), dtype.itemsize)
    if rest:
        raise Malformed(f"{what}: {len(data)} bytes are not whole rows of {dtype.itemsize}")
    if count > rows_max:
        raise LimitExceeded(f"{what}: {count} rows, more than the limit of {rows_max}")
    if count == 0:
        return np.zeros(0, dtype)
    return np.frombuffer(data, dtype)


def column(rows: Rows, name: str) -> U64:
    """One numeric column, widened so that sums of two values cannot wrap."""
    return rows[name].astype(np.uint64)


def refuse(bad: Mask, *, what: str, reason: str) -> None:
    """Refuse a table in which any row is bad.

    Raises:
        Malformed: One is; the message names the first.
    """
    if bad.any():
        raise Malformed(f"{what}, row {int(bad.argmax())}: {reason}")


def refuse_over(values: U64, limit: int, *, what: str, reason: str) -> None:
    """Refuse a column with a value above a limit.

    Raises:
        LimitExceeded: There is one; the message names the first.
    """
    bad = values > limit
    if bad.any():
        row = int(bad.argmax())
        raise LimitExceeded(f"{what}, row {row}: {reason} {int(values[row])} exceeds {limit}")


def id_words(ids: Rows) -> U64:
    """The 32-byte ids as rows of four numbers that compare as the bytes do."""
    count = len(ids)
    if count == 0:
        return np.zeros((0, ID_WORDS), np.uint64)
    packed = np.ascontiguousarray(ids).view(">u8")
    return packed.reshape(count, ID_WORDS).astype(np.uint64)


def first_words(ids: Rows) -> U64:
    """The first eight bytes of each id, as a number that compares as the bytes do."""
    words: U64 = np.ascontiguousarray(id_words(ids)[:, 0])
    return words


def order_of_ids(ids: Rows) -> npt.NDArray[np.intp]:
    """Row numbers in the order of the ids as bytes; of equal ids the earlier row first.

    Eight bytes of a digest nearly always decide, so only rows that tie there are looked at whole.
    """
    words = id_words(ids)
    order = np.argsort(words[:, 0], kind="stable")
    first = words[order, 0]
    equal_to_next = first[1:] == first[:-1]
    at = np.flatnonzero(equal_to_next)
    # Where indexes are merged, ties are the same id twice, which are in order already.
    if (words[order[at], 1:] != words[order[at + 1], 1:]).any():
        tied = np.zeros(len(first), np.bool_)
        tied[1:] |= equal_to_next
        tied[:-1] |= equal_to_next
        rows = order[tied]
        # Ties are runs in the order by first word; a sort by all words keeps these runs in place.
        order[tied] = rows[np.lexsort(words[rows].T[::-1])]
    return order


def unsorted_ids(ids: Rows) -> Mask:
    """Which rows do not have a greater id than the row before (the first row never)."""
    words = id_words(ids)
    before, after = words[:-1], words[1:]
    greater = np.zeros(max(len(words) - 1, 0), np.bool_)
    equal = np.ones_like(greater)
    for word in range(ID_WORDS):
        greater |= equal & (after[:, word] > before[:, word])
        equal &= after[:, word] == before[:, word]
    bad = np.zeros(len(words), np.bool_)
    bad[1:] = ~greater
    return bad


def check_runs(streams: Rows, lengths: U64, *, what: str) -> None:
    """Check that streams own the rows in order and without remainder, and that lengths add up.

    `lengths` are the lengths of the extents or segments.

    Raises:
        Malformed: A stream owns other rows than it should, or its length is not their sum.
        LimitExceeded: A length, or all together, is more than the format allows.
    """
    firsts, counts = column(streams, "first"), column(streams, "count")
    stream_lengths = column(streams, "length")
    total = len(lengths)
    refuse_over(stream_lengths, limits.STREAM_BYTES_MAX, what=f"{what} STRM", reason="length")
    # Bounded by the number of rows first, so that the sums below cannot wrap.
    refuse(counts > total, what=f"{what} STRM", reason="more rows than the table has")
    ends = np.zeros(len(streams) + 1, np.uint64)
    np.cumsum(counts, out=ends[1:])
    refuse(firsts != ends[:-1], what=f"{what} STRM", reason="rows do not follow the stream before")
    if int(ends[-1]) != total:
        raise Malformed(f"{what} STRM: streams own {int(ends[-1])} rows of {total}")
    sums = np.zeros(total + 1, np.uint64)
    np.cumsum(lengths, out=sums[1:])
    # No single length reaches 2^51, so a sum that wraps falls below the one before.
    wrapped = bool((sums[1:] < sums[:-1]).any())
    if wrapped or int(sums[-1]) > limits.RANK_LOGICAL_BYTES_MAX:
        raise LimitExceeded(f"{what}: lengths add up to more than 2^63 bytes")
    actual = sums[ends[1:].astype(np.intp)] - sums[ends[:-1].astype(np.intp)]
    refuse(actual != stream_lengths, what=f"{what} STRM", reason="length is not that of its rows")
