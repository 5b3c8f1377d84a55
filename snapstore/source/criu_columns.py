"""Decode many small messages of one shape at once, into columns.

A terabyte of memory makes a million pagemap entries, a large process tens of thousands of
mappings. Where every message has the usual shape, each field is one vectorized step over all of
them; where some message has not, the caller reads them one by one, which says the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Column", "NumberColumn", "decode_columns"]

Column = NDArray[np.uint64]

# Varints have at most this many bytes, of which the last holds one bit; the decoder may look that
# far behind the end of the last message.
_VARINT_BYTES = 10


class NumberColumn(NamedTuple):
    """One field of all messages."""

    values: Column
    """Zero where a message has no such field."""
    present: NDArray[np.bool_]


def decode_columns(
    data: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64], numbers: Sequence[int]
) -> dict[int, NumberColumn] | None:
    """Decode messages that have only numbers, each at most once, in ascending order.

    Args:
        data: What holds the messages.
        starts: Where each begins; all of them within the data.
        ends: Where each ends; all of them within the data.
        numbers: The fields that are known, ascending, each below 16.

    Returns:
        A column for each known field; none if some message has another shape than that, or a
        number of more than 64 bits.
    """
    octets = np.frombuffer(data + bytes(_VARINT_BYTES + 1), dtype=np.uint8)
    position = starts.copy()
    columns: dict[int, NumberColumn] = {}
    for number in numbers:
        has = (position < ends) & (octets[np.minimum(position, len(data))] == number << 3)
        value, length = _varints(octets, position[has] + 1)
        if (length > _VARINT_BYTES).any():
            return None
        values = np.zeros(len(starts), dtype=np.uint64)
        values[has] = value
        columns[number] = NumberColumn(values, has)
        position[has] += 1 + length
    return columns if (position == ends).all() else None


def _varints(
    octets: NDArray[np.uint8], position: NDArray[np.int64]
) -> tuple[Column, NDArray[np.int64]]:
    """Decode a varint at each position; a length above the limit says that it is none."""
    value = np.zeros(len(position), dtype=np.uint64)
    length = np.full(len(position), _VARINT_BYTES + 1, dtype=np.int64)
    going_on = np.arange(len(position))
    for index in range(_VARINT_BYTES):
        octet = octets[position[going_on] + index]
        value[going_on] |= (octet & 0x7F).astype(np.uint64) << np.uint64(7 * index)
        is_last = octet < (0x80 if index + 1 < _VARINT_BYTES else 2)
        length[going_on[is_last]] = index + 1
        going_on = going_on[~is_last]
        if not len(going_on):
            break
    return value, length
