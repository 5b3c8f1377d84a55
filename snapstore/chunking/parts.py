"""Dividing a window that arrives bit by bit into parts that are cut as the whole window would be.

A part ends behind what decides about its bytes: never beside zeros of which it is not yet known
whether there are enough of them to be left out. Pure.
"""

from __future__ import annotations

from snapstore.chunking.base import Before, ByteArray
from snapstore.chunking.content import ZERO_RUN_BYTES
from snapstore.units import PAGE_BYTES

__all__ = ["PART_BYTES_MIN", "divide"]

_RUN_BLOCKS = ZERO_RUN_BYTES // PAGE_BYTES

PART_BYTES_MIN = 2 * ZERO_RUN_BYTES
"""Of so many bytes some can always be handed on: all but the last blocks of zeros and one more."""


def divide(data: ByteArray) -> tuple[int, Before]:
    """Say how many bytes of a window's beginning can be cut before the rest of it is there.

    Args:
        data: What is there of the window behind the parts before; whole blocks of 4096 bytes, and
            at least `PART_BYTES_MIN`.

    Returns:
        The length of the next part, a positive multiple of 4096, and what the part behind it has
        to know.
    """
    assert len(data) >= PART_BYTES_MIN, len(data)
    assert len(data) % PAGE_BYTES == 0, len(data)
    length = len(data)
    zeros = _zero_blocks_at_end(data)
    if zeros < _RUN_BLOCKS:
        # The block behind the part is not zero, so that a run before it ends there, and a run
        # behind it reaches no further back than into that block.
        length -= (zeros + 1) * PAGE_BYTES
        zeros = _zero_blocks_at_end(data[:length])
    return length, Before(data[length - 4 : length].tobytes(), zeros >= _RUN_BLOCKS)


def _zero_blocks_at_end(data: ByteArray) -> int:
    """Count zero blocks at the end; not beyond what makes a run."""
    count = 0
    while count < _RUN_BLOCKS and (count + 1) * PAGE_BYTES <= len(data):
        end = len(data) - count * PAGE_BYTES
        if data[end - PAGE_BYTES : end].any():
            break
        count += 1
    return count
