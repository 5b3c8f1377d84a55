"""What two snapshots share, checked to the byte on trees whose chunks are known."""

from pathlib import Path

import pytest

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.errors import DanglingRef, RefNotFound
from snapstore.repository.spool import KeySpool
from snapstore.testing.clock import ManualClock
from snapstore.units import MIB
from tests.support.samples import nonzero_bytes, random_bytes
from tests.unit.repository.parts import names_of, open_on, write_files

# Every small file is one chunk; noise is stored as it is.
P, Q, R, S = (random_bytes(size, size).tobytes() for size in (1000, 2000, 3000, 5000))
LARGE = nonzero_bytes(3 * MIB, 1).tobytes()
OTHER = nonzero_bytes(1 * MIB, 2).tobytes()


class World:
    """A store in memory, with what pushes into it returned."""

    def __init__(self, folder: Path) -> None:
        self.backend = MemoryBackend()
        self.store = open_on(self.backend, ManualClock())
        self.tree = folder / "tree"
        self.pushed: dict[str, snapstore.PushResult] = {}

    def push(self, name: str, files: dict[str, bytes]) -> None:
        """Push a tree of these files."""
        self.pushed[name] = self.store.push(write_files(self.tree, files), name)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def counted(**sizes: int) -> snapstore.DiffBytes:
    return snapstore.DiffBytes(**{f"{name}_bytes": size for name, size in sizes.items()})


def test_small_files_are_compared_one_by_one(world: World) -> None:
    """Goal: every number, where all chunks are known.

    Method: A has p, q, r. B has p twice, r, and s instead of q.
    """
    world.push("a", {"p": P, "q": Q, "r": R})
    world.push("b", {"p": P, "p2": P, "r": R, "s": S})
    found = world.store.diff("a", "b")
    assert (found.a, found.b) == (world.pushed["a"].snapshot, world.pushed["b"].snapshot)
    wanted = counted(logical_a=6000, logical_b=10_000, shared=5000, new=5000, gone=2000)
    assert found.total == wanted
    (stream,) = found.streams
    assert (stream.rank, stream.data_class, stream.bytes) == ("host", "small", wanted)
    assert found.by_rank == {"host": wanted}
    assert found.by_class == {"small": wanted}
    assert (found.shared_unique_bytes, found.new_unique_bytes) == (4000, 5000)
    # A is one frame, of which B needs all; s has a frame of its own.
    assert (found.stored_a_bytes, found.stored_b_bytes) == (6000, 11_000)
    assert found.added_bytes == 5000
    assert [str(name) for name in found.names_of_b] == ["b:latest"]
    assert found.freed_without_b.stored_bytes == 5000
    assert found.freed_without_b.packs == 1
    assert found.added_metadata_bytes == found.freed_without_b.metadata_bytes
    assert found.added_metadata_bytes == world.pushed["b"].metadata_bytes


def test_what_is_new_twice_is_unique_once(world: World) -> None:
    world.push("a", {"p": P})
    world.push("b", {"q": Q, "q2": Q, "q3": Q})
    found = world.store.diff("a", "b")
    assert found.total == counted(logical_a=1000, logical_b=6000, new=6000, gone=1000)
    assert (found.new_unique_bytes, found.shared_unique_bytes) == (2000, 0)
    assert found.added_bytes == 2000


def test_ranks_on_one_side_only_and_zeros(world: World) -> None:
    """Goal: ranks are matched by their number, and chunks wherever they are.

    Method: the large file moves from rank 0 to rank 1, of which A has nothing; rank 2 is A's
    alone; zeros take no part.
    """
    zeros = bytes(2 * MIB)
    world.push("a", {"rank-0/w": LARGE + zeros, "rank-2/w": OTHER, "p": P})
    world.push("b", {"rank-0/w": zeros, "rank-1/w": LARGE, "p": P})
    found = world.store.diff("a", "b")
    assert list(found.by_rank) == ["host", 0, 1, 2]
    assert found.by_rank["host"] == counted(logical_a=1000, logical_b=1000, shared=1000)
    moved = found.by_rank[1]
    assert (moved.logical_a_bytes, moved.logical_b_bytes) == (0, 3 * MIB)
    # The last chunk of the file ends with it in B, and with zeros in A.
    assert moved.shared_bytes + moved.new_bytes == 3 * MIB
    assert moved.shared_bytes > 2 * MIB
    first = found.by_rank[0]
    assert (first.logical_b_bytes, first.zero_b_bytes, first.new_bytes) == (2 * MIB, 2 * MIB, 0)
    assert first.zero_a_bytes > MIB
    assert found.by_rank[2] == counted(logical_a=MIB, gone=MIB)
    assert list(found.by_class) == ["generic", "small"]


def test_streams_are_matched_by_origin(world: World) -> None:
    """Goal: a file is compared with the file of its name, and its class is that of B.

    Method: one file stays, one changes, one comes and one goes; the order of names changes.
    """
    world.push("a", {"keep.bin": LARGE, "old.bin": OTHER, "p": P})
    world.push("b", {"keep.bin": LARGE, "a-new.bin": OTHER, "p": P, "q": Q})
    streams = {one.origin: one.bytes for one in world.store.diff("a", "b").streams}
    assert streams == {
        "keep.bin": counted(logical_a=3 * MIB, logical_b=3 * MIB, shared=3 * MIB),
        "old.bin": counted(logical_a=MIB),
        "a-new.bin": counted(logical_b=MIB, shared=MIB),
        "2 files below 64 KiB": counted(logical_a=1000, logical_b=3000, shared=1000, new=2000),
    }


def test_a_snapshot_and_itself(world: World) -> None:
    world.push("a", {"p": P, "large": LARGE})
    found = world.store.diff("a", f"x@b3:{world.pushed['a'].snapshot.hex}")
    assert found.total.shared_bytes == found.total.logical_b_bytes == 3 * MIB + 1000
    assert (found.total.new_bytes, found.total.gone_bytes) == (0, 0)
    assert (found.added_bytes, found.added_metadata_bytes) == (0, 0)
    assert found.freed_without_b.stored_bytes == found.stored_a_bytes


def test_nothing_and_nothing(world: World) -> None:
    world.push("a", {})
    world.push("b", {"empty": b""})
    found = world.store.diff("a", "b")
    assert (found.total, found.added_bytes, found.streams) == (counted(), 0, [])


def test_what_a_third_snapshot_needs_is_not_freed(world: World) -> None:
    """Goal: B costs something on top of A, and removing it frees less: C needs it too."""
    world.push("a", {"p": P})
    world.push("b", {"p": P, "q": Q})
    world.push("c", {"q": Q, "s": S})
    found = world.store.diff("a", "b")
    assert found.added_bytes == 2000
    assert found.freed_without_b.stored_bytes == 0
    assert world.store.diff("b", "c").freed_without_b.stored_bytes == 5000


def test_names_of_b_go_together(world: World) -> None:
    world.push("a", {"p": P})
    world.push("b", {"q": Q})
    world.store.tag("b", "prod:x")
    found = world.store.diff("a", "b")
    assert [str(name) for name in found.names_of_b] == ["b:latest", "prod:x"]
    assert found.freed_without_b.stored_bytes == 2000
    world.store.remove("b", "prod:x")
    unnamed = world.store.diff("a", f"b@b3:{world.pushed['b'].snapshot.hex}")
    assert unnamed.names_of_b == ()
    assert unnamed.freed_without_b == found.freed_without_b


def test_memory_may_be_small(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers when everything waits in files."""
    world.push("a", {"rank-0/w": LARGE, "p": P, "q": Q})
    world.push("b", {"rank-0/w": LARGE + OTHER, "p": P, "s": S})
    found = world.store.diff("a", "b")
    plain = KeySpool.__init__

    def tiny(self: KeySpool, *, memory_bytes: int) -> None:
        assert memory_bytes > MIB
        plain(self, memory_bytes=1)

    monkeypatch.setattr(KeySpool, "__init__", tiny)
    assert world.store.diff("a", "b") == found


def test_what_is_missing(world: World) -> None:
    world.push("a", {"p": P})
    with pytest.raises(RefNotFound):
        world.store.diff("a", "b")
    with pytest.raises(RefNotFound):
        world.store.diff("b", "a")
    for rank in names_of(world.backend, ObjectKind.RANK):
        world.backend.delete(ObjectKind.RANK, rank)
    with pytest.raises(DanglingRef):
        world.store.diff("a", "a")
