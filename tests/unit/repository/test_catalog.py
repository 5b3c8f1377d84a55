"""Which chunks are known, and where: the newest place wins, and the budget is kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.format.tables import U64
from snapstore.repository import chunk_runs
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


def test_beyond_the_budget_the_largest_run_goes_to_a_file() -> None:
    """Goal: a catalog never holds more than its budget in memory, and forgets nothing.

    Method: add three budgets of chunks, in numbers that make it merge what it spilled, some of them
    again under new frames.
    """
    with empty_catalog(ROWS_MIN * ROW_BYTES) as catalog:
        ids = [chunk_id(number) for number in range(12 * ROWS_MIN)]
        for start in range(0, len(ids), 512):
            add(catalog, words_of(ids[start : start + 512]), start)
            assert sum(map(len, catalog._runs)) <= ROWS_MIN
        assert 0 < len(catalog._spilled) <= 8
        assert found(catalog, ids) == list(range(len(ids)))
        assert found(catalog, [chunk_id(-1 - number) for number in range(100)]) == [MISSING] * 100
        add(catalog, words_of(ids[:50]), 10**6)
        assert found(catalog, ids[:60]) == [*range(10**6, 10**6 + 50), *range(50, 60)]


def test_without_room_for_a_file_the_largest_run_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was just added stays known: the next window is likely to refer to it."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chunk_runs.tempfile, "TemporaryFile", full)
    catalog = empty_catalog(ROWS_MIN * ROW_BYTES)
    ids = [chunk_id(number) for number in range(3 * ROWS_MIN)]
    for start in range(0, len(ids), 512):
        add(catalog, words_of(ids[start : start + 512]), start)
        assert sum(map(len, catalog._runs)) <= ROWS_MIN
        assert found(catalog, ids[start : start + 512]) == list(range(start, start + 512))
    answers = found(catalog, ids)
    assert all(answer in {number, MISSING} for number, answer in enumerate(answers))
    assert MISSING in answers


@given(batches, st.integers(31, 64), st.integers(1, 40))
def test_spilled_runs_answer_like_runs(
    numbers: list[list[int]], first_words: int, in_memory: int
) -> None:
    """Goal: the newest place wins, wherever runs are, also for ids with equal first words."""
    catalog, model = empty_catalog(), {}
    catalog._rows_max = in_memory
    ids = {n: chunk_id(n, first_word=n % first_words << 57) for n in range(61)}
    frame = 0
    with catalog:
        for batch in numbers:
            chosen = [ids[number] for number in batch]
            add(catalog, words_of(chosen), frame)
            for raw in chosen:
                model[raw] = frame
                frame += 1
        answers = found(catalog, list(ids.values()))
    assert answers == [model.get(raw, MISSING) for raw in ids.values()]


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


@pytest.mark.parametrize("chunks", [300, 900, 1500, 4000])
@pytest.mark.parametrize("indexes", [3, 30])
def test_what_does_not_fit_is_found_all_the_same(chunks: int, indexes: int) -> None:
    """Goal: every chunk of every index is found, at its newest place, whatever the budget.

    Method: indexes that fit together or not, alone or not, with chunks in common; the same store
    through a catalog with room for all and one with room for few; ids that nobody has.
    """
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)
    ids = [chunk_id(number) for number in range(indexes * chunks)]
    for pack in range(indexes):
        rows = ids[pack * chunks : (pack + 1) * chunks] + ids[:100]
        add_index(backend, pack, [(raw, 1) for raw in dict.fromkeys(rows)], clock=clock)
    large, large_frames = loaded(backend)
    small, small_frames = loaded(backend, ROWS_MIN * ROW_BYTES)
    with small:
        assert sum(map(len, small._runs)) <= ROWS_MIN
        # A chunk that several indexes have may lie anywhere; of others there is one place.
        asked = [*ids[100:], *(chunk_id(-1 - number) for number in range(500))]
        assert packs_of(small, small_frames, asked) == packs_of(large, large_frames, asked)
        places, expected = small.lookup(words_of(asked)), large.lookup(words_of(asked))
        assert places.offsets.tolist() == expected.offsets.tolist()
        assert places.lengths.tolist() == expected.lengths.tolist()
        assert (small.lookup(words_of(ids[:100])).frames != MISSING).all()


def test_an_index_that_is_damaged_while_it_is_used_is_passed_over() -> None:
    """Goal: damage found during a push costs what only that index lists, and is told.

    Method: two indexes too large for memory; after loading, bytes of the first change.
    """
    backend = MemoryBackend()
    ids = [chunk_id(number) for number in range(8000)]
    first = add_index(backend, 1, [(raw, 1) for raw in ids[:4000]])
    add_index(backend, 2, [(raw, 1) for raw in ids[4000:]])
    with Catalog(FrameTable(), budget_bytes=ROWS_MIN * ROW_BYTES) as catalog:
        report = catalog.load(backend)
        assert len(catalog._indexes) == 2
        size = backend.stat(ObjectKind.INDEX, first.hex).size_bytes
        backend.delete(ObjectKind.INDEX, first.hex)
        backend.put_new(ObjectKind.INDEX, first.hex, [bytes(size)])
        assert not report.damaged
        known = catalog.lookup(words_of(ids)).frames != MISSING
        assert known.tolist() == [False] * 4000 + [True] * 4000
        assert list(report.damaged) == [first.hex]
        assert "is damaged" in report.warnings[0]
        backend.delete(ObjectKind.INDEX, catalog._indexes[0].name)
        assert (catalog.lookup(words_of(ids)).frames == MISSING).all()
        assert len(report.damaged) == 1


@pytest.mark.parametrize("chunks", [10, 4000])
def test_chunks_in_packs_that_are_gone_are_unknown(chunks: int) -> None:
    """The same for an index in memory and one that is looked into."""
    backend = MemoryBackend()
    ids = [chunk_id(number) for number in range(2 * chunks)]
    for pack in (1, 2):
        add_index(backend, pack, [(raw, 1) for raw in ids[(pack - 1) * chunks : pack * chunks]])
    backend.delete(ObjectKind.PACK, pack_name(1))
    with Catalog(FrameTable(), budget_bytes=ROWS_MIN * ROW_BYTES) as catalog:
        report = catalog.load(backend)
        known = catalog.lookup(words_of(ids)).frames != MISSING
        assert known.tolist() == [False] * chunks + [True] * chunks
        assert report.lost == {pack_name(1)}
    with Catalog(FrameTable(), budget_bytes=ROWS_MIN * ROW_BYTES) as catalog:
        report = catalog.load(backend, without=[pack_name(1), pack_name(2)])
        assert (catalog.lookup(words_of(ids)).frames == MISSING).all()
        assert not report.lost


def test_a_chunk_with_another_length_is_reported_as_it_is_stored() -> None:
    """Whoever asks compares lengths: an index that lies about one must not be believed."""
    backend = MemoryBackend()
    add_index(backend, 1, [(chunk_id(1), 10)])
    catalog, _ = loaded(backend)
    assert catalog.lookup(words_of([chunk_id(1)])).lengths.tolist() == [10]
