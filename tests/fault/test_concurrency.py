"""Several at once: whoever is first decides, and everybody sees something whole."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.backend.posix import PosixBackend
from snapstore.backend.trace import Operation, TracingBackend
from snapstore.errors import LeaseLost, RefConflict, RefNotFound
from snapstore.format.lease import Lease, LeaseState, decode_lease, encode_lease
from snapstore.progress import Progress
from snapstore.repository.refs import set_ref
from snapstore.testing.clock import ManualClock
from tests.support.damage import (
    Boundary,
    Crash,
    Lab,
    Meanwhile,
    open_on,
    open_traced,
    ref_name,
    tree_state,
)
from tests.support.schemas import check_store

pytestmark = pytest.mark.slow

Trees = tuple[Path, Path]


def writes_of_a_push(lab: Lab, folder: Path) -> list[Boundary]:
    """The moments before each object that a push writes, in the order of their kinds."""
    copy = Lab(folder / "recorded", lab.tree, options=lab.options)
    shutil.copytree(lab.root, copy.root)
    record = Crash()
    with open_traced(copy.root, copy.options, record) as store:
        store.push(copy.tree, copy.name)
    return sorted({one for one in record.boundaries if one.verb == "put_new" and not one.after})


@pytest.mark.parametrize("same_tree", [True, False], ids=["same-tree", "other-tree"])
def test_a_push_within_a_push(
    empty: Lab,
    trees: Trees,
    tmp_path: Path,
    same_tree: bool,  # noqa: FBT001
) -> None:
    """At each moment of one push another one, to the same name, runs from beginning to end.

    Method: the other push runs in the hook of a traced backend, before each object that the
    first one writes. Both succeed, the first one to finish is the older generation, and both
    snapshots are whole. With the same tree both write the same layouts. Proves: I2, I4, C1, C2.
    """
    other = trees[1] if same_tree else trees[0]
    found = writes_of_a_push(empty, tmp_path)
    assert len(found) > 15
    for boundary in found[::2]:
        lab = Lab(tmp_path / "copy", empty.tree, options=empty.options)
        shutil.copytree(empty.root, lab.root)
        inner: list[str] = []

        def act(lab: Lab = lab, inner: list[str] = inner) -> None:
            inner.append(lab.push(tree=other).snapshot.hex)

        hook = Meanwhile(boundary, act)
        with open_traced(lab.root, lab.options, hook) as store:
            outer = store.push(lab.tree, lab.name)
        assert hook.has_acted
        assert outer.generation == 2, boundary
        assert lab.snapshot_id() == outer.snapshot
        for number, (snapshot, tree) in enumerate(((inner[0], other), (outer.snapshot, lab.tree))):
            out = tmp_path / f"out-{number}"
            lab.pull(out, f"any@b3:{snapshot}")
            assert tree_state(out) == tree_state(tree), boundary
            shutil.rmtree(out)
        check_store(lab.root)
        shutil.rmtree(lab.root)


def test_a_pull_within_a_push(lab: Lab, trees: Trees, tmp_path: Path) -> None:
    """A reader of a name that is being moved gets the old tree or the new one, whole.

    Method: pull before each object that the push writes, and after the ref. Proves: I2.
    """
    last = Boundary("refs", "put_new", 0, after=True)
    moved = []
    for boundary in [*writes_of_a_push(lab, tmp_path), last]:
        copy = Lab(tmp_path / "copy", lab.tree, options=lab.options)
        shutil.copytree(lab.root, copy.root)
        out = tmp_path / "out"

        def act(copy: Lab = copy, out: Path = out) -> None:
            copy.pull(out)

        with open_traced(copy.root, copy.options, Meanwhile(boundary, act)) as store:
            store.push(copy.tree, copy.name)
        if tree_state(out) == tree_state(trees[1]):
            moved.append(boundary)
        else:
            assert tree_state(out) == tree_state(trees[0]), boundary
        shutil.rmtree(out)
        shutil.rmtree(copy.root)
    assert moved == [last]


def together(*acts: Callable[[], object]) -> list[BaseException]:
    """Do things at once, each in a thread of its own; returns what they raised."""
    start = threading.Barrier(len(acts))
    raised: list[BaseException] = []

    def run(act: Callable[[], object]) -> None:
        start.wait()
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            raised.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_pushes_at_once(empty: Lab, trees: Trees, tmp_path: Path) -> None:
    """Four pushes in one process share a store, two of them a name and two a tree.

    Proves: I2, I4, C1.
    """
    jobs = [
        ("one:v1", trees[0]),
        ("one:v1", trees[1]),
        ("two:v1", trees[1]),
        ("three:v1", trees[1]),
    ]
    with empty.open() as store:
        raised = together(*(lambda job=job: store.push(job[1], job[0]) for job in jobs))
        assert raised == []
        raised = together(
            *(
                lambda number=number, job=job: store.pull(job[0], tmp_path / f"out-{number}")
                for number, job in enumerate(jobs)
            )
        )
        assert raised == []
    states = [tree_state(tmp_path / f"out-{number}") for number in range(4)]
    assert states[0] == states[1]
    assert states[0] in [tree_state(tree) for tree in trees]
    assert states[2] == states[3] == tree_state(trees[1])
    assert empty.names(ObjectKind.REF, "one/") == ["one/@v1/00000001", "one/@v1/00000002"]
    check_store(empty.root)


def test_a_storm_on_one_name(empty: Lab, trees: Trees) -> None:
    """Of many who move a name at once each gets a generation of its own. Proves: C1, C2, S3."""
    snapshot = empty.push().snapshot
    assert trees
    numbers: list[int] = []
    with empty.open() as store:
        backend = store._backend
        name = ref_name(empty.name)
        raised = together(
            *[lambda: numbers.append(set_ref(backend, ManualClock(), name, snapshot))] * 12
        )
    assert raised == []
    assert sorted(numbers) == [*range(2, 14)]
    check_store(empty.root)


class AlwaysFaster:
    """Writes each generation of a ref just before its victim does (`TraceHook`)."""

    def __init__(self, lab: Lab, snapshot: str) -> None:
        self._lab = lab
        self._snapshot = snapshot
        self.times = 0

    def before(self, operation: Operation) -> None:
        if operation.verb == "put_new" and operation.kind is ObjectKind.REF:
            self.times += 1
            self._lab.point(self._snapshot)

    def after(self, operation: Operation, error: BaseException | None) -> None:
        pass


def test_others_are_always_faster(lab: Lab, trees: Trees, tmp_path: Path) -> None:
    """A name that others move each time is given up with exit 6, and is as they left it.

    Proves: C1, I2.
    """
    hook = AlwaysFaster(lab, lab.snapshot_id().hex)
    with (
        open_traced(lab.root, lab.options, hook) as store,
        pytest.raises(RefConflict, match="16 times") as caught,
    ):
        store.push(lab.tree, lab.name)
    assert hook.times == 16
    assert caught.value.exit_code == 6
    assert caught.value.retryable
    assert caught.value.next_step
    lab.pull(tmp_path / "out")
    assert tree_state(tmp_path / "out") == tree_state(trees[0])
    assert lab.push().generation == 18
    check_store(lab.root)


def revoke(lab: Lab) -> None:
    """Take the next number of the only lease, as a pruner does."""
    chain, _, number = lab.names(ObjectKind.LEASE)[-1].partition("/")
    lease = Lease(
        created="2026-11-30T05:00:00Z",
        holder="pruner",
        nonce="0" * 32,
        snapshot=None,
        state=LeaseState.REVOKED,
        ttl_s=1,
    )
    lab.put(ObjectKind.LEASE, f"{chain}/{int(number) + 1:08d}", encode_lease(lease))


def test_a_long_push_renews_its_lease(empty: Lab) -> None:
    """Half an hour a window: the lease is renewed each time, until somebody revokes it.

    Method: the clock moves with the progress. After the revocation is noticed nothing is written.
    Proves: R4, R5.
    """
    clock = ManualClock()
    record = Crash()
    seen = 0

    def progress(now: Progress) -> None:
        nonlocal seen
        clock.advance_s(1800)
        seen += now.phase == "store"
        if seen == 4:
            revoke(empty)

    backend = TracingBackend(PosixBackend(empty.root), clock=clock, hook=record)
    with (
        open_on(backend, empty.root, empty.options, clock=clock) as store,
        pytest.raises(LeaseLost, match="revoked"),
    ):
        store.push(empty.tree, empty.name, progress=progress)
    states = [
        decode_lease(empty.path(ObjectKind.LEASE, name).read_bytes()).state.value
        for name in empty.names(ObjectKind.LEASE)
    ]
    assert states[0] == "acquired"
    assert "renewed" in states
    assert states[-1] == "revoked"
    kinds = {boundary.kind for boundary in record.boundaries if boundary.verb == "put_new"}
    assert kinds <= {"leases", "packs", "indexes"}
    check_store(empty.root)
    empty.push()
    check_store(empty.root)


def test_a_revoked_push_stops(empty: Lab) -> None:
    """A push whose lease a pruner has revoked publishes nothing and says to push again.

    Method: right before the root manifest is written the next number of the lease is taken.
    Proves: R4.
    """
    hook = Meanwhile(Boundary("snapshots", "put_new", 0, after=False), lambda: revoke(empty))
    with (
        open_traced(empty.root, empty.options, hook) as store,
        pytest.raises(LeaseLost, match="revoked") as caught,
    ):
        store.push(empty.tree, empty.name)
    assert caught.value.exit_code == 6
    assert caught.value.retryable
    with empty.open() as store, pytest.raises(RefNotFound):
        store.snapshot(empty.name)
    assert empty.push().ingest.new_bytes == 0, "nothing is sent twice"
    check_store(empty.root)
