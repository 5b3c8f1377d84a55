"""A writer of arriving files that dies or is left at any moment publishes nothing."""

import shutil
from pathlib import Path

import pytest

import snapstore
from snapstore.errors import RefNotFound
from snapstore.testing.faults import Killed
from tests.support.damage import Boundary, Crash, Lab, Meanwhile, nothing_left, open_traced
from tests.support.schemas import check_store

pytestmark = pytest.mark.slow


def write(lab: Lab, store: snapstore.Store) -> snapstore.PushResult:
    """Write the files of the lab's tree, two at a time, in turns."""
    files = sorted(path for path in lab.tree.rglob("*") if path.is_file() and not path.is_symlink())
    with store.begin(lab.name) as writer:
        for pair in zip(files[::2], files[1::2], strict=False):
            opened = [
                (writer.open_file("host", str(path.relative_to(lab.tree))), path.read_bytes())
                for path in pair
            ]
            for step in range(4):
                for file, data in opened:
                    file.write(data[len(data) * step // 4 : len(data) * (step + 1) // 4])
            for file, _ in opened:
                file.close()
        return writer.commit()


def boundaries_of_writing(lab: Lab) -> tuple[list[Boundary], snapstore.PushResult]:
    crash = Crash()
    with open_traced(lab.root, lab.options, crash) as store:
        result = write(lab, store)
    found = sorted({one for one in crash.boundaries if one.verb == "put_new"})
    return found, result


def test_a_writer_dies(empty: Lab, tmp_path: Path) -> None:
    """Until the ref is there the name is not, nothing is left running, and writing again succeeds.

    Method: record the operations of a whole writing, then die before and after each that stores
    something, in a fresh store. Proves: I1, I2, I3.
    """
    shutil.copytree(empty.root, tmp_path / "copy")
    found, whole = boundaries_of_writing(Lab(tmp_path / "copy", empty.tree, options=empty.options))
    assert len(found) > 30
    for boundary in found:
        shutil.rmtree(tmp_path / "copy")
        shutil.copytree(empty.root, tmp_path / "copy")
        lab = Lab(tmp_path / "copy", empty.tree, options=empty.options)
        with (
            nothing_left(),
            open_traced(lab.root, lab.options, Crash(boundary)) as store,
            pytest.raises(Killed),
        ):
            write(lab, store)
        check_store(lab.root)
        with lab.open() as store:
            if boundary == Boundary("refs", "put_new", 0, after=True):
                store.snapshot(lab.name)
            else:
                with pytest.raises(RefNotFound):
                    store.snapshot(lab.name)
            again = write(lab, store)
        assert again.ingest.logical_bytes == whole.ingest.logical_bytes
        check_store(lab.root)


def test_a_writer_is_interrupted_at_any_operation(empty: Lab, tmp_path: Path) -> None:
    """Ctrl-C lets cleaning up happen: no thread, descriptor or name is left.

    Method: raise `KeyboardInterrupt` before each operation that stores something, on whichever
    thread it is; the one that writes gets it. Proves: I2, R4.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    shutil.copytree(empty.root, tmp_path / "copy")
    found, _ = boundaries_of_writing(Lab(tmp_path / "copy", empty.tree, options=empty.options))
    for boundary in found:
        if boundary.after:
            continue
        shutil.rmtree(tmp_path / "copy")
        shutil.copytree(empty.root, tmp_path / "copy")
        lab = Lab(tmp_path / "copy", empty.tree, options=empty.options)
        with (
            nothing_left(),
            open_traced(lab.root, lab.options, Meanwhile(boundary, interrupt)) as store,
            pytest.raises(KeyboardInterrupt),
        ):
            write(lab, store)
        with lab.open() as store, pytest.raises(RefNotFound):
            store.snapshot(lab.name)
