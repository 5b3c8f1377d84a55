"""What is missing of a task's memory, against a dictionary of pages."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from snapagent.lazy.address_space import AddressSpace
from snapagent.lazy.intervals import IntervalSet

PAGE = 4096
PAGES = 48
"""Of memory, and about as many in the image."""

pages = st.integers(0, PAGES)
spans = st.tuples(pages, pages).map(sorted)


row_shapes = st.tuples(st.integers(0, 6), st.integers(0, 2), st.sampled_from([0, 0, 0, 1]))


def pagemap(shapes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Lay runs of pages out: address, count, place in the image; some of that is of others."""
    rows = []
    address = offset = 0
    for count, gap, others in shapes:
        rows.append((address, count, offset))
        address += count + gap
        offset += count + others
    return rows


def build(rows: list[tuple[int, int, int]], borders: list[int]) -> AddressSpace:
    table = np.array(rows, dtype=np.int64).reshape(-1, 3) * PAGE
    return AddressSpace.build(
        table[:, 0], table[:, 1], table[:, 2], np.array(borders, dtype=np.int64) * PAGE
    )


class Model:
    """Page of memory to page of the image, of all that is missing."""

    def __init__(self, missing: dict[int, int], borders: set[int]) -> None:
        self.missing = missing
        self.borders = borders

    def copy(self) -> "Model":
        return Model(dict(self.missing), set(self.borders))


class AddressSpaces(RuleBasedStateMachine):
    """A task and its forked children, while memory is filled, moved and discarded."""

    tasks = Bundle("tasks")

    @initialize(
        target=tasks,
        shapes=st.lists(row_shapes, max_size=12),
        borders=st.lists(pages, max_size=5),
    )
    def start(
        self, shapes: list[tuple[int, int, int]], borders: list[int]
    ) -> tuple[AddressSpace, Model]:
        rows = pagemap(shapes)
        missing = {
            address + number: offset + number
            for address, count, offset in rows
            for number in range(count)
        }
        self.all: list[tuple[AddressSpace, Model]] = []
        return self.known(build(rows, borders), Model(missing, set(borders)))

    def known(self, space: AddressSpace, model: Model) -> tuple[AddressSpace, Model]:
        self.all.append((space, model))
        return space, model

    @rule(target=tasks, task=tasks)
    def fork(self, task: tuple[AddressSpace, Model]) -> tuple[AddressSpace, Model]:
        space, model = task
        return self.known(space.fork(), model.copy())

    @rule(task=tasks, span=spans)
    def fill(self, task: tuple[AddressSpace, Model], span: list[int]) -> None:
        space, model = task
        start, end = span
        before = space.missing_bytes
        filled = space.fill(start * PAGE, (end - start) * PAGE)
        model.missing = {a: o for a, o in model.missing.items() if not start <= o < end}
        assert before - filled == space.missing_bytes

    @rule(task=tasks, span=spans)
    def remove(self, task: tuple[AddressSpace, Model], span: list[int]) -> None:
        space, model = task
        start, end = span
        gone = [address for address in model.missing if start <= address < end]
        assert space.remove(start * PAGE, end * PAGE) == len(gone) * PAGE
        for address in gone:
            del model.missing[address]

    @rule(task=tasks, span=spans, to=st.integers(0, 2 * PAGES))
    def remap(self, task: tuple[AddressSpace, Model], span: list[int], to: int) -> None:
        space, model = task
        start, end = span
        length = end - start
        if not length or (to < end and start < to + length):
            return
        space.remap(start * PAGE, to * PAGE, length * PAGE)
        kept = {
            address: offset
            for address, offset in model.missing.items()
            if not start <= address < end and not to <= address < to + length
        }
        moved = {
            address + to - start: offset
            for address, offset in model.missing.items()
            if start <= address < end
        }
        model.missing = kept | moved
        model.borders = {b for b in model.borders if not to < b < to + length}
        model.borders |= {b + to - start for b in model.borders if start < b < end}
        model.borders |= {to, to + length}

    @rule(task=tasks)
    def end(self, task: tuple[AddressSpace, Model]) -> None:
        space, model = task
        space.clear()
        model.missing.clear()

    @rule(task=tasks, address=st.integers(0, 3 * PAGES))
    def find(self, task: tuple[AddressSpace, Model], address: int) -> None:
        space, model = task
        run = space.find(address * PAGE + 123)
        if address not in model.missing:
            assert run is None
            limit = address + 10
            gap = next((a for a in range(address, limit) if a in model.missing), limit)
            assert space.gap_end(address * PAGE, limit * PAGE) == gap * PAGE
            return
        assert run is not None
        pages_of_run = range(run.address // PAGE, (run.address + run.length) // PAGE)
        assert address in pages_of_run
        for number, page in enumerate(pages_of_run):
            assert model.missing[page] == run.offset // PAGE + number

    @rule(task=tasks, span=spans, limit=st.integers(1, PAGES))
    def runs(self, task: tuple[AddressSpace, Model], span: list[int], limit: int) -> None:
        space, model = task
        start, end = span
        wanted = sorted((o, a) for a, o in model.missing.items() if start <= o < end)
        found = []
        for run in space.runs(start * PAGE, end * PAGE, limit * PAGE):
            count = run.length // PAGE
            assert count
            first, place = run.address // PAGE, run.offset // PAGE
            assert not any(first < border < first + count for border in model.borders)
            found += [(place + n, first + n) for n in range(count)]
        assert found == wanted[:limit]

    @invariant()
    def counts(self) -> None:
        for space, model in getattr(self, "all", []):
            assert space.missing_bytes == len(model.missing) * PAGE
            offsets = {o for low, high in space.missing_spans() for o in range(low, high, PAGE)}
            assert offsets == {offset * PAGE for offset in model.missing.values()}


TestAddressSpaces = AddressSpaces.TestCase
TestAddressSpaces.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


@given(
    numbers=st.sets(st.integers(0, 60)),
    cuts=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))),
    at=st.integers(0, 60),
)
def test_interval_set(numbers: set[int], cuts: list[tuple[int, int]], at: int) -> None:
    intervals = IntervalSet((number, number + 1) for number in sorted(numbers))
    for start, end in cuts:
        copy = intervals.copy()
        gone = {number for number in numbers if start <= number < end}
        assert intervals.subtract(start, end) == len(gone)
        assert copy.total == len(numbers)
        numbers = numbers - gone
    assert intervals.total == len(numbers)
    assert {n for low, high in intervals for n in range(low, high)} == numbers
    assert all(high < low for (_, high), (low, _) in itertools.pairwise(intervals))
    around = intervals.around(at)
    assert (around is not None) == (at in numbers)
    if around is not None:
        assert set(range(*around)) <= numbers
        assert around[0] - 1 not in numbers
        assert around[1] not in numbers
    within = {n for low, high in intervals.within(at, 45) for n in range(low, high)}
    assert within == {number for number in numbers if at <= number < 45}


def test_a_million_entries_are_quick() -> None:
    """Each entry on its own, as of a heap full of holes; counted in steps, not in seconds."""
    count = 1_000_000
    numbers = np.arange(count, dtype=np.int64)
    space = AddressSpace.build(
        numbers * 2 * PAGE, np.full(count, PAGE), numbers * PAGE, np.zeros(0, dtype=np.int64)
    )
    assert space.missing_bytes == count * PAGE
    assert len(space.missing_spans()) == 1
    run = space.find(2 * 777_777 * PAGE)
    assert run is not None
    assert run == (2 * 777_777 * PAGE, 777_777 * PAGE, PAGE)
    assert len(space.runs(0, count * PAGE, 64 * PAGE)) == 64
    space.remap(2 * 500_000 * PAGE, 1 << 46, 100 * PAGE)
    found = space.find((1 << 46) + 98 * PAGE)
    assert found is not None
    assert found.offset == 500_049 * PAGE
