"""`criu restore` from a mounted snapshot: images are read in place, no copy of them is made."""

import mmap
import os
import subprocess
from pathlib import Path

import pytest

import snapstore
from tests.support.mounts import Mounts
from tools.live_process import Criu, LiveProcess

pytestmark = [pytest.mark.criu, pytest.mark.slow]


def test_restore_from_a_mount(
    criu: Criu, live_process: LiveProcess, mounts: Mounts, work_dir: Path
) -> None:
    """Goal: a process comes back from a mount as from the folder that was pushed.

    Method: dump it to its end, push and delete the dump, mount it, and restore from the mount with
    a folder beside it for what CRIU writes.
    """
    dump, scratch = work_dir / "dump", work_dir / "scratch"
    dump.mkdir()
    scratch.mkdir()
    memory = live_process.memory_hash()
    before = live_process.ask("ping")
    criu.dump(live_process.pid, dump)
    live_process.reap()
    url = f"file://{work_dir / 'store'}"
    with snapstore.init_store(url) as store:
        store.push(dump, "test/process:v1")
    for image in dump.iterdir():
        image.unlink()
    mount = mounts.mount("test/process:v1", url)
    criu.restore(mount.directory, "--work-dir", str(scratch))
    assert live_process.memory_hash() == memory
    after = live_process.ask("ping")
    assert after["threads"] == before["threads"]
    assert int(str(after["ticks"])) >= int(str(before["ticks"]))
    live_process.ask("quit")
    live_process.reap()
    assert (scratch / "stats-restore").exists()


def test_restore_reading_directly(
    criu: Criu, live_process: LiveProcess, mounts: Mounts, work_dir: Path
) -> None:
    """Goal: images can be read as CRIU 4.3 does with `--image-io-mode direct`, and restored so.

    Method: read each pages image past the page cache, in one call for many runs of pages as CRIU
    does, and compare; then restore, directly if the CRIU at hand can.
    """
    dump, scratch = work_dir / "dump", work_dir / "scratch"
    dump.mkdir()
    scratch.mkdir()
    memory = live_process.memory_hash()
    criu.dump(live_process.pid, dump)
    live_process.reap()
    url = f"file://{work_dir / 'store'}"
    with snapstore.init_store(url) as store:
        store.push(dump, "test/process:v1")
    mount = mounts.mount("test/process:v1", url)
    for image in dump.glob("pages-*.img"):
        content = image.read_bytes()
        buffer = mmap.mmap(-1, len(content))
        view = memoryview(buffer)
        runs = [view[at : at + 13 * 4096] for at in range(0, len(content), 13 * 4096)]
        file = os.open(mount.directory / image.name, os.O_RDONLY | os.O_DIRECT)
        assert os.preadv(file, runs[:1024], 0) == min(len(content), 1024 * 13 * 4096)
        os.close(file)
        assert buffer[: 1024 * 13 * 4096] == content[: 1024 * 13 * 4096]
    usage = subprocess.run([criu.program, "--help"], capture_output=True, text=True, check=False)  # noqa: S603
    direct = ["--image-io-mode", "direct"] if "--image-io-mode" in usage.stdout else []
    criu.restore(mount.directory, "--work-dir", str(scratch), *direct)
    assert live_process.memory_hash() == memory
    live_process.ask("quit")
    live_process.reap()
