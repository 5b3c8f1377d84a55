"""Where the streams of one rank lie in frames: the part of a layout that reading a range needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from snapstore.format.layout import ZEROS
from snapstore.repository.lazy import lazy

if TYPE_CHECKING:
    from snapstore.format.layout import LayoutTables
    from snapstore.repository.frames import Numbers

__all__ = ["Segments"]


class Segments:
    """The segments of all streams of a layout. Immutable; thread-safe.

    Positions run through all streams one after the other, so one search serves them all.
    """

    def __init__(self, layout: LayoutTables) -> None:
        self.layout = layout
        self.ends: Numbers = np.cumsum(layout.segments["length"].astype(np.int64))
        lengths = layout.streams["length"].astype(np.int64)
        self._bases = np.cumsum(lengths) - lengths

    def base(self, stream: int) -> int:
        """The position of a stream's first byte."""
        return int(self._bases[stream])

    def start(self, row: int) -> int:
        """The position of a segment's first byte."""
        return int(self.ends[row]) - int(self.layout.segments["length"][row])

    def rows(self, begin: int, end: int) -> range:
        """The segments that hold the bytes from one position to another, of which there are some.

        The first and the last may hold more than that.
        """
        first = int(np.searchsorted(self.ends, begin, side="right"))
        return range(first, int(np.searchsorted(self.ends, end, side="left")) + 1)

    def data_bytes(self, begin: int, end: int) -> int:
        """Count the bytes from one position to another that are not in segments of zeros."""
        return self._data_before(end) - self._data_before(begin)

    def _data_before(self, position: int) -> int:
        row = int(np.searchsorted(self.ends, position, side="right"))
        before = int(self._data_ends[row - 1]) if row else 0
        if row < len(self.ends) and self.layout.segments["frame"][row] != ZEROS:
            before += position - self.start(row)
        return before

    @lazy
    def _data_ends(self) -> Numbers:
        """How many bytes of data there are up to the end of each segment."""
        lengths = self.layout.segments["length"].astype(np.int64)
        lengths[self.layout.segments["frame"] == ZEROS] = 0
        counted: Numbers = np.cumsum(lengths)
        return counted

    @lazy
    def uses(self) -> tuple[Numbers, Numbers]:
        """The first and the last segment of each frame."""
        rows = np.flatnonzero(self.layout.segments["frame"] != ZEROS)
        used = self.layout.segments["frame"][rows]
        first = np.empty(len(self.layout.frames), np.int64)
        last = np.empty(len(self.layout.frames), np.int64)
        # Of several values for one frame the last that is assigned stays.
        last[used] = rows
        first[used[::-1]] = rows[::-1]
        return first, last
