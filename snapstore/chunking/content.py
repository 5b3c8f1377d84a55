"""Cutting of everything else: byte-level, content-defined chunks.

Tensor files shift by odd amounts and move whole tensors about. A position may end a chunk when a
hash of the four bytes before it is large; a *strong* one ends a chunk from the minimal length on,
any of them from the mean length on. Four strided multiplications per window find all positions
at memory speed without holding the GIL, which a byte-by-byte rolling hash does not allow.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from snapstore.chunking.base import (
    Analysis,
    ByteArray,
    Cut,
    Offsets,
    assemble,
    block_sums,
    data_extents,
    repeat_counts,
    zero_block_runs,
)
from snapstore.units import KIB, MIB, PAGE_BYTES

__all__ = ["ContentCutter"]

_WORD_BYTES = 4
_SCAN_BYTES = 1 * MIB
"""Scanned at a time: its products and flags stay in the second-level cache."""

_MULTIPLIER = np.uint32(0x9E3779B1)
"""Odd, with the bits of the golden ratio. Zero words hash to zero, so they never end a chunk."""


@dataclasses.dataclass(frozen=True, slots=True)
class ContentCutter:
    """Cuts at content-defined positions about `mean_bytes` apart.

    Chunks have a quarter to four times the mean, shorter only where data ends. Runs of zeros of
    at least `zero_run_bytes` are no part of any chunk, to the byte, so that what follows them is
    cut the same wherever it lies.
    """

    mean_bytes: int = 256 * KIB
    zero_run_bytes: int = 32 * KIB

    @property
    def chunk_bytes_max(self) -> int:
        """No chunk is longer."""
        return 4 * self.mean_bytes

    def analyse(self, window: ByteArray) -> Analysis:
        """Find long zero runs and positions where a chunk may end."""
        ends, hashes = _scan(window, np.uint32((1 << 32) - (1 << 34) // self.mean_bytes))
        strong = hashes > np.uint32((1 << 32) - (1 << 31) // self.mean_bytes)
        runs = zero_block_runs(window, block_sums(window))
        runs = runs[runs[:, 1] - runs[:, 0] >= self.zero_run_bytes]
        return Analysis(
            length=len(window),
            zero_runs=_widen(window, runs),
            ends=ends,
            strong=strong,
            repeats=repeat_counts(window),
        )

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


def _scan(window: ByteArray, threshold: np.uint32) -> tuple[Offsets, np.ndarray]:
    """Find all positions whose preceding four bytes hash above the threshold, with the hashes."""
    products = np.empty(_SCAN_BYTES // _WORD_BYTES, np.uint32)
    flags = np.empty(len(products), np.bool_)
    places: list[Offsets] = []
    hashes: list[np.ndarray] = []
    for base in range(0, len(window), _SCAN_BYTES):
        for phase in range(_WORD_BYTES):
            count = min(len(products), (len(window) - base - phase) // _WORD_BYTES)
            if count <= 0:
                continue
            begin = base + phase
            words = window[begin : begin + count * _WORD_BYTES].view(np.uint32)
            np.multiply(words, _MULTIPLIER, out=products[:count])
            np.greater(products[:count], threshold, out=flags[:count])
            hits = _flag_positions(flags, count)
            places.append(hits * _WORD_BYTES + begin + _WORD_BYTES)
            hashes.append(products[hits])
    if not places:
        return np.empty(0, np.int64), np.empty(0, np.uint32)
    all_places = np.concatenate(places)
    order = np.argsort(all_places, kind="stable")
    return all_places[order], np.concatenate(hashes)[order]


def _flag_positions(flags: np.ndarray, count: int) -> Offsets:
    """Like `flatnonzero(flags[:count])` for sparse flags: looks at eight at a time first."""
    whole = count // 8 * 8
    groups = np.flatnonzero(flags[:whole].view(np.uint64))
    row, column = np.nonzero(flags[:whole].reshape(-1, 8)[groups])
    hits = groups[row] * 8 + column
    if whole < count:
        hits = np.concatenate((hits, np.flatnonzero(flags[whole:count]) + whole))
    return hits


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
