"""Numbers of frames and packs never change, whatever becomes known later."""

import numpy as np
import pytest

from snapstore.errors import Malformed
from snapstore.format.index import FRAME_DTYPE, PACK_DTYPE
from snapstore.ids import PackId
from snapstore.repository.frames import FrameTable, GrowingRows

A, B, C = (bytes([letter]) * 32 for letter in b"abc")


def frame_rows(packs: list[int], first_offset: int = 0) -> np.ndarray:
    rows = np.zeros(len(packs), FRAME_DTYPE)
    rows["pack"] = packs
    rows["offset"] = first_offset + 4096 * np.arange(len(packs))
    rows["stored_length"] = rows["plain_length"] = 100
    return rows


def pack_rows(*packs: tuple[bytes, int]) -> np.ndarray:
    return np.array(list(packs), PACK_DTYPE)


def test_rows_grow_and_keep_what_is_there() -> None:
    rows = GrowingRows(PACK_DTYPE)
    for number in range(50):
        first = rows.extend(pack_rows(*[(A, number)] * 100))
        assert first == 100 * number
    assert len(rows) == 5000
    assert rows.rows["length"].tolist() == [number // 100 for number in range(5000)]
    assert rows.extend(pack_rows()) == 5000


def test_packs_keep_their_numbers() -> None:
    frames = FrameTable()
    assert frames.add_packs(pack_rows((A, 10), (B, 20))).tolist() == [0, 1]
    assert frames.add_packs(pack_rows((B, 20), (C, 30), (A, 10))).tolist() == [1, 2, 0]
    listed = frames.pack_rows(np.array([2, 0], np.int64))
    assert [(bytes(raw), length) for raw, length in listed.tolist()] == [(C, 30), (A, 10)]


def test_one_pack_cannot_have_two_lengths() -> None:
    frames = FrameTable()
    frames.add_packs(pack_rows((A, 10)))
    with pytest.raises(Malformed, match="two lengths"):
        frames.add_packs(pack_rows((A, 11)))


def test_frames_of_several_tables_are_renumbered() -> None:
    frames = FrameTable()
    first = frames.add_frames(frame_rows([0, 1]), frames.add_packs(pack_rows((A, 9999), (B, 9999))))
    second = frames.add_frames(frame_rows([0, 0]), frames.add_packs(pack_rows((B, 9999))))
    assert (first, second, len(frames)) == (0, 2, 4)
    assert frames.rows["pack"].tolist() == [0, 1, 1, 1]


def test_the_callers_rows_are_not_changed() -> None:
    frames = FrameTable()
    frames.reserve_pack()
    rows = frame_rows([0])
    frames.add_frames(rows, frames.add_packs(pack_rows((A, 9999))))
    assert rows["pack"].tolist() == [0]


def test_reserved_frames_and_packs_are_filled_in_later() -> None:
    frames = FrameTable()
    frames.add_packs(pack_rows((A, 10)))
    pack = frames.reserve_pack()
    number = frames.reserve_frames(np.array([100, 200], np.uint32))
    placed = frame_rows([pack])
    placed["offset"] = 8192
    frames.place_frame(number, placed)
    assert frames.rows["offset"].tolist() == [8192, 0]
    assert frames.rows["plain_length"].tolist() == [100, 200]
    with pytest.raises(AssertionError):
        frames.pack_rows(np.array([pack], np.int64))
    frames.seal_pack(pack, PackId(B), 77)
    assert frames.pack_rows(np.array([pack], np.int64)).tolist() == [(B, 77)]


def test_a_frame_of_another_length_than_reserved_is_our_bug() -> None:
    frames = FrameTable()
    number = frames.reserve_frames(np.array([200], np.uint32))
    with pytest.raises(AssertionError):
        frames.place_frame(number, frame_rows([0]))


def test_a_pack_is_sealed_once() -> None:
    frames = FrameTable()
    pack = frames.reserve_pack()
    frames.seal_pack(pack, PackId(A), 1)
    with pytest.raises(AssertionError):
        frames.seal_pack(pack, PackId(A), 1)
