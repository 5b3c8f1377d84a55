"""A store in numbers, checked to the byte where all chunks are known."""

import dataclasses
from pathlib import Path

import pytest

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.errors import UsageError
from snapstore.ids import RefName
from snapstore.repository.refs import chain_of
from snapstore.repository.spool import KeySpool
from snapstore.testing.clock import ManualClock
from tests.support.samples import random_bytes
from tests.unit.repository.parts import names_of, open_on, write_files

# Every small file is one chunk; noise is stored as it is.
P, Q, R, S = (random_bytes(size, size).tobytes() for size in (1000, 2000, 3000, 5000))


class World:
    """A store with names of two teams and one of nobody.

    x/m:1 brings p and q in one frame; x/n:1 adds r; y/m:1 has p of x, and s; z has q, r as x/n.
    """

    def __init__(self, folder: Path) -> None:
        self.backend = MemoryBackend()
        self.store = open_on(self.backend, ManualClock())
        self.pushed: dict[str, snapstore.PushResult] = {}
        for name, files in (
            ("x/m:1", {"p": P, "q": Q}),
            ("x/n:1", {"q": Q, "r": R, "q2": Q}),
            ("y/m:1", {"p": P, "s": S}),
        ):
            tree = write_files(folder / "tree", files)
            self.pushed[name] = self.store.push(tree, name)
        self.store.tag("x/n:1", "z")

    def totals(self, *kinds: ObjectKind) -> snapstore.ObjectTotals:
        """All objects of these kinds."""
        sizes = [info.size_bytes for kind in kinds for info in self.backend.list(kind)]
        return snapstore.ObjectTotals(len(sizes), sum(sizes))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def by_namespace(found: snapstore.StoreStats) -> dict[str, tuple[int, ...]]:
    return {one.namespace: dataclasses.astuple(one)[1:] for one in found.namespaces}


def test_everything_by_team(world: World) -> None:
    """Goal: every number: names, snapshots, logical, data, unique, shared, own, stored, own."""
    found = world.store.stats()
    assert by_namespace(found) == {
        "x": (2, 2, 10_000, 10_000, 6000, 6000, 0, 6000, 0),
        "y": (1, 1, 6000, 6000, 6000, 1000, 5000, 8000, 5000),
        "z": (1, 1, 7000, 7000, 5000, 5000, 0, 6000, 0),
    }
    # All of x is shared: p with y, the rest with z. The frame of p and q is needed by all.
    total = dataclasses.astuple(found.total)
    assert total == ("", 4, 3, 16_000, 16_000, 11_000, 6000, 5000, 11_000, 5000)


def test_objects_are_counted(world: World) -> None:
    found = world.store.stats()
    assert found.packs == world.totals(ObjectKind.PACK)
    assert found.indexes == world.totals(ObjectKind.INDEX)
    assert found.manifests == world.totals(ObjectKind.SNAPSHOT, ObjectKind.RANK)
    assert found.layouts == world.totals(ObjectKind.LAYOUT)
    assert found.unused_packs == snapstore.ObjectTotals(0, 0)
    assert found.loose_bytes == found.packs.bytes - 11_000
    assert (found.unnamed_snapshots, found.pushes, found.damaged) == (0, 0, ())


def test_deeper_namespaces(world: World) -> None:
    """Names with fewer components are namespaces of their own, and tags are none."""
    assert list(by_namespace(world.store.stats(depth=2))) == ["x/m", "x/n", "y/m", "z"]
    assert list(by_namespace(world.store.stats(depth=9))) == ["x/m", "x/n", "y/m", "z"]
    for wrong in (0, -1):
        with pytest.raises(UsageError, match="components"):
            world.store.stats(depth=wrong)


def test_a_prefix_counts_fewer_names_and_knows_the_others(world: World) -> None:
    """Goal: what a namespace shares does not depend on which are counted."""
    all_of_it = world.store.stats()
    for prefix in ("x", "x/"):
        found = world.store.stats(prefix)
        assert by_namespace(found) == {"x": by_namespace(all_of_it)["x"]}
        assert dataclasses.astuple(found.total)[1:] == by_namespace(all_of_it)["x"]
        assert found.packs == all_of_it.packs
        assert found.unused_packs == all_of_it.unused_packs
        assert found.loose_bytes == all_of_it.loose_bytes
    one = world.store.stats("x/n")
    # r is of z as well, and q of x/m and of z: shared with what is outside of the prefix.
    assert by_namespace(one) == {"x": (1, 1, 7000, 7000, 5000, 5000, 0, 6000, 0)}
    assert world.store.stats("nothing").namespaces == []


def test_what_no_name_needs(world: World) -> None:
    """Goal: packs without a frame in use are told whole, and frames in other packs at most.

    Method: remove y, which has a pack of its own; then x, whose first pack z needs a part of.
    """
    packs = world.store.stats().packs.bytes
    pack = world.store.remove("y/m:1").freed.pack_bytes
    found = world.store.stats()
    assert found.unused_packs == snapstore.ObjectTotals(1, pack)
    assert (found.packs.bytes, found.unnamed_snapshots) == (packs, 1)
    assert found.loose_bytes == packs - pack - 6000
    world.store.remove("x/m:1", "x/n:1")
    found = world.store.stats()
    assert list(by_namespace(found)) == ["z"]
    assert (found.total.unique_bytes, found.total.stored_bytes) == (5000, 6000)
    assert found.unused_packs.objects == 1
    world.store.remove("z")
    found = world.store.stats()
    assert (found.unused_packs, found.loose_bytes) == (found.packs, 0)
    assert found.unnamed_snapshots == 3


def test_an_empty_store() -> None:
    found = open_on(MemoryBackend(), ManualClock()).stats()
    assert dataclasses.astuple(found.total) == ("", *[0] * 9)
    assert (found.namespaces, found.packs) == ([], snapstore.ObjectTotals(0, 0))


def test_memory_may_be_small(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers when everything waits in files."""
    found = world.store.stats()
    plain = KeySpool.__init__
    monkeypatch.setattr(
        KeySpool,
        "__init__",
        lambda self, *, memory_bytes: plain(self, memory_bytes=memory_bytes >> 40),
    )
    assert world.store.stats() == found


# -- what is damaged ------------------------------------------------------------------------------


def spoil(backend: MemoryBackend, kind: ObjectKind, name: str) -> None:
    """Change the end of an object; in a rank manifest the chunk table is there."""
    size = backend.stat(kind, name).size_bytes
    data = bytearray(size)
    backend.get_range(kind, name, 0, memoryview(data))
    data[-1] ^= 0x10
    backend.delete(kind, name)
    backend.put_new(kind, name, [bytes(data)])


@pytest.mark.parametrize("kind", [ObjectKind.SNAPSHOT, ObjectKind.RANK])
def test_a_damaged_manifest_is_told_and_the_others_are_counted(
    world: World, kind: ObjectKind
) -> None:
    whole = by_namespace(world.store.stats())
    pushed = world.pushed["y/m:1"]
    (rank,) = pushed.ranks.values()
    name = pushed.snapshot if kind is ObjectKind.SNAPSHOT else rank
    spoil(world.backend, kind, name.hex)
    found = world.store.stats()
    (told,) = found.damaged
    assert name.short in told
    assert by_namespace(found)["z"] == whole["z"]
    x = by_namespace(found)["x"]
    # Nobody is known to share p any more.
    assert x == (2, 2, 10_000, 10_000, 6000, 5000, 1000, 6000, 0)
    assert by_namespace(found)["y"][:2] == (1, 1)


def test_a_damaged_name_a_lost_pack_and_a_lost_layout_are_told(world: World) -> None:
    world.backend.put_new(ObjectKind.REF, f"{chain_of(RefName('x/m', '1'))}/00000002", [b"{}"])
    (rank,) = world.pushed["y/m:1"].ranks.values()
    for pack in names_of(world.backend, ObjectKind.PACK):
        world.backend.delete(ObjectKind.PACK, pack)
    spoil(world.backend, ObjectKind.LAYOUT, f"{rank.hex}/00000001")
    name, layout, packs = world.store.stats().damaged
    assert "x/m:1" in name
    assert "are in no index" in layout
    assert "packs that are needed are gone" in packs
