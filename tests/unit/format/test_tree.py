"""Trees: what the encoder refuses, and size."""

import numpy as np
import pytest

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format import limits
from snapstore.format.rank import STREAM_DTYPE, check_tree_against_streams
from snapstore.format.tree import EntryType, TreeEntry, check_tree, decode_tree, encode_tree


def entry(path: bytes, kind: EntryType = EntryType.FILE, **more: object) -> TreeEntry:
    plain: dict[str, object] = {"mode": 0o644, "uid": 0, "gid": 0, "mtime_ns": 0}
    return TreeEntry(path=path, type=kind, **{**plain, **more})


ROOT = entry(b"", EntryType.DIRECTORY)


@pytest.mark.parametrize(
    "odd",
    [
        {"mode": 0o10000},
        {"mode": -1},
        {"uid": 2**32},
        {"gid": -1},
        {"mtime_ns": 2**63},
        {"mtime_ns": -(2**63) - 1},
        {"size_bytes": 1, "stream": 2**20},
        {"size_bytes": 1, "stream": -1},
        {"size_bytes": 1, "offset": -1},
        {"size_bytes": 1, "offset": 2**50 + 1},
        {"stream": 1},
        {"offset": 1},
        {"target": b"x"},
        {"xattrs": ((b"\xff", b""),)},
        {"xattrs": ((b"b", b""), (b"a", b""))},
    ],
)
def test_what_cannot_be_stored_is_refused(odd: dict[str, object]) -> None:
    with pytest.raises(Malformed):
        encode_tree([ROOT, entry(b"a", **odd)])


def test_sizes_beyond_a_stream_are_refused() -> None:
    for size in (-1, 2**50 + 1):
        with pytest.raises(LimitExceeded):
            encode_tree([ROOT, entry(b"a", size_bytes=size)])


def test_limits_count_bytes() -> None:
    check_tree([ROOT, entry("é".encode() * 127)])
    with pytest.raises(LimitExceeded):
        check_tree([ROOT, entry("é".encode() * 128)])
    big = entry(b"a", xattrs=((b"n", b"x" * 2**20),))
    with pytest.raises(LimitExceeded):
        check_tree([ROOT, big])
    check_tree([ROOT, entry(b"a", xattrs=((b"n", b"x" * (2**20 - 1)),))])


def test_a_tree_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_tree([ROOT])
    monkeypatch.setattr(limits, "RANK_TREE_BYTES_MAX", len(data) - 1)
    with pytest.raises(LimitExceeded):
        encode_tree([ROOT])
    with pytest.raises(LimitExceeded):
        decode_tree(data)


def test_the_deepest_path() -> None:
    """H3: no step of the check recurses, so depth costs nothing."""
    paths = [b"/".join([b"a"] * depth) for depth in range(1, 2049)]
    tree = [ROOT, *(entry(path, EntryType.DIRECTORY) for path in paths)]
    assert decode_tree(encode_tree(tree)) == tree
    with pytest.raises(LimitExceeded):
        check_tree([*tree, entry(paths[-1] + b"/a", EntryType.DIRECTORY)])


def test_files_are_within_their_streams() -> None:
    streams = np.array([(0, 1, 10), (1, 0, 0)], STREAM_DTYPE)
    check_tree_against_streams([entry(b"a", size_bytes=10)], streams)
    for odd in (
        {"size_bytes": 11},
        {"size_bytes": 1, "offset": 10},
        {"size_bytes": 1, "stream": 1},
    ):
        with pytest.raises(Malformed):
            check_tree_against_streams([entry(b"a", **odd)], streams)


@pytest.mark.slow
def test_a_million_entries_take_seconds() -> None:
    tree = [ROOT]
    for folder in range(100):
        tree.append(entry(b"%03d" % folder, EntryType.DIRECTORY))
        tree += (
            entry(b"%03d/%05d" % (folder, name), size_bytes=1, offset=name)
            for name in range(10_000)
        )
    assert decode_tree(encode_tree(tree)) == tree
