"""Cutting of everything else: byte-level, content-defined chunks.

Tensor files shift by odd amounts and move whole tensors about. A position may end a chunk when a
hash of the two bytes before it is large, and then a hash of the four before it; a *strong* one ends
a chunk from the minimal length on, any of them from the mean length on. Two strided
multiplications per window leave one position in 256 for the second hash: memory speed, without
holding the GIL, which a byte-by-byte rolling hash does not allow.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np
import numpy.typing as npt

from snapstore.chunking.base import (
    Analysis,
    Before,
    ByteArray,
    Cut,
    Offsets,
    assemble,
    data_extents,
    zero_block_runs,
)
from snapstore.units import KIB, PAGE_BYTES

__all__ = ["ZERO_RUN_BYTES", "ContentCutter"]

ZERO_RUN_BYTES = 32 * KIB
"""A shorter run of zeros is not worth an extent of its own, nor two more chunks beside it."""

U32 = npt.NDArray[np.uint32]

_PAIR_BYTES = 2
_WORD_BYTES = 4
_SIEVE = 256
"""One position in so many passes the first hash."""

_SCAN_BYTES = 1024 * KIB
"""Scanned at a time: its products and flags stay in the second-level cache."""

_PAGES_COMPARED = 16
"""So many pages of a chunk of mean length tell its texture; fewer miss what repeats in float16."""

_PAIR_MULTIPLIER = np.uint16(0x9E37)
_WORD_MULTIPLIER = np.uint32(0x9E3779B1)
"""Odd, with the bits of the golden ratio. Zeros hash to zero, so they never end a chunk."""


@dataclasses.dataclass(frozen=True, slots=True)
class ContentCutter:
    """Cuts at content-defined positions about `mean_bytes` apart.

    Chunks have a quarter to four times the mean, shorter only where data ends. Runs of zeros of
    at least `zero_run_bytes` are no part of any chunk, to the byte, so that what follows them is
    cut the same wherever it lies.
    """

    mean_bytes: int = 256 * KIB
    zero_run_bytes: int = ZERO_RUN_BYTES

    @property
    def chunk_bytes_max(self) -> int:
        """No chunk is longer."""
        return 4 * self.mean_bytes

    @property
    def texture_pitch_bytes(self) -> int:
        """A number of pages of each chunk."""
        return max(self.mean_bytes // _PAGES_COMPARED, PAGE_BYTES)

    def analyse(self, window: ByteArray, before: Before | None = None) -> Analysis:
        """Find long zero runs and positions where a chunk may end."""
        # Four suggestions per mean length, one in eight of them strong.
        threshold = _threshold(4 * _SIEVE, self.mean_bytes)
        ends, hashes = _scan(window, threshold)
        if before is not None:
            first_ends, first_hashes = _scan_border(before.word, window, threshold)
            ends, hashes = np.append(first_ends, ends), np.append(first_hashes, hashes)
        strong = hashes > _threshold(_SIEVE // 2, self.mean_bytes)
        return Analysis(
            length=len(window),
            zero_runs=self._zero_runs(window, goes_on=before is not None and before.zeros),
            ends=ends,
            strong=strong,
        )

    def _zero_runs(self, window: ByteArray, *, goes_on: bool) -> Offsets:
        """Find runs that are long enough; one that `goes_on` from the part before always is."""
        runs = zero_block_runs(window, _may_be_zero(window))
        if not goes_on:
            return _widen(window, runs[runs[:, 1] - runs[:, 0] >= self.zero_run_bytes])
        end = int(runs[0, 1]) if len(runs) and not runs[0, 0] else 0
        runs = runs[runs[:, 0] > 0]
        others = _widen(window, runs[runs[:, 1] - runs[:, 0] >= self.zero_run_bytes])
        end += _leading_zeros(window[end : end + PAGE_BYTES])
        return np.concatenate((np.array([[0, end]] if end else np.empty((0, 2)), np.int64), others))

    def cut(self, analysis: Analysis, *, carried: int, final: bool) -> Cut:
        """Decide the pieces; see `Cutter.cut`."""
        anywhere = analysis.ends.tolist()
        strong = analysis.ends[analysis.strong].tolist()
        starts: list[int] = []
        ends: list[int] = []
        left = 0
        begins, stops = data_extents(analysis, carried)
        for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True):
            start = begin
            unfinished = not final and stop == analysis.length
            while start < stop:
                end = self._next_end(start, stop, strong, anywhere, unfinished=unfinished)
                if end is None:
                    left = stop - start
                    break
                starts.append(start)
                ends.append(end)
                start = end
        return assemble(analysis, np.array(starts, np.int64), np.array(ends, np.int64), left)

    def _next_end(
        self, start: int, stop: int, strong: list[int], anywhere: list[int], *, unfinished: bool
    ) -> int | None:
        """Find the end of the chunk at `start`, or None if that needs the next window."""
        found = _first_at(strong, start + self.mean_bytes // 4)
        if found is not None and found <= min(stop, start + self.mean_bytes):
            return found
        limit = start + self.chunk_bytes_max
        found = _first_at(anywhere, start + self.mean_bytes)
        if found is not None and found <= min(stop, limit):
            return found
        if limit <= stop:
            return limit
        return None if unfinished else stop


def _first_at(positions: list[int], at_least: int) -> int | None:
    place = bisect.bisect_left(positions, at_least)
    return positions[place] if place < len(positions) else None


def _threshold(numerator: int, denominator: int) -> np.uint32:
    """The hash that one word in `denominator / numerator` exceeds."""
    return np.uint32((1 << 32) - (numerator << 32) // denominator)


def _scan(window: ByteArray, threshold: np.uint32) -> tuple[Offsets, U32]:
    """Find the positions that pass both hashes, ascending, with the second one."""
    products = np.empty(_SCAN_BYTES // _PAIR_BYTES, np.uint16)
    flags = np.empty(len(products), np.bool_)
    sieve = np.uint16((1 << 16) - (1 << 16) // _SIEVE)
    places = [np.empty(0, np.int64)]
    for base in range(0, len(window), _SCAN_BYTES):
        for begin in (base, base + 1):
            count = min(len(products), (len(window) - begin) // _PAIR_BYTES)
            if count <= 0:
                continue
            pairs = window[begin : begin + count * _PAIR_BYTES].view(np.uint16)
            np.multiply(pairs, _PAIR_MULTIPLIER, out=products[:count])
            np.greater_equal(products[:count], sieve, out=flags[:count])
            places.append(np.flatnonzero(flags[:count]) * _PAIR_BYTES + begin + _PAIR_BYTES)
    ends = np.concatenate(places)
    ends = ends[ends >= _WORD_BYTES]
    if not len(ends):
        return ends, np.empty(0, np.uint32)
    # The word that ends at each position, wherever it begins.
    words = np.ndarray((len(window) - _WORD_BYTES + 1,), "<u4", window.data, strides=(1,))
    hashes = words[ends - _WORD_BYTES] * _WORD_MULTIPLIER
    passed = hashes > threshold
    ends, hashes = ends[passed], hashes[passed]
    order = np.argsort(ends, kind="stable")
    return ends[order], hashes[order]


def _scan_border(word: bytes, window: ByteArray, threshold: np.uint32) -> tuple[Offsets, U32]:
    """Find the positions that pass among the first three, whose words begin before the window."""
    border = np.concatenate((np.frombuffer(word, np.uint8), window[: _WORD_BYTES - 1]))
    ends, hashes = _scan(border, threshold)
    inside = ends > _WORD_BYTES
    return ends[inside] - _WORD_BYTES, hashes[inside]


def _may_be_zero(window: ByteArray) -> npt.NDArray[np.bool_]:
    """Tell the blocks whose first and middle words are zero: reading all of them takes longer."""
    blocks = len(window) // PAGE_BYTES
    words = window[: blocks * PAGE_BYTES].view(np.uint64).reshape(blocks, PAGE_BYTES // 8)
    suspects: npt.NDArray[np.bool_] = (words[:, 0] | words[:, PAGE_BYTES // 16]) == 0
    return suspects


def _widen(window: ByteArray, runs: Offsets) -> Offsets:
    """Extend runs of zero blocks to the bytes where the zeros really begin and end."""
    widened = runs.copy()
    floor = 0
    for row in widened:
        begin, end = int(row[0]), int(row[1])
        before = window[max(floor, begin - PAGE_BYTES) : begin][::-1]
        after = window[end : end + PAGE_BYTES]
        row[0] = begin - _leading_zeros(before)
        row[1] = end + _leading_zeros(after)
        floor = int(row[1])
    return widened


def _leading_zeros(data: ByteArray) -> int:
    nonzero = np.flatnonzero(data)
    return int(nonzero[0]) if len(nonzero) else len(data)
