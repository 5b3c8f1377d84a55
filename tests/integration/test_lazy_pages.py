"""Real restores whose memory the daemon fills while the processes run."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapagent.criu.laziness import with_lazy_marks
from snapagent.criu.pagemaps import build_pagemap
from snapagent.lazy.daemon import LazyPages
from snapagent.lazy.memory import TaskMemory
from snapstore.source.criu_images import parse_pstree
from snapstore.source.criu_memory import parse_mm
from snapstore.source.criu_pagemap import PageFlag, Pagemap, parse_pagemap
from tests.support.lazy_pages import WAIT_S, DumpedImage, Gate
from tests.support.waiting import wait_until
from tools.live_process import Criu, explanation

pytestmark = [pytest.mark.criu, pytest.mark.slow]

SIZE_MIB = 24
PROGRAM = Path(__file__).parents[1] / "support" / "lazy_tree.py"
ALL_RIGHT = [True] * 3


class Tree:
    """Three processes, in any of their lives, in a folder of their own."""

    def __init__(self, criu: Criu, size_mib: int) -> None:
        self._criu = criu
        self._stack = contextlib.ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="lazy-tree-"))
        self._stack.callback(shutil.rmtree, self.folder)
        self.images, self.work = self.folder / "images", self.folder / "work"
        self.images.mkdir()
        self.work.mkdir()
        self.held: list[int] = []
        self.before_read: Callable[[int, int, bool], None] = lambda *_: None
        self.failed = threading.Event()
        self._stack.callback(self.release)
        with (self.folder / "output.txt").open("ab") as output:
            self._first = subprocess.Popen(  # noqa: S603 - no shell
                [sys.executable, str(PROGRAM), str(self.folder / "control"), str(size_mib)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,
            )
        self.pid = self._first.pid
        self._stack.callback(self.end)
        self.ask("touch")

    def ask(self, request: str, timeout_s: float = WAIT_S) -> list[bool]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            for _ in range(1000):
                try:
                    connection.connect(str(self.folder / "control"))
                    break
                except OSError:
                    assert self._first.poll() is None
                    threading.Event().wait(0.01)
            connection.sendall(request.encode())
            return list(json.loads(connection.recv(100)))

    def dump(self) -> None:
        self._criu.dump(self.pid, self.images)
        self._first.wait()
        # Until init has waited for the others: their process ids are needed again.
        for process in parse_pstree((self.images / "pstree.img").read_bytes()):
            for _ in range(3000):
                if not Path(f"/proc/{process.pid}").exists():
                    break
                threading.Event().wait(0.01)

    def memories(self) -> dict[int, TaskMemory]:
        found = {}
        for process in parse_pstree((self.images / "pstree.img").read_bytes()):
            pagemap = parse_pagemap((self.images / f"pagemap-{process.pid}.img").read_bytes())
            mappings = parse_mm((self.images / f"mm-{process.pid}.img").read_bytes()).vmas
            # CRIU's own marks are missing where a stack pointer is at the start of a page.
            pagemap = with_lazy_marks(pagemap, mappings)
            name = f"pages-{pagemap.pages_id}.img"
            image = DumpedImage(self.images / name)
            image.before_read = self.before_read
            self._stack.callback(image.close)
            spans = list(zip(mappings.starts.tolist(), mappings.ends.tolist(), strict=True))
            found[process.pid] = TaskMemory(process.pid, pagemap, spans, name, image)
        return found

    def hold(self, fd: int) -> None:
        self.held.append(os.dup(fd))

    def release(self) -> None:
        while self.held:
            os.close(self.held.pop())

    def daemon(self, **settings: object) -> LazyPages:
        options: dict = {"threads": 2, "buffer_bytes": 8 << 20, **settings}
        daemon = LazyPages(
            self.work,
            self.memories(),
            hold=self.hold,
            on_error=lambda _: self.failed.set(),
            **options,
        )
        self._stack.callback(daemon.close)
        daemon.start()
        return daemon

    def restore(self) -> None:
        """Restore as a child of this process; returns when it runs.

        CRIU finds only what it restores itself in the pages images, the rest is a hole.
        """
        eager = self.folder / "eager"
        eager.mkdir()
        for path in self.images.iterdir():
            if not path.name.startswith("pages-"):
                (eager / path.name).symlink_to(path)
        for pid, memory in self.memories().items():
            pagemap = memory.pagemap
            keep_eager(self.images / memory.image, eager / memory.image, pagemap)
            columns = (pagemap.vaddrs, pagemap.counts, pagemap.flags)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            (eager / f"pagemap-{pid}.img").unlink()
            (eager / f"pagemap-{pid}.img").write_bytes(build_pagemap(pagemap.pages_id, rows))
        log = self.folder / "restore.log"
        command = [self._criu.program, "restore", "-D", eager, "-W", self.work]
        command += ["--lazy-pages", "--restore-detached", "--restore-sibling", "-o", log, "-v2"]
        status = subprocess.run(  # noqa: S603 - no shell
            command, stdin=subprocess.DEVNULL, start_new_session=True, timeout=60, check=False
        ).returncode
        assert status == 0, explanation(log)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._first.poll()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def close(self) -> None:
        self._stack.close()


def keep_eager(source: Path, target: Path, pagemap: Pagemap) -> None:
    """Copy those pages that are not lazy, to where they are."""
    with source.open("rb") as pages, target.open("wb") as kept:
        kept.truncate(source.stat().st_size)
        for entry in pagemap.entries():
            if entry.offset is not None and not entry.flags & PageFlag.LAZY:
                pages.seek(entry.offset)
                kept.seek(entry.offset)
                kept.write(pages.read(entry.nr_pages * 4096))


@pytest.fixture
def tree(criu: Criu) -> Iterator[Tree]:
    one = Tree(criu, SIZE_MIB)
    yield one
    one.close()


def finish(daemon: LazyPages, tree: Tree) -> None:
    """End the daemon of a restore as its owner does."""
    assert daemon.wait_filled(WAIT_S)
    tree.release()
    daemon.close()


def test_a_tree_runs_while_its_memory_is_filled(tree: Tree) -> None:
    tree.dump()
    daemon = tree.daemon()
    tree.restore()
    assert daemon.wait_restored(WAIT_S)
    assert tree.ask("hash") == ALL_RIGHT
    finish(daemon, tree)
    assert tree.ask("hash") == ALL_RIGHT
    stats = daemon.stats
    assert stats.tasks == 3
    assert stats.fault_bytes + stats.fill_bytes >= 3 * SIZE_MIB << 20
    assert stats.dropped_bytes == 0


def test_a_tree_runs_on_faults_alone(tree: Tree) -> None:
    tree.dump()
    daemon = tree.daemon(fill=False, record=True)
    tree.restore()
    assert tree.ask("hash") == ALL_RIGHT
    recorded = sum(run.page_count for run in daemon.recorded_order) * 4096
    assert recorded >= 3 * SIZE_MIB << 20
    # Who waits is woken by the copy itself, and answers before that has been counted.
    wait_until(lambda: daemon.stats.fault_bytes >= recorded, "all copies are counted")
    assert daemon.stats.fault_bytes == recorded
    assert daemon.stats.fill_bytes == 0
    daemon.start_fill()
    finish(daemon, tree)
    assert tree.ask("hash") == ALL_RIGHT


def test_forks_and_discards_while_parts_are_read(tree: Tree) -> None:
    tree.dump()
    tree.before_read = gate = Gate()
    daemon = tree.daemon()
    tree.restore()
    gate.wait()
    assert tree.ask("discard") == ALL_RIGHT
    assert tree.ask("fork") == ALL_RIGHT
    gate.open()
    assert tree.ask("fork") == ALL_RIGHT
    finish(daemon, tree)
    assert tree.ask("hash") == ALL_RIGHT
    assert daemon.stats.tasks >= 6


def test_forks_while_memory_is_filled(tree: Tree) -> None:
    tree.dump()
    daemon = tree.daemon(buffer_bytes=1 << 20, threads=3)
    tree.restore()
    for _ in range(5):
        assert tree.ask("fork") == ALL_RIGHT
    finish(daemon, tree)
    assert tree.ask("hash") == ALL_RIGHT


def test_nobody_runs_on_zeros_when_the_daemon_ends_early(tree: Tree) -> None:
    """Goal: while a duplicate of the userfaultfds is open, the loss of the daemon loses nothing.

    Method: close the daemon when nothing is filled. The processes must neither answer nor die.
    """
    tree.dump()
    daemon = tree.daemon(fill=False)
    tree.restore()
    assert daemon.wait_restored(WAIT_S)
    daemon.close()
    with pytest.raises(TimeoutError):
        tree.ask("hash", timeout_s=1)
    assert len(tree.held) == 3
    for process in tree.memories():
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        assert state[0] in {"S", "D", "R"}, (process, state[0])
