"""A pull that dies at any moment has no final name, and goes on from what it had with --resume."""

import os
import shutil
from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.errors import Interrupted, SnapError, TargetError
from snapstore.progress import Progress
from snapstore.testing.faults import Killed
from tests.support.damage import (
    Boundary,
    Crash,
    Lab,
    leftovers,
    nothing_left,
    open_traced,
    tree_state,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def pushed(empty: Lab) -> Lab:
    empty.push()
    return empty


def test_the_store_goes_away_at_any_moment(pushed: Lab, tmp_path: Path) -> None:
    """Die at each operation of a pull in turn; then resume. Proves: I8, I6.

    Method: record the operations of a whole pull; before each of them raise what a dead process
    would not live to see. What was pulled by then is not read again.
    """
    record = Crash()
    with open_traced(pushed.root, pushed.options, record) as store:
        store.pull(pushed.name, tmp_path / "whole")
    found = sorted({one for one in record.boundaries if not one.after})
    reads = [one for one in found if one.kind == "packs"]
    assert len(reads) > 4
    out = tmp_path / "out"
    resumed = []
    for boundary in found:
        crash = Crash(boundary)
        with (
            nothing_left(),
            open_traced(pushed.root, pushed.options, crash) as store,
            pytest.raises(Killed),
        ):
            store.pull(pushed.name, out)
        assert not out.exists()
        assert bool(leftovers(out)) == (boundary.kind == "packs"), boundary
        if leftovers(out):
            with pushed.open() as store, pytest.raises(TargetError, match="earlier pull") as caught:
                store.pull(pushed.name, out)
            assert "--resume" in caught.value.next_step
        result = pushed.pull(out, resume=True)
        resumed.append(result.resumed_bytes)
        assert tree_state(out) == tree_state(pushed.tree)
        assert leftovers(out) == []
        shutil.rmtree(out)
    assert max(resumed) > 0


def test_a_callback_stops_a_pull(pushed: Lab, tmp_path: Path) -> None:
    """An exception from the progress callback, or Ctrl-C in one, ends it like any error."""

    def stop(error: BaseException, at: int) -> None:
        seen = 0

        def progress(now: Progress) -> None:
            nonlocal seen
            seen += now.phase == "fetch"
            if seen > at:
                raise error

        with pushed.open() as store:
            store.pull(pushed.name, tmp_path / "out", resume=True, progress=progress)

    for at, error in enumerate((KeyboardInterrupt(), Interrupted("stop"), ZeroDivisionError())):
        with nothing_left(), pytest.raises(type(error)):
            stop(error, at)
        assert not (tmp_path / "out").exists()
    pushed.pull(tmp_path / "out", resume=True)
    assert tree_state(tmp_path / "out") == tree_state(pushed.tree)


def test_a_journal_that_lies_or_is_damaged(pushed: Lab, tmp_path: Path) -> None:
    """A torn or foreign journal costs time: what it does not say is fetched again."""
    out = tmp_path / "out"
    for spoil in (b"", b"{", b"\0" * 100, b'{"format":"other"}\n', b'{"done":1}\n', b"[]\n"):
        crash = Crash(Boundary("packs", "get_range", 3, after=False))
        with open_traced(pushed.root, pushed.options, crash) as store, pytest.raises(Killed):
            store.pull(pushed.name, out)
        journal = tmp_path / leftovers(out)[-1]
        assert journal.name.endswith(".journal")
        journal.write_bytes(spoil)
        pushed.pull(out, resume=True)
        assert tree_state(out) == tree_state(pushed.tree)
        shutil.rmtree(out)


def test_another_snapshot_is_not_resumed_from(pushed: Lab, tmp_path: Path) -> None:
    """What is left of one snapshot is nothing to another: the same name may have moved."""
    out = tmp_path / "out"
    crash = Crash(Boundary("packs", "get_range", 4, after=False))
    with open_traced(pushed.root, pushed.options, crash) as store, pytest.raises(Killed):
        store.pull(pushed.name, out)
    first = leftovers(out)
    (pushed.root.parent / "other").mkdir()
    (pushed.root.parent / "other/file").write_bytes(b"another tree")
    pushed.push(tree=pushed.root.parent / "other")
    result = pushed.pull(out, resume=True)
    assert result.resumed_bytes == 0
    assert [path.name for path in out.iterdir()] == ["file"]
    assert leftovers(out) == first, "somebody may still want to go on with the old one"


def test_somebody_takes_the_name_meanwhile(pushed: Lab, tmp_path: Path) -> None:
    """Who fills the directory while a pull is under way keeps what they have. Proves: I8."""
    out = tmp_path / "out"

    def progress(now: Progress) -> None:
        if now.phase == "finish" and not out.exists():
            out.mkdir()
            (out / "theirs").write_bytes(b"precious")

    with pushed.open() as store, pytest.raises(TargetError, match="somebody else") as caught:
        store.pull(pushed.name, out, progress=progress)
    assert "--resume" in caught.value.next_step
    assert [path.name for path in out.iterdir()] == ["theirs"]
    (out / "theirs").rename(tmp_path / "moved away")
    pushed.pull(out, resume=True)
    assert tree_state(out) == tree_state(pushed.tree)


def test_two_pulls_to_one_place(pushed: Lab, tmp_path: Path) -> None:
    """The second one is told so, and the first is not disturbed."""
    out = tmp_path / "out"
    told: list[SnapError] = []

    def progress(now: Progress) -> None:
        if now.phase == "finish":
            with pushed.open() as second, pytest.raises(TargetError, match="another pull") as error:
                second.pull(pushed.name, out, resume=True)
            told.append(error.value)

    with pushed.open() as store:
        store.pull(pushed.name, out, progress=progress)
    assert told
    assert tree_state(out) == tree_state(pushed.tree)


@pytest.mark.parametrize("kind", [ObjectKind.PACK, ObjectKind.RANK, ObjectKind.LAYOUT])
def test_an_object_vanishes_under_a_reader(pushed: Lab, tmp_path: Path, kind: ObjectKind) -> None:
    """It ends with exit 4 and the reason, unless something else does as well. Proves: I8."""

    def progress(now: Progress) -> None:
        if now.phase == "plan":
            for name in pushed.names(kind):
                os.unlink(pushed.path(kind, name))  # noqa: PTH108 - once, however often it is told

    with pushed.open() as store:
        if kind is ObjectKind.LAYOUT:
            store.pull(pushed.name, tmp_path / "out", progress=progress)
            assert tree_state(tmp_path / "out") == tree_state(pushed.tree)
            return
        with pytest.raises(SnapError) as caught:
            store.pull(pushed.name, tmp_path / "out", progress=progress)
    assert caught.value.exit_code == 4
    assert "push the same tree again" in caught.value.next_step
    assert not (tmp_path / "out").exists()
