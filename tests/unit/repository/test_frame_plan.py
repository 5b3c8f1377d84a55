"""Grouping new chunks into frames: each once, in order, of one texture, none too long."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from snapstore.repository.frame_plan import (
    CODED_FRAME_BYTES,
    RAW_FRAME_BYTES,
    FramePlan,
    plan_frames,
    plan_raw_frames,
)
from snapstore.units import KIB, MIB

NOISE, TEXT, HALVES, SHIFTED, FLOATS = 0b0000, 0b1111, 0b1010, 0b0101, 0b1000


class Chunks:
    """The chunks of a window, with gaps where zeros are."""

    def __init__(self, parts: list[tuple[int, int, int, bool]], *, first: int = 0) -> None:
        """Each part is a gap before the chunk, its length, its texture and whether it is new."""
        starts, ends = [], []
        position = first
        for gap, length, _, _ in parts:
            starts.append(position + gap)
            position += gap + length
            ends.append(position)
        self.starts = np.array(starts, np.int64)
        self.ends = np.array(ends, np.int64)
        self.textures = np.array([texture for _, _, texture, _ in parts], np.uint8)
        self.rows = np.flatnonzero(np.array([is_new for *_, is_new in parts], np.bool_))

    def plan(self) -> list[FramePlan]:
        return plan_frames(self.rows, self.starts, self.ends, self.textures[self.rows])


def alike(count: int, length: int, texture: int) -> Chunks:
    return Chunks([(0, length, texture, True)] * count)


lengths = st.one_of(
    st.integers(1, 9),
    st.integers(4096, 20_000),
    st.integers(64 * KIB - 1, 64 * KIB + 1),
    st.integers(200_000, MIB),
)
gaps = st.sampled_from([0, 0, 0, 1, 2, 4, 4095, 4096])
windows = st.lists(
    st.tuples(
        gaps, lengths, st.sampled_from([NOISE, TEXT, HALVES, SHIFTED, FLOATS, 3]), st.booleans()
    ),
    max_size=40,
)


@given(windows, st.integers(-MIB + 1, 0))
def test_every_new_chunk_is_in_exactly_one_frame(
    parts: list[tuple[int, int, int, bool]], first: int
) -> None:
    chunks = Chunks(parts, first=first)
    plans = chunks.plan()
    rows = np.concatenate([np.zeros(0, np.int64), *(plan.rows for plan in plans)])
    assert rows.tolist() == chunks.rows.tolist()
    for plan in plans:
        _check_plan(chunks, plan)


def _check_plan(chunks: Chunks, plan: FramePlan) -> None:
    covered = [(int(chunks.starts[row]), int(chunks.ends[row])) for row in plan.rows.tolist()]
    assert plan.length == sum(end - start for start, end in covered)
    assert 0 < plan.length <= (CODED_FRAME_BYTES if plan.texture else RAW_FRAME_BYTES)
    assert [begin for begin, _ in plan.spans] == sorted(begin for begin, _ in plan.spans)
    # The spans are the chunks, joined where they abut.
    joined: list[tuple[int, int]] = []
    for start, end in covered:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    assert plan.spans == joined
    assert plan.phase == plan.spans[0][0] % 4
    if plan.texture not in {NOISE, TEXT}:
        before = 0
        for begin, end in plan.spans:
            assert (begin - plan.phase - before) % 4 == 0
            before += end - begin


@given(windows)
def test_a_long_run_of_one_texture_keeps_it(parts: list[tuple[int, int, int, bool]]) -> None:
    """Goal: frames get the texture of their chunks, or that of the run before if theirs is short.

    Method: walk over the runs of new chunks of one texture as the rule says, one by one.
    """
    chunks = Chunks(parts)
    settled: dict[int, int] = {}
    current: int | None = None
    runs: list[list[int]] = []
    for row in chunks.rows.tolist():
        if runs and chunks.textures[runs[-1][0]] == chunks.textures[row]:
            runs[-1].append(row)
        else:
            runs.append([row])
    for run in runs:
        length = sum(int(chunks.ends[row] - chunks.starts[row]) for row in run)
        if current is None or length >= 64 * KIB:
            current = int(chunks.textures[run[0]])
        settled |= dict.fromkeys(run, current)
    for plan in chunks.plan():
        assert {settled[row] for row in plan.rows.tolist()} == {plan.texture}


def test_nothing_new_makes_no_frame() -> None:
    assert Chunks([]).plan() == []
    assert Chunks([(0, 4096, TEXT, False)]).plan() == []


def test_frames_are_filled() -> None:
    """Frames are large: noise up to 4 MiB, what is compressed up to 1 MiB."""
    assert [plan.length for plan in alike(64, 256 * KIB, NOISE).plan()] == [4 * MIB] * 4
    assert [plan.length for plan in alike(32, 64 * KIB, HALVES).plan()] == [MIB] * 2
    assert [plan.length for plan in alike(3, MIB, TEXT).plan()] == [MIB] * 3


def test_zeros_in_between_do_not_end_a_frame() -> None:
    plans = Chunks([(0, 8192, NOISE, True), (4096, 8192, NOISE, True)]).plan()
    assert [plan.spans for plan in plans] == [[(0, 8192), (12288, 20480)]]


def test_numbers_of_two_phases_do_not_share_a_frame() -> None:
    for gap, frames in ((1, 2), (2, 2), (3, 2), (4, 1)):
        parts = [(0, 70_000, HALVES, True), (gap, 70_000, HALVES, True)]
        assert len(Chunks(parts).plan()) == frames


def test_small_files_of_text_share_frames_whatever_lies_between() -> None:
    """Every second small file is known already: the others must not get a frame each."""
    parts = [(0, 1001 + number, TEXT, number % 2 == 0) for number in range(1000)]
    assert len(Chunks(parts).plan()) == 1
    parts = [(0, 1001 + number, NOISE, number % 2 == 0) for number in range(1000)]
    assert len(Chunks(parts).plan()) == 1


def test_a_short_run_of_another_texture_is_no_frame_of_its_own() -> None:
    parts = [
        (0, 200_000, HALVES, True),
        (0, 60_000, TEXT, True),
        (0, 200_000, HALVES, True),
        (0, 70_000, TEXT, True),
    ]
    assert [(plan.texture, plan.length) for plan in Chunks(parts).plan()] == [
        (HALVES, 460_000),
        (TEXT, 70_000),
    ]


@given(
    st.lists(st.tuples(gaps, lengths | st.just(MIB)), min_size=1, max_size=40),
    st.integers(0, 4 * MIB),
)
def test_without_texture_they_need_not_be_looked_at(
    parts: list[tuple[int, int]], first: int
) -> None:
    """Goal: the same frames as if each chunk were looked at in turn."""
    chunks = Chunks([(gap, length, NOISE, True) for gap, length in parts], first=first)
    slow = chunks.plan()
    fast = plan_raw_frames(chunks.starts, chunks.ends)
    assert fast.firsts.tolist() == [int(plan.rows[0]) for plan in slow]
    assert fast.spans == [plan.spans for plan in slow]
