"""Marks of removal from the pusher's side: revive what is needed, never use what is going."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typing_extensions import override

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.clock import format_utc
from snapstore.errors import LeaseLost, RefNotFound
from snapstore.format.mark import Mark, MarkState, encode_mark, may_follow
from snapstore.repository.chains import append_generation, read_history
from snapstore.repository.leases import deleting_names, revive
from snapstore.repository.store import Store
from snapstore.testing.clock import ManualClock
from snapstore.units import BytesLike
from tests.support.samples import random_bytes
from tests.support.schemas import check_document, check_store
from tests.unit.repository.parts import CONFIG, write_mark

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def states(backend: MemoryBackend, kind: ObjectKind, name: str) -> list[str]:
    """All generations of a mark, each checked against its schema and the one before."""
    found: list[MarkState] = []
    for one in read_history(backend, ObjectKind.MARK, f"{kind.value}/{name}"):
        mark = check_document("mark", one.body)
        assert isinstance(mark, Mark)
        assert may_follow(mark.state, found[-1] if found else None)
        found.append(mark.state)
    return [state.value for state in found]


def test_condemned_objects_that_are_needed_are_revived(clock: ManualClock) -> None:
    """Proves: R2, R3. What is not needed is left to its fate."""
    backend = MemoryBackend()
    for name in (A, B):
        write_mark(backend, clock, ObjectKind.PACK, name, MarkState.CONDEMNED)
    revive(backend, clock, ObjectKind.PACK, [A, C])
    assert states(backend, ObjectKind.PACK, A) == ["condemned", "revived"]
    assert states(backend, ObjectKind.PACK, B) == ["condemned"]
    assert states(backend, ObjectKind.PACK, C) == []


def test_reviving_twice_writes_once(clock: ManualClock) -> None:
    backend = MemoryBackend()
    write_mark(backend, clock, ObjectKind.PACK, A, MarkState.CONDEMNED)
    for _ in range(2):
        revive(backend, clock, ObjectKind.PACK, [A])
    assert states(backend, ObjectKind.PACK, A) == ["condemned", "revived"]
    write_mark(backend, clock, ObjectKind.PACK, A, MarkState.CONDEMNED)
    revive(backend, clock, ObjectKind.PACK, [A])
    assert states(backend, ObjectKind.PACK, A) == ["condemned", "revived"] * 2


def test_what_is_being_removed_cannot_be_revived(clock: ManualClock) -> None:
    backend = MemoryBackend()
    write_mark(backend, clock, ObjectKind.PACK, A, MarkState.CONDEMNED)
    write_mark(backend, clock, ObjectKind.PACK, A, MarkState.DELETING)
    with pytest.raises(LeaseLost):
        revive(backend, clock, ObjectKind.PACK, [A])
    assert states(backend, ObjectKind.PACK, A) == ["condemned", "deleting"]


def test_kinds_are_apart(clock: ManualClock) -> None:
    backend = MemoryBackend()
    write_mark(backend, clock, ObjectKind.RANK, A, MarkState.CONDEMNED)
    revive(backend, clock, ObjectKind.PACK, [A])
    assert states(backend, ObjectKind.RANK, A) == ["condemned"]
    write_mark(backend, clock, ObjectKind.RANK, A, MarkState.DELETING)
    assert deleting_names(backend, ObjectKind.PACK) == frozenset()
    assert deleting_names(backend, ObjectKind.RANK) == {A}


def test_deleting_is_told_from_condemned_and_revived(clock: ManualClock) -> None:
    backend = MemoryBackend()
    for name, marks in (
        (A, [MarkState.CONDEMNED]),
        (B, [MarkState.CONDEMNED, MarkState.REVIVED]),
        (C, [MarkState.CONDEMNED, MarkState.DELETING]),
    ):
        for state in marks:
            write_mark(backend, clock, ObjectKind.PACK, name, state)
    assert deleting_names(backend, ObjectKind.PACK) == {C}


class Interfering(MemoryBackend):
    """Lets somebody else do something right before a mark is written."""

    before_mark: Callable[[], None] | None = None

    @override
    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""
        if kind is ObjectKind.MARK and self.before_mark is not None:
            act, self.before_mark = self.before_mark, None
            act()
        super().put_new(kind, name, pieces)


def test_a_pruner_that_is_faster_wins(clock: ManualClock) -> None:
    """Goal: *revived* and *deleting* fight for one number, and the first one decides. Proves: R2.

    Method: the pruner writes *deleting* right before the pusher's *revived* arrives.
    """
    backend = Interfering()
    write_mark(backend, clock, ObjectKind.PACK, A, MarkState.CONDEMNED)
    backend.before_mark = lambda: write_mark(backend, clock, ObjectKind.PACK, A, MarkState.DELETING)
    with pytest.raises(LeaseLost):
        revive(backend, clock, ObjectKind.PACK, [A])
    assert states(backend, ObjectKind.PACK, A) == ["condemned", "deleting"]


def test_another_pusher_that_is_faster_has_revived_it_for_both(clock: ManualClock) -> None:
    backend = Interfering()
    write_mark(backend, clock, ObjectKind.PACK, A, MarkState.CONDEMNED)
    backend.before_mark = lambda: write_mark(backend, clock, ObjectKind.PACK, A, MarkState.REVIVED)
    revive(backend, clock, ObjectKind.PACK, [A])
    assert states(backend, ObjectKind.PACK, A) == ["condemned", "revived"]


def test_a_pruner_that_comes_back_is_answered_again(clock: ManualClock) -> None:
    """Goal: between two looks a mark may go round; the push must not take the old for the new.

    Method: another pusher revives and a pruner condemns again, both before our *revived* arrives.
    """
    backend = Interfering()
    write_mark(backend, clock, ObjectKind.PACK, A, MarkState.CONDEMNED)

    def go_round() -> None:
        write_mark(backend, clock, ObjectKind.PACK, A, MarkState.REVIVED)
        write_mark(backend, clock, ObjectKind.PACK, A, MarkState.CONDEMNED)

    backend.before_mark = go_round
    revive(backend, clock, ObjectKind.PACK, [A])
    assert states(backend, ObjectKind.PACK, A) == ["condemned", "revived"] * 2


# -- real pushes ----------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "data.bin").write_bytes(random_bytes(3 << 20, 1).tobytes())
    return folder


def store_of(backend: MemoryBackend, clock: ManualClock) -> Store:
    return Store(backend, CONFIG, snapstore.StoreOptions(), clock)


def names(backend: MemoryBackend, kind: ObjectKind) -> set[str]:
    return {info.name for info in backend.list(kind)}


@pytest.mark.parametrize("kind", [ObjectKind.PACK, ObjectKind.RANK])
def test_a_push_revives_what_it_finds_condemned(
    tree: Path, clock: ManualClock, kind: ObjectKind
) -> None:
    """Proves: R3."""
    backend = MemoryBackend()
    store = store_of(backend, clock)
    store.push(tree, "a:1")
    (name,) = names(backend, kind)
    write_mark(backend, clock, kind, name, MarkState.CONDEMNED)
    again = store.push(tree, "a:2")
    assert again.ingest.new_chunks == 0
    assert states(backend, kind, name) == ["condemned", "revived"]


def test_a_push_stores_again_what_is_being_removed(
    tree: Path, clock: ManualClock, tmp_path: Path
) -> None:
    """Goal: the content of a pack that is being removed is stored under another name. Proves: R2.

    Method: mark the only pack *deleting*, push the same tree, remove the old pack as the pruner
    does, and pull. The new pack must have another name, through its salt, and nothing of the
    second snapshot may need the first pack.
    """
    backend = MemoryBackend()
    store = store_of(backend, clock)
    store.push(tree, "a:1")
    (old,) = names(backend, ObjectKind.PACK)
    for state in (MarkState.CONDEMNED, MarkState.DELETING):
        write_mark(backend, clock, ObjectKind.PACK, old, state)
    again = store.push(tree, "a:2")
    assert again.packed.packs == 1
    (new,) = names(backend, ObjectKind.PACK) - {old}
    backend.delete(ObjectKind.PACK, old)
    store.pull("a:2", tmp_path / "out")
    assert (tmp_path / "out" / "data.bin").read_bytes() == (tree / "data.bin").read_bytes()
    assert states(backend, ObjectKind.PACK, new) == []


def test_a_salted_pack_follows_the_format(tree: Path, clock: ManualClock, tmp_path: Path) -> None:
    root = tmp_path / "store"
    with snapstore.init_store(f"file://{root}", clock=clock) as store:
        store.push(tree, "a:1")
        backend = store._backend
        (old,) = (info.name for info in backend.list(ObjectKind.PACK))
        for number, state in enumerate((MarkState.CONDEMNED, MarkState.DELETING)):
            mark = Mark(created=format_utc(clock.now_ns()), nonce="f" * 32, state=state)
            chain = f"packs/{old}"
            append_generation(backend, ObjectKind.MARK, chain, encode_mark(mark), after=number)
        store.push(tree, "a:2")
    assert check_store(root)["packs"] == 2


def test_a_pack_that_is_condemned_and_deleted_during_the_push(
    tree: Path, clock: ManualClock
) -> None:
    """Goal: a push that relied on a pack which is removed meanwhile fails, and the next succeeds.

    Method: the pruner condemns the pack and marks it *deleting* while the push stores: the push
    has read its indexes already. Proves: R3.
    """
    backend = MemoryBackend()
    store = store_of(backend, clock)
    store.push(tree, "a:1")
    (old,) = names(backend, ObjectKind.PACK)

    def prune(_: object) -> None:
        if not states(backend, ObjectKind.PACK, old):
            for state in (MarkState.CONDEMNED, MarkState.DELETING):
                write_mark(backend, clock, ObjectKind.PACK, old, state)

    (tree / "more").write_bytes(b"more")
    calls: list[object] = []

    def progress(now: object) -> None:
        calls.append(now)
        if len(calls) == 3:
            prune(now)

    with pytest.raises(LeaseLost):
        store.push(tree, "a:2", progress=progress)
    with pytest.raises(RefNotFound):
        store.show("a:2")
    assert store.push(tree, "a:2").ingest.new_bytes >= 3 << 20


@pytest.mark.parametrize("kind", [ObjectKind.RANK])
def test_a_rank_manifest_that_is_being_removed_stops_the_push(
    tree: Path, clock: ManualClock, kind: ObjectKind
) -> None:
    """Its name depends on its content alone, so the push has to wait until it is gone."""
    backend = MemoryBackend()
    store = store_of(backend, clock)
    store.push(tree, "a:1")
    (name,) = names(backend, kind)
    for state in (MarkState.CONDEMNED, MarkState.DELETING):
        write_mark(backend, clock, kind, name, state)
    with pytest.raises(LeaseLost):
        store.push(tree, "a:2")
