"""What all cutters share: the two steps of cutting, zero runs, and the texture of data.

A stream is cut window by window. *Analysing* a window is the costly step, a pure function of its
bytes that many threads do at once. *Cutting* takes the analyses in order and decides; its only
state is how many bytes of an unfinished chunk the windows before have left over.

Cut points decide what deduplicates, never how anything is read, so they are no part of the stored
format: another version may cut elsewhere and still read everything.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt

from snapstore.units import PAGE_BYTES

__all__ = [
    "Analysis",
    "ByteArray",
    "Cut",
    "Cutter",
    "Offsets",
    "assemble",
    "block_sums",
    "data_extents",
    "repeat_counts",
    "textures",
    "zero_block_runs",
]

ByteArray = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

_SLICES_MAX = 64
"""Up to so many runs of blocks are looked at in place; more are copied together first."""

_COMPARED_BYTES = 256
_COMPARED_PAIRS = ((0, 512), (1024, 2048), (2560, 3328))
# Of 192 comparisons per block and byte position, random bytes agree 0.75 times, exponent bytes of
# bfloat16 weights about 39 times, of float16 weights 5 times, text 3 to 40 times.
_REPEATS_OF_POSITION = 3
_REPEATS_OF_BLOCK = 8
_CONTRAST = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Analysis:
    """What one thread found out about one window. Offsets are relative to its start.

    Attributes:
        length: Bytes in the window.
        zero_runs: `[begin, end)` of runs of zeros that are not stored; shape (runs, 2).
        ends: Ascending offsets at which the content suggests to end a chunk.
        strong: Which of `ends` are strong suggestions.
        repeats: Cumulative counts per block and byte position modulo 4; shape (blocks+1, 4).
        pitch_bytes: The length of these blocks, of each of which the first page was looked at.
    """

    length: int
    zero_runs: Offsets
    ends: Offsets
    strong: npt.NDArray[np.bool_]
    repeats: npt.NDArray[np.int64]
    pitch_bytes: int = PAGE_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Where a window ends up being cut.

    Attributes:
        starts: First byte of each piece; the first may be negative: it began in the window before.
        ends: End of each piece.
        zero: Which pieces are zeros; the others are chunks.
        carried: Bytes at the window's end that belong to a chunk not yet finished.
    """

    starts: Offsets
    ends: Offsets
    zero: npt.NDArray[np.bool_]
    carried: int


class Cutter(Protocol):
    """Decides the chunks of one class of data. Stateless and thread-safe."""

    @property
    def chunk_bytes_max(self) -> int:
        """No chunk is longer; `Cut.carried` is always less."""
        ...

    def analyse(self, window: ByteArray) -> Analysis:
        """Find zero runs and possible cuts of a window that starts at a multiple of 4096."""
        ...

    def cut(self, analysis: Analysis, *, carried: int, final: bool) -> Cut:
        """Decide the pieces of `carried` bytes of the window before followed by this window.

        Args:
            analysis: Of this window.
            carried: Unfinished bytes before the window, as the previous `Cut` said.
            final: The stream ends with this window, so nothing is carried on.
        """
        ...


def block_sums(window: ByteArray) -> npt.NDArray[np.uint64]:
    """Add up the 64-bit words of each whole 4 KiB block: a cheap function of all of its bytes."""
    blocks = len(window) // PAGE_BYTES
    words = window[: blocks * PAGE_BYTES].view(np.uint64).reshape(blocks, PAGE_BYTES // 8)
    sums: npt.NDArray[np.uint64] = np.add.reduce(words, axis=1, dtype=np.uint64)
    return sums


def zero_block_runs(window: ByteArray, suspects: npt.NDArray[np.bool_]) -> Offsets:
    """Find the runs of whole 4 KiB blocks that are zero, as `[begin, end)` in bytes.

    Args:
        window: The bytes.
        suspects: Which blocks may be zero, by a cheap test that no zero block fails.
    """
    blocks = len(suspects)
    words = window[: blocks * PAGE_BYTES].view(np.uint64).reshape(blocks, PAGE_BYTES // 8)
    zero = suspects.copy()
    runs = _runs(suspects)
    if len(runs) <= _SLICES_MAX:
        for begin, end in runs.tolist():
            zero[begin:end] = np.maximum.reduce(words[begin:end], axis=1) == 0
    else:
        zero[suspects] = np.maximum.reduce(words[suspects], axis=1) == 0
    return _runs(zero) * PAGE_BYTES


def _runs(flags: npt.NDArray[np.bool_]) -> Offsets:
    edges = np.diff(flags.astype(np.int8), prepend=0, append=0)
    return np.stack((np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)), axis=1)


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


def textures(analysis: Analysis, starts: Offsets, ends: Offsets) -> npt.NDArray[np.uint8]:
    """Say for each chunk which byte positions modulo 4 repeat, as a bit mask.

    A chunk of less than a block is taken to repeat everywhere: trying costs little.
    """
    last = len(analysis.repeats) - 1
    first_block = np.clip(starts // analysis.pitch_bytes, 0, last)
    end_block = np.clip(-(-ends // analysis.pitch_bytes), 0, last)
    blocks = end_block - first_block
    counts = analysis.repeats[end_block] - analysis.repeats[first_block]
    bits = counts >= (_REPEATS_OF_POSITION * blocks)[:, None]
    masks = np.packbits(bits, axis=1, bitorder="little")[:, 0]
    # Only numbers make some positions repeat much more than others; text does so evenly.
    # Half a repeat per block is added so that a handful of chance repeats is no contrast.
    even = 2 * counts.max(axis=1) < 2 * _CONTRAST * counts.min(axis=1) + blocks
    repetitive = counts.sum(axis=1) >= _REPEATS_OF_BLOCK * blocks
    masks[even] = np.where(repetitive[even], 0b1111, 0)
    masks[blocks <= 0] = 0b1111
    return masks


def data_extents(analysis: Analysis, carried: int) -> tuple[Offsets, Offsets]:
    """Give begins and ends of the runs between the zeros, the first from `-carried` on."""
    begins = np.concatenate(([-carried], analysis.zero_runs[:, 1]))
    ends = np.concatenate((analysis.zero_runs[:, 0], [analysis.length]))
    keep = ends > begins
    return begins[keep], ends[keep]


def assemble(analysis: Analysis, starts: Offsets, ends: Offsets, carried: int) -> Cut:
    """Merge chunks and zero runs into pieces in order of offset."""
    zero_runs = analysis.zero_runs
    all_starts = np.concatenate((starts, zero_runs[:, 0]))
    all_ends = np.concatenate((ends, zero_runs[:, 1]))
    zero = np.zeros(len(all_starts), np.bool_)
    zero[len(starts) :] = True
    order = np.argsort(all_starts, kind="stable")
    return Cut(all_starts[order], all_ends[order], zero[order], carried)
