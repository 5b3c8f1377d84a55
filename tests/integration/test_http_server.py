"""The example server, captured and restored for real; the test plays the agent of the handshake."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import snapstore
from snapagent.handshake import ControlDirectory
from tests.support.criu import criu_program
from tests.support.http_example import EXAMPLE, PAUSE_S_MAX, WARM_UP, Server
from tests.support.network_locks import without_network_locks
from tests.support.processes import end_processes_in, open_files
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.criu, pytest.mark.slow, pytest.mark.usefixtures("criu")]

ROOT = Path(__file__).parents[2]
NAME = "examples/http:warm"

# It looks for files only when it finds that it was frozen.
ONLY_WHEN_FROZEN = f"""
import runpy, sys
from snapagent.workload import handshake
handshake.LOOK_S = 3600
sys.argv[0] = {str(EXAMPLE)!r}
sys.path.insert(0, {str(EXAMPLE.parent)!r})
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def snapagent(home: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of the agent, and return what it says."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "SNAPSTORE_URL": str(home.parent / "store"),
        "SNAPAGENT_CRIU": str(criu_program()),
        "SNAPAGENT_STATE_DIR": str(home.parent / "state"),
    }
    program = [sys.executable, "-m", "snapagent", *arguments, "--json"]
    done = subprocess.run(  # noqa: S603 - no shell
        program, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(params=[[str(EXAMPLE)], ["-c", ONLY_WHEN_FROZEN]], ids=["as it is", "hourly"])
def server(request: pytest.FixtureRequest, work_dir: Path) -> Iterator[Server]:
    home, control = work_dir / "home", work_dir / "control"
    for directory in (home, control):
        directory.mkdir()
    snapstore.init_store(str(work_dir / "store")).close()
    with without_network_locks():
        try:
            server = Server(home, control, request.param)
        except BaseException:
            end_processes_in(home)
            raise
        try:
            yield server
        finally:
            server.end()


def test_a_server_answers_the_same_before_and_after(server: Server, work_dir: Path) -> None:
    """Goal: capture, restore and handshake work together, with another directory afterwards.

    Method: let the example serve until it is warm, capture it once it is ready, and end it. Take
    the control directory away, and restore it into fresh pids and a fresh network. Then give it
    another directory, as another container would have, with the agent's word; after that, all is
    as before. With `hourly`, only having been frozen can have told it that it was restored.
    """
    control = work_dir / "control"
    before = [server.ask("/state"), server.ask("/item/7"), server.ask("/item/41999")]
    assert [answer["requests"] for answer in before] == [1, 2, WARM_UP]
    server.await_ready()
    files = " ".join(open_files(server.pid))
    assert "inotify" not in files
    assert str(control) not in files
    snapagent(server.home, "capture", "--pid", str(server.pid), NAME, "--stop")
    server.end()
    control.rename(work_dir / "control-of-the-first-life")

    restored = snapagent(server.home, "restore", NAME, "--pids", "fresh", "--network", "fresh")
    pid = restored["root_pid"]
    # In the next life it is told by inotify.
    watch = "anon_inode:inotify"
    wait_until(lambda: watch in open_files(pid), "it watches", seconds=PAUSE_S_MAX)
    control.mkdir()
    with ControlDirectory.open(str(control)) as agent:
        agent.announce_restored()
        assert agent.wait_serving("http", PAUSE_S_MAX) == "ready\n"
    assert watch not in open_files(pid)

    after = [server.ask(path, pid) for path in ("/state", "/item/7", "/item/41999")]
    for old, new in zip(before, after, strict=True):
        assert new == old | {"requests": old["requests"] + WARM_UP}


@pytest.mark.parametrize("server", [[str(EXAMPLE)]], indirect=True)
def test_a_server_that_was_captured_goes_on(server: Server) -> None:
    """An older agent says so, and the first life serves again."""
    for _ in range(WARM_UP):
        server.ask("/state")
    with ControlDirectory.of_process(server.pid) as agent:
        agent.wait_ready(PAUSE_S_MAX)
        snapagent(server.home, "capture", "--pid", str(server.pid), NAME)
        agent.announce_captured()
    assert server.ask("/state")["requests"] == WARM_UP + 1
