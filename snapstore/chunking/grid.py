"""Cutting of device memory that an agent captured: a fixed grid from the start of each allocation.

What lies in an allocation does not shift, and on a fixed grid a GPU can hash all chunks at once,
and find those that are zeros, without anybody having read a byte (`format_spec/00-terms.md`).
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
    block_sums,
    zero_block_runs,
)
from snapstore.units import KIB, PAGE_BYTES

__all__ = ["DEVICE_CHUNK_BYTES", "GridCutter"]

DEVICE_CHUNK_BYTES = 256 * KIB
"""The grid of the class `device`: four million chunks for a terabyte."""

_PAGES_COMPARED = 16


@dataclasses.dataclass(frozen=True, slots=True)
class GridCutter:
    """Cuts every `chunk_bytes` from the start of the stream; whole chunks of zeros are left out."""

    chunk_bytes: int = DEVICE_CHUNK_BYTES

    @property
    def chunk_bytes_max(self) -> int:
        """No chunk is longer."""
        return self.chunk_bytes

    @property
    def texture_pitch_bytes(self) -> int:
        """A number of pages of each chunk."""
        return max(self.chunk_bytes // _PAGES_COMPARED, PAGE_BYTES)

    def analyse(self, window: ByteArray, before: Before | None = None) -> Analysis:
        """Find the zeros; where to cut does not depend on the content."""
        del before
        return Analysis(
            length=len(window),
            zero_runs=zero_block_runs(window, block_sums(window) == 0),
            ends=np.empty(0, np.int64),
            strong=np.empty(0, np.bool_),
        )

    def cut(self, analysis: Analysis, *, carried: int, final: bool) -> Cut:
        """Decide the pieces; see `Cutter.cut`. Neighbouring chunks of zeros are one piece."""
        whole = (carried + analysis.length) // self.chunk_bytes
        ends = np.arange(1, whole + 1, dtype=np.int64) * self.chunk_bytes - carried
        left = analysis.length - (int(ends[-1]) if whole else -carried)
        if final and left:
            ends = np.append(ends, analysis.length)
            left = 0
        starts = np.concatenate(([-carried], ends))[: len(ends)]
        zero = _inside(analysis.zero_runs, starts, ends)
        first = np.ones(len(ends), np.bool_)
        first[1:] = ~(zero[1:] & zero[:-1])
        last = np.append(first[1:], np.True_)[: len(ends)]
        return Cut(starts[first], ends[last], zero[first], left)


def _inside(runs: Offsets, starts: Offsets, ends: Offsets) -> np.ndarray:
    """Which pieces lie inside one of the runs, which are in order and apart."""
    if not len(runs):
        return np.zeros(len(starts), np.bool_)
    run = np.searchsorted(runs[:, 0], starts, side="right") - 1
    found: np.ndarray = (run >= 0) & (ends <= runs[np.maximum(run, 0), 1])
    return found
