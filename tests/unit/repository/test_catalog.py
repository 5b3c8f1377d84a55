"""Which chunks are known, and where: the newest place wins, and the budget is kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.format.tables import U64
from snapstore.repository.catalog import MISSING, Catalog
from snapstore.repository.frames import FrameTable
from snapstore.testing.clock import ManualClock
from tests.unit.repository.parts import (
    ForgetfulBackend,
    add_index,
    chunk_id,
    pack_name,
    words_of,
)

ROW_BYTES = 56
ROWS_MIN = 4096
PLENTY = 1 << 30


def empty_catalog(budget_bytes: int = PLENTY) -> Catalog:
    return Catalog(FrameTable(), budget_bytes=budget_bytes)


def add(catalog: Catalog, words: U64, first_frame: int) -> None:
    """Add chunks one by frame, with offsets and lengths that tell the frame."""
    frames = np.arange(first_frame, first_frame + len(words), dtype=np.int64)
    catalog.add(words, frames, (frames * 10).astype(np.uint32), (frames + 1).astype(np.uint32))


def found(catalog: Catalog, ids: list[bytes]) -> list[int]:
    places = catalog.lookup(words_of(ids))
    known = places.frames != MISSING
    assert (places.offsets[known] == places.frames[known] * 10).all()
    assert (places.lengths[known] == places.frames[known] + 1).all()
    assert not places.offsets[~known].any()
    assert not places.lengths[~known].any()
    frames: list[int] = places.frames.tolist()
    return frames


def test_an_empty_catalog_knows_nothing() -> None:
    assert found(empty_catalog(), [chunk_id(1), chunk_id(2)]) == [MISSING, MISSING]
    assert found(empty_catalog(), []) == []


batches = st.lists(st.lists(st.integers(0, 60), max_size=30, unique=True), max_size=12)


@given(batches, st.integers(31, 64))
def test_the_newest_place_wins(numbers: list[list[int]], first_words: int) -> None:
    """Goal: a catalog answers like a dict, however its runs are merged.

    Method: add batches of chunks, some again and again under new frame numbers, and compare with a
    dict. The first eight bytes of the ids take few values, so that many ids share them.
    """
    catalog, model = empty_catalog(), {}
    frame = 0
    ids = {n: chunk_id(n, first_word=n % first_words) for n in range(61)}
    for batch in numbers:
        chosen = [ids[number] for number in batch]
        add(catalog, words_of(chosen), frame)
        for raw in chosen:
            model[raw] = frame
            frame += 1
    answers = found(catalog, list(ids.values()))
    assert answers == [model.get(raw, MISSING) for raw in ids.values()]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_ids_that_share_their_first_eight_bytes_are_told_apart(order: list[int]) -> None:
    """Goal: three ids with equal first words are all found, in one run and across merged runs.

    Method: add them in several orders, at once and one by one, then each again: the newer place
    must win for each. A fourth id with the same first word is not there and must not be found.
    """
    ids = [chunk_id(number, first_word=2**63 + 5) for number in range(3)]
    others = [chunk_id(number) for number in range(10, 40)]
    absent = chunk_id(99, first_word=2**63 + 5)
    at_once, one_by_one = empty_catalog(), empty_catalog()
    add(at_once, words_of([ids[number] for number in order] + others), 0)
    for place, number in enumerate(order):
        add(one_by_one, words_of([ids[number]]), place)
    for catalog in (at_once, one_by_one):
        expected = [order.index(number) for number in range(3)]
        assert found(catalog, [*ids, absent]) == [*expected, MISSING]
        for number in range(3):
            add(catalog, words_of([ids[number]]), 100 + number)
        assert found(catalog, [*ids, absent]) == [100, 101, 102, MISSING]


def test_the_greatest_and_the_least_id() -> None:
    catalog = empty_catalog()
    ids = [bytes(32), b"\xff" * 32, bytes(31) + b"\1", b"\xff" * 31 + b"\xfe"]
    add(catalog, words_of([ids[0], ids[1]]), 0)
    assert found(catalog, ids) == [0, 1, MISSING, MISSING]


def test_many_small_batches_stay_few_runs() -> None:
    """The work of adding must not grow with the square of the number of windows."""
    catalog = empty_catalog()
    ids = [chunk_id(number) for number in range(2000)]
    for start in range(0, 2000, 10):
        add(catalog, words_of(ids[start : start + 10]), start)
    assert len(catalog._runs) <= 8
    assert found(catalog, ids) == list(range(2000))


def test_beyond_the_budget_the_largest_run_is_dropped() -> None:
    """Goal: a catalog never holds more than its budget, and what it still says is right."""
    catalog = empty_catalog(ROWS_MIN * ROW_BYTES)
    ids = [chunk_id(number) for number in range(3 * ROWS_MIN)]
    for start in range(0, len(ids), 512):
        add(catalog, words_of(ids[start : start + 512]), start)
        assert sum(map(len, catalog._runs)) <= ROWS_MIN
        # What was just added is known: the next window is likely to refer to it.
        assert found(catalog, ids[start : start + 512]) == list(range(start, start + 512))
    answers = found(catalog, ids)
    assert all(answer in {number, MISSING} for number, answer in enumerate(answers))
    assert MISSING in answers


# -- loading --------------------------------------------------------------------------------------


def loaded(backend: MemoryBackend, budget_bytes: int = PLENTY) -> tuple[Catalog, FrameTable]:
    frames = FrameTable()
    catalog = Catalog(frames, budget_bytes=budget_bytes)
    catalog.load(backend)
    return catalog, frames


def packs_of(catalog: Catalog, frames: FrameTable, ids: list[bytes]) -> list[str | None]:
    """In which pack each chunk is said to be."""
    answers: list[str | None] = []
    for frame in catalog.lookup(words_of(ids)).frames.tolist():
        if frame == MISSING:
            answers.append(None)
        else:
            number = frames.rows["pack"][frame]
            answers.append(frames.pack_rows(np.array([number], np.int64))["id"][0].tobytes().hex())
    return answers


def test_indexes_are_merged_and_the_newest_wins() -> None:
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)
    ids = [chunk_id(number) for number in range(4)]
    add_index(backend, 1, [(ids[0], 10), (ids[1], 20)], clock=clock)
    add_index(backend, 2, [(ids[1], 20), (ids[2], 30)], clock=clock)
    catalog, frames = loaded(backend)
    one, two = pack_name(1), pack_name(2)
    assert packs_of(catalog, frames, ids) == [one, two, two, None]
    places = catalog.lookup(words_of(ids))
    assert places.lengths.tolist() == [10, 20, 30, 0]
    assert places.offsets.tolist() == [1, 2, 1002, 0]


def test_superseded_indexes_are_not_read() -> None:
    """An index that is contained in another is neither read nor needed."""
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)
    first = add_index(backend, 1, [(chunk_id(1), 10)], clock=clock)
    backend.delete(ObjectKind.INDEX, first.hex)
    backend.put_new(ObjectKind.INDEX, first.hex, [b"not an index at all"])
    clock.advance_s(1)
    add_index(backend, 2, [(chunk_id(2), 10)], clock=clock, supersedes=[first])
    catalog, frames = loaded(backend)
    assert packs_of(catalog, frames, [chunk_id(1), chunk_id(2)]) == [None, pack_name(2)]


def test_an_index_that_a_stale_listing_still_shows_is_passed_over() -> None:
    """Goal: an index that was merged and removed meanwhile does not stop a push.

    Method: a listing that shows an index which reading by name does not find.
    """

    backend = ForgetfulBackend()
    add_index(backend, 1, [(chunk_id(1), 10)])
    gone = add_index(backend, 2, [(chunk_id(2), 10)])
    backend.ghosts[ObjectKind.INDEX] = [backend.stat(ObjectKind.INDEX, gone.hex)]
    backend.delete(ObjectKind.INDEX, gone.hex)
    catalog, frames = loaded(backend)
    assert packs_of(catalog, frames, [chunk_id(1), chunk_id(2)]) == [pack_name(1), None]


def test_only_the_newest_indexes_are_loaded_if_not_all_fit() -> None:
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)
    ids = [chunk_id(number) for number in range(3 * 1500)]
    for pack in range(3):
        rows = [(raw, 1) for raw in ids[pack * 1500 : (pack + 1) * 1500]]
        add_index(backend, pack, rows, clock=clock)
    catalog, _ = loaded(backend, ROWS_MIN * ROW_BYTES)
    known = (catalog.lookup(words_of(ids)).frames != MISSING).reshape(3, 1500)
    assert known.all(axis=1).tolist() == [False, True, True]
    assert known.any(axis=1).tolist() == [False, True, True]


def test_a_chunk_with_another_length_is_reported_as_it_is_stored() -> None:
    """Whoever asks compares lengths: an index that lies about one must not be believed."""
    backend = MemoryBackend()
    add_index(backend, 1, [(chunk_id(1), 10)])
    catalog, _ = loaded(backend)
    assert catalog.lookup(words_of([chunk_id(1)])).lengths.tolist() == [10]
