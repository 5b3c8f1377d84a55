"""What all cutters share: the two steps of cutting, and zero runs.

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
    "Before",
    "ByteArray",
    "Cut",
    "Cutter",
    "Offsets",
    "assemble",
    "block_sums",
    "data_extents",
    "zero_block_runs",
]

ByteArray = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

_SLICES_MAX = 64
"""Up to so many runs of blocks are looked at in place; more are copied together first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Analysis:
    """What one thread found out about one window. Offsets are relative to its start.

    Attributes:
        length: Bytes in the window.
        zero_runs: `[begin, end)` of runs of zeros that are not stored; shape (runs, 2).
        ends: Ascending offsets at which the content suggests to end a chunk.
        strong: Which of `ends` are strong suggestions.
    """

    length: int
    zero_runs: Offsets
    ends: Offsets
    strong: npt.NDArray[np.bool_]


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


@dataclasses.dataclass(frozen=True, slots=True)
class Before:
    """What a part of a window has to know of the part before it, to be cut as the whole would be.

    Attributes:
        word: The last four bytes.
        zeros: It ended in zeros that are not stored; zeros at the beginning go on with them.
    """

    word: bytes
    zeros: bool


class Cutter(Protocol):
    """Decides the chunks of one class of data. Stateless and thread-safe."""

    @property
    def chunk_bytes_max(self) -> int:
        """No chunk is longer; `Cut.carried` is always less."""
        ...

    @property
    def texture_pitch_bytes(self) -> int:
        """How far apart the pages are that tell the texture of a chunk (`textures`)."""
        ...

    def analyse(self, window: ByteArray, before: Before | None = None) -> Analysis:
        """Find zero runs and possible cuts of a window that starts at a multiple of 4096.

        With `before` it is a later part of a window, as `parts.divide` makes them.
        """
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
