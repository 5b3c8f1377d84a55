"""A real process through the store and back: dump, push, pull, restore, and it remembers."""

import hashlib
from pathlib import Path

import pytest

import snapstore
from tests.support.criu import RealDumps
from tools.live_process import Criu, LiveProcess

pytestmark = [pytest.mark.criu, pytest.mark.slow]


def through_the_store(source: Path, store_folder: Path, target: Path) -> None:
    """Push a folder into a new store and pull it into another folder.

    The one place of this module that calls the API.
    """
    with snapstore.init_store(f"file://{store_folder}") as store:
        store.push(source, "test/process:v1")
        store.pull("test/process:v1", target)


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Return mode and digest of every file below a folder, by relative path."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_process_survives_without_its_dump(
    criu: Criu, live_process: LiveProcess, work_dir: Path
) -> None:
    """Goal: what the store gives back is enough for CRIU, and is the same process.

    Method: dump a process to its end, push and delete the dump, pull it, restore from that, and
    ask the process for the hash of its memory, its counter and the offset of its open file.
    """
    dump, pulled = work_dir / "dump", work_dir / "pulled"
    dump.mkdir()
    memory = live_process.memory_hash()
    before = live_process.ask("ping")
    criu.dump(live_process.pid, dump)
    live_process.reap()
    dumped = contents(dump)

    through_the_store(dump, work_dir / "store", pulled)
    for image in dump.iterdir():
        image.unlink()

    assert contents(pulled) == dumped
    criu.restore(pulled)
    assert live_process.memory_hash() == memory
    after = live_process.ask("ping")
    assert after["threads"] == before["threads"]
    assert after["file_offset"] == before["file_offset"]
    assert int(str(after["ticks"])) >= int(str(before["ticks"]))
    live_process.ask("quit")
    live_process.reap()


def test_both_dumps_come_back_byte_for_byte(real_dumps: RealDumps, work_dir: Path) -> None:
    for number, dump in enumerate((real_dumps.first, real_dumps.second)):
        pulled = work_dir / f"pulled-{number}"
        through_the_store(dump, work_dir / f"store-{number}", pulled)
        assert contents(pulled) == contents(dump)
