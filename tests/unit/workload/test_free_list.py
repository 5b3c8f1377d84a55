"""Dividing ranges: against a model that knows every unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapagent.workload.free_list import FreeList

START, LENGTH = 100, 64

steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, LENGTH), st.sampled_from([1, 2, 4, 16])),
        st.tuples(st.just("give"), st.integers(0, 50), st.just(1)),
    ),
    max_size=60,
)


@pytest.mark.slow
@given(steps)
def test_what_is_taken_is_nobody_elses(wanted: list[tuple[str, int, int]]) -> None:
    """Goal: parts never overlap, are aligned, and are refused only if there really is no room.

    Method: keep the set of free units beside it; give parts back in any order.
    """
    free = set(range(START, START + LENGTH))
    taken: list[tuple[int, int]] = []
    parts = FreeList(START, LENGTH)
    for kind, number, alignment in wanted:
        if kind == "give":
            if taken:
                begin, length = taken.pop(number % len(taken))
                parts.give(begin, length)
                free |= set(range(begin, begin + length))
        else:
            found = parts.take(number, alignment)
            possible = any(
                set(range(begin, begin + number)) <= free
                for begin in range(START, START + LENGTH)
                if not begin % alignment
            )
            assert (found is not None) == possible
            if found is not None:
                units = set(range(found, found + number))
                assert units <= free
                assert not found % alignment
                free -= units
                taken.append((found, number))
        assert parts.free_bytes == len(free)
        assert parts.is_whole == (not taken)
    for begin, length in taken:
        parts.give(begin, length)
    assert parts.take(LENGTH, 1) == START


def test_the_smallest_part_that_suffices_is_taken() -> None:
    parts = FreeList(0, 100)
    for begin in (0, 10, 50, 60):
        assert parts.take({0: 10, 10: 40, 50: 10, 60: 40}[begin], 1) == begin
    parts.give(10, 40)
    parts.give(60, 20)
    assert parts.take(15, 1) == 60
