"""Files that change while they are read: then there is no state that a snapshot could be of."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from snapstore.errors import RefNotFound, SnapError, SourceChanged, SourceError
from snapstore.format.tree import TreeEntry
from snapstore.progress import Progress
from snapstore.repository import file_streams
from snapstore.repository.windows import ByteArray
from snapstore.units import KIB
from tests.support.damage import Lab, age, nothing_left, temporaries, tree_state
from tests.support.schemas import check_store

WINDOW_BYTES = 128 * KIB
WINDOWS = 4
Change = Callable[[Path], object]


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"changed")


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    other = path.with_name("new")
    other.write_bytes(b"\1" * path.stat().st_size)
    other.rename(path)


def become_symlink(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def move_parent(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.mkdir()


CHANGES: dict[str, Change] = {
    "written to": overwrite,
    "appended to": append,
    "cut off": lambda path: os.truncate(path, 70 * KIB),
    "emptied": lambda path: os.truncate(path, 0),
    "replaced": replace,
    "removed": Path.unlink,
    "a symlink": become_symlink,
    "a fifo": become_fifo,
    "a directory": become_directory,
}


@pytest.fixture
def tree(empty: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a tree of one file of four windows, and one small file; the lab pushes it."""
    monkeypatch.setattr(file_streams, "WINDOW_BYTES", WINDOW_BYTES)
    folder = tmp_path / "tree"
    (folder / "inner").mkdir(parents=True)
    data = bytes(range(256)) * (WINDOWS * WINDOW_BYTES // 256)
    (folder / "inner/large").write_bytes(data)
    (folder / "inner/small").write_bytes(data[: 60 * KIB])
    age(folder)
    empty.tree = folder
    return folder


def at_read(
    monkeypatch: pytest.MonkeyPatch, file: bytes, offset: int, act: Callable[[], object]
) -> None:
    """Have another thread do something just before a range of a file is read."""
    read = file_streams._read_exactly

    def read_exactly(fd: int, data: ByteArray, start: int, entry: TreeEntry) -> None:
        if entry.path == file and start == offset:
            other = threading.Thread(target=act)
            other.start()
            other.join()
        read(fd, data, start, entry)

    monkeypatch.setattr(file_streams, "_read_exactly", read_exactly)


def refused(lab: Lab) -> SnapError:
    """Push what cannot be pushed: nothing has the name and nothing is left."""
    with nothing_left(), pytest.raises(SourceError) as caught:
        lab.push()
    assert caught.value.exit_code == 1
    with lab.open() as store, pytest.raises(RefNotFound):
        store.snapshot(lab.name)
    assert temporaries(lab.root) == []
    check_store(lab.root)
    return caught.value


@pytest.mark.parametrize("window", range(WINDOWS))
@pytest.mark.parametrize("change", CHANGES)
def test_a_large_file_changes(
    empty: Lab, tree: Path, monkeypatch: pytest.MonkeyPatch, change: str, window: int
) -> None:
    """Whichever window is being read, the push ends with `SourceChanged`. Proves: I7.

    Method: another thread makes the change right before that window is read, and is waited for.
    """
    path = tree / "inner/large"
    act = CHANGES[change]
    with monkeypatch.context() as patch:
        at_read(patch, b"inner/large", window * WINDOW_BYTES, lambda: act(path))
        error = refused(empty)
    assert isinstance(error, SourceChanged)
    assert error.retryable
    assert "large" in str(error)
    assert error.next_step
    if path.is_fifo():
        path.unlink()
    empty.push()
    empty.pull(empty.root.parent / "out")
    assert tree_state(empty.root.parent / "out") == tree_state(tree)


@pytest.mark.parametrize("change", CHANGES)
def test_a_small_file_changes(
    empty: Lab, tree: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Small files are read in one go, and are compared before and after all the same.

    Proves: I7.
    """
    path = tree / "inner/small"
    act = CHANGES[change]
    at_read(monkeypatch, b"inner/small", 0, lambda: act(path))
    assert isinstance(refused(empty), SourceChanged)


@pytest.mark.parametrize("change", [*CHANGES, "parent moved"])
@pytest.mark.parametrize("name", ["large", "small"])
def test_a_file_changes_between_the_scan_and_the_read(
    empty: Lab, tree: Path, change: str, name: str
) -> None:
    """What is opened is what was scanned, or the push ends. Proves: I7."""
    act = CHANGES.get(change, move_parent)

    def progress(now: Progress) -> None:
        if now.phase == "store" and now.done_bytes == 0:
            act(tree / "inner" / name)

    with nothing_left(), empty.open() as store, pytest.raises(SourceChanged):
        store.push(tree, empty.name, progress=progress)
    with empty.open() as store, pytest.raises(RefNotFound):
        store.snapshot(empty.name)
    check_store(empty.root)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_the_whole_tree_goes_away(
    empty: Lab,
    tree: Path,
    is_replaced: bool,  # noqa: FBT001
) -> None:
    """The directory that was scanned is the one that is read, or none. Proves: I7."""

    def progress(now: Progress) -> None:
        if now.phase == "store" and now.done_bytes == 0:
            tree.rename(tree.with_name("elsewhere"))
            if is_replaced:
                shutil.copytree(tree.with_name("elsewhere"), tree)

    with nothing_left(), empty.open() as store, pytest.raises(SourceError, match="tree"):
        store.push(tree, empty.name, progress=progress)
    with empty.open() as store, pytest.raises(RefNotFound):
        store.snapshot(empty.name)


def add_file(tree: Path) -> None:
    (tree / "inner/added").write_bytes(b"added")


def remove_file(tree: Path) -> None:
    (tree / "inner/empty").unlink()


def fill_empty_file(tree: Path) -> None:
    (tree / "inner/empty").write_bytes(b"no more")


@pytest.mark.parametrize("change", [add_file, remove_file, fill_empty_file])
def test_what_is_never_read_changes_too(empty: Lab, tree: Path, change: Change) -> None:
    """Goal: a snapshot is a state that the whole tree had, empty files and names included.

    Method: change the tree when its last byte was read. Proves: I7.
    """
    (tree / "inner/empty").touch()
    changed: list[int] = []

    def progress(now: Progress) -> None:
        if now.phase == "store" and now.done_bytes == now.total_bytes and not changed:
            changed.append(1)
            change(tree)

    with nothing_left(), empty.open() as store, pytest.raises(SourceChanged, match="inner"):
        store.push(tree, empty.name, progress=progress)
    with empty.open() as store, pytest.raises(RefNotFound):
        store.snapshot(empty.name)


def test_files_that_only_say_that_they_are_empty(empty: Lab) -> None:
    with empty.open() as store, pytest.raises(SourceError, match="although its size is 0"):
        store.push(Path("/proc/sys/kernel/random"), empty.name)


def test_a_change_after_the_read_is_none_of_ours(empty: Lab, tree: Path, tmp_path: Path) -> None:
    """A snapshot is of what was there when it was read: later changes are for the next one."""
    before = tree_state(tree)

    def progress(now: Progress) -> None:
        if now.phase == "commit":
            overwrite(tree / "inner/large")

    with empty.open() as store:
        store.push(tree, empty.name, progress=progress)
    empty.pull(tmp_path / "out")
    assert tree_state(tmp_path / "out") == before
    empty.push()
    empty.pull(tmp_path / "second")
    assert tree_state(tmp_path / "second") == tree_state(tree)


def test_a_file_that_cannot_be_read(
    empty: Lab, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector of the source is told with file and offset. Proves: I7."""

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 2 * WINDOW_BYTES:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    assert tree.is_dir()
    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    error = refused(empty)
    assert f"'inner/large' at offset {2 * WINDOW_BYTES}: Input/output error" in str(error)
