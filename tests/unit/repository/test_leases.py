"""Leases of pushes: renewed in time, lost when revoked, given back when the push fails."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.retry import RetryingBackend
from snapstore.clock import format_utc
from snapstore.errors import LeaseLost, RefNotFound, SnapError, TransientBackendError
from snapstore.format.config import StoreConfig
from snapstore.format.lease import Lease, LeaseState, decode_lease, encode_lease, may_follow
from snapstore.ids import SnapshotId
from snapstore.progress import Progress
from snapstore.repository.chains import append_generation, read_history
from snapstore.repository.leases import PushLease
from snapstore.repository.store import Store
from snapstore.testing.clock import ManualClock
from snapstore.testing.faults import Fault, FaultyBackend
from tests.support.samples import random_bytes
from tests.support.schemas import check_document
from tests.unit.repository.parts import memory_stores

SNAPSHOT = SnapshotId.of(b"a snapshot")
TTL_S = 3600
CONFIG = StoreConfig(created="2026-11-30T05:00:00Z", store_id="0" * 32)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def lease_ids(backend: MemoryBackend) -> list[str]:
    return sorted({info.name.split("/")[0] for info in backend.list(ObjectKind.LEASE)})


def the_lease(backend: MemoryBackend) -> list[Lease]:
    """All generations of the only lease, each checked against its schema and the one before."""
    (name,) = lease_ids(backend)
    generations = [
        check_document("lease", one.body) for one in read_history(backend, ObjectKind.LEASE, name)
    ]
    leases = [one for one in generations if isinstance(one, Lease)]
    assert len(leases) == len(generations)
    previous: LeaseState | None = None
    for lease in leases:
        assert may_follow(lease.state, previous), (previous, lease.state)
        previous = lease.state
    return leases


def states(backend: MemoryBackend) -> list[str]:
    return [lease.state.value for lease in the_lease(backend)]


def revoke(backend: MemoryBackend, clock: ManualClock) -> None:
    """What a pruner does to a lease that it takes for dead."""
    (name,) = lease_ids(backend)
    body = encode_lease(
        Lease(
            created=format_utc(clock.now_ns()),
            holder="a pruner",
            nonce="f" * 32,
            state=LeaseState.REVOKED,
            ttl_s=TTL_S,
        )
    )
    newest = len(read_history(backend, ObjectKind.LEASE, name))
    append_generation(backend, ObjectKind.LEASE, name, body, after=newest)


# -- the lease itself -----------------------------------------------------------------------------


def test_a_lease_is_renewed_when_a_third_of_its_time_is_gone(clock: ManualClock) -> None:
    """Goal: a live push is never taken for dead, and renewing costs next to nothing.

    Method: let a manual clock run in steps of ten minutes and ask for renewal at each.
    """
    backend = MemoryBackend()
    lease = PushLease(backend, clock)
    times = [clock.now_ns()]
    for minutes in range(10, 130, 10):
        clock.advance_s(600)
        lease.renew_if_due()
        lease.renew_if_due()
        if minutes % 30 == 0:
            times.append(clock.now_ns())
    written = the_lease(backend)
    assert [one.state for one in written] == [LeaseState.ACQUIRED, *[LeaseState.RENEWED] * 4]
    assert [one.created for one in written] == [format_utc(time) for time in times]
    assert len({one.nonce for one in written}) == 1
    assert {one.ttl_s for one in written} == {TTL_S}


def test_a_lease_is_not_renewed_early(clock: ManualClock) -> None:
    backend = MemoryBackend()
    lease = PushLease(backend, clock)
    clock.advance_s(TTL_S / 3)
    lease.renew_if_due()
    assert states(backend) == ["acquired"]


def test_committing_ends_a_lease(clock: ManualClock) -> None:
    """Proves: R4, for the holder's side."""
    backend = MemoryBackend()
    lease = PushLease(backend, clock)
    lease.commit(SNAPSHOT)
    lease.release()
    written = the_lease(backend)
    assert [one.state for one in written] == [LeaseState.ACQUIRED, LeaseState.COMMITTED]
    assert written[-1].snapshot == SNAPSHOT.hex


def test_releasing_twice_is_releasing_once(clock: ManualClock) -> None:
    backend = MemoryBackend()
    lease = PushLease(backend, clock)
    lease.release()
    lease.release()
    assert states(backend) == ["acquired", "released"]


@pytest.mark.parametrize(
    "act", [PushLease.renew_if_due, lambda lease: lease.commit(SNAPSHOT)], ids=["renew", "commit"]
)
def test_a_revoked_lease_is_lost(act: Callable[[PushLease], None], clock: ManualClock) -> None:
    """Proves: R4. The pruner was first, so the holder must stop, and writes nothing more."""
    backend = MemoryBackend()
    lease = PushLease(backend, clock)
    clock.advance_s(TTL_S)
    revoke(backend, clock)
    with pytest.raises(LeaseLost) as caught:
        act(lease)
    assert caught.value.retryable
    assert caught.value.next_step
    lease.release()
    assert states(backend) == ["acquired", "revoked"]


def test_a_pruner_loses_against_a_renewal(clock: ManualClock) -> None:
    """Whoever writes the number first has decided, whatever their clocks say. Proves: R5."""
    backend = MemoryBackend()
    lease = PushLease(backend, clock)
    (name,) = lease_ids(backend)
    clock.advance_s(100 * TTL_S)
    lease.renew_if_due()
    body = encode_lease(
        Lease(
            created=format_utc(clock.now_ns()),
            holder="a pruner",
            nonce="f" * 32,
            state=LeaseState.REVOKED,
            ttl_s=TTL_S,
        )
    )
    with pytest.raises(SnapError):
        append_generation(backend, ObjectKind.LEASE, name, body, after=1)
    lease.commit(SNAPSHOT)
    assert states(backend) == ["acquired", "renewed", "committed"]


@pytest.mark.parametrize("operation", [0, 1, 2])
def test_lost_replies_do_not_lose_the_lease(operation: int, clock: ManualClock) -> None:
    """Proves: C4, for leases: the nonce tells the holder that it was they who wrote."""
    backend = MemoryBackend()
    faulty = FaultyBackend(backend, {operation: Fault.LOST_REPLY})
    lease = PushLease(RetryingBackend(faulty, rng=random.Random(1), clock=clock), clock)
    clock.advance_s(TTL_S)
    lease.renew_if_due()
    lease.commit(SNAPSHOT)
    assert states(backend) == ["acquired", "renewed", "committed"]


def test_two_leases_are_two_chains(clock: ManualClock) -> None:
    backend = MemoryBackend()
    one, two = PushLease(backend, clock), PushLease(backend, clock)
    one.release()
    two.commit(SNAPSHOT)
    last = {
        decode_lease(read_history(backend, ObjectKind.LEASE, name)[-1].body).state
        for name in lease_ids(backend)
    }
    assert last == {LeaseState.RELEASED, LeaseState.COMMITTED}


# -- the leases of real pushes --------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "large.bin").write_bytes(random_bytes(20 << 20, 1).tobytes())
    (folder / "small").write_bytes(b"small")
    return folder


def new_store(clock: ManualClock) -> tuple[Store, MemoryBackend]:
    url = next(memory_stores())
    return snapstore.init_store(url, clock=clock), MemoryBackend.named(url[len("memory://") :])


def test_a_push_commits_its_lease(tree: Path, clock: ManualClock) -> None:
    store, backend = new_store(clock)
    result = store.push(tree, "a/b:v1")
    written = the_lease(backend)
    assert [one.state for one in written] == [LeaseState.ACQUIRED, LeaseState.COMMITTED]
    assert written[-1].snapshot == result.snapshot.hex


def test_a_slow_push_renews(tree: Path, clock: ManualClock) -> None:
    """Every window takes half an hour here."""
    store, backend = new_store(clock)
    store.push(tree, "a/b:v1", progress=lambda _: clock.advance_s(1800))
    written = states(backend)
    assert written[0] == "acquired"
    assert written[-1] == "committed"
    assert set(written[1:-1]) == {"renewed"}


class StoppedError(Exception):
    """Raised by a progress callback."""


@pytest.mark.parametrize("phase", ["store", "commit"])
def test_a_push_that_fails_gives_its_lease_back(tree: Path, clock: ManualClock, phase: str) -> None:
    store, backend = new_store(clock)

    def stop(progress: Progress) -> None:
        if progress.phase == phase and progress.done_bytes:
            raise StoppedError

    with pytest.raises(StoppedError):
        store.push(tree, "a/b:v1", progress=stop)
    assert states(backend) == ["acquired", "released"]
    with pytest.raises(RefNotFound):
        store.show("a/b:v1")
    assert list(backend.list(ObjectKind.SNAPSHOT)) == []


@pytest.mark.parametrize("operation", [1, 2, 3])
def test_a_push_that_cannot_even_begin_gives_its_lease_back(
    tree: Path, clock: ManualClock, operation: int
) -> None:
    """Reading indexes and marks may fail after the lease was written, before anything is stored."""
    backend = MemoryBackend()
    faulty = FaultyBackend(backend, {operation: Fault.FAIL_BEFORE})
    store = Store(faulty, CONFIG, snapstore.StoreOptions(), clock)
    with pytest.raises(TransientBackendError):
        store.push(tree, "a/b:v1")
    assert states(backend) == ["acquired", "released"]
    assert list(backend.list(ObjectKind.PACK)) == []


def test_a_push_whose_lease_is_revoked_publishes_nothing(tree: Path, clock: ManualClock) -> None:
    """Goal: a revoked push stops, leaves no name, and can be repeated at once. Proves: R4.

    Method: a pruner revokes the lease while data are stored; half an hour later the push wants to
    renew. What it had stored by then is found by the second push.
    """
    store, backend = new_store(clock)

    def interfere(progress: Progress) -> None:
        if progress.phase == "store" and progress.done_bytes and states(backend) == ["acquired"]:
            revoke(backend, clock)
            clock.advance_s(1800)

    with pytest.raises(LeaseLost):
        store.push(tree, "a/b:v1", progress=interfere)
    assert states(backend) == ["acquired", "revoked"]
    assert list(backend.list(ObjectKind.SNAPSHOT)) == []
    assert list(backend.list(ObjectKind.REF)) == []
    result = store.push(tree, "a/b:v1")
    assert store.show("a/b:v1").id == result.snapshot


def test_a_push_whose_lease_is_revoked_at_the_very_end_publishes_nothing(
    tree: Path, clock: ManualClock
) -> None:
    """The lease is *committed* before the name exists: the name cannot exist without it."""
    store, backend = new_store(clock)

    def interfere(progress: Progress) -> None:
        if progress.phase == "commit":
            revoke(backend, clock)

    with pytest.raises(LeaseLost):
        store.push(tree, "a/b:v1", progress=interfere)
    assert list(backend.list(ObjectKind.REF)) == []
    again = store.push(tree, "a/b:v1")
    assert again.ingest.new_chunks == 0
