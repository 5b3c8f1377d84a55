"""Planning reads: every frame once, every byte to its place, neighbours together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import Malformed
from snapstore.format.layout import (
    FRAME_DTYPE,
    PACK_DTYPE,
    SEGMENT_DTYPE,
    STREAM_DTYPE,
    ZEROS,
    LayoutMeta,
    LayoutTables,
    build_layout,
    parse_layout,
)
from snapstore.repository.read_plan import Destination, ReadPlan, plan_reads
from snapstore.units import KIB, MIB

META = LayoutMeta(rank="a" * 64, nonce="0" * 32, created="2026-11-30T05:00:00Z")
GAP = 64 * KIB
PLAIN_BYTES = 4 * MIB
PACK_BYTES = 64 * MIB

Frame = tuple[int, int, int]
"""Pack, offset and stored length."""
Segment = tuple[int, int | None, int]
"""Length, number of the frame or None for zeros, offset in it."""


def layout_of(frames: list[Frame], streams: list[list[Segment]]) -> LayoutTables:
    """Build a layout and read it back."""
    packs = np.array([(bytes([number + 1]) * 32, PACK_BYTES) for number in range(9)], PACK_DTYPE)
    frame_rows = np.zeros(len(frames), FRAME_DTYPE)
    for row, (pack, offset, stored) in zip(frame_rows, frames, strict=True):
        row["pack"], row["offset"], row["stored_length"] = pack, offset, stored
        row["plain_length"], row["codec"] = PLAIN_BYTES, 1
    flat = [
        (length, ZEROS if frame is None else frame, offset)
        for stream in streams
        for length, frame, offset in stream
    ]
    counts = [len(stream) for stream in streams]
    stream_rows = np.zeros(len(streams), STREAM_DTYPE)
    stream_rows["count"] = counts
    stream_rows["first"] = np.cumsum([0, *counts])[:-1]
    stream_rows["length"] = [sum(length for length, _, _ in stream) for stream in streams]
    built = build_layout(META, packs, frame_rows, stream_rows, np.array(flat, SEGMENT_DTYPE))
    return parse_layout(built.to_bytes())


Place = tuple[int, int, int, int, Frame, int]
"""Layout, stream, offset in the stream, length, frame, offset in the frame."""


def expected_places(
    layouts: list[tuple[list[Frame], list[list[Segment]]]],
) -> list[Place]:
    """What must arrive where, by the most obvious program."""
    places: list[Place] = []
    for source, (frames, streams) in enumerate(layouts):
        for stream, segments in enumerate(streams):
            start = 0
            for length, frame, offset in segments:
                if frame is not None:
                    places.append((source, stream, start, length, frames[frame], offset))
                start += length
    return sorted(places)


def planned_places(plan: ReadPlan) -> list[Place]:
    places: list[Place] = []
    for unit in plan.units:
        for row in range(unit.first, unit.last):
            frame = plan.frames[row]
            where = (unit.pack.raw[0] - 1, int(frame["offset"]), int(frame["stored_length"]))
            places.extend(
                (one.source, one.stream, one.start, one.length, where, one.offset)
                for one in plan.destinations(row)
            )
    return sorted(places)


def check_units(plan: ReadPlan, read_bytes_max: int) -> None:
    """Check that units tile the frames, that each covers its own, and that none is too long."""
    row = 0
    keys = []
    for unit in plan.units:
        assert unit.first == row
        assert unit.last > unit.first
        row = unit.last
        frames = plan.frames[unit.first : unit.last]
        begins = frames["offset"].astype(np.int64)
        ends = begins + frames["stored_length"]
        assert len(set(frames["pack"].tolist())) == 1
        assert unit.offset == begins[0]
        assert unit.offset + unit.length == min(-(-ends[-1] // 4096) * 4096, PACK_BYTES)
        assert (begins[1:] - ends[:-1] <= GAP).all()
        assert unit.length <= read_bytes_max or len(frames) == 1
        keys.append((int(frames["pack"][0]), unit.offset))
    assert row == len(plan.frames)
    assert keys == sorted(keys)
    for one, other in zip(plan.units, plan.units[1:], strict=False):
        if one.pack == other.pack:
            assert one.offset + one.length <= other.offset
            last = plan.frames[one.last - 1]
            gap = other.offset - int(last["offset"] + last["stored_length"])
            span = (
                int(plan.frames[other.first]["offset"] + plan.frames[other.first]["stored_length"])
                - one.offset
            )
            # Two reads only where one would not do.
            assert gap > GAP or span > read_bytes_max
    assert plan.stored_bytes == sum(unit.length for unit in plan.units)


@st.composite
def frame_tables(draw: st.DrawFn) -> list[Frame]:
    """Frames that do not overlap, in several packs, close to each other and far apart."""
    frames: list[Frame] = []
    for pack in range(draw(st.integers(1, 3))):
        offset = 0
        for _ in range(draw(st.integers(0, 8))):
            offset += draw(st.sampled_from([0, 4096, GAP, GAP + 4096, MIB]))
            stored = draw(st.sampled_from([1, 4096, 5000, 300_000, 2 * MIB, 4 * MIB]))
            frames.append((pack, offset, stored))
            offset += -(-stored // 4096) * 4096
    return frames


def segment_lists(frames: list[Frame]) -> st.SearchStrategy[list[list[Segment]]]:
    zeros = st.tuples(st.integers(1, MIB), st.none(), st.just(0))
    some: st.SearchStrategy[Segment] = zeros
    if frames:
        numbers = st.integers(0, len(frames) - 1)
        data = st.tuples(st.integers(1, MIB), numbers, st.integers(0, PLAIN_BYTES - MIB))
        some = st.one_of(zeros, data)
    return st.lists(st.lists(some, max_size=6), min_size=1, max_size=4)


@given(st.data(), st.sampled_from([1, 4 * MIB, 8 * MIB, 64 * MIB]))
def test_every_frame_is_read_once_and_every_byte_placed(
    data: st.DataObject, read_bytes_max: int
) -> None:
    """Goal: whatever the layouts share, the plan reads each needed frame once.

    Method: up to three layouts over one table of frames. Placed must be exactly what the layouts
    say, from as few frames as there are, in reads that tile them in order.
    """
    frames = data.draw(frame_tables())
    sources = [
        (frames, streams)
        for streams in data.draw(st.lists(segment_lists(frames), min_size=1, max_size=3))
    ]
    layouts = [layout_of(*source) for source in sources]
    plan = plan_reads(layouts, read_bytes_max=read_bytes_max)
    expected = expected_places(sources)
    assert planned_places(plan) == expected
    assert len(plan.frames) == len({place[4] for place in expected})
    assert plan.data_bytes == sum(place[3] for place in expected)
    check_units(plan, read_bytes_max)


def test_nothing_to_read() -> None:
    for layouts in ([], [layout_of([], [])], [layout_of([], [[(5000, None, 0)], []])]):
        plan = plan_reads(layouts, read_bytes_max=MIB)
        assert plan.units == []
        assert (plan.data_bytes, plan.stored_bytes, len(plan.frames)) == (0, 0, 0)


def test_a_frame_that_two_ranks_share_is_read_once() -> None:
    frames = [(0, 0, 9000), (0, 12288, 9000)]
    one = layout_of(frames, [[(100, 0, 0), (100, 1, 0)]])
    two = layout_of(frames, [[(100, 1, 500)], [(100, 1, 700), (50, None, 0), (100, 1, 0)]])
    plan = plan_reads([one, two], read_bytes_max=MIB)
    assert len(plan.frames) == 2
    assert plan.stored_bytes == 12288 + 12288
    assert list(plan.destinations(1)) == [
        Destination(0, 0, 100, 100, 0),
        Destination(1, 0, 0, 100, 500),
        Destination(1, 1, 0, 100, 700),
        Destination(1, 1, 150, 100, 0),
    ]


@pytest.mark.parametrize(("gap", "reads"), [(0, 1), (GAP, 1), (GAP + 4096, 2)])
def test_small_gaps_are_read_along(gap: int, reads: int) -> None:
    frames = [(0, 0, 8192), (0, 8192 + gap, 8192)]
    plan = plan_reads([layout_of(frames, [[(1, 0, 0), (1, 1, 0)]])], read_bytes_max=MIB)
    assert len(plan.units) == reads
    assert plan.stored_bytes == 16384 + (gap if reads == 1 else 0)


def test_frames_of_two_packs_are_two_reads() -> None:
    plan = plan_reads(
        [layout_of([(0, 0, 4096), (1, 4096, 4096)], [[(1, 1, 0), (1, 0, 0)]])], read_bytes_max=MIB
    )
    assert [(unit.pack.raw[0], unit.offset) for unit in plan.units] == [(2, 4096), (1, 0)]


def test_packs_that_contradict_each_other_are_refused() -> None:
    one = layout_of([(0, 0, 4096)], [[(1, 0, 0)]])
    packs = one.packs.copy()
    packs["length"] += 1
    other = LayoutTables(one.meta, packs, one.frames, one.streams, one.segments)
    with pytest.raises(Malformed):
        plan_reads([one, other], read_bytes_max=MIB)
