"""Where a file is divided: everything once, at pages, and where few frames are on both sides."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.format.layout import (
    FRAME_DTYPE,
    PACK_DTYPE,
    SEGMENT_DTYPE,
    ZEROS,
    LayoutMeta,
    LayoutTables,
)
from snapstore.format.tables import STREAM_DTYPE
from snapstore.repository.file_ranges import FileRange, divide_file
from snapstore.repository.segments import Segments
from snapstore.units import KIB, MIB

META = LayoutMeta(rank="a" * 64, nonce="0" * 32, created="2026-11-30T05:00:00Z")
PAGE = 4096
ABOUT = 64 * KIB

Piece = tuple[int, int | None]
"""Length, and number of the frame or None for zeros."""


def segments_of(pieces: list[Piece]) -> Segments:
    """One stream of these pieces; of each frame they show the bytes in order."""
    count = max([frame for _, frame in pieces if frame is not None], default=-1) + 1
    frames = np.zeros(count, FRAME_DTYPE)
    frames["offset"] = np.arange(count) * MIB
    rows = np.zeros(len(pieces), SEGMENT_DTYPE)
    rows["length"] = [length for length, _ in pieces]
    rows["frame"] = [ZEROS if frame is None else frame for _, frame in pieces]
    packs = np.array([(b"p" * 32, 1 << 40)], PACK_DTYPE)
    streams = np.array([(0, len(rows), int(rows["length"].sum()))], STREAM_DTYPE)
    return Segments(LayoutTables(META, packs, frames, streams, rows))


def divide(pieces: list[Piece], *, zeros_bytes_min: int = PAGE) -> list[FileRange]:
    segments = segments_of(pieces)
    size = sum(length for length, _ in pieces)
    return divide_file(segments, 0, size, about_bytes=ABOUT, zeros_bytes_min=zeros_bytes_min)


def test_cuts_are_where_frames_end() -> None:
    """A frame on both sides of a cut would be decoded for both, so the cut gives way to it."""
    found = divide([(40 * KIB, 0), (40 * KIB, 1), (48 * KIB, 2)])
    assert [(one.offset, one.length) for one in found] == [(0, 80 * KIB), (80 * KIB, 48 * KIB)]
    # The frame 0 is on both sides of the first place, none is of the second.
    pieces: list[Piece] = [(56 * KIB, 0), (4 * KIB, 1), (16 * KIB, 0), (52 * KIB, 2)]
    assert [one.offset for one in divide(pieces)] == [0, 76 * KIB]
    # Everybody needs the frame 9, wherever the cut is.
    pieces = [(4 * KIB, 9), (52 * KIB, 0), (16 * KIB, 0), (52 * KIB, 2), (4 * KIB, 9)]
    assert [one.offset for one in divide(pieces)] == [0, 72 * KIB]


def test_without_a_place_the_cut_is_at_a_page() -> None:
    found = divide([(200 * KIB, 0)])
    assert [one.offset for one in found] == [0, 48 * KIB, 100 * KIB, 148 * KIB]


def test_zeros_are_apart() -> None:
    pieces: list[Piece] = [(5000, 0), (20_000, None), (3000, 0), (4096, None), (77, 1)]
    found = divide(pieces)
    assert [(one.offset, one.length, one.is_zeros) for one in found] == [
        (0, 8192, False),
        (8192, 16384, True),
        (24576, 32173 - 24576, False),
    ]
    assert [one.order < 0 for one in found] == [False, True, False]
    assert not any(one.is_zeros for one in divide(pieces, zeros_bytes_min=20_000))
    # The end of a file may end a page.
    (first, last) = divide([(4096, 0), (4097, None)])
    assert (last.offset, last.length, last.is_zeros) == (4096, 4097, True)
    assert not first.is_zeros
    (only,) = divide([(4097, None)])
    assert only == FileRange(0, 4097, is_zeros=True, order=-1)


def test_the_order_is_that_of_the_store() -> None:
    found = divide([(64 * KIB, 2), (64 * KIB, 1), (64 * KIB, 0)])
    assert [one.offset for one in sorted(found, key=lambda one: one.order)] == [
        128 * KIB,
        64 * KIB,
        0,
    ]


_pieces = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 100_000), st.integers(1, 60).map(lambda pages: pages * PAGE)),
        st.one_of(st.none(), st.integers(0, 12)),
    ),
    min_size=1,
    max_size=40,
)


@given(_pieces, st.sampled_from([PAGE, 16 * PAGE]), st.data())
def test_ranges_cover_any_file(pieces: list[Piece], zeros_min: int, data: st.DataObject) -> None:
    """Goal: ranges abut, begin at pages, are not too long, and call zeros what is zeros.

    Method: any segments, and a file anywhere in the stream; a mask tells which bytes are zeros.
    """
    segments = segments_of(pieces)
    total = sum(length for length, _ in pieces)
    begin = data.draw(st.integers(0, total - 1))
    size = data.draw(st.integers(1, total - begin))
    zeros = np.concatenate([np.full(length, frame is None) for length, frame in pieces])
    found = divide_file(segments, begin, size, about_bytes=ABOUT, zeros_bytes_min=zeros_min)
    position = 0
    for one in found:
        assert one.offset == position
        assert one.offset % PAGE == 0
        assert one.length > 0
        position += one.length
        inside = zeros[begin + one.offset : begin + position]
        if one.is_zeros:
            assert one.length >= zeros_min
            assert inside.all()
        else:
            assert one.length <= ABOUT * 3 // 2
        assert one.is_zeros == (one.order < 0) or inside.all()
    assert position == size


@pytest.mark.slow
def test_a_terabyte_takes_seconds() -> None:
    """Goal: dividing is done once at the start of a restore and must not be noticed.

    Method: a stream of 1 TB in frames of 1 MiB of which each is used twice, with zeros in between.
    """
    count = 1 << 20
    rows = np.zeros(3 * count, SEGMENT_DTYPE)
    rows["length"] = np.tile([600 * KIB, 64 * KIB, 424 * KIB], count)
    rows["frame"] = np.repeat(np.arange(count), 3)
    rows["frame"][1::3] = ZEROS
    frames = np.zeros(count, FRAME_DTYPE)
    frames["pack"] = np.arange(count) // 64
    frames["offset"] = np.arange(count) % 64 * MIB
    packs = np.zeros(count // 64, PACK_DTYPE)
    size = int(rows["length"].sum())
    streams = np.array([(0, len(rows), size)], STREAM_DTYPE)
    segments = Segments(LayoutTables(META, packs, frames, streams, rows))
    started_s = time.perf_counter()
    found = divide_file(segments, 0, size, about_bytes=8 * MIB, zeros_bytes_min=MIB)
    assert len(segments.uses[0]) == count
    assert time.perf_counter() - started_s < 20
    assert sum(one.length for one in found) == size > 10**12
    # Each of them ends where a frame does.
    assert {one.offset % (1088 * KIB) for one in found} == {0}
