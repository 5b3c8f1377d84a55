"""A tag, a rollback or a removal that dies at any moment has been done whole or not at all."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from snapstore.errors import RefNotFound
from snapstore.ids import SnapshotId
from snapstore.repository.store import Store
from snapstore.testing.faults import Killed
from tests.support.damage import Crash, Lab, nothing_left, open_traced, temporaries
from tests.support.schemas import check_store

pytestmark = pytest.mark.slow

DOING: dict[str, Callable[[Store], object]] = {
    "tag": lambda store: store.tag(f"x@b3:{store.history(Lab.name)[-1].snapshot}", Lab.name),
    "rollback": lambda store: store.rollback(Lab.name),
    "remove": lambda store: store.remove(Lab.name),
}


def now(lab: Lab) -> SnapshotId | None:
    """What the name points to."""
    try:
        return lab.snapshot_id()
    except RefNotFound:
        return None


@pytest.mark.parametrize("what", sorted(DOING))
def test_all_or_nothing(lab: Lab, tmp_path: Path, what: str) -> None:
    """Goal: the name is what it was or what it was to become, and a repetition succeeds.

    Method: die at each operation of the backend in turn, each time in a fresh store with two
    generations. Proves: I2, I3, R6.
    """
    old = lab.snapshot_id()
    lab.push()
    new = lab.snapshot_id()
    wanted = None if what == "remove" else old
    copy = Lab(tmp_path / "copy", lab.tree, options=lab.options)
    shutil.copytree(lab.root, copy.root)
    watch = Crash()
    with open_traced(copy.root, lab.options, watch) as store:
        DOING[what](store)
    assert now(copy) == wanted
    boundaries = sorted({one for one in watch.boundaries if not one.after or one.verb == "put_new"})
    assert len(boundaries) > 10
    for boundary in boundaries:
        shutil.rmtree(copy.root)
        shutil.copytree(lab.root, copy.root)
        with (
            nothing_left(),
            open_traced(copy.root, lab.options, Crash(boundary)) as store,
            pytest.raises(Killed),
        ):
            DOING[what](store)
        is_done = boundary.kind == "refs" and boundary.verb == "put_new" and boundary.after
        assert now(copy) == (wanted if is_done else new), boundary
        if not is_done:
            with copy.open() as store:
                DOING[what](store)
        assert now(copy) == wanted
        check_store(copy.root)
        assert temporaries(copy.root) == []
