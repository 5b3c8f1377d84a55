"""What of one task's memory is still missing, and where in its pages image it is. Pure.

Two things are kept apart. `_Segments` says which addresses belong to which part of the image; it
changes only when the task moves memory, and then it is made anew, so forked children share it.
What is missing is a set of *offsets* in the image: data lie there without gaps, so that set stays
small where the addresses are a million runs. Every missing offset has exactly one address.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from snapagent.lazy.intervals import IntervalSet

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AddressSpace", "Run"]

Numbers = NDArray[np.int64]


class Run(NamedTuple):
    """Missing memory that is one piece in the task and in the image."""

    address: int
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """Which addresses belong to which part of the image, a row each.

    Attributes:
        starts: First address; rows are in the order of these.
        ends: Address behind the last.
        offsets: Where in the image the first byte is.
        by_offset: Numbers of the rows in the order of their offsets.
        sorted_offsets: The offsets in that order.
    """

    starts: Numbers
    ends: Numbers
    offsets: Numbers
    by_offset: Numbers
    sorted_offsets: Numbers

    @classmethod
    def of(cls, starts: Numbers, ends: Numbers, offsets: Numbers) -> _Segments:
        """Put rows in order."""
        order = np.argsort(starts, kind="stable")
        starts, ends, offsets = starts[order], ends[order], offsets[order]
        by_offset = np.argsort(offsets, kind="stable")
        return cls(starts, ends, offsets, by_offset, offsets[by_offset])

    def split(self, borders: Numbers) -> _Segments:
        """Cut rows that contain a border in two."""
        rows = np.searchsorted(self.starts, borders, side="right") - 1
        is_inner = rows >= 0
        is_inner[is_inner] = (borders[is_inner] > self.starts[rows[is_inner]]) & (
            borders[is_inner] < self.ends[rows[is_inner]]
        )
        if not is_inner.any():
            return self
        starts = np.union1d(self.starts, borders[is_inner])
        rows = np.searchsorted(self.starts, starts, side="right") - 1
        next_starts = np.append(starts[1:], np.iinfo(np.int64).max)
        return _Segments.of(
            starts,
            np.minimum(self.ends[rows], next_starts),
            self.offsets[rows] + (starts - self.starts[rows]),
        )

    def file_spans(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield where in the image the bytes between two addresses are, neighbours joined."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        if first >= last:
            return
        starts = np.maximum(self.starts[first:last], start)
        begins = self.offsets[first:last] + (starts - self.starts[first:last])
        ends = begins + (np.minimum(self.ends[first:last], end) - starts)
        is_new = np.append(True, begins[1:] != ends[:-1])
        is_last = np.append(is_new[1:], True)
        yield from zip(begins[is_new].tolist(), ends[is_last].tolist(), strict=True)


class AddressSpace:
    """The missing memory of one task. Not thread-safe."""

    def __init__(self, segments: _Segments, missing: IntervalSet) -> None:
        """Use `build` instead."""
        self._segments = segments
        self._missing = missing

    @classmethod
    def build(
        cls, addresses: Numbers, lengths: Numbers, offsets: Numbers, borders: Numbers
    ) -> AddressSpace:
        """Make one of runs of memory that are all missing.

        Args:
            addresses: Where each run begins; ascending, and runs must not overlap.
            lengths: Bytes; runs of none are left out.
            offsets: Where in the image its data begin; they must not overlap either.
            borders: Addresses where mappings begin or end: no `Run` will cross one. In any order.
        """
        some = lengths > 0
        starts, offsets = addresses[some], offsets[some]
        ends = starts + lengths[some]
        file_ends = offsets + lengths[some]
        assert (starts[1:] >= ends[:-1]).all()
        is_new = np.append(True, (starts[1:] != ends[:-1]) | (offsets[1:] != file_ends[:-1]))
        is_new = is_new[: len(starts)]
        is_last = np.append(is_new[1:], True)[: len(starts)]
        joined = _Segments.of(starts[is_new], ends[is_last], offsets[is_new])
        segments = joined.split(np.unique(borders))
        return cls(segments, IntervalSet(_file_intervals(segments)))

    @property
    def missing_bytes(self) -> int:
        """How much is missing."""
        return self._missing.total

    def fork(self) -> AddressSpace:
        """Return the memory of a child: it misses what its parent misses now."""
        return AddressSpace(self._segments, self._missing.copy())

    def find(self, address: int) -> Run | None:
        """Return all that is missing in one piece around an address, if that is missing."""
        segments = self._segments
        row = int(np.searchsorted(segments.starts, address, side="right")) - 1
        if row < 0 or address >= segments.ends[row]:
            return None
        start, end = int(segments.starts[row]), int(segments.ends[row])
        base = int(segments.offsets[row])
        interval = self._missing.around(base + address - start)
        if interval is None:
            return None
        low, high = max(interval[0], base), min(interval[1], base + end - start)
        return Run(start + low - base, low, high - low)

    def misses(self, offset: int, end: int) -> bool:
        """Tell whether something of a part of the image is missing."""
        return self._missing.overlaps(offset, end)

    def runs(self, offset: int, end: int, limit_bytes: int) -> list[Run]:
        """Return what is missing of a part of the image, in its order.

        Args:
            offset: Where the part begins.
            end: Where it ends.
            limit_bytes: How much is enough; the last run is cut there.
        """
        found: list[Run] = []
        for low, high in self._missing.within(offset, end):
            for run in self._addresses(low, min(high, low + limit_bytes)):
                found.append(run)
                limit_bytes -= run.length
            if limit_bytes <= 0:
                break
        return found

    def _addresses(self, low: int, high: int) -> Iterator[Run]:
        """Yield the runs of a part of the image all of which has addresses."""
        segments = self._segments
        first = int(np.searchsorted(segments.sorted_offsets, low, side="right")) - 1
        last = int(np.searchsorted(segments.sorted_offsets, high, side="left"))
        rows = segments.by_offset[first:last]
        columns = (segments.starts[rows], segments.ends[rows], segments.offsets[rows])
        for start, end, base in zip(*(column.tolist() for column in columns), strict=True):
            begin = max(low, base)
            stop = min(high, base + end - start)
            yield Run(start + begin - base, begin, stop - begin)

    def gap_end(self, address: int, limit: int) -> int:
        """Return up to where, from one address to another, nothing is missing."""
        segments = self._segments
        row = int(np.searchsorted(segments.ends, address, side="right"))
        while row < len(segments.starts) and segments.starts[row] < limit:
            start, base = int(segments.starts[row]), int(segments.offsets[row])
            low, high = max(start, address), min(int(segments.ends[row]), limit)
            for offset, _ in self._missing.within(base + low - start, base + high - start):
                return start + offset - base
            row += 1
        return limit

    def missing_spans(self) -> list[tuple[int, int]]:
        """Return the parts of the image that are missing, in order."""
        return list(self._missing)

    def fill(self, offset: int, length: int) -> int:
        """Note that a part of the image is there; returns how much of it was missing."""
        return self._missing.subtract(offset, offset + length)

    def remove(self, start: int, end: int) -> int:
        """Note that addresses no longer hold what the image has; returns how much was missing."""
        return sum(self._missing.subtract(*span) for span in self._segments.file_spans(start, end))

    def clear(self) -> None:
        """Note that nothing is missing any more, since the task is gone."""
        self._missing.clear()

    def remap(self, source: int, target: int, length: int) -> None:
        """Note that the task moved memory; what was at the target before is gone."""
        self.remove(target, target + length)
        borders = np.array([source, source + length, target, target + length], dtype=np.int64)
        parts = self._segments.split(np.unique(borders))
        is_moved = (parts.starts >= source) & (parts.ends <= source + length)
        is_lost = (parts.starts >= target) & (parts.ends <= target + length) & ~is_moved
        if not is_moved.any() and not is_lost.any():
            return
        shift = np.where(is_moved, target - source, 0)[~is_lost]
        self._segments = _Segments.of(
            parts.starts[~is_lost] + shift, parts.ends[~is_lost] + shift, parts.offsets[~is_lost]
        )


def _file_intervals(segments: _Segments) -> Iterator[tuple[int, int]]:
    """Yield the parts of the image that have an address, neighbours joined."""
    rows = segments.by_offset
    begins = segments.sorted_offsets
    ends = begins + (segments.ends[rows] - segments.starts[rows])
    is_new = np.append(True, begins[1:] != ends[:-1])[: len(begins)]
    is_last = np.append(is_new[1:], True)[: len(begins)]
    yield from zip(begins[is_new].tolist(), ends[is_last].tolist(), strict=True)
