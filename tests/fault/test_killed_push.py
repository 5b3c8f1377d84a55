"""A push that dies at any moment leaves garbage, never damage, and the next one goes on from it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.errors import RefNotFound
from snapstore.testing.faults import Killed
from tests.support.damage import (
    Boundary,
    Crash,
    Lab,
    killed_at,
    nothing_left,
    open_on,
    open_traced,
    temporaries,
    tree_state,
)
from tests.support.schemas import check_store

pytestmark = pytest.mark.slow

PARTS = 3


def boundaries_of_a_push(lab: Lab) -> tuple[list[Boundary], list[int]]:
    """All moments at which a push of the new tree can die, and the sizes of the packs it writes.

    After an operation that only reads is the same moment as before the next one.
    """
    crash = Crash()
    with open_traced(lab.root, lab.options, crash) as store:
        store.push(lab.tree, lab.name)
    found = sorted({one for one in crash.boundaries if not one.after or one.verb == "put_new"})
    return found, crash.put_bytes[ObjectKind.PACK]


def fresh_copies(lab: Lab, folder: Path) -> Iterator[Lab]:
    """Copies of a store, one at a time."""
    while True:
        copy = Lab(folder / "copy", lab.tree, options=lab.options)
        shutil.copytree(lab.root, copy.root)
        yield copy
        shutil.rmtree(copy.root)


def crash_at(lab: Lab, boundary: Boundary) -> int:
    """Push until the boundary; returns the bytes of packs that were on their way until then."""
    crash = Crash(boundary)
    with (
        nothing_left(),
        open_traced(lab.root, lab.options, crash) as store,
        pytest.raises(Killed),
    ):
        store.push(lab.tree, lab.name)
    assert crash.dead
    return sum(crash.put_bytes[ObjectKind.PACK])


def finish(lab: Lab) -> int:
    """Push again, to the end; returns the bytes of packs that this took."""
    watch = Crash()
    with open_traced(lab.root, lab.options, watch) as store:
        store.push(lab.tree, lab.name)
    return sum(watch.put_bytes[ObjectKind.PACK])


def check_finished(lab: Lab, to: Path) -> None:
    lab.pull(to)
    assert tree_state(to) == tree_state(lab.tree)
    check_store(lab.root)
    assert temporaries(lab.root) == []
    shutil.rmtree(to)


@pytest.mark.parametrize("part", range(PARTS))
def test_the_first_push_dies(empty: Lab, tmp_path: Path, part: int) -> None:
    """Until the ref is there the name is not; at most two packs are ever sent twice.

    Method: record the operations of a whole push, then die at each boundary in turn, each time in
    a fresh store. A boundary is told by verb, kind and ordinal, so it is the same moment in every
    run although threads interleave. Proves: I1, I2, I3.
    """
    copies = fresh_copies(empty, tmp_path)
    found, packs = boundaries_of_a_push(next(copies))
    assert len(found) > 50
    assert len(packs) > 4
    for boundary in found[part::PARTS]:
        lab = next(copies)
        sent = crash_at(lab, boundary)
        check_store(lab.root)
        if boundary == Boundary("refs", "put_new", 0, after=True):
            lab.snapshot_id()
        else:
            with lab.open() as store, pytest.raises(RefNotFound):
                store.snapshot(lab.name)
        again = finish(lab)
        assert sent + again <= sum(packs) + 2 * max(packs), boundary
        check_finished(lab, tmp_path / "out")


def test_a_push_over_an_old_snapshot_dies(
    lab: Lab, trees: tuple[Path, Path], tmp_path: Path
) -> None:
    """The name leads to the old snapshot, whole, until the instant at which it leads to the new.

    Method: as above, before everything that is written and after the ref. Proves: I1, I2, I3.
    """
    old = lab.snapshot_id()
    copies = fresh_copies(lab, tmp_path)
    found, _ = boundaries_of_a_push(next(copies))
    for boundary in found:
        moved = boundary == Boundary("refs", "put_new", 0, after=True)
        if boundary.verb != "put_new" or boundary.after != moved:
            continue
        copy = next(copies)
        crash_at(copy, boundary)
        assert (copy.snapshot_id() == old) != moved, boundary
        copy.pull(tmp_path / "out")
        assert tree_state(tmp_path / "out") == tree_state(trees[moved])
        shutil.rmtree(tmp_path / "out")
        finish(copy)
        check_finished(copy, tmp_path / "out")


def test_a_push_dies_between_file_calls(empty: Lab, tmp_path: Path) -> None:
    """Also within an operation of the backend: between write, sync, link and unlink.

    Method: every seventh file call that changes something, from the first to the last; what the
    dead process had in `tmp/` stays there as garbage. Proves: S2, S4, I2, I3.
    """
    copies = fresh_copies(empty, tmp_path)
    calls = push_with(next(copies), None)
    changing = [
        number
        for number, call in enumerate(calls)
        if call in {"writev", "fsync", "link", "unlink", "mkdir"}
    ]
    assert len(changing) > 100
    for number in changing[::7]:
        lab = next(copies)
        push_with(lab, number)
        garbage = temporaries(lab.root)
        check_store(lab.root)
        lab.push()
        assert temporaries(lab.root) == garbage
        lab.pull(tmp_path / "out")
        assert tree_state(tmp_path / "out") == tree_state(lab.tree)
        shutil.rmtree(tmp_path / "out")


def push_with(lab: Lab, number: int | None) -> list[str]:
    """Push, and die before that many file calls if a number is given; returns the calls made."""
    return killed_at(
        lab.root,
        number,
        lambda backend: open_on(backend, lab.root, lab.options).push(lab.tree, lab.name),
    )
