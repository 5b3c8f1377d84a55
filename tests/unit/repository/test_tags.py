"""Other names for a snapshot, the history of a name and the way back, safe beside a pruner."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typing_extensions import override

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.errors import (
    DanglingRef,
    LeaseLost,
    MissingPack,
    RefConflict,
    RefNotFound,
    SnapError,
    SnapshotNotFound,
    UsageError,
)
from snapstore.format.lease import LeaseState
from snapstore.format.mark import MarkState
from snapstore.ids import RefName, SnapshotId
from snapstore.repository.chains import read_history
from snapstore.repository.refs import chain_of, set_ref
from snapstore.repository.roots import newest_leases
from snapstore.testing.clock import ManualClock
from snapstore.units import BytesLike
from tests.support.samples import random_bytes
from tests.support.schemas import check_document
from tests.unit.repository.parts import names_of, open_on, write_files, write_mark

ONE = {"data.bin": random_bytes(200_000, 1).tobytes(), "small": b"one"}
TWO = {"data.bin": random_bytes(200_000, 2).tobytes(), "small": b"two"}
NAME = RefName("team/model", "v1")


class Interfering(MemoryBackend):
    """Lets somebody else do something right before an object of a kind is written."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[ObjectKind, Callable[[], object]] = {}
        self.written: list[ObjectKind] = []

    @override
    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""
        self.before.pop(kind, lambda: None)()
        super().put_new(kind, name, pieces)
        self.written.append(kind)


class World:
    """A store with two generations of one name."""

    def __init__(self, folder: Path) -> None:
        self.backend = Interfering()
        self.clock = ManualClock()
        self.store = open_on(self.backend, self.clock)
        self.tree = folder / "tree"
        self.one = self.push(ONE)
        self.two = self.push(TWO)

    def push(self, files: dict[str, bytes], name: RefName | str = NAME) -> SnapshotId:
        """Push a tree of these files."""
        self.clock.advance_s(60)
        return self.store.push(write_files(self.tree, files), name).snapshot

    def at(self, name: RefName | str = NAME) -> SnapshotId:
        """What a name points to."""
        return self.store.snapshot(name).id

    def leases(self) -> list[LeaseState]:
        """In which state each lease is."""
        return [lease.state for lease in newest_leases(self.backend, [])]

    def packs_of(self, snapshot: SnapshotId) -> set[str]:
        """The packs of one snapshot."""
        found = self.store.snapshot(f"x@b3:{snapshot.hex}")
        packs = [rank.layout.packs["id"].tolist() for rank in found.ranks()]
        return {bytes(raw).hex() for rows in packs for raw in rows}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# -- tag ------------------------------------------------------------------------------------------


def test_a_tag_points_to_the_same_snapshot(world: World, tmp_path: Path) -> None:
    """Goal: from a name or an exact snapshot; nothing is stored but the ref and the lease.

    Method: tag, tag the older snapshot by its id, and pull what the tags say.
    """
    world.backend.written.clear()
    made = world.store.tag(NAME, "prod:x")
    assert (made.name, made.snapshot, made.generation) == (RefName("prod", "x"), world.two, 1)
    assert world.backend.written == [ObjectKind.LEASE, ObjectKind.LEASE, ObjectKind.REF]
    assert set(world.leases()) == {LeaseState.COMMITTED}
    moved = world.store.tag(f"any@b3:{world.one.hex}", "prod:x")
    assert (moved.snapshot, moved.generation, world.at("prod:x")) == (world.one, 2, world.one)
    world.store.pull("prod:x", tmp_path / "out")
    assert (tmp_path / "out" / "small").read_bytes() == b"one"
    for generation in read_history(world.backend, ObjectKind.REF, chain_of(RefName("prod", "x"))):
        check_document("ref", generation.body)


def test_tagging_twice_writes_once(world: World) -> None:
    first = world.store.tag(NAME, "prod:x")
    world.backend.written.clear()
    assert world.store.tag(NAME, "prod:x") == first
    assert world.backend.written == []


def test_a_damaged_name_can_be_tagged_over(world: World) -> None:
    world.backend.put_new(ObjectKind.REF, "prod/@x/00000001", [b"{}"])
    assert world.store.tag(NAME, "prod:x").generation == 2


def test_what_cannot_be_tagged(world: World) -> None:
    with pytest.raises(RefNotFound):
        world.store.tag("team/model:v9", "prod:x")
    with pytest.raises(SnapshotNotFound):
        world.store.tag(f"x@b3:{'0' * 64}", "prod:x")
    with pytest.raises(UsageError, match="one exact snapshot"):
        world.store.tag(NAME, f"x@b3:{world.one.hex}")
    with pytest.raises(RefNotFound):
        world.store.snapshot("prod:x")


@pytest.mark.parametrize("kind", [ObjectKind.PACK, ObjectKind.RANK, ObjectKind.SNAPSHOT])
def test_what_is_condemned_is_revived(world: World, kind: ObjectKind) -> None:
    """A pruner that has not seen the new name meets the answer. Proves: R6, R3."""
    for name in names_of(world.backend, kind):
        write_mark(world.backend, world.clock, kind, name, MarkState.CONDEMNED)
    world.backend.written.clear()
    world.store.tag(f"x@b3:{world.one.hex}", "prod:x")
    lease, *marks, committed, ref = world.backend.written
    assert (lease, committed, ref) == (ObjectKind.LEASE, ObjectKind.LEASE, ObjectKind.REF)
    assert set(marks) == {ObjectKind.MARK}
    assert len(marks) < len(names_of(world.backend, ObjectKind.MARK))


@pytest.mark.parametrize("kind", [ObjectKind.PACK, ObjectKind.RANK, ObjectKind.SNAPSHOT])
def test_what_is_being_removed_is_refused(world: World, kind: ObjectKind) -> None:
    """Proves: R6. The name stays what it was, and the lease is given back."""
    for name in names_of(world.backend, kind):
        write_mark(world.backend, world.clock, kind, name, MarkState.CONDEMNED)
        write_mark(world.backend, world.clock, kind, name, MarkState.DELETING)
    with pytest.raises(LeaseLost) as caught:
        world.store.tag(NAME, "prod:x")
    assert caught.value.exit_code == 6
    with pytest.raises(RefNotFound):
        world.store.snapshot("prod:x")
    assert LeaseState.RELEASED in world.leases()


def test_a_pruner_that_finishes_meanwhile_wins(world: World) -> None:
    """Goal: what is gone by the time that its mark is answered is not pointed to. Proves: R6.

    Method: the pruner condemns a pack before, and goes through with it right before *revived* is
    written, so that the tag finds the mark *deleted*.
    """
    (pack,) = world.packs_of(world.two)
    write_mark(world.backend, world.clock, ObjectKind.PACK, pack, MarkState.CONDEMNED)

    def finish() -> None:
        write_mark(world.backend, world.clock, ObjectKind.PACK, pack, MarkState.DELETING)
        world.backend.delete(ObjectKind.PACK, pack)
        write_mark(world.backend, world.clock, ObjectKind.PACK, pack, MarkState.DELETED)

    world.backend.before[ObjectKind.MARK] = finish
    with pytest.raises(MissingPack, match=pack[:12]):
        world.store.tag(NAME, "prod:x")
    with pytest.raises(RefNotFound):
        world.store.snapshot("prod:x")


# -- history and rollback -------------------------------------------------------------------------


def test_history_is_newest_first_and_says_who(world: World) -> None:
    world.store.remove(NAME)
    found = world.store.history(NAME)
    assert [(one.number, one.snapshot, one.state) for one in found] == [
        (3, None, "deleted"),
        (2, world.two, "snapshot"),
        (1, world.one, "snapshot"),
    ]
    assert [" pid " in one.holder for one in found] == [False, True, True]
    assert [one.present for one in found] == [False, True, True]
    assert found[1].created > found[2].created
    with pytest.raises(RefNotFound, match="nothing was ever named"):
        world.store.history("team/model:v9")


def test_history_tells_what_is_gone_or_damaged(world: World) -> None:
    world.backend.delete(ObjectKind.SNAPSHOT, world.one.hex)
    world.backend.put_new(ObjectKind.REF, f"{chain_of(NAME)}/00000003", [b"{}"])
    for lease in names_of(world.backend, ObjectKind.LEASE):
        world.backend.delete(ObjectKind.LEASE, lease)
    found = world.store.history(NAME)
    assert [(one.state, one.present, one.holder) for one in found] == [
        ("damaged", False, ""),
        ("snapshot", True, ""),
        ("snapshot", False, ""),
    ]
    assert found[0].damaged


def test_back_and_forth(world: World) -> None:
    """Goal: a rollback is a new generation, and the next one undoes it. Proves: C2.

    Method: roll back twice, then to numbers.
    """
    back = world.store.rollback(NAME)
    assert (back.snapshot, back.generation, world.at()) == (world.one, 3, world.one)
    forth = world.store.rollback(NAME)
    assert (forth.snapshot, forth.generation, world.at()) == (world.two, 4, world.two)
    assert world.store.rollback(NAME, to=1).snapshot == world.one
    assert world.store.rollback(NAME, to=2).snapshot == world.two
    assert [one.number for one in world.store.history(NAME)] == [6, 5, 4, 3, 2, 1]


def test_a_deleted_name_comes_back(world: World, tmp_path: Path) -> None:
    world.store.remove(NAME)
    with pytest.raises(RefNotFound) as caught:
        world.store.pull(NAME, tmp_path / "out")
    assert f"tag rollback {NAME}" in caught.value.next_step
    assert list(world.store.list()) == []
    assert world.store.rollback(NAME).snapshot == world.two
    world.store.pull(NAME, tmp_path / "out")
    assert [str(found.name) for found in world.store.list()] == [str(NAME)]


def test_rolling_back_to_what_it_is_writes_nothing(world: World) -> None:
    world.backend.written.clear()
    assert world.store.rollback(NAME, to=2).generation == 2
    assert world.backend.written == []


@pytest.mark.parametrize("body", [b"{}", b"", bytes(1 << 17)])
def test_a_damaged_generation_is_left_behind(world: World, body: bytes) -> None:
    world.backend.put_new(ObjectKind.REF, f"{chain_of(NAME)}/00000003", [body])
    assert world.store.history(NAME)[0].state == "damaged"
    assert world.store.rollback(NAME).snapshot == world.two
    with pytest.raises(UsageError, match="damaged"):
        world.store.rollback(NAME, to=3)


def test_generations_that_cannot_be_meant(world: World) -> None:
    for wrong in (0, 7, -1):
        with pytest.raises(RefNotFound, match=f"no generation {wrong}"):
            world.store.rollback(NAME, to=wrong)
    world.store.remove(NAME)
    with pytest.raises(UsageError, match="deleted"):
        world.store.rollback(NAME, to=3)
    with pytest.raises(RefNotFound, match="nothing was ever named"):
        world.store.rollback("team/model:v9")
    world.push(ONE, "single:v1")
    with pytest.raises(RefNotFound, match="never pointed to another"):
        world.store.rollback("single:v1")


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (ObjectKind.SNAPSHOT, DanglingRef),
        (ObjectKind.RANK, DanglingRef),
        (ObjectKind.PACK, MissingPack),
    ],
)
def test_what_was_pruned_cannot_be_gone_back_to(
    world: World, kind: ObjectKind, error: type[SnapError]
) -> None:
    """Goal: a rollback never leaves a name that cannot be pulled. Proves: R6, I1.

    Method: remove the objects of the older snapshot, one kind at a time.
    """
    found = world.store.snapshot(f"x@b3:{world.one.hex}")
    gone = {
        ObjectKind.SNAPSHOT: {world.one.hex},
        ObjectKind.RANK: {rank.id.hex for rank in found.ranks()},
        ObjectKind.PACK: world.packs_of(world.one),
    }
    for name in gone[kind]:
        world.backend.delete(kind, name)
    with pytest.raises(error) as caught:
        world.store.rollback(NAME)
    assert caught.value.exit_code == 4
    assert caught.value.next_step
    assert world.at() == world.two
    assert world.store.history(NAME)[0].number == 2
    assert LeaseState.ACQUIRED not in world.leases()


def test_somebody_else_moves_the_name_meanwhile(world: World) -> None:
    """Goal: what was decided for one state of the name is not done to another. Proves: C1.

    Method: another push moves the name right before the rollback's ref is written.
    """
    other = SnapshotId.of(b"other")
    world.backend.before[ObjectKind.REF] = lambda: set_ref(world.backend, world.clock, NAME, other)
    with pytest.raises(RefConflict, match="meanwhile") as caught:
        world.store.rollback(NAME)
    assert "tag history" in caught.value.next_step
    assert world.store.history(NAME)[0].snapshot == other


def test_a_store_open_for_reading_is_not_written(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    with snapstore.init_store(url) as store:
        for files in (ONE, TWO):
            store.push(write_files(tmp_path / "tree", files), NAME)
    before = sorted((tmp_path / "store").rglob("*"))
    with snapstore.open_store(url, readonly=True) as store:
        for doing in (
            lambda: store.tag(NAME, "other"),
            lambda: store.rollback(NAME),
            lambda: store.remove(NAME),
        ):
            with pytest.raises(SnapError) as caught:
                doing()
            assert caught.value.exit_code == 5
        store.remove(NAME, dry_run=True)
        assert len(store.history(NAME)) == 2
    assert sorted((tmp_path / "store").rglob("*")) == before
