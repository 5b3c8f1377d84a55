"""The agent's ends of CRIU's protocols against CRIU itself: what it dumps comes back to life."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapagent.criu.hooks import ScriptHooks
from snapagent.criu.image_streamer import CaptureStreamer, RestoreStreamer
from snapagent.criu.page_receiver import PageReceiver, PageTotals, page_sockets
from snapagent.criu.page_server import PageServer
from snapagent.criu.pagemaps import build_pagemap
from snapstore.source.criu_pagemap import parse_pagemap
from snapstore.units import MIB, PAGE_BYTES
from tests.support.criu import SIZE_MIB
from tests.support.criu_sessions import (
    DirectoryImages,
    DirectoryPages,
    DumpReader,
    running,
    wait_for,
)
from tests.support.processes import stop_process
from tools.live_process import Criu, CriuFailedError, LiveProcess

pytestmark = [pytest.mark.criu, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


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
    ours, theirs = page_sockets()
    with (
        ours,
        theirs,
        CaptureStreamer(work, DirectoryImages(images)) as streamer,
        ThreadPoolExecutor(1) as thread,
    ):
        receiver = PageReceiver(ours, DirectoryPages(images))
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

    Method: dump a stopped process once to a directory and once to the agent. CRIU's pagemap comes
    out again if it is built of its own entries; that of the other dump says the same, except that
    pipes may cut the runs of pages elsewhere.
    """
    work, images, local = folders(work_dir, "w", "images", "local")
    stop_process(live_process.pid)
    criu.dump(live_process.pid, local, leave_running=True)
    dump_to_agent(criu, live_process.pid, work, images, "--leave-running")

    name = f"pagemap-{live_process.pid}.img"
    pagemap = parse_pagemap((local / name).read_bytes())
    entries = [entry[:3] for entry in pagemap.entries()]
    assert build_pagemap(pagemap.pages_id, entries) == (local / name).read_bytes()
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


# -- pages on demand ------------------------------------------------------------------------------


@contextlib.contextmanager
def lazy_pages(criu: Criu, work: Path, images: Path, port: int) -> Iterator[None]:
    """Let CRIU's own daemon fetch pages from a server; see at the end that it had no error."""
    log = work / "lazy.log"
    ready, status = os.pipe()
    arguments = ["lazy-pages", "--page-server", "--address", "127.0.0.1", "--port", str(port)]
    arguments += ["--images-dir", str(images), "--work-dir", str(work)]
    arguments += ["--status-fd", str(status)]
    with running(criu, arguments, log, pass_fds=[status]) as process:
        os.close(status)
        with os.fdopen(ready, "rb") as pipe:
            pipe.read(1)
        yield
        wait_for(process, log)


def restore_lazily(criu: Criu, process: LiveProcess, work: Path, images: Path, port: int) -> str:
    """Restore with pages from a server, and return what the process says of its memory."""
    with lazy_pages(criu, work, images, port):
        arguments = ["restore", "--images-dir", str(images), "--work-dir", str(work)]
        arguments += ["--lazy-pages", "--restore-detached", "--restore-sibling"]
        log = work / "restore.log"
        with running(criu, arguments, log) as restoring:
            wait_for(restoring, log)
        return process.memory_hash()


def test_two_lazy_restores_at_once(criu: Criu, work_dir: Path) -> None:
    """Goal: plain `criu lazy-pages` gets its pages from the server, several at the same time.

    Method: dump two processes, restore both at once with short answers, so that CRIU has to ask
    again for most of what it wants, and compare what they say of their memory.
    """
    reader = DumpReader()
    with contextlib.ExitStack() as stack:
        stack.callback(reader.close)
        listener = socket.create_server(("127.0.0.1", 0))
        server = stack.enter_context(PageServer(listener, reader, answer_bytes=128 * PAGE_BYTES))
        port = listener.getsockname()[1]
        processes, memories, places = [], [], []
        for number in range(2):
            home, work, images = folders(work_dir, f"home{number}", f"w{number}", f"i{number}")
            process = stack.enter_context(LiveProcess(home, size_mib=SIZE_MIB, seed=number))
            processes.append(process)
            memories.append(process.memory_hash())
            places.append((work, images))
        for process, (_, images) in zip(processes, places, strict=True):
            criu.dump(process.pid, images)
            process.reap()
            reader.add(images, process.pid)

        with ThreadPoolExecutor(2) as threads:
            restored = [
                threads.submit(restore_lazily, criu, process, work, images, port)
                for process, (work, images) in zip(processes, places, strict=True)
            ]
            assert [one.result() for one in restored] == memories
        assert server.error is None
        # Not the size of the memory: CRIU 4.2 takes no page as lazy where the stack pointer of
        # some thread happens to be at the beginning of a page.
        assert server.sent_bytes >= reader.lazy_bytes


# -- hooks ----------------------------------------------------------------------------------------


def dump_with_hook(criu: Criu, pid: int, work: Path, hooks: ScriptHooks) -> None:
    """Dump into a folder `images` below `work`, and ask the hooks."""
    (images,) = folders(work, "images")
    log = work / "dump.log"
    arguments = ["dump", "--tree", str(pid), "--images-dir", str(images)]
    arguments += ["--action-script", str(hooks.path)]
    with running(criu, arguments, log) as process:
        wait_for(process, log)


def hook_calls(answers: dict[str, bool], seen: list[str]) -> dict[str, Callable[[], bool]]:
    """Return actions that note that they were called, and answer as told."""

    def action(name: str) -> Callable[[], bool]:
        def call() -> bool:
            seen.append(name)
            return answers[name]

        return call

    return {name: action(name) for name in answers}


def test_hook_lets_a_dump_pass(criu: Criu, live_process: LiveProcess, work_dir: Path) -> None:
    seen: list[str] = []
    actions = hook_calls({"pre-dump": True, "post-dump": True}, seen)
    with ScriptHooks(work_dir, actions) as hooks:
        dump_with_hook(criu, live_process.pid, work_dir, hooks)
        assert hooks.error is None
    live_process.reap()
    assert seen == ["pre-dump", "post-dump"]


def test_source_lives_when_the_hook_says_no(
    criu: Criu, live_process: LiveProcess, work_dir: Path
) -> None:
    """A refusal at `post-dump`, when all images are written, makes CRIU let the process go on."""
    memory = live_process.memory_hash()
    seen: list[str] = []
    with (
        ScriptHooks(work_dir, hook_calls({"post-dump": False}, seen)) as hooks,
        pytest.raises(CriuFailedError),
    ):
        dump_with_hook(criu, live_process.pid, work_dir, hooks)
    assert seen == ["post-dump"]
    assert (work_dir / "images" / "inventory.img").exists()
    assert live_process.memory_hash() == memory


def test_capture_settles_within_the_hook(
    criu: Criu, live_process: LiveProcess, work_dir: Path
) -> None:
    """Goal: at `post-dump` a capture can tell that it has everything, and still say no.

    Method: dump to the agent with a hook that waits for the page receiver and the streamer, notes
    which images are complete, and refuses. Another dump, to a directory, says which there are.
    """
    work, images, again = folders(work_dir, "w", "images", "again")
    complete: list[str] = []
    ours, theirs = page_sockets()
    with (
        ours,
        theirs,
        CaptureStreamer(work, DirectoryImages(images)) as streamer,
        ThreadPoolExecutor(1) as thread,
        contextlib.closing(PageReceiver(ours, DirectoryPages(images))) as receiver,
    ):
        received = thread.submit(receiver.run)

        def refuse() -> bool:
            received.result()
            streamer.settle()
            complete.extend(sorted(path.name for path in images.iterdir()))
            return False

        with ScriptHooks(work, {"post-dump": refuse}) as hooks:
            pid = live_process.pid
            options = ["--page-server", "--ps-socket", str(theirs.fileno())]
            options += ["--action-script", str(hooks.path)]
            arguments = ["dump", "--tree", str(pid), "--images-dir", str(work), "--stream"]
            with running(
                criu, [*arguments, *options], work / "log", pass_fds=[theirs.fileno()]
            ) as process:
                assert process.wait(timeout=60) != 0
            assert hooks.error is None
        streamer.join()
    assert live_process.ask("ping")
    criu.dump(live_process.pid, again, leave_running=True)
    expected = {path.name for path in again.iterdir()} - {"stats-dump", "pages-1.img"}
    assert set(complete) == expected | {"pages-65537.img"}


AGENT = """
import os, signal, sys
from pathlib import Path
from snapagent.criu.hooks import ScriptHooks
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
ScriptHooks(Path(sys.argv[1]), {"post-dump": die}).start()
print("ready", flush=True)
signal.pause()
"""


def test_hook_fails_at_once_without_its_agent(
    criu: Criu, live_process: LiveProcess, work_dir: Path
) -> None:
    """Goal: when the agent is gone, CRIU does not wait for it, and the process goes on.

    Method: another program is the agent, and kills itself when it is asked at `post-dump`. Then
    dump once more, with nobody there from the beginning.
    """
    memory = live_process.memory_hash()
    with subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-c", AGENT, str(work_dir)], cwd=ROOT, stdout=subprocess.PIPE
    ) as agent:
        try:
            assert agent.stdout is not None
            assert agent.stdout.readline() == b"ready\n"
            arguments = ["dump", "--tree", str(live_process.pid)]
            arguments += ["--action-script", str(work_dir / "hook"), "--images-dir"]
            for name in ("first", "second"):
                (images,) = folders(work_dir, name)
                log = work_dir / f"{name}.log"
                with (
                    running(criu, [*arguments, str(images)], log) as process,
                    pytest.raises(CriuFailedError),
                ):
                    wait_for(process, log)
                assert agent.wait() == -signal.SIGKILL
                assert live_process.memory_hash() == memory
        finally:
            agent.kill()


def test_source_lives_when_its_pages_cannot_be_stored(
    criu: Criu, live_process: LiveProcess, work_dir: Path
) -> None:
    """What the sink raises ends the dump, comes out of the receiver, and costs nobody's life."""

    class FullDisk(DirectoryPages):
        def advance(self, count: int) -> None:
            raise OSError(errno.ENOSPC, f"no space for {count} bytes")

    memory = live_process.memory_hash()
    work, images = folders(work_dir, "w", "images")
    ours, theirs = page_sockets()
    log = work / "log"
    with (
        ours,
        theirs,
        ThreadPoolExecutor(1) as thread,
        contextlib.closing(FullDisk(images)) as sink,
    ):
        received = thread.submit(PageReceiver(ours, sink).run)
        arguments = ["dump", "--tree", str(live_process.pid), "--images-dir", str(images)]
        arguments += ["--page-server", "--ps-socket", str(theirs.fileno())]
        with (
            running(criu, arguments, log, pass_fds=[theirs.fileno()]) as process,
            pytest.raises(CriuFailedError),
        ):
            wait_for(process, log)
        with pytest.raises(OSError, match="no space"):
            received.result()
    assert live_process.memory_hash() == memory
