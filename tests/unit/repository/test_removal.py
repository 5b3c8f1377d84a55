"""Names are ended, never erased, and what that could free is told to the byte."""

from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.clock import format_utc
from snapstore.errors import RefConflict, RefNotFound, UsageError
from snapstore.format.lease import Lease, LeaseState, encode_lease
from snapstore.ids import RefName
from snapstore.repository.chains import append_generation, head_number
from snapstore.repository.refs import chain_of, set_ref
from snapstore.repository.roots import find_roots
from snapstore.testing.clock import ManualClock
from tests.support.samples import random_bytes
from tests.unit.repository.parts import names_of, open_on, write_files

COMMON = random_bytes(300_000, 1).tobytes()
ONLY_A = random_bytes(5000, 2).tobytes()
ONLY_B = random_bytes(7000, 3).tobytes()


class World:
    """A store whose snapshots `a` and `b` share a large file and have a small one each.

    Random bytes are stored as they are, so that frames are as long as what is in them.
    """

    def __init__(self, folder: Path) -> None:
        self.backend = MemoryBackend()
        self.clock = ManualClock()
        self.store = open_on(self.backend, self.clock)
        tree = folder / "tree"
        self.a = self.store.push(write_files(tree, {"large": COMMON, "s": ONLY_A}), "a")
        self.packs_of_a = names_of(self.backend, ObjectKind.PACK)
        self.b = self.store.push(write_files(tree, {"large": COMMON, "s": ONLY_B}), "b")

    def size(self, kind: ObjectKind, names: set[str]) -> int:
        """Bytes of some objects."""
        return sum(self.backend.stat(kind, name).size_bytes for name in names)

    def manifests_of(self, pushed_ranks: set[str], snapshot: str) -> int:
        """Bytes of a snapshot's manifests and layouts."""
        layouts = {f"{rank}/00000001" for rank in pushed_ranks}
        return (
            self.size(ObjectKind.RANK, pushed_ranks)
            + self.size(ObjectKind.LAYOUT, layouts)
            + self.size(ObjectKind.SNAPSHOT, {snapshot})
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_removed_name_is_gone_and_nothing_else(world: World, tmp_path: Path) -> None:
    before = {kind: names_of(world.backend, kind) for kind in ObjectKind}
    result = world.store.remove("a")
    (removed,) = result.removed
    assert (removed.name, removed.snapshot) == (RefName("a"), world.a.snapshot)
    assert (removed.generation, removed.others, result.dry_run) == (2, (), False)
    assert [str(found.name) for found in world.store.list()] == ["b:latest"]
    with pytest.raises(RefNotFound, match="deleted"):
        world.store.show("a")
    for kind in set(ObjectKind) - {ObjectKind.REF}:
        assert names_of(world.backend, kind) == before[kind]
    world.store.pull("b", tmp_path / "out")
    with pytest.raises(RefNotFound):
        world.store.remove("a")


def test_what_the_others_need_stays(world: World) -> None:
    """Goal: the first snapshot brought the large file, which the second needs: it is not freed.

    Method: the first push wrote its small file into a frame of its own in the same pack, so the
    frame is freed and the pack is not.
    """
    freed = world.store.remove("a", dry_run=True).freed
    assert freed.stored_bytes == len(ONLY_A)
    assert (freed.packs, freed.pack_bytes) == (0, 0)
    ranks = {rank.hex for rank in world.a.ranks.values()}
    assert freed.metadata_bytes == world.manifests_of(ranks, world.a.snapshot.hex)
    assert (freed.pushes, freed.damaged) == (0, ())


def test_a_pack_that_nothing_else_needs_is_freed_whole(world: World) -> None:
    freed = world.store.remove("b", dry_run=True).freed
    packs = names_of(world.backend, ObjectKind.PACK) - world.packs_of_a
    assert freed.stored_bytes == len(ONLY_B)
    assert (freed.packs, freed.pack_bytes) == (1, world.size(ObjectKind.PACK, packs))


def test_all_names_together_free_everything(world: World) -> None:
    """Goal: names that go together are counted together, and a name given twice once."""
    freed = world.store.remove("a", "b", "a", dry_run=True).freed
    packs = names_of(world.backend, ObjectKind.PACK)
    assert freed.stored_bytes == len(COMMON) + len(ONLY_A) + len(ONLY_B)
    assert (freed.packs, freed.pack_bytes) == (2, world.size(ObjectKind.PACK, packs))
    manifests = (ObjectKind.RANK, ObjectKind.LAYOUT, ObjectKind.SNAPSHOT)
    assert freed.metadata_bytes == sum(
        world.size(kind, names_of(world.backend, kind)) for kind in manifests
    )


def test_another_name_keeps_all_of_it(world: World) -> None:
    world.store.tag("b", "c/d:e")
    result = world.store.remove("b", dry_run=True)
    assert [str(name) for name in result.removed[0].others] == ["c/d:e"]
    assert (result.freed.stored_bytes, result.freed.metadata_bytes) == (0, 0)
    both = world.store.remove("b", "c/d:e", dry_run=True)
    assert [one.others for one in both.removed] == [(), ()]
    assert both.freed.stored_bytes == len(ONLY_B)


def test_a_dry_run_changes_nothing(world: World) -> None:
    before = {kind: names_of(world.backend, kind) for kind in ObjectKind}
    result = world.store.remove("a", "b", dry_run=True)
    assert result.dry_run
    assert {kind: names_of(world.backend, kind) for kind in ObjectKind} == before
    assert result.freed == world.store.remove("a", "b").freed


def test_all_or_none(world: World) -> None:
    with pytest.raises(RefNotFound, match="nope"):
        world.store.remove("a", "nope")
    with pytest.raises(UsageError, match="cannot remove one exact snapshot"):
        world.store.remove("a", f"a@b3:{world.a.snapshot.hex}")
    assert len(list(world.store.list())) == 2


def test_a_name_that_moves_meanwhile_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what was looked at is removed, and nothing that came later. Proves: C1.

    Method: the second of two names is moved right before its deletion is written.
    """
    put_new = world.backend.put_new

    def meanwhile(kind: ObjectKind, name: str, pieces: list[bytes]) -> None:
        if name == f"{chain_of(RefName('b'))}/00000002":
            monkeypatch.setattr(world.backend, "put_new", put_new)
            set_ref(world.backend, world.clock, RefName("b"), world.a.snapshot)
        put_new(kind, name, pieces)

    monkeypatch.setattr(world.backend, "put_new", meanwhile)
    with pytest.raises(RefConflict, match="b:latest was moved") as caught:
        world.store.remove("a", "b")
    assert caught.value.__notes__ == ["removed before: a:latest"]
    assert world.store.snapshot("b").id == world.a.snapshot


# -- what cannot be read --------------------------------------------------------------------------


def test_a_damaged_name_can_be_removed(world: World) -> None:
    world.backend.put_new(ObjectKind.REF, f"{chain_of(RefName('a'))}/00000002", [b"{}"])
    (removed,) = world.store.remove("a").removed
    assert (removed.snapshot, removed.generation) == (None, 3)
    assert [str(found.name) for found in world.store.list()] == ["b:latest"]


def test_what_others_need_may_not_be_known(world: World) -> None:
    """Goal: a damaged manifest of another snapshot does not stop a removal, and is told.

    Method: take the rank manifest of the other snapshot away.
    """
    (rank,) = world.b.ranks.values()
    world.backend.delete(ObjectKind.RANK, rank.hex)
    result = world.store.remove("a")
    (told,) = result.freed.damaged
    assert rank.short in told
    assert result.freed.stored_bytes == len(COMMON) + len(ONLY_A)


def test_a_name_of_something_that_is_gone_can_be_removed(world: World) -> None:
    world.backend.delete(ObjectKind.SNAPSHOT, world.a.snapshot.hex)
    result = world.store.remove("a")
    assert result.removed[0].snapshot == world.a.snapshot
    assert (result.freed.stored_bytes, result.freed.metadata_bytes) == (0, 0)
    assert any(world.a.snapshot.short in text for text in result.freed.damaged)


# -- leases ---------------------------------------------------------------------------------------


def write_lease(
    world: World, state: LeaseState, *, snapshot: str | None = None, age_s: int = 0
) -> None:
    """Write a lease as a push of some other process does."""
    lease = Lease(
        created=format_utc(world.clock.now_ns() - age_s * 1_000_000_000),
        holder="somebody",
        nonce="e" * 32,
        snapshot=snapshot,
        state=state,
        ttl_s=3600,
    )
    name = f"{len(names_of(world.backend, ObjectKind.LEASE)):032x}"
    newest = head_number(world.backend, ObjectKind.LEASE, name)
    append_generation(world.backend, ObjectKind.LEASE, name, encode_lease(lease), after=newest)


def test_pushes_under_way_are_counted(world: World) -> None:
    write_lease(world, LeaseState.ACQUIRED)
    write_lease(world, LeaseState.RENEWED, age_s=3000)
    write_lease(world, LeaseState.RENEWED, age_s=4000)
    write_lease(world, LeaseState.RELEASED)
    assert world.store.remove("a", dry_run=True).freed.pushes == 2


def test_a_snapshot_that_is_about_to_get_its_name_is_kept(world: World) -> None:
    """Goal: what a push has committed stays until its name is there, or its time is over.

    Method: a snapshot without a name and with a committed lease, then with one of long ago.
    """
    world.store.remove("b")
    for lease in names_of(world.backend, ObjectKind.LEASE):
        world.backend.delete(ObjectKind.LEASE, lease)
    for ref in names_of(world.backend, ObjectKind.REF):
        if ref.startswith("b/"):
            world.backend.delete(ObjectKind.REF, ref)
    write_lease(world, LeaseState.COMMITTED, snapshot=world.b.snapshot.hex)
    roots = find_roots(world.backend, world.clock)
    assert roots.committed == {world.b.snapshot}
    assert world.store.remove("a", dry_run=True).freed.stored_bytes == len(ONLY_A)
    world.clock.advance_s(3601)
    assert find_roots(world.backend, world.clock).committed == frozenset()
    freed = world.store.remove("a", dry_run=True).freed
    assert freed.stored_bytes == len(COMMON) + len(ONLY_A)


def test_a_lease_that_has_done_its_work_keeps_nothing(world: World) -> None:
    """The lease of a push stays after its name was set, and must not keep what was removed."""
    world.store.remove("b")
    roots = find_roots(world.backend, world.clock)
    assert roots.committed == frozenset()
    assert roots.names == {RefName("a"): world.a.snapshot}


def test_a_lease_that_cannot_be_read_is_told(world: World) -> None:
    world.backend.put_new(ObjectKind.LEASE, f"{'d' * 32}/00000001", [b"{}"])
    (told,) = world.store.remove("a", dry_run=True).freed.damaged
    assert "lease dddddddddddd" in told
