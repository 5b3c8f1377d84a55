"""A set of numbers as the intervals that it consists of. Pure; not thread-safe."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["IntervalSet"]


class IntervalSet:
    """Half-open intervals that neither overlap nor touch, in order."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        """Begin with intervals that are in order and do not overlap."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        for start, end in intervals:
            if self._ends and start <= self._ends[-1]:
                assert start == self._ends[-1], (start, self._ends[-1])
                self._ends[-1] = end
            else:
                self._starts.append(start)
                self._ends.append(end)
            self.total += end - start

    def copy(self) -> IntervalSet:
        """Return another set that is the same."""
        other = IntervalSet()
        other._starts = self._starts.copy()
        other._ends = self._ends.copy()
        other.total = self.total
        return other

    def clear(self) -> None:
        """Make it empty."""
        self._starts.clear()
        self._ends.clear()
        self.total = 0

    def subtract(self, start: int, end: int) -> int:
        """Take out all from `start` to `end`; returns how much of that was in the set."""
        first = bisect.bisect_right(self._ends, start)
        last = bisect.bisect_left(self._starts, end)
        if first >= last or start >= end:
            return 0
        starts, ends = self._starts[first:last], self._ends[first:last]
        taken = sum(ends) - sum(starts)
        left: list[tuple[int, int]] = []
        if starts[0] < start:
            left.append((starts[0], start))
        if ends[-1] > end:
            left.append((end, ends[-1]))
        taken -= sum(high - low for low, high in left)
        self._starts[first:last] = [low for low, _ in left]
        self._ends[first:last] = [high for _, high in left]
        self.total -= taken
        return taken

    def around(self, number: int) -> tuple[int, int] | None:
        """Return the interval that a number is in, if it is in one."""
        at = bisect.bisect_right(self._starts, number) - 1
        if at < 0 or number >= self._ends[at]:
            return None
        return self._starts[at], self._ends[at]

    def overlaps(self, start: int, end: int) -> bool:
        """Tell whether something of the set is between two numbers."""
        return next(self.within(start, end), None) is not None

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield what of the set is between two numbers. It must not change meanwhile."""
        at = bisect.bisect_right(self._ends, start)
        while start < end and at < len(self._starts) and self._starts[at] < end:
            yield max(start, self._starts[at]), min(end, self._ends[at])
            at += 1

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))
