"""The agent's ends of CRIU's protocols against CRIU itself: what it dumps comes back to life."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapagent.criu.image_streamer import CaptureStreamer, RestoreStreamer
from snapagent.criu.page_receiver import PageReceiver, PageTotals
from snapstore.source.criu_pagemap import parse_pagemap
from snapstore.units import MIB, PAGE_BYTES
from tests.support.criu import SIZE_MIB
from tests.support.criu_sessions import (
    DirectoryImages,
    DirectoryPages,
    running,
    wait_for,
)
from tools.live_process import Criu, LiveProcess

pytestmark = [pytest.mark.criu, pytest.mark.slow]


def dump_to_agent(
    criu: Criu,
    pid: int,
    work: Path,
    images: Path,
    *options: str,
    pages: DirectoryPages | None = None,
) -> PageTotals:
    """Dump through streamer and page server into `images`; the process ends unless told else."""
    log = work / "dump.log"
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        CaptureStreamer(work, DirectoryImages(images)) as streamer,
        ThreadPoolExecutor(1) as thread,
    ):
        receiver = PageReceiver(ours, pages or DirectoryPages(images))
        with contextlib.closing(receiver):
            received = thread.submit(receiver.run)
            arguments = ["dump", "--tree", str(pid), "--images-dir", str(work), "--stream"]
            arguments += ["--page-server", "--ps-socket", str(theirs.fileno()), *options]
            with running(criu, arguments, log, pass_fds=[theirs.fileno()]) as process:
                theirs.close()
                wait_for(process, log)
            totals = received.result()
        streamer.join()
    return totals


def folders(work: Path, *names: str) -> list[Path]:
    """Make folders with names short enough for sockets."""
    made = [work / name for name in names]
    for path in made:
        path.mkdir()
    return made


def test_dump(criu: Criu, live_process: LiveProcess, work_dir: Path) -> None:
    """Goal: what the agent receives of a dump is what CRIU would have written.

    Method: dump to the agent, which writes a directory, and let plain `criu restore` bring the
    process back from there.
    """
    work, images = folders(work_dir, "w", "images")
    memory = live_process.memory_hash()
    totals = dump_to_agent(criu, live_process.pid, work, images)
    live_process.reap()

    assert totals.data_bytes >= SIZE_MIB * MIB
    assert sorted(path.name for path in work.iterdir() if path.name.startswith("stream")) == []
    criu.restore(images)
    assert live_process.memory_hash() == memory


def test_pagemaps_are_those_of_criu(criu: Criu, live_process: LiveProcess, work_dir: Path) -> None:
    """Goal: pagemaps that the agent builds are, byte for byte, those that CRIU writes.

    Method: dump a process that goes on once to a directory and once to the agent. Its stack may
    change in between, and pipes cut the runs of pages elsewhere; joined, the runs are the same.
    Built anew from its own entries, CRIU's image comes out byte for byte.
    """
    work, images, local = folders(work_dir, "w", "images", "local")
    criu.dump(live_process.pid, local, leave_running=True)
    dump_to_agent(criu, live_process.pid, work, images, "--leave-running")

    name = f"pagemap-{live_process.pid}.img"
    assert joined(images / name) == joined(local / name)


def joined(path: Path) -> list[tuple[int, int, int]]:
    """Return the runs of a pagemap, with those that follow one another made one."""
    runs: list[tuple[int, int, int]] = []
    for entry in parse_pagemap(path.read_bytes()).entries():
        vaddr, count, flags = entry.vaddr, entry.nr_pages, entry.flags
        if runs and runs[-1][2] == flags and runs[-1][0] + runs[-1][1] * PAGE_BYTES == vaddr:
            vaddr, count = runs[-1][0], runs.pop()[1] + count
        runs.append((vaddr, count, flags))
    return runs


def test_restore(criu: Criu, live_process: LiveProcess, work_dir: Path) -> None:
    """A process comes back through the restore streamer, from a directory that CRIU wrote."""
    work, images = folders(work_dir, "w", "images")
    memory = live_process.memory_hash()
    criu.dump(live_process.pid, images)
    live_process.reap()

    with RestoreStreamer(work, DirectoryImages(images)) as streamer:
        arguments = ["restore", "--images-dir", str(work), "--stream"]
        arguments += ["--restore-detached", "--restore-sibling"]
        log = work / "restore.log"
        with running(criu, arguments, log) as process:
            wait_for(process, log)
        streamer.join()
    assert live_process.memory_hash() == memory
