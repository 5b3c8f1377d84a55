"""Layouts: put into order of use, unused rows left out, contradictions refused."""

import numpy as np
import pytest

from snapstore.errors import DigestMismatch, LimitExceeded, Malformed
from snapstore.format import limits
from snapstore.format.layout import (
    FRAME_DTYPE,
    PACK_DTYPE,
    SEGMENT_DTYPE,
    STREAM_DTYPE,
    ZEROS,
    LayoutMeta,
    build_layout,
    parse_layout,
)
from snapstore.ids import RankId
from snapstore.units import MIB

META = LayoutMeta(rank="a" * 64, nonce="0" * 32, created="2026-11-30T05:00:00Z")


def sample() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    packs = np.array([(bytes([number]) * 32, 64 * MIB) for number in range(3)], PACK_DTYPE)
    frames = np.array(
        [(4096 * row, 9, 1000, pack, 1, b"", b"\1" * 16) for row, pack in enumerate([0, 2, 2, 1])],
        FRAME_DTYPE,
    )
    streams = np.array([(0, 3, 300), (3, 1, 7)], STREAM_DTYPE)
    segments = np.array([(100, 2, 0), (100, ZEROS, 0), (100, 0, 900), (7, 2, 5)], SEGMENT_DTYPE)
    return packs, frames, streams, segments


def test_rows_are_put_into_order_of_use() -> None:
    read = parse_layout(build_layout(META, *sample()).to_bytes())
    assert [one[0] for one in read.packs["id"].tolist()] == [2, 0]
    assert read.frames["offset"].tolist() == [8192, 0]
    assert read.frames["pack"].tolist() == [0, 1]
    assert read.segments["frame"].tolist() == [0, ZEROS, 1, 0]
    assert read.segments["offset"].tolist() == [0, 0, 900, 5]


def test_the_callers_tables_are_not_changed() -> None:
    tables = sample()
    before = [table.tobytes() for table in tables]
    build_layout(META, *tables)
    assert [table.tobytes() for table in tables] == before


def test_of_which_rank() -> None:
    data = build_layout(META, *sample()).to_bytes()
    assert parse_layout(data, rank=RankId.parse("a" * 64)).meta == META
    with pytest.raises(DigestMismatch):
        parse_layout(data, rank=RankId.parse("b" * 64))


def test_a_layout_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LAYOUT_PLAIN_BYTES_MAX", 200)
    with pytest.raises(LimitExceeded):
        build_layout(META, *sample())


def test_metadata_is_checked_when_written() -> None:
    odd = LayoutMeta(rank="x", nonce="0" * 32, created="2026-11-30T05:00:00Z")
    with pytest.raises(Malformed):
        build_layout(odd, *sample())


@pytest.mark.parametrize(
    ("table", "row", "field", "value", "error"),
    [
        (3, 0, "frame", 4, Malformed),
        (3, 0, "offset", 901, Malformed),
        (3, 1, "offset", 1, Malformed),
        (3, 0, "length", 101, Malformed),
        (1, 0, "pack", 3, Malformed),
        (1, 0, "offset", 64 * MIB, Malformed),
        (0, 0, "length", 129 * MIB, LimitExceeded),
        (2, 1, "first", 2, Malformed),
    ],
)
def test_contradictions_are_refused(
    table: int, row: int, field: str, value: int, error: type[Exception]
) -> None:
    tables = sample()
    tables[table][field][row] = value
    with pytest.raises(error):
        build_layout(META, *tables)
