"""Footers: what the encoder refuses to write."""

import numpy as np
import pytest

from snapstore.format.pack import CHUNK_DTYPE, FRAME_DTYPE, encode_footer, parse_footer


def one_frame() -> tuple[np.ndarray, np.ndarray]:
    frames = np.array([(0, 5, 7, 0, 2, 1, b"", b"\1" * 16)], FRAME_DTYPE)
    chunks = np.array([(b"\2" * 32, 3), (b"\3" * 32, 4)], CHUNK_DTYPE)
    return frames, chunks


def test_rows_have_the_sizes_of_the_specification() -> None:
    frames, chunks = one_frame()
    footer = encode_footer(frames, chunks, offset=4096)
    assert (frames.nbytes, chunks.nbytes) == (48, 72)
    assert frames.tobytes() in footer
    assert chunks.tobytes() in footer


@pytest.mark.parametrize(
    ("field", "value"),
    [("offset", 1), ("stored_length", 0), ("plain_length", 8), ("chunk_count", 1), ("codec", 7)],
)
def test_a_bad_footer_is_a_bug_of_the_writer(field: str, value: int) -> None:
    frames, chunks = one_frame()
    frames[field] = value
    with pytest.raises(AssertionError, match="refusing to write"):
        encode_footer(frames, chunks, offset=4096)


def test_a_pack_beyond_the_limit_is_a_bug_of_the_writer() -> None:
    frames, chunks = one_frame()
    frames["offset"] = (128 << 20) - 8192
    with pytest.raises(AssertionError):
        encode_footer(frames, chunks, offset=(128 << 20) - 4096 + 4096)
    with pytest.raises(AssertionError):
        encode_footer(frames, chunks, offset=8192, salt=b"short")


def test_a_full_pack() -> None:
    """All frames that a footer may list, each of one byte, checked in well under a second."""
    count = 1 << 15
    frames = np.zeros(count, FRAME_DTYPE)
    frames["offset"] = np.arange(count) * 4096 // 2 * 2
    frames["stored_length"] = frames["plain_length"] = frames["chunk_count"] = 1
    frames["first_chunk"] = np.arange(count)
    frames = frames[: count - 1024]
    chunks = np.ones(len(frames), CHUNK_DTYPE)
    chunks["length"] = 1
    offset = 4096 * len(frames)
    footer = encode_footer(frames, chunks, offset=offset)
    assert len(parse_footer(footer[:-32], footer_offset=offset).frames) == len(frames)
