"""Ctrl-C at any moment: the operation undoes what must not stay, and can simply be run again."""

import shutil
from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.errors import Interrupted, RefNotFound
from snapstore.format.lease import LeaseState, decode_lease
from snapstore.progress import Progress
from snapstore.repository import rank_builder
from snapstore.testing.faults import Killed
from tests.support.damage import (
    Boundary,
    Crash,
    Lab,
    Meanwhile,
    nothing_left,
    open_traced,
    temporaries,
    tree_state,
)
from tests.support.schemas import check_store

pytestmark = pytest.mark.slow


def last_lease(lab: Lab) -> LeaseState:
    name = lab.names(ObjectKind.LEASE)[-1]
    return decode_lease(lab.path(ObjectKind.LEASE, name).read_bytes()).state


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_push_is_interrupted_between_any_two_operations(empty: Lab, tmp_path: Path) -> None:
    """No thread, descriptor or temporary file is left, and the lease is given back.

    Method: raise `KeyboardInterrupt` before each operation of the thread that was asked to push;
    unlike a death it lets cleaning up happen. Proves: I2, I3, R4.
    """
    record = Crash()
    first = Lab(tmp_path / "recorded", empty.tree, options=empty.options)
    shutil.copytree(empty.root, first.root)
    with open_traced(first.root, first.options, record) as store:
        store.push(first.tree, first.name)
    others = {"packs", "indexes"}  # written by a thread of the packer, which Ctrl-C never hits
    found = sorted({one for one in record.boundaries if not one.after and one.kind not in others})
    assert len(found) > 25
    for boundary in found:
        lab = Lab(tmp_path / "copy", empty.tree, options=empty.options)
        shutil.copytree(empty.root, lab.root)
        with (
            nothing_left(),
            open_traced(lab.root, lab.options, Meanwhile(boundary, interrupt)) as store,
            pytest.raises(KeyboardInterrupt),
        ):
            store.push(lab.tree, lab.name)
        assert temporaries(lab.root) == []
        assert lab.names(ObjectKind.REF) == []
        if boundary != Boundary("leases", "put_new", 0, after=False):
            committed = boundary.kind == "refs"
            wanted = LeaseState.COMMITTED if committed else LeaseState.RELEASED
            assert last_lease(lab) is wanted, boundary
        lab.push()
        check_store(lab.root)
        shutil.rmtree(lab.root)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stop"), ZeroDivisionError()])
def test_a_callback_stops_a_push(empty: Lab, tmp_path: Path, error: BaseException) -> None:
    """An exception from the progress callback ends a push at any of its calls. Proves: I2, I3."""
    calls = 0

    def count(_: Progress) -> None:
        nonlocal calls
        calls += 1

    copy = Lab(tmp_path / "copy", empty.tree, options=empty.options)
    shutil.copytree(empty.root, copy.root)
    with copy.open() as store:
        store.push(copy.tree, copy.name, progress=count)
    assert calls > 5
    for last in range(calls):
        seen = 0

        def stop(_: Progress, last: int = last) -> None:
            nonlocal seen
            seen += 1
            if seen > last:
                raise error

        with nothing_left(), empty.open() as store, pytest.raises(type(error)):
            store.push(empty.tree, empty.name, progress=stop)
        assert temporaries(empty.root) == []
        with empty.open() as store, pytest.raises(RefNotFound):
            store.snapshot(empty.name)
    empty.push()
    check_store(empty.root)
    empty.pull(tmp_path / "out")
    assert tree_state(tmp_path / "out") == tree_state(empty.tree)


def test_nothing_is_left_of_a_spool(
    empty: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk tables beyond the limit of memory wait in a temporary file, which is given back.

    Method: the limit is two rows, so that every rank has such a file.
    """
    monkeypatch.setattr(rank_builder, "_SPOOL_BYTES", 96)
    with nothing_left():
        empty.push()
    crash = Crash(Boundary("refs", "put_new", 0, after=False))
    with (
        nothing_left(),
        open_traced(empty.root, empty.options, crash) as store,
        pytest.raises(Killed),
    ):
        store.push(empty.tree, empty.name)
    empty.pull(tmp_path / "out")
    assert tree_state(tmp_path / "out") == tree_state(empty.tree)
    check_store(empty.root)
