"""Dividing a range of numbers among those who ask for parts of it. Pure; used under a lock."""

from __future__ import annotations

import bisect

__all__ = ["FreeList"]


class FreeList:
    """What is free of a range: parts of it, sorted, none of which touches another.

    The smallest part that suffices is taken, the lowest of several.
    """

    def __init__(self, start: int, length: int) -> None:
        assert length > 0, length
        self._start = start
        self._length = length
        self._starts = [start]
        self._ends = [start + length]

    @property
    def free_bytes(self) -> int:
        """How much is free, in however many parts."""
        return sum(self._ends) - sum(self._starts)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is taken."""
        return self.free_bytes == self._length

    def take(self, length: int, alignment: int) -> int | None:
        """Take a part that begins at a multiple of `alignment`; none if there is no such part."""
        assert length > 0, length
        best: tuple[int, int, int] | None = None
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            aligned = -(-start // alignment) * alignment
            if aligned + length <= end and (best is None or end - start < best[0]):
                best = (end - start, index, aligned)
        if best is None:
            return None
        _, index, begin = best
        start, end = self._starts[index], self._ends[index]
        rest = [(start, begin), (begin + length, end)]
        kept = [(one, other) for one, other in rest if one < other]
        self._starts[index : index + 1] = [one for one, _ in kept]
        self._ends[index : index + 1] = [other for _, other in kept]
        return begin

    def give(self, start: int, length: int) -> None:
        """Give a part back that was taken."""
        end = start + length
        assert self._start <= start < end <= self._start + self._length, (start, length)
        index = bisect.bisect_left(self._starts, start)
        joins_before = index > 0 and self._ends[index - 1] == start
        joins_after = index < len(self._starts) and self._starts[index] == end
        assert index == 0 or self._ends[index - 1] <= start, "taken before it is given back"
        assert index == len(self._starts) or self._starts[index] >= end, "given back once"
        if joins_before and joins_after:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_before:
            self._ends[index - 1] = end
        elif joins_after:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
