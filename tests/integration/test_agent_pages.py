"""Shows that plain CRIU restores from `snapagent serve-pages`, which holds no copy of the pages."""

import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.agent import Agent
from tests.support.criu_sessions import running
from tests.support.network_locks import without_network_locks
from tests.support.processes import end_processes_in, processes_in
from tests.support.supervised import inside_network
from tests.support.waiting import wait_until
from tools.live_process import LAZY_SOCKET, Criu, LiveProcess

pytestmark = [pytest.mark.criu, pytest.mark.slow]

CLIENTS = 2
SIZE_MIB = 8


@contextlib.contextmanager
def serving(agent: Agent, images: Path) -> Iterator[int]:
    """Serve the pages of a snapshot, with all else written to a folder; give the port."""
    with agent.start("serve-pages", "one", "--write-images", str(images)) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["port"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 130
        finally:
            process.kill()


@contextlib.contextmanager
def restored(criu: Criu, images: Path, work: Path, port: int) -> Iterator[int]:
    """Restore into fresh namespaces, which end with the body; give a process inside."""
    work.mkdir()
    arguments = ["lazy-pages", "--page-server", "--address", "127.0.0.1", "--port", str(port)]
    arguments += ["--images-dir", str(images), "--work-dir", str(work)]
    script = 'ip link set lo up && "$@" && touch restored && exec sleep infinity'
    unshare = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
    restore = [str(criu.program), "restore", "--restore-detached", "--lazy-pages"]
    restore += ["--images-dir", str(images), "--work-dir", str(work), "--log-file", "restore.log"]
    restore += ["--tcp-established", "-v2"]
    with running(criu, arguments, work / "lazy.log") as daemon:
        wait_until((work / LAZY_SOCKET).exists, "criu lazy-pages listens")
        with subprocess.Popen(  # noqa: S603 - no shell but ours
            [*unshare, "sh", "-c", script, "sh", *restore], stdin=subprocess.DEVNULL, cwd=work
        ) as process:
            try:
                wait_until(
                    lambda: (work / "restored").exists() or process.poll() is not None, "a restore"
                )
                assert process.poll() is None, (work / "restore.log").read_text()
                yield process.pid
                assert daemon.wait(60) == 0
            finally:
                process.kill()


def test_two_clients_at_once(criu: Criu, agent: Agent, work_dir: Path) -> None:
    home, images = work_dir / "home", work_dir / "images"
    home.mkdir()
    with without_network_locks(), LiveProcess(home, size_mib=SIZE_MIB) as process:
        memory = process.memory_hash()
        agent.run("capture", "one", "--pid", str(process.pid), "--stop")
        process.reap()

        def restore_and_ask(number: int) -> str:
            with restored(criu, images, work_dir / f"work-{number}", port) as pid:
                return inside_network(pid, process.memory_hash)

        with agent.nothing_left(home):
            with serving(agent, images) as port, ThreadPoolExecutor(CLIENTS) as pool:
                pages = sum(path.stat().st_blocks * 512 for path in images.glob("pages-*.img"))
                assert pages < SIZE_MIB << 20, "pages that are to come from the server"
                assert list(pool.map(restore_and_ask, range(CLIENTS))) == [memory] * CLIENTS
            end_processes_in(home)
    assert processes_in(home) == []
    shutil.rmtree(images)
