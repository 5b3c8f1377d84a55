"""Strong integrity: no layout can lie about a byte, and no honest one is refused. Proves: I6."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import DigestMismatch
from snapstore.format.layout import (
    FRAME_DTYPE,
    PACK_DTYPE,
    SEGMENT_DTYPE,
    ZEROS,
    LayoutMeta,
    LayoutTables,
)
from snapstore.format.rank import EXTENT_DTYPE
from snapstore.format.tables import STREAM_DTYPE, Rows
from snapstore.ids import ChunkId, RankId
from snapstore.repository.read_plan import Destination, plan_reads
from snapstore.repository.verifier import ChunkVerifier, Claim

META = LayoutMeta(rank="a" * 64, nonce="0" * 32, created="2026-11-30T05:00:00Z")
RANK = RankId.parse("a" * 64)

Extent = tuple[int, int, int | None]
"""Length, offset in the chunk, number of the chunk or None for zeros."""
Segment = tuple[int, int | None, int]
"""Length, number of the frame or None for zeros, offset in it."""


@dataclasses.dataclass(frozen=True)
class World:
    """Chunks, where a manifest wants them, and frames that hold them one after the other."""

    chunks: list[bytes]
    streams: list[list[Extent]]
    in_frames: list[list[int]]

    @property
    def frames(self) -> list[bytes]:
        return [b"".join(self.chunks[number] for number in frame) for frame in self.in_frames]

    def truth(self) -> list[bytes]:
        return [
            b"".join(
                bytes(length) if chunk is None else self.chunks[chunk][offset : offset + length]
                for length, offset, chunk in extents
            )
            for extents in self.streams
        ]

    def verifier(self) -> ChunkVerifier:
        flat = [extent for extents in self.streams for extent in extents]
        rows = np.zeros(len(flat), EXTENT_DTYPE)
        for row, (length, offset, chunk) in zip(rows, flat, strict=True):
            row["length"], row["chunk_offset"] = length, offset
            if chunk is not None:
                row["chunk_length"] = len(self.chunks[chunk])
                row["id"] = ChunkId.of(self.chunks[chunk]).raw
        return ChunkVerifier(RANK, self._stream_rows(self.streams), rows)

    def honest(self) -> list[list[Segment]]:
        """The layout that is right: one segment per extent, from the first frame that has it."""
        places: dict[int, tuple[int, int]] = {}
        for frame, numbers in enumerate(self.in_frames):
            position = 0
            for number in numbers:
                places.setdefault(number, (frame, position))
                position += len(self.chunks[number])
        return [
            [
                (length, None, 0)
                if chunk is None
                else (length, places[chunk][0], places[chunk][1] + offset)
                for length, offset, chunk in extents
            ]
            for extents in self.streams
        ]

    def layout(self, segments: list[list[Segment]]) -> LayoutTables:
        frames = np.zeros(len(self.in_frames), FRAME_DTYPE)
        frames["plain_length"] = [len(frame) for frame in self.frames]
        frames["stored_length"], frames["offset"] = 1, 4096 * np.arange(len(frames))
        packs = np.array([(b"p" * 32, 1 << 20)], PACK_DTYPE)
        flat = [
            (length, ZEROS if frame is None else frame, offset)
            for stream in segments
            for length, frame, offset in stream
        ]
        return LayoutTables(
            META, packs, frames, self._stream_rows(segments), np.array(flat, SEGMENT_DTYPE)
        )

    def read(self, segments: list[list[Segment]]) -> list[bytes]:
        """Read everything as a pull does, with all checks; raises if one fails."""
        layout = self.layout(segments)
        verifier = self.verifier()
        verifier.check_zeros(layout)
        out = [bytearray(sum(length for length, _, _ in stream)) for stream in segments]
        plan = plan_reads([layout], read_bytes_max=1 << 20)
        for row in range(len(plan.frames)):
            decoded = memoryview(self.frames[int(plan.frames[row]["offset"]) // 4096])
            for place in plan.destinations(row):
                data = decoded[place.offset : place.offset + place.length]
                whole = verifier.whole_chunks(place.stream, 0, len(out[place.stream]))
                is_right = whole.are_right(place.start, data)
                try:
                    verifier.check(place, decoded)
                except DigestMismatch:
                    # The quick check may leave it to the other, never be content with less.
                    assert not is_right
                    raise
                out[place.stream][place.start : place.start + place.length] = data
        return [bytes(stream) for stream in out]

    @staticmethod
    def _stream_rows(streams: list[list[Extent]] | list[list[Segment]]) -> Rows:
        rows = np.zeros(len(streams), STREAM_DTYPE)
        counts = [len(stream) for stream in streams]
        rows["count"], rows["first"] = counts, np.cumsum([0, *counts])[:-1]
        rows["length"] = [sum(part[0] for part in stream) for stream in streams]
        return rows


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A few short chunks over two letters and zero, so that many runs of them look alike."""
    letters = st.sampled_from([0, 0, 1, 2])
    chunks = draw(
        st.lists(st.lists(letters, min_size=1, max_size=6).map(bytes), min_size=1, max_size=5)
    )
    numbers = st.integers(0, len(chunks) - 1)
    in_frames = draw(st.lists(st.lists(numbers, min_size=1, max_size=4), max_size=3))
    in_frames.append(list(range(len(chunks))))

    @st.composite
    def extents(draw: st.DrawFn) -> Extent:
        if draw(st.integers(0, 2)) == 0:
            return draw(st.integers(1, 8)), 0, None
        number = draw(numbers)
        offset = draw(st.integers(0, len(chunks[number]) - 1))
        return draw(st.integers(1, len(chunks[number]) - offset)), offset, number

    streams = draw(st.lists(st.lists(extents(), max_size=5), min_size=1, max_size=3))
    return World(chunks, streams, in_frames)


@given(worlds())
def test_an_honest_layout_is_believed(world: World) -> None:
    assert world.read(world.honest()) == world.truth()


@given(worlds(), st.data())
def test_no_lie_gets_through(world: World, data: st.DataObject) -> None:
    """Goal: whatever a layout says, what is placed is what the manifest says, or it is refused.

    Method: random layouts with the right lengths of streams and segments within their frames, as
    the format demands: places at random, cuts at random, zeros at random. The oracle is the truth.
    """
    frames = world.frames
    segments: list[list[Segment]] = []
    for true_bytes in world.truth():
        stream: list[Segment] = []
        left = len(true_bytes)
        while left:
            frame = data.draw(st.none() | st.integers(0, len(frames) - 1))
            longest = left if frame is None else min(left, len(frames[frame]))
            length = data.draw(st.integers(1, longest))
            offset = 0
            if frame is not None:
                offset = data.draw(st.integers(0, len(frames[frame]) - length))
            stream.append((length, frame, offset))
            left -= length
        segments.append(stream)
    try:
        placed = world.read(segments)
    except DigestMismatch:
        return
    assert placed == world.truth()


@given(worlds(), st.data())
def test_no_small_change_gets_through(world: World, data: st.DataObject) -> None:
    """Like the test above, but from the honest layout on: changes that are nearly right."""
    segments = [list(stream) for stream in world.honest()]
    places = [(row, column) for row, stream in enumerate(segments) for column in range(len(stream))]
    if not places:
        return
    frames = world.frames
    for _ in range(data.draw(st.integers(1, 2))):
        row, column = data.draw(st.sampled_from(places))
        length, frame, offset = segments[row][column]
        kind = data.draw(st.sampled_from(["zeros", "offset", "frame", "swap"]))
        if kind == "zeros":
            frame, offset = None, 0
        elif kind == "offset" and frame is not None:
            offset = data.draw(st.integers(0, len(frames[frame]) - length))
        elif kind == "frame":
            frame = data.draw(st.integers(0, len(frames) - 1))
            if len(frames[frame]) < length:
                return
            offset = min(offset, len(frames[frame]) - length)
        elif kind == "swap":
            other_row, other_column = data.draw(st.sampled_from(places))
            other = segments[other_row][other_column]
            if other[0] != length:
                return
            segments[other_row][other_column] = (length, frame, offset)
            _, frame, offset = other
        segments[row][column] = (length, frame, offset)
    try:
        placed = world.read(segments)
    except DigestMismatch:
        return
    assert placed == world.truth()


WORLD = World(
    chunks=[b"A" * 100, b"B" * 100, b"C" * 50],
    streams=[[(100, 0, 0), (300, 0, None), (100, 0, 1)], [(50, 0, 2), (40, 30, 0)]],
    in_frames=[[0, 1, 2], [2]],
)


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param([[(100, 0, 100), (300, None, 0), (100, 0, 0)]], id="segments swapped"),
        pytest.param([[(100, 0, 0), (400, None, 0)]], id="data called zeros"),
        pytest.param([[(99, 0, 0), (301, None, 0), (100, 0, 100)]], id="one byte called zero"),
        pytest.param([[(500, None, 0)]], id="all called zeros"),
        pytest.param(
            [[(100, 0, 0), (200, None, 0), (100, 0, 0), (100, 0, 100)]], id="zeros called data"
        ),
        pytest.param([[(100, 0, 0), (299, None, 0), (101, 0, 99)]], id="one zero byte called data"),
        pytest.param([[(100, 0, 1), (300, None, 0), (100, 0, 100)]], id="offset off by one"),
        pytest.param([[(100, 0, 0), (300, None, 0), (100, 0, 101)]], id="the last off by one"),
        pytest.param(
            [[(100, 0, 0), (300, None, 0), (50, 0, 100), (50, 1, 0)]], id="half of another chunk"
        ),
        pytest.param([[(100, 0, 0), (300, None, 0), (100, 0, 150)]], id="beyond its chunk"),
    ],
)
def test_lies(lie: list[list[Segment]]) -> None:
    assert WORLD.read(WORLD.honest()) == WORLD.truth()
    with pytest.raises(DigestMismatch):
        WORLD.read([*lie, WORLD.honest()[1]])


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param([(50, 1, 0), (40, 0, 29)], id="another part of the chunk"),
        pytest.param([(50, 1, 0), (40, 0, 130)], id="the same part of another chunk"),
        pytest.param([(50, 0, 0), (40, 0, 30)], id="another chunk"),
    ],
)
def test_lies_about_parts_of_chunks(lie: list[Segment]) -> None:
    with pytest.raises(DigestMismatch):
        WORLD.read([WORLD.honest()[0], lie])


def test_the_message_names_rank_and_offset() -> None:
    with pytest.raises(DigestMismatch, match=r"aaaaaaaaaaaa leaves out data at 400") as caught:
        WORLD.read([[(100, 0, 0), (300, None, 0), (100, None, 0)], WORLD.honest()[1]])
    assert caught.value.next_step
    with pytest.raises(DigestMismatch, match=r"of stream 1 at offset 50 "):
        WORLD.read([WORLD.honest()[0], [(50, 1, 0), (40, 0, 29)]])


def test_a_frame_that_is_too_short_for_its_chunk_is_refused() -> None:
    """The part that is placed is right, but the chunk it is part of is not whole."""
    world = World([b"AAAA", b"A"], [[(1, 0, 0)]], [[1]])
    with pytest.raises(DigestMismatch):
        world.read([[(1, 0, 0)]])


def test_whole_chunks_are_checked_in_place() -> None:
    """Runs of whole chunks are told right from wrong; all else is left to the whole frame."""
    whole = WORLD.verifier().whole_chunks(0, 0, 500)
    a, b = memoryview(b"A" * 100), memoryview(b"B" * 100)
    assert whole.are_right(0, a)
    assert whole.are_right(400, b)
    assert not whole.are_right(0, b)
    assert not whole.are_right(400, a)
    assert not whole.are_right(0, a[:99])
    assert not whole.are_right(1, a[1:])
    assert not whole.are_right(100, memoryview(bytes(300)))
    assert not whole.are_right(0, memoryview(b"A" * 100 + bytes(300)))
    assert not whole.are_right(400, memoryview(b"B" * 101))
    part = WORLD.verifier().whole_chunks(1, 0, 90)
    assert part.are_right(0, memoryview(b"C" * 50))
    assert not part.are_right(50, memoryview(b"A" * 40))


def test_what_was_checked_is_remembered_where_it_was() -> None:
    """Goal: a claim that was true of one place in a frame says nothing of another."""
    known: set[Claim] = set()
    verifier = WORLD.verifier()
    frame = memoryview(WORLD.frames[0])
    verifier.check(Destination(0, 0, 10, 5, 10), frame, known)
    assert len(known) == 1
    verifier.check(Destination(0, 0, 0, 100, 0), frame, known)
    assert len(known) == 1
    with pytest.raises(DigestMismatch):
        verifier.check(Destination(0, 0, 10, 5, 11), frame, known)
    assert len(known) == 1


def test_a_rank_without_bytes() -> None:
    assert World([b"x"], [[], []], [[0]]).read([[], []]) == [b"", b""]
