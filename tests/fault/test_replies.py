"""Replies that are lost, operations that fail, listings that are old, disks that lie."""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from snapstore.backend.base import Backend, ObjectInfo, ObjectKind
from snapstore.backend.forwarding import ForwardingBackend
from snapstore.backend.posix import PosixBackend
from snapstore.backend.retry import RetryingBackend
from snapstore.errors import (
    OutOfSpace,
    RefNotFound,
    SnapError,
    TransientBackendError,
)
from snapstore.repository.pull import PullResult
from snapstore.repository.push import PushResult
from snapstore.repository.store import Store
from snapstore.testing.clock import ManualClock
from snapstore.testing.faults import Fault, FaultyBackend
from tests.support.damage import (
    Lab,
    leftovers,
    nothing_left,
    open_on,
    temporaries,
    tree_state,
)
from tests.support.schemas import check_store

pytestmark = pytest.mark.slow

Act = Callable[[Store], object]


def run(
    lab: Lab, faults: dict[int, Fault], act: Act, *, patient: bool = False
) -> tuple[SnapError | None, int]:
    """Do something with a store whose chosen operations go wrong; its error, and the operations."""
    faulty = FaultyBackend(PosixBackend(lab.root), faults)
    backend: Backend = faulty
    if patient:
        backend = RetryingBackend(faulty, rng=random.Random(0), clock=ManualClock())
    error = None
    with nothing_left(), open_on(backend, lab.root, lab.options) as store:
        try:
            act(store)
        except SnapError as caught:
            error = caught
    return error, faulty.operations


def pushed(lab: Lab) -> Callable[[Store], PushResult]:
    return lambda store: store.push(lab.tree, lab.name)


def pulled(lab: Lab, to: Path) -> Callable[[Store], PullResult]:
    return lambda store: store.pull(lab.name, to, resume=True)


def copy_of(lab: Lab, folder: Path) -> Lab:
    copy = Lab(folder / "copy", lab.tree, options=lab.options)
    shutil.rmtree(copy.root, ignore_errors=True)
    shutil.copytree(lab.root, copy.root)
    return copy


def check_pulled(lab: Lab, to: Path) -> None:
    lab.pull(to)
    assert tree_state(to) == tree_state(lab.tree)
    shutil.rmtree(to)


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.FAIL_BEFORE])
def test_one_reply_is_lost_and_we_try_again(empty: Lab, tmp_path: Path, fault: Fault) -> None:
    """Each operation of a push may be repeated, whether it was carried out or not.

    Method: let one operation after the other fail once, below the wrapper that tries again.
    Proves: C4, S4, I4.
    """
    _, count = run(copy_of(empty, tmp_path), {}, pushed(empty))
    assert count > 40
    for number in range(count):
        lab = copy_of(empty, tmp_path)
        error, _ = run(lab, {number: fault}, pushed(lab), patient=True)
        assert error is None, number
        assert lab.names(ObjectKind.REF) == ["team/model/@v1/00000001"]
        assert len(lab.names(ObjectKind.LEASE)) == 2
        if number % 8 == 0:
            check_store(lab.root)
            check_pulled(lab, tmp_path / "out")


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.FAIL_BEFORE, Fault.FULL_DISK])
def test_an_operation_fails_for_good(empty: Lab, tmp_path: Path, fault: Fault) -> None:
    """A push ends with exit 5 or 8, nothing has the name, and the same push works later.

    Method: let each operation fail, without a wrapper. A ref whose reply was lost is there, and
    a failure to give the lease back is nobody's trouble. Proves: I2, I3, S4.
    """
    _, count = run(copy_of(empty, tmp_path), {}, pushed(empty))
    failures = 0
    for number in range(count):
        lab = copy_of(empty, tmp_path)
        error, _ = run(lab, {number: fault}, pushed(lab))
        assert temporaries(lab.root) == []
        if error is None:
            # Only writing fills a disk, and where nothing is found there is no reply to lose.
            assert fault is not Fault.FAIL_BEFORE, number
            continue
        failures += 1
        is_full = fault is Fault.FULL_DISK
        assert isinstance(error, OutOfSpace if is_full else TransientBackendError), number
        assert error.exit_code == (8 if is_full else 5)
        assert error.retryable != is_full
        refs = lab.names(ObjectKind.REF)
        with lab.open() as store:
            if refs:
                assert fault is Fault.LOST_REPLY
                check_pulled(lab, tmp_path / "out")
            else:
                with pytest.raises(RefNotFound):
                    store.snapshot(lab.name)
        lab.push()
        if number % 4 == 0:
            check_store(lab.root)
            check_pulled(lab, tmp_path / "out")
    assert failures > 15


def test_patience_ends(empty: Lab) -> None:
    """Storage that never answers is exit 5, and the error says how often it was asked."""
    faults = dict.fromkeys(range(10, 1000), Fault.FAIL_BEFORE)
    error, operations = run(empty, faults, pushed(empty), patient=True)
    assert isinstance(error, TransientBackendError)
    assert error.exit_code == 5
    assert operations < 40
    assert any("tried 6 times" in note for note in error.__notes__)
    empty.push()
    check_store(empty.root)


@pytest.mark.parametrize(
    "fault", [Fault.LOST_REPLY, Fault.FAIL_BEFORE, Fault.WRONG_BYTES, Fault.TRUNCATE]
)
def test_an_operation_of_a_pull_fails(empty: Lab, tmp_path: Path, fault: Fault) -> None:
    """With patience a pull is right; without, it ends with 4 or 5 and can be resumed.

    A disk that hands out wrong bytes once is no matter for patience: it is exit 4, or a layout
    that is passed over. Proves: I6, I8.
    """
    empty.push()
    out = tmp_path / "out"
    _, count = run(empty, {}, pulled(empty, out))
    shutil.rmtree(out)
    is_transient = fault in {Fault.LOST_REPLY, Fault.FAIL_BEFORE}
    for number in range(count):
        error, _ = run(empty, {number: fault}, pulled(empty, out), patient=is_transient)
        if is_transient:
            assert error is None, number
        if error is not None:
            assert error.exit_code in {3, 4}, (number, error)
            assert not out.exists()
            error, _ = run(empty, {}, pulled(empty, out))
            assert error is None
        assert tree_state(out) == tree_state(empty.tree), number
        assert leftovers(out) == []
        shutil.rmtree(out)


@pytest.mark.parametrize("fault", [Fault.WRONG_BYTES, Fault.TRUNCATE])
def test_a_disk_that_does_not_store_what_it_was_given(
    empty: Lab, tmp_path: Path, fault: Fault
) -> None:
    """A push cannot know; whoever reads it is told, and never gets wrong bytes. Proves: I6.

    Method: let each object in turn be stored with one wrong bit, or half of it.
    """
    _, count = run(copy_of(empty, tmp_path), {}, pushed(empty))
    refused = 0
    (tmp_path / "out").mkdir()
    for number in range(count):
        lab = copy_of(empty, tmp_path)
        error, _ = run(lab, {number: fault}, pushed(lab))
        assert error is None or error.exit_code in {4, 5, 6}, (number, error)
        if error is not None:
            continue
        wrong, _ = run(lab, {}, pulled(lab, tmp_path / "out" / str(number)))
        if wrong is None:
            assert tree_state(tmp_path / "out" / str(number)) == tree_state(lab.tree)
        else:
            refused += 1
            assert wrong.exit_code in {3, 4}, (number, wrong)
            assert wrong.next_step
            assert not (tmp_path / "out" / str(number)).exists()
        lab.push("another/name", lab.tree.parent / "old")
    assert refused > 5


class StaleListings(ForwardingBackend):
    """Shows listings as they were when it was made, plus what is asked for."""

    def __init__(self, inner: Backend, ghosts: Sequence[tuple[ObjectKind, str]] = ()) -> None:
        super().__init__(inner)
        self._then = {kind: [*inner.list(kind)] for kind in ObjectKind if kind.value != "marks"}
        for kind, name in ghosts:
            self._then[kind].append(ObjectInfo(name, 5, 0))

    @override
    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        return (info for info in self._then.get(kind, []) if info.name.startswith(prefix))

    @override
    def close(self) -> None:
        self._inner.close()


def test_listings_are_old(empty: Lab, tmp_path: Path) -> None:
    """Chains are found by probing, so three pushes in a row work though no listing shows one.

    What was pushed is unknown to the next push, since indexes are found by listing: it is sent
    again under the same names, which costs nothing on this storage. Proves: S6, C3.
    """
    backend = StaleListings(PosixBackend(empty.root))
    with open_on(backend, empty.root, empty.options) as store:
        generations = [store.push(empty.tree, empty.name).generation for _ in range(3)]
        assert generations == [1, 2, 3]
        store.pull(empty.name, tmp_path / "out")
        assert [*store.list()] == []
    assert tree_state(tmp_path / "out") == tree_state(empty.tree)
    check_store(empty.root)
    with empty.open() as store:
        assert [str(found.name) for found in store.list()] == [empty.name]
        assert store.push(empty.tree, empty.name).ingest.new_bytes == 0


def test_old_listings_hide_packs(empty: Lab, tmp_path: Path) -> None:
    """An index that is listed is believed though the listing of its packs is older. Proves: S6."""
    empty.push()

    class NoPacks(StaleListings):
        @override
        def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
            return iter(()) if kind is ObjectKind.PACK else super().list(kind, prefix)

    with open_on(NoPacks(PosixBackend(empty.root)), empty.root, empty.options) as store:
        result = store.push(empty.tree, empty.name)
    assert result.ingest.new_bytes == 0
    assert result.warnings == ()
    check_pulled(empty, tmp_path / "out")


def test_listings_show_what_is_gone(empty: Lab, tmp_path: Path) -> None:
    """Objects that were deleted may still be listed: nobody stumbles over them. Proves: S6."""
    empty.push()
    rank = empty.rank_ids()[0]
    ghosts = [
        (ObjectKind.PACK, "0" * 64),
        (ObjectKind.INDEX, "0" * 64),
        (ObjectKind.LAYOUT, f"{rank.hex}/00000009"),
        (ObjectKind.REF, "gone/@v1/00000001"),
    ]
    backend = StaleListings(PosixBackend(empty.root), ghosts)
    with open_on(backend, empty.root, empty.options) as store:
        assert store.push(empty.tree, empty.name).warnings == ()
        assert [str(found.name) for found in store.list()] == [empty.name]
        store.pull(empty.name, tmp_path / "out")
    assert tree_state(tmp_path / "out") == tree_state(empty.tree)
