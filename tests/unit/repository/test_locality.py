"""What is stored again for the sake of restore speed: bounded by what is new, and worth it."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.format.index import FRAME_DTYPE
from snapstore.repository.frames import FrameTable
from snapstore.repository.locality import AMPLIFICATION_MAX, Locality
from snapstore.units import KIB, MIB


class Window(NamedTuple):
    """Known chunks of one window, and how many bytes of it are new."""

    frames: list[int]
    lengths: list[int]
    new_bytes: int


def table_of(plain_lengths: list[int]) -> FrameTable:
    frames = FrameTable()
    add_stored(frames, plain_lengths)
    return frames


def add_stored(frames: FrameTable, plain_lengths: list[int]) -> None:
    rows = np.zeros(len(plain_lengths), FRAME_DTYPE)
    rows["plain_length"] = plain_lengths
    frames.add_frames(rows, np.zeros(1, np.int64))


def rejected(locality: Locality, window: Window) -> list[bool]:
    found: list[bool] = locality.rejected(
        np.array(window.frames, np.int64), np.array(window.lengths, np.int64), window.new_bytes
    ).tolist()
    return found


@st.composite
def stores(draw: st.DrawFn) -> tuple[list[int], list[Window]]:
    plain_lengths = draw(st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=12))
    chunk = st.tuples(st.integers(0, len(plain_lengths) - 1), st.integers(1, MIB))
    windows = []
    for _ in range(draw(st.integers(1, 8))):
        chunks = draw(st.lists(chunk, max_size=20))
        new_bytes = draw(st.one_of(st.just(0), st.integers(0, 8 * MIB)))
        windows.append(
            Window([frame for frame, _ in chunks], [length for _, length in chunks], new_bytes)
        )
    return plain_lengths, windows


@given(stores())
def test_what_is_stored_again_never_exceeds_what_is_new(
    store: tuple[list[int], list[Window]],
) -> None:
    plain_lengths, windows = store
    locality = Locality(table_of(plain_lengths))
    again = new = 0
    for window in windows:
        flags = rejected(locality, window)
        new += window.new_bytes
        again += sum(length for length, flag in zip(window.lengths, flags, strict=True) if flag)
        assert again <= new


@given(stores())
def test_frames_are_kept_or_left_as_wholes(store: tuple[list[int], list[Window]]) -> None:
    plain_lengths, windows = store
    locality = Locality(table_of(plain_lengths))
    for window in windows:
        flags = rejected(locality, window)
        verdicts: dict[int, bool] = {}
        for frame, flag in zip(window.frames, flags, strict=True):
            assert verdicts.setdefault(frame, flag) == flag


@given(stores())
def test_a_tree_that_is_all_known_is_not_touched(store: tuple[list[int], list[Window]]) -> None:
    plain_lengths, windows = store
    locality = Locality(table_of(plain_lengths))
    for window in windows:
        assert not any(rejected(locality, window._replace(new_bytes=0)))


@given(stores(), st.integers(1, 5))
def test_what_this_push_has_stored_is_never_stored_again(
    store: tuple[list[int], list[Window]], count: int
) -> None:
    plain_lengths, windows = store
    frames = table_of(plain_lengths)
    locality = Locality(frames)
    first = frames.reserve_frames(np.full(count, 4 * MIB, np.uint32))
    for window in windows:
        own = [first + number % count for number in range(len(window.frames))]
        assert not any(rejected(locality, window._replace(frames=own, new_bytes=8 * MIB)))


@given(stores())
def test_decoding_is_bounded_where_the_budget_allows(
    store: tuple[list[int], list[Window]],
) -> None:
    """Goal: a window costs at most a quarter more decoding than it has bytes.

    Method: windows with far more new bytes than old ones, so that the budget is never the limit.
    The cost is computed here, frame by frame: frames that the push used before, and those at both
    ends of the window, cost only what they are used for.
    """
    plain_lengths, windows = store
    locality = Locality(table_of(plain_lengths))
    kept: set[int] = set()
    for window in windows:
        new_bytes = 64 * MIB
        flags = rejected(locality, window._replace(new_bytes=new_bytes))
        used: dict[int, int] = {}
        for frame, length in zip(window.frames, window.lengths, strict=True):
            used[frame] = used.get(frame, 0) + length
        dropped = {frame for frame, flag in zip(window.frames, flags, strict=True) if flag}
        free = kept | set(window.frames[:1]) | set(window.frames[-1:])
        decoded = new_bytes
        for frame, length in used.items():
            whole = max(plain_lengths[frame], length)
            decoded += length if frame in dropped or frame in free else whole
        assert decoded <= AMPLIFICATION_MAX * (new_bytes + sum(used.values()))
        kept |= set(used) - dropped


def test_the_worst_frames_go_first() -> None:
    """Of four frames in the middle of a window the hardly used ones are stored again."""
    locality = Locality(table_of([4 * MIB] * 6))
    window = Window(
        frames=[0, 1, 2, 3, 4, 5],
        lengths=[MIB, 16 * KIB, 4 * MIB, 64 * KIB, 3 * MIB, MIB],
        new_bytes=2 * MIB,
    )
    assert rejected(locality, window) == [False, True, False, True, False, False]


def test_frames_at_both_ends_are_free() -> None:
    locality = Locality(table_of([4 * MIB] * 2))
    assert rejected(locality, Window([0, 1], [4096, 4096], 8 * MIB)) == [False, False]


def test_frames_that_were_used_before_are_free() -> None:
    """What an earlier window decodes anyway costs nothing; to a fresh push it would."""
    little = Window([0, 1, 2, 3, 4, 5], [4096] * 6, 1 * MIB)
    assert sum(rejected(Locality(table_of([4 * MIB] * 6)), little)) == 4
    locality = Locality(table_of([4 * MIB] * 6))
    assert not any(rejected(locality, little._replace(lengths=[4 * MIB] * 6)))
    assert not any(rejected(locality, little))


def test_a_budget_that_is_too_small_drops_what_it_can() -> None:
    locality = Locality(table_of([4 * MIB] * 6))
    window = Window([0, 1, 2, 3, 4, 5], [4096, 8192, 8192, 8192, 8192, 4096], 20_000)
    flags = rejected(locality, window)
    assert sum(flags) == 2
    assert flags[0] is flags[-1] is False


def test_what_is_not_used_of_the_budget_is_left_for_later() -> None:
    """Goal: the budget is what is new in all windows so far, less what was spent of it.

    Method: new bytes for two frames come in one window, the first with scattered chunks spends
    them, and the next one finds nothing left.
    """
    scattered = Window([0, 1, 2, 3], [4096, 65536, 65536, 4096], 0)
    assert not any(rejected(Locality(table_of([4 * MIB] * 4)), scattered))
    locality = Locality(table_of([4 * MIB] * 8))
    assert not any(rejected(locality, Window([], [], 140_000)))
    assert rejected(locality, scattered) == [False, True, True, False]
    others = scattered._replace(frames=[4, 5, 6, 7])
    assert not any(rejected(locality, others))


@pytest.mark.parametrize("plain_lengths", [[], [4096]])
def test_a_window_without_old_chunks(plain_lengths: list[int]) -> None:
    locality = Locality(table_of(plain_lengths))
    assert rejected(locality, Window([], [], 1000)) == []


def test_stored_frames_that_are_found_later_count_as_those_known_from_the_start() -> None:
    """Goal: it makes no difference whether an index was loaded or is looked into during the push.

    Method: the same windows, with all frames known at once, and with some that become known after
    frames of this push.
    """
    at_once = table_of([4 * MIB] * 8)
    in_time = table_of([4 * MIB] * 2)
    late = Locality(in_time)
    in_time.reserve_frames(np.full(3, 4 * MIB, np.uint32))
    add_stored(in_time, [4 * MIB] * 6)
    lengths = [4096, 65536, 65536, 4096]
    expected = rejected(Locality(at_once), Window([0, 2, 3, 7], lengths, MIB))
    assert rejected(late, Window([0, 5, 6, 10], lengths, MIB)) == expected
    assert any(expected)
    assert not any(rejected(late, Window([2, 3, 4, 2], lengths, MIB)))
