"""Collecting a rank: what is told window by window comes out as one manifest and one layout."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapstore.format.index import FRAME_DTYPE
from snapstore.format.layout import ZEROS, LayoutTables, parse_layout
from snapstore.format.rank import RankTables, parse_rank
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.ids import PackId
from snapstore.repository import rank_builder
from snapstore.repository.frames import FrameTable
from snapstore.repository.layouts import ZERO_FRAME
from snapstore.repository.rank_builder import Pieces, RankBuilder
from snapstore.testing.clock import ManualClock
from tests.unit.repository.parts import chunk_id

ROOT = TreeEntry(path=b"", type=EntryType.DIRECTORY, mode=0o755, uid=0, gid=0, mtime_ns=0)
FRAME_BYTES = 1 << 20
FRAMES = 4

Piece = tuple[int, int | None, int]
"""Length, frame or None for zeros, and offset in the frame."""


def pieces_of(pieces: list[Piece]) -> Pieces:
    ids = np.array(
        [bytes(32) if frame is None else id_of(frame, offset) for _, frame, offset in pieces],
        "V32",
    )
    return Pieces(
        lengths=np.array([length for length, _, _ in pieces], np.int64),
        ids=ids,
        frames=np.array(
            [ZERO_FRAME if frame is None else frame for _, frame, _ in pieces], np.int64
        ),
        offsets=np.array([offset for _, _, offset in pieces], np.int64),
    )


def id_of(frame: int, offset: int) -> bytes:
    return chunk_id(frame * FRAME_BYTES + offset)


def frame_table() -> FrameTable:
    frames = FrameTable()
    packs = [frames.reserve_pack() for _ in range(2)]
    rows = np.zeros(FRAMES, FRAME_DTYPE)
    rows["plain_length"], rows["stored_length"], rows["codec"] = FRAME_BYTES, 5000, 1
    rows["offset"] = 8192 * np.arange(FRAMES)
    rows["pack"] = [packs[number % 2] for number in range(FRAMES)]
    first = frames.reserve_frames(rows["plain_length"])
    for number in range(FRAMES):
        frames.place_frame(first + number, rows[number : number + 1])
    for number, pack in enumerate(packs):
        frames.seal_pack(pack, PackId(bytes([number + 1]) * 32), 1 << 20)
    return frames


def built(streams: list[list[list[Piece]]]) -> tuple[RankTables, LayoutTables]:
    """Tell a builder streams of windows of pieces, and read back what it makes of them."""
    builder = RankBuilder(7)
    try:
        for number, windows in enumerate(streams):
            assert builder.add_stream(data_class="pages", origin=f"stream {number}") == number
            for window in windows:
                builder.add_pieces(number, pieces_of(window))
        lengths = [sum(piece[0] for window in windows for piece in window) for windows in streams]
        assert builder.logical_bytes == sum(lengths)
        manifest = builder.build_manifest([ROOT], {"gpu": 3})
        rank = parse_rank(manifest.to_bytes(), root=manifest.root)
        layout, _ = builder.build_layout(manifest.root, frame_table(), ManualClock())
        assert builder.data_bytes == int(
            rank.extents["length"][rank.extents["chunk_length"] != 0].sum()
        )
        return rank, parse_layout(layout.to_bytes())
    finally:
        builder.close()
        builder.close()


zeros = st.integers(1, 9000).map(lambda length: (length, None, 0))
data = st.builds(
    lambda length, frame, offset: (length, frame, offset),
    st.integers(1, 4096),
    st.integers(0, FRAMES - 1),
    st.sampled_from([0, 4096, 8192, 50_000]),
)


def flattened(windows: list[list[Piece]]) -> list[Piece]:
    """The pieces of a stream, with zeros joined: the extents that it must have."""
    result: list[Piece] = []
    for length, frame, offset in (piece for window in windows for piece in window):
        if frame is None and result and result[-1][1] is None:
            result[-1] = (result[-1][0] + length, None, 0)
        else:
            result.append((length, frame, offset))
    return result


# A cutter never gives two runs of zeros one after the other within a window.
window = st.lists(st.one_of(zeros, data), max_size=6).map(lambda pieces: flattened([pieces]))
streams = st.lists(st.lists(window, max_size=5), min_size=1, max_size=3)


def bytes_of(rows: list[Piece]) -> list[tuple[int | None, int]]:
    """Where each byte is: frame and offset. For small lengths only."""
    places: list[tuple[int | None, int]] = []
    for length, frame, offset in rows:
        step = 0 if frame is None else 1
        places.extend((frame, offset + step * place) for place in range(length))
    return places


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(streams, st.sampled_from([48, 480, 1 << 25]))
def test_manifest_and_layout_say_what_was_told(
    monkeypatch: pytest.MonkeyPatch, told: list[list[list[Piece]]], spool_bytes: int
) -> None:
    """Goal: extents and segments are those of the pieces, in memory as in the temporary file.

    Method: build from any pieces in any windows, with a spool of one row, of ten, and of so many
    that none is ever written to a file. Compare extents row by row and segments byte by byte.
    """
    monkeypatch.setattr(rank_builder, "_SPOOL_BYTES", spool_bytes)
    rank, layout = built(told)
    assert rank.meta.rank == 7
    assert rank.meta.placement == {"gpu": 3}
    for number, windows in enumerate(told):
        expected = flattened(windows)
        first, count, length = rank.streams[number].tolist()
        extents = rank.extents[first : first + count].tolist()
        assert length == sum(piece[0] for piece in expected)
        assert extents == [
            (size, 0, size, id_of(frame, offset)) if frame is not None else (size, 0, 0, bytes(32))
            for size, frame, offset in expected
        ]
        first, count, _ = layout.streams[number].tolist()
        segments = [
            (size, None if frame == ZEROS else layout.frames["offset"][frame] // 8192, offset)
            for size, frame, offset in layout.segments[first : first + count].tolist()
        ]
        assert bytes_of(segments) == bytes_of(expected)


def test_a_hole_and_written_zeros_are_one_extent() -> None:
    """Proves: I5: one extent of zeros however many windows they came in."""
    hole: list[list[Piece]] = [[(5000, 0, 0)], [(30_000_000, None, 0)], [(4096, 1, 0)]]
    written: list[list[Piece]] = [
        [(5000, 0, 0), (10_000_000, None, 0)],
        [(8_000_000, None, 0)],
        [(8_000_000, None, 0)],
        [],
        [(4_000_000, None, 0), (4096, 1, 0)],
    ]
    one, one_layout = built([hole])
    two, two_layout = built([written])
    assert one.root == two.root
    assert len(one.extents) == 3
    assert one_layout.segments.tolist() == two_layout.segments.tolist()


def test_zeros_of_two_streams_are_two_extents() -> None:
    rank, _ = built([[[(100, None, 0)]], [[(200, None, 0)]], [], [[(300, None, 0)]]])
    assert rank.extents["length"].tolist() == [100, 200, 300]
    assert rank.streams["count"].tolist() == [1, 1, 0, 1]


def test_chunks_that_abut_share_a_segment_across_windows() -> None:
    told: list[list[Piece]] = [
        [(4096, 2, 0), (4096, 2, 4096)],
        [(4096, 2, 8192)],
        [(4096, 2, 4096)],
    ]
    rank, layout = built([told])
    assert len(rank.extents) == 4
    assert layout.segments.tolist() == [(12288, 0, 0), (4096, 0, 4096)]


def test_a_rank_without_streams() -> None:
    rank, layout = built([])
    assert len(rank.extents) == len(rank.streams) == 0
    assert len(layout.segments) == len(layout.packs) == 0


def test_many_extents_wait_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the rows are in an anonymous file: it has no name and dies with the push."""
    monkeypatch.setattr(rank_builder, "_SPOOL_BYTES", 48 * 1000)
    builder = RankBuilder("host")
    builder.add_stream(data_class="pages", origin="x")
    window = pieces_of([(4096, 0, 4096 * (number % 9)) for number in range(100)])
    for _ in range(30):
        builder.add_pieces(0, window)
    assert builder._spool._rolled  # type: ignore[attr-defined]
    manifest = builder.build_manifest([ROOT], {})
    rank = parse_rank(manifest.to_bytes())
    assert len(rank.extents) == 3000
    assert rank.extents[:100].tobytes() * 30 == rank.extents.tobytes()
    # What was built stays valid without the file, since it may be uploaded later.
    builder.close()
    assert manifest.to_bytes()[:8] == b"SNAPRANK"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(streams, st.sampled_from([48, 480, 1 << 25]), st.data())
def test_streams_may_grow_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
    told: list[list[list[Piece]]],
    spool_bytes: int,
    drawn: st.DataObject,
) -> None:
    """Goal: the order in which windows of several streams come changes nothing.

    Method: tell a builder the windows in any order that keeps each stream's, with streams begun in
    any order and arranged at the end; compare with one that was told one stream after the other.
    """
    monkeypatch.setattr(rank_builder, "_SPOOL_BYTES", spool_bytes)
    order = drawn.draw(st.permutations(range(len(told))))
    turns = drawn.draw(
        st.permutations([number for number, windows in enumerate(told) for _ in windows])
    )
    builder = RankBuilder(7)
    try:
        numbers = {
            stream: builder.add_stream(data_class="pages", origin="unknown") for stream in order
        }
        left = [iter(windows) for windows in told]
        for stream in turns:
            builder.add_pieces(numbers[stream], pieces_of(next(left[stream])))
        for stream, number in numbers.items():
            builder.set_origin(number, f"stream {stream}")
        builder.arrange([numbers[stream] for stream in range(len(told))])
        manifest = builder.build_manifest([ROOT], {"gpu": 3})
        layout, _ = builder.build_layout(manifest.root, frame_table(), ManualClock())
        rank, expected_layout = built(told)
        assert manifest.root == rank.root
        segments = parse_layout(layout.to_bytes()).segments
        assert segments.tobytes() == expected_layout.segments.tobytes()
    finally:
        builder.close()
