"""Cutting of page images: small, page-aligned, content-defined chunks.

Memory images change in short runs of pages and shift by whole pages. Each page votes for or
against ending a chunk after it, by a hash of its content; so cuts find themselves again behind
an insertion, without any knowledge of the process's address space.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from snapstore.chunking.base import (
    Analysis,
    Before,
    ByteArray,
    Cut,
    Offsets,
    assemble,
    block_sums,
    data_extents,
    zero_block_runs,
)
from snapstore.units import PAGE_BYTES

__all__ = ["PageCutter"]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, with the bits of the golden ratio: spreads sums over the upper bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class PageCutter:
    """Cuts after one page in `pages_mean`, never later than after `pages_max` pages.

    Zero pages, even single ones, are no part of any chunk.
    """

    pages_mean: int = 8
    pages_max: int = 32

    @property
    def chunk_bytes_max(self) -> int:
        """No chunk is longer."""
        return self.pages_max * PAGE_BYTES

    @property
    def texture_pitch_bytes(self) -> int:
        """Every page: a chunk has few."""
        return PAGE_BYTES

    def analyse(self, window: ByteArray, before: Before | None = None) -> Analysis:
        """Find zero pages and the pages after which a chunk may end."""
        del before  # Each page speaks for itself.
        sums = block_sums(window)
        threshold = np.uint64((1 << 64) // self.pages_mean)
        ends = (np.flatnonzero(sums * _MULTIPLIER < threshold) + 1) * PAGE_BYTES
        return Analysis(
            length=len(window),
            zero_runs=zero_block_runs(window, sums == 0),
            ends=ends,
            strong=np.ones(len(ends), np.bool_),
        )

    def cut(self, analysis: Analysis, *, carried: int, final: bool) -> Cut:
        """Decide the pieces; see `Cutter.cut`."""
        begins, ends = data_extents(analysis, carried)
        inside = _ends_inside(analysis.ends, begins, ends)
        closed = np.unique(np.concatenate((inside, ends)))
        begins_all = np.unique(np.concatenate((begins, inside)))
        begins_all = begins_all[begins_all < closed[-1]] if len(closed) else begins_all
        starts, stops = _split_long(begins_all, closed, self.chunk_bytes_max)
        left = 0
        if not final and len(stops) and stops[-1] == analysis.length:
            open_chunk = stops[-1] - starts[-1]
            suggested = bool(len(analysis.ends)) and analysis.ends[-1] == analysis.length
            if not suggested and open_chunk < self.chunk_bytes_max:
                left = int(open_chunk)
                starts, stops = starts[:-1], stops[:-1]
        return assemble(analysis, starts, stops, left)


def _ends_inside(candidates: Offsets, begins: Offsets, ends: Offsets) -> Offsets:
    """Keep the candidates that lie strictly inside a data extent."""
    extent = np.searchsorted(begins, candidates, side="left") - 1
    valid = (extent >= 0) & (candidates < ends[np.maximum(extent, 0)]) if len(begins) else None
    return candidates[valid] if valid is not None else candidates[:0]


def _split_long(starts: Offsets, ends: Offsets, limit: int) -> tuple[Offsets, Offsets]:
    """Split pieces that are longer than `limit` into pieces of that length and a rest."""
    counts = np.maximum(-(-(ends - starts) // limit), 1)
    total = int(counts.sum())
    if total == len(starts):
        return starts, ends
    first = np.cumsum(counts) - counts
    part = np.arange(total) - np.repeat(first, counts)
    new_starts = np.repeat(starts, counts) + part * limit
    new_ends = np.minimum(new_starts + limit, np.repeat(ends, counts))
    return new_starts, new_ends
