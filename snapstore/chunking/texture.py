"""The texture of data: which byte positions repeat, so that the encoder knows what may pay.

Numbers in memory repeat in some of their bytes, those of the exponent, and are noise in the others;
text repeats evenly; what is encrypted or compressed does not. A few comparisons per page tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from snapstore.units import PAGE_BYTES, align_up

if TYPE_CHECKING:
    from snapstore.chunking.base import ByteArray, Offsets

__all__ = ["repeat_counts", "textures"]

_COMPARED_BYTES = 256
_COMPARED_PAIRS = ((0, 512), (1024, 2048), (2560, 3328))
# Of 192 comparisons per block and byte position, random bytes agree 0.75 times, exponent bytes of
# bfloat16 weights about 39 times, of float16 weights 5 times, text 3 to 40 times.
_REPEATS_OF_POSITION = 3
_REPEATS_OF_BLOCK = 8
_CONTRAST = 4


def textures(
    window: ByteArray, starts: Offsets, ends: Offsets, *, pitch_bytes: int = PAGE_BYTES
) -> npt.NDArray[np.uint8]:
    """Say for each chunk which byte positions modulo 4 repeat, as a bit mask.

    A chunk of less than a block is taken to repeat everywhere: trying costs little.

    Args:
        window: The bytes that the offsets are relative to.
        starts: First byte of each chunk, ascending; what lies before the window is not looked at.
        ends: End of each chunk.
        pitch_bytes: One page is looked at in every block of this many bytes.
    """
    if not len(starts):
        return np.empty(0, np.uint8)
    # Only what lies between the first chunk and the last is looked at.
    base = max(int(starts[0]), 0) // pitch_bytes
    looked_at = window[base * pitch_bytes : align_up(int(ends[-1]), PAGE_BYTES)]
    repeats = repeat_counts(looked_at, pitch_bytes=pitch_bytes)
    last = len(repeats) - 1
    first_block = np.clip(starts // pitch_bytes - base, 0, last)
    end_block = np.clip(-(-ends // pitch_bytes) - base, 0, last)
    blocks = end_block - first_block
    counts = repeats[end_block] - repeats[first_block]
    bits = counts >= (_REPEATS_OF_POSITION * blocks)[:, None]
    masks = np.packbits(bits, axis=1, bitorder="little")[:, 0]
    # Only numbers make some positions repeat much more than others; text does so evenly.
    # Half a repeat per block is added so that a handful of chance repeats is no contrast.
    even = 2 * counts.max(axis=1) < 2 * _CONTRAST * counts.min(axis=1) + blocks
    repetitive = counts.sum(axis=1) >= _REPEATS_OF_BLOCK * blocks
    masks[even] = np.where(repetitive[even], 0b1111, 0)
    masks[blocks <= 0] = 0b1111
    return masks


def repeat_counts(window: ByteArray, *, pitch_bytes: int = PAGE_BYTES) -> npt.NDArray[np.int64]:
    """Count, per block and byte position modulo 4, how often bytes some distance apart agree.

    One page at the beginning of every `pitch_bytes` is looked at.
    """
    pages = window[: len(window) // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)
    rows = pages[:: pitch_bytes // PAGE_BYTES]
    agree = np.zeros((len(rows), _COMPARED_BYTES), np.uint8)
    for left, right in _COMPARED_PAIRS:
        agree += rows[:, left : left + _COMPARED_BYTES] == rows[:, right : right + _COMPARED_BYTES]
    # Four counters of one byte each in one addition: none can pass 192.
    packed = np.add.reduce(agree.view(np.uint32), axis=1, dtype=np.uint32)
    counts = packed.view(np.uint8).reshape(-1, 4)
    total = np.zeros((len(rows) + 1, 4), np.int64)
    np.cumsum(counts, axis=0, out=total[1:])
    return total
