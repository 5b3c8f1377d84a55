"""Users who may not write the store, or not read some of it, or not write where they pull to."""

import codecs
import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapstore.errors import AccessDenied, SnapError, SourceError, TargetError
from snapstore.repository.store import init_store, open_store
from tests.support.damage import Lab, leftovers, make_tree, nothing_left, tree_state
from tests.support.schemas import check_store
from tests.support.users import as_nobody, nobodys_directory


@pytest.fixture
def shared() -> Iterator[tuple[Lab, Path]]:
    """A store of root's that everybody may read, and a directory of nobody's."""
    # Loaded when it is first used, which nobody may not be allowed to.
    codecs.lookup("ascii")
    with nobodys_directory() as folder:
        folder.chmod(0o755)
        place = folder / "of-root"
        place.mkdir()
        lab = Lab(place / "store", make_tree(place / "tree", random.Random(3)))
        with init_store(str(lab.root), lab.options) as store:
            store.push(lab.tree, lab.name)
        yield lab, folder


def content(folder: Path) -> dict[str, object]:
    """What somebody without privilege can bring back: all but owners."""
    return {
        path: (state[0], *state[2:]) for path, state in tree_state(folder).items() if path != "."
    }


@contextlib.contextmanager
def denied(text: str, error: type[SnapError] = AccessDenied) -> Iterator[None]:
    with nothing_left(), pytest.raises(error, match=text) as caught:
        yield
    assert caught.value.exit_code == (5 if error is AccessDenied else 1)
    assert caught.value.next_step


def test_a_reader_without_write_access(shared: tuple[Lab, Path]) -> None:
    """Reading needs no permission to write; a push is told so before it has read a byte.

    Proves: I2, I8.
    """
    lab, folder = shared
    before = sorted(lab.root.rglob("*"))
    with as_nobody(), lab.open() as store:
        store.pull(lab.name, folder / "out")
        assert [str(found.name) for found in store.list()] == [lab.name]
        assert store.show(lab.name).ranks
        assert store.stats().total.names == 1
        assert store.diff(lab.name, lab.name).total.new_bytes == 0
        assert len(store.history(lab.name)) == 1
        assert store.remove(lab.name, dry_run=True).dry_run
        with denied("LEASE"):
            store.push(lab.tree, lab.name)
        with denied("LEASE"):
            store.tag(lab.name, "other")
        with denied("REF"):
            store.remove(lab.name)
    assert content(folder / "out") == content(lab.tree)
    assert sorted(lab.root.rglob("*")) == before
    check_store(lab.root)


def test_a_store_that_is_open_for_reading_only(shared: tuple[Lab, Path]) -> None:
    """`readonly` is kept to even by root."""
    lab, folder = shared
    with open_store(str(lab.root), readonly=True) as store:
        store.pull(lab.name, folder / "out")
        with denied("open for reading only"):
            store.push(lab.tree, lab.name)
    check_store(lab.root)


def test_objects_that_may_not_be_read(shared: tuple[Lab, Path]) -> None:
    """The error names the object and says whose business it is; others can go on. Proves: I8."""
    lab, folder = shared
    pack = lab.packs_of()[0]
    pack.chmod(0)
    with as_nobody(), denied(pack.name), lab.open() as store:
        store.pull(lab.name, folder / "out")
    assert not (folder / "out").exists()
    with as_nobody():
        assert leftovers(folder / "out"), "it can go on"
    pack.chmod(0o644)
    with as_nobody(), lab.open() as store:
        store.pull(lab.name, folder / "out", resume=True)
    assert content(folder / "out") == content(lab.tree)
    lab.root.chmod(0o700)
    with as_nobody(), denied("open store"):
        lab.open()


def test_a_store_that_may_only_be_added_to_in_part(shared: tuple[Lab, Path]) -> None:
    """A push that is refused half-way leaves the store as it was, but for garbage.

    Method: everybody may write leases and temporary files, but no packs. Proves: I1, I3.
    """
    lab, folder = shared
    for name in ("leases", "tmp"):
        (lab.root / name).chmod(0o777)
    other = make_tree(folder / "other", random.Random(4))
    with as_nobody(), denied("PACK"), lab.open() as store:
        store.push(other, "nobody")
    assert [*(lab.root / "tmp").iterdir()] == []
    with lab.open() as store:
        assert [str(found.name) for found in store.list()] == [lab.name]
    check_store(lab.root)


def test_trees_that_may_not_be_read(shared: tuple[Lab, Path]) -> None:
    """A push names the files; nothing is stored. Proves: I7."""
    lab, _ = shared
    lab.root.chmod(0o777)
    for path in lab.root.iterdir():
        if path.is_dir():
            path.chmod(0o777)
    (lab.tree / "weights/odd.bin").chmod(0)
    with as_nobody(), denied(r"weights/odd\.bin", SourceError), lab.open() as store:
        store.push(lab.tree, "nobody")
    check_store(lab.root)


def test_places_that_may_not_be_written(shared: tuple[Lab, Path]) -> None:
    """A pull says so before it has read a byte."""
    lab, folder = shared
    closed = folder / "closed"
    closed.mkdir(mode=0o755)
    with as_nobody(), denied("closed", TargetError), lab.open() as store:
        store.pull(lab.name, closed / "out")
    (folder / "full").mkdir()
    (folder / "full/file").write_bytes(b"theirs")
    with as_nobody(), denied("not empty", TargetError), lab.open() as store:
        store.pull(lab.name, folder / "full")
    shutil.rmtree(closed)
