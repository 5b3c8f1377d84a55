"""Refs: names that move, with a history that only grows."""

import threading
from collections.abc import Callable

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend, MemoryObjects
from snapstore.backend.posix import PosixBackend
from snapstore.clock import format_utc
from snapstore.errors import Malformed, RefConflict, RefNotFound
from snapstore.format.ref import decode_ref
from snapstore.ids import RefName, SnapshotId
from snapstore.repository.chains import read_history
from snapstore.repository.refs import chain_of, list_refs, resolve_ref, set_ref
from snapstore.testing.clock import ManualClock
from tests.support.schemas import check_document
from tests.unit.repository.parts import ForgetfulBackend

NAME = RefName("team/model", "v1")
ONE, TWO = SnapshotId.of(b"one"), SnapshotId.of(b"two")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_a_name_points_to_what_was_set_last(clock: ManualClock) -> None:
    backend = MemoryBackend()
    assert set_ref(backend, clock, NAME, ONE) == 1
    clock.advance_s(61)
    assert set_ref(backend, clock, NAME, TWO) == 2
    found = resolve_ref(backend, NAME)
    assert (found.name, found.snapshot, found.generation) == (NAME, TWO, 2)
    assert found.created == format_utc(clock.now_ns())


def test_what_is_written_follows_the_schema(clock: ManualClock) -> None:
    backend = MemoryBackend()
    set_ref(backend, clock, NAME, ONE)
    set_ref(backend, clock, NAME, None)
    for generation in read_history(backend, ObjectKind.REF, chain_of(NAME)):
        check_document("ref", generation.body)


def test_a_name_nobody_set(clock: ManualClock) -> None:
    backend = MemoryBackend()
    set_ref(backend, clock, RefName("team/model", "v10"), ONE)
    with pytest.raises(RefNotFound, match="team/model:v1"):
        resolve_ref(backend, NAME)


def test_numbers_go_on_after_a_deletion(clock: ManualClock) -> None:
    """Goal: a deleted name is gone, can be set again, and its history never restarts. Proves: C2.

    Method: set, delete, delete again, set; look at each step and at all that is written.
    """
    backend = MemoryBackend()
    set_ref(backend, clock, NAME, ONE)
    assert set_ref(backend, clock, NAME, None) == 2
    with pytest.raises(RefNotFound):
        resolve_ref(backend, NAME)
    assert set_ref(backend, clock, NAME, None) == 3
    assert set_ref(backend, clock, NAME, ONE) == 4
    assert resolve_ref(backend, NAME).generation == 4
    history = read_history(backend, ObjectKind.REF, chain_of(NAME))
    states = [decode_ref(generation.body).snapshot_id for generation in history]
    assert states == [ONE, None, None, ONE]


def test_numbers_go_on_after_old_generations_were_removed(clock: ManualClock) -> None:
    backend = MemoryBackend()
    for _ in range(3):
        set_ref(backend, clock, NAME, ONE)
    for number in (1, 2):
        backend.delete(ObjectKind.REF, f"{chain_of(NAME)}/{number:08d}")
    assert set_ref(backend, clock, NAME, TWO) == 4
    assert resolve_ref(backend, NAME).snapshot == TWO


def test_a_stale_listing_does_not_hide_the_newest(clock: ManualClock) -> None:
    """Proves: C3."""
    backend = ForgetfulBackend()
    set_ref(backend, clock, NAME, ONE)
    set_ref(backend, clock, NAME, TWO)
    backend.unnoticed.add(f"{chain_of(NAME)}/00000002")
    assert resolve_ref(backend, NAME).snapshot == TWO
    assert set_ref(backend, clock, NAME, ONE) == 3


def test_listing_is_sorted_and_by_prefix(clock: ManualClock) -> None:
    backend = MemoryBackend()
    names = ["b", "a/b:x", "a/b:w", "a", "a-b:v", "ab/c"]
    refs = [RefName(*text.split(":")) for text in names]
    for ref in refs:
        set_ref(backend, clock, ref, ONE)
        set_ref(backend, clock, ref, TWO)
    assert list(list_refs(backend)) == sorted(refs)
    assert list(map(str, list_refs(backend, "a/"))) == ["a/b:w", "a/b:x"]
    assert list(map(str, list_refs(backend, "a/b:x"))) == ["a/b:x"]
    assert list(map(str, list_refs(backend, "a:"))) == ["a:latest"]
    assert list(list_refs(backend, "zzz")) == []


def test_deleted_names_are_listed_too(clock: ManualClock) -> None:
    """Whether they are shown is for the caller, who resolves them anyway."""
    backend = MemoryBackend()
    set_ref(backend, clock, NAME, ONE)
    set_ref(backend, clock, NAME, None)
    assert list(list_refs(backend)) == [NAME]


def test_a_damaged_generation_is_not_passed_over(clock: ManualClock) -> None:
    """An older generation must never come back to life."""
    backend = MemoryBackend()
    set_ref(backend, clock, NAME, ONE)
    backend.put_new(ObjectKind.REF, f"{chain_of(NAME)}/00000002", [b"{}"])
    with pytest.raises(Malformed):
        resolve_ref(backend, NAME)


@pytest.fixture(params=["memory", "file"])
def connect(request: pytest.FixtureRequest) -> Callable[[], MemoryBackend | PosixBackend]:
    """Return what opens the same store again and again, as several clients do."""
    if request.param == "memory":
        objects = MemoryObjects()
        return lambda: MemoryBackend(objects)
    root = request.getfixturevalue("tmp_path") / "store"
    PosixBackend.create(root).close()
    return lambda: PosixBackend(root)


def test_eight_threads_set_one_name(connect: Callable[[], MemoryBackend | PosixBackend]) -> None:
    """Goal: everyone gets a number of their own, or learns that others were faster. Proves: C1.

    Method: eight clients set one name five times each, all at once. Every number that was returned
    must hold what its caller wrote, and the numbers must have no gap.
    """
    clock = ManualClock()
    start = threading.Barrier(8)
    won: dict[int, SnapshotId] = {}
    lost: list[SnapshotId] = []

    def work(client: int) -> None:
        backend = connect()
        start.wait()
        for turn in range(5):
            snapshot = SnapshotId.of(b"%d %d" % (client, turn))
            try:
                won[set_ref(backend, clock, NAME, snapshot)] = snapshot
            except RefConflict:
                lost.append(snapshot)
        backend.close()

    threads = [threading.Thread(target=work, args=(client,)) for client in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    backend = connect()
    history = read_history(backend, ObjectKind.REF, chain_of(NAME))
    assert {one.number: decode_ref(one.body).snapshot_id for one in history} == won
    assert sorted(won) == list(range(1, len(won) + 1))
    assert len(won) + len(lost) == 40
    # Each round of a race has a winner, so who tries sixteen times can hardly lose.
    assert len(won) >= 16
    assert resolve_ref(backend, NAME).generation == len(won)
    backend.close()
