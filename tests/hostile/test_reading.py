"""Lies and damage met by who reads files in place: refused as a pull refuses them."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from snapstore import Snapshot, SnapshotEntry, SnapshotFile
from snapstore.backend.base import ObjectKind
from snapstore.errors import SnapError
from snapstore.format.canonical import decode_typed
from snapstore.format.layout import LayoutTables
from snapstore.options import Integrity
from snapstore.units import KIB
from tests.hostile.test_lies import data_as_zeros, other_frame, shifted
from tests.hostile.test_mutations import mutated
from tests.support.damage import Lab, Sections, canonical, flip

pytestmark = pytest.mark.slow

MUTATIONS = 40
PIECE_BYTES = 70_001


def contents(lab: Lab) -> dict[str, bytes]:
    return {
        path.relative_to(lab.tree).as_posix(): path.read_bytes()
        for path in lab.tree.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def in_pieces(file: SnapshotFile) -> bytes:
    pieces = range(0, max(file.size_bytes, 1), PIECE_BYTES)
    return b"".join(file.read_at(at, PIECE_BYTES) for at in pieces)


def in_ranges(file: SnapshotFile) -> bytes:
    data = bytearray(file.size_bytes)
    for part in file.ranges(about_bytes=512 * KIB, zeros_bytes_min=64 * KIB):
        if not part.is_zeros:
            view = memoryview(data)[part.offset : part.offset + part.length]
            file.read_into(part.offset, view, streaming=True)
    return bytes(data)


WAYS = [in_pieces, in_ranges]
Way = Callable[[SnapshotFile], bytes]


def read_whole(snapshot: Snapshot, entry: SnapshotEntry, way: Way) -> bytes | None:
    caught: SnapError | None = None
    try:
        return way(snapshot.open(entry.path))
    except SnapError as error:
        caught = error
    assert caught.exit_code == 4, (entry.name, caught)
    assert caught.next_step, (entry.name, caught)
    return None


def read_all(
    lab: Lab, integrity: Integrity = Integrity.STRONG, *, way: Way = in_pieces
) -> dict[str, bytes]:
    """Read every file; files that are refused are left out, with exit code 4."""
    found = {}
    with lab.open(integrity=integrity) as store:
        snapshot = store.snapshot(lab.name)
        for entry in snapshot.walk():
            if not entry.is_file:
                continue
            content = read_whole(snapshot, entry, way)
            if content is not None:
                found[entry.name] = content
    return found


@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_is_what_was_pushed(lab: Lab, way: Way) -> None:
    for integrity in Integrity:
        assert read_all(lab, integrity, way=way) == contents(lab)


@pytest.mark.parametrize("way", WAYS)
def test_mutated_layouts(lab: Lab, way: Way) -> None:
    """Goal: with whatever layout a file gives its bytes, or an error of exit code 4.

    Method: mutate one section of the newest layout and write it as the next generation. With fast
    integrity a layout is believed, so only errors are looked at. Proves: H1, I6.
    """
    want = contents(lab)
    refused = 0
    for number in range(MUTATIONS):
        seed = f"reading {number}"
        path = lab.lie_in_layout(mutated(random.Random(seed)), position=number % 3)
        found = read_all(lab, way=way)
        assert {name: want[name] for name in found} == found, seed
        refused += len(want) - len(found)
        read_all(lab, Integrity.FAST, way=way)
        path.unlink()
    assert refused


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lie", [data_as_zeros, other_frame, shifted])
def test_a_layout_that_lies(lab: Lab, lie: Callable[[LayoutTables], None], way: Way) -> None:
    """Zeros, other bytes or shifted ones where the manifest says data. Proves: I6."""
    lab.lie_in_tables(lie)
    found, want = read_all(lab, way=way), contents(lab)
    assert {name: want[name] for name in found} == found
    assert len(found) < len(want)


def test_trees_that_contradict_each_other(lab: Lab) -> None:
    """Two ranks with the same file make no tree, for a reader as for a pull. Proves: H2."""
    (path,) = (one for one in contents(lab) if one == "rank0.bin")

    def change(sections: Sections) -> None:
        tree = decode_typed(sections[b"TREE"], list[Any], what="tree")
        for entry in tree:
            if entry.get("path") == "rank1.bin":
                entry["path"] = path
        sections[b"TREE"] = canonical(tree)

    lab.lie_in_rank(change, position=2)
    with lab.open() as store:
        with pytest.raises(SnapError, match="there twice") as caught:
            store.snapshot(lab.name).walk()
        assert caught.value.exit_code == 4
        with pytest.raises(SnapError, match="there twice"):
            store.snapshot(lab.name).open("note-1")


@pytest.mark.parametrize("way", WAYS)
def test_damaged_packs(lab: Lab, way: Way) -> None:
    for pack in lab.packs_of():
        flip(pack, 0.1)
    found = read_all(lab, way=way)
    want = contents(lab)
    assert {name: want[name] for name in found} == found
    assert len(found) < len(want)
    assert found["sparse.img"] == want["sparse.img"]


def test_a_rank_that_is_gone(lab: Lab) -> None:
    lab.path(ObjectKind.RANK, lab.rank_ids()[1].hex).unlink()
    with lab.open() as store, pytest.raises(SnapError) as caught:
        store.snapshot(lab.name).open("note-1")
    assert caught.value.exit_code == 4
