"""Rank manifests: what the encoder refuses, and sections read alone."""

import numpy as np
import pytest

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format.rank import (
    EXTENT_DTYPE,
    STREAM_DTYPE,
    RankMeta,
    StreamInfo,
    build_rank,
    parse_extents,
    parse_streams,
)
from snapstore.format.tree import EntryType, TreeEntry

INFO = StreamInfo(data_class="pages", origin="pages-1.img")
META = RankMeta(rank=0, streams=(INFO,))
PLAIN = {"mode": 0o644, "uid": 0, "gid": 0, "mtime_ns": 0}
ROOT = TreeEntry(path=b"", type=EntryType.DIRECTORY, **PLAIN)


def tables() -> tuple[np.ndarray, np.ndarray]:
    streams = np.array([(0, 2, 108)], STREAM_DTYPE)
    extents = np.array([(100, 0, 0, bytes(32)), (8, 1, 9, b"\1" * 32)], EXTENT_DTYPE)
    return streams, extents


def test_bad_extents_are_not_written() -> None:
    streams, extents = tables()
    extents["chunk_length"][1] = 8
    with pytest.raises(Malformed, match="row 1: does not end within its chunk"):
        build_rank(META, [ROOT], streams, extents)


def test_files_outside_their_streams_are_not_written() -> None:
    file = TreeEntry(path=b"a", type=EntryType.FILE, size_bytes=109, **PLAIN)
    with pytest.raises(Malformed, match="ends beyond stream 0"):
        build_rank(META, [ROOT, file], *tables())


def test_streams_without_information_are_a_bug_of_the_writer() -> None:
    with pytest.raises(AssertionError):
        build_rank(RankMeta(rank=0), [ROOT], *tables())


def test_sections_are_read_alone() -> None:
    streams, extents = tables()
    read = parse_streams(streams.tobytes())
    assert parse_extents(extents.tobytes(), read).tobytes() == extents.tobytes()
    streams["length"] = (1 << 50) + 1
    with pytest.raises(LimitExceeded, match="stream length"):
        parse_streams(streams.tobytes())
