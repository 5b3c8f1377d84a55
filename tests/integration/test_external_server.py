"""A server with external memory, by commands and the daemon: the same before and after."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapagent.handshake import ControlDirectory
from tests.support.agent import FRESH, Agent
from tests.support.daemon import Daemon, running_daemon
from tests.support.http_example import PAUSE_S_MAX, WARM_UP, Server
from tests.support.network_locks import without_network_locks
from tests.support.processes import end_processes_in
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.criu, pytest.mark.slow, pytest.mark.usefixtures("criu")]

NAME = "team/http:warm"
MIB = 1 << 20
OWN_MIB = 32
EXTERNAL_MIB = 64
PYTHON_MIB_MAX = 40
"""What an interpreter has besides."""
PATHS = ("/state", "/item/7", "/item/41999")


@contextlib.contextmanager
def served(agent: Agent, work_dir: Path) -> Iterator[tuple[Daemon, Server]]:
    """Run a daemon, and a server that keeps memory with its broker and waits to be captured."""
    home, control = work_dir / "home", work_dir / "control"
    for directory in (home, control):
        directory.mkdir()
    with without_network_locks(), running_daemon(agent) as daemon:
        try:
            broker = agent.run_directory / "memory.sock"
            server = Server(home, control, mebibytes=OWN_MIB, external=(EXTERNAL_MIB, broker))
            try:
                yield daemon, server
            finally:
                server.end()
        finally:
            end_processes_in(home)


def test_a_server_with_external_memory_is_the_same_elsewhere(agent: Agent, work_dir: Path) -> None:
    """Goal: what is kept with the broker comes back with the rest, checked by the server itself.

    Method: ask a server that has external memory, capture it to its end with the command, restore
    it into a fresh network and fresh process ids, tell it, and ask again. On the way: who has no
    broker is refused, before and after, and the daemon tells what its broker has.
    """
    with served(agent, work_dir) as (daemon, server):
        before = [server.ask(path) for path in PATHS]
        server.await_ready()
        told = daemon.get("/v1/status")["memory"]
        assert told["processes"] == {"released": 1}
        assert told["size_bytes"] >= EXTERNAL_MIB * MIB
        for pid in (daemon.process.pid, told["holder_pid"]):
            soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            assert soft == hard

        arguments = ("capture", NAME, "--pid", str(server.pid))
        refused = agent.fails(*arguments, "--no-daemon", code=7)
        assert "external-no-broker" in refused["message"]
        captured = agent.run(*arguments, "--stop")
        assert captured["external_bytes"] >= EXTERNAL_MIB * MIB
        assert captured["page_bytes"] < (OWN_MIB + PYTHON_MIB_MAX) * MIB
        server.end()
        wait_until(lambda: not daemon.get("/v1/status")["memory"]["processes"], "it is freed")

        refused = agent.fails("restore", NAME, *FRESH, "--no-daemon", code=7)
        assert "memory broker" in refused["message"]
        restored = agent.run("restore", NAME, *FRESH)
        pid = restored["root_pid"]
        assert restored["external_bytes"] == EXTERNAL_MIB * MIB
        assert 0 < restored["external_s"] <= restored["total_s"]
        with ControlDirectory.of_process(pid) as control:
            control.announce_restored()
            assert control.wait_serving("http", PAUSE_S_MAX) == "ready\n"
        after = [server.ask(path, pid) for path in PATHS]
        for old, new in zip(before, after, strict=True):
            assert new == old | {"requests": old["requests"] + WARM_UP}
        metrics = daemon.ask("GET", "/v1/metrics").body.decode()
        assert 'snapagent_external_processes{state="shared"} 1.0' in metrics
        assert "snapagent_external_held 1.0" in metrics


def test_preflight_tells_of_external_memory(agent: Agent, work_dir: Path) -> None:
    """Goal: what stands in the way is told beforehand, mapped, released, or without a daemon.

    Method: look in each of these; then kill the daemon and start the next one with the same run
    directory, which finds what the holder has there and captures it.
    """
    with served(agent, work_dir) as (daemon, server):
        pid = str(server.pid)
        assert codes(agent, pid) == {"external-mapped"}
        assert codes(agent, pid, "--no-daemon") == {"external-no-broker"}
        for _ in range(WARM_UP):
            server.ask("/item/1")
        server.await_ready()
        assert codes(agent, pid) == set()
        assert codes(agent, pid, "--no-daemon") == {"external-no-broker"}
        daemon.kill()
        # The holder has it, and tells.
        assert codes(agent, pid, "--no-daemon") == {"external-no-broker"}
        with running_daemon(agent) as after:
            assert after.get("/v1/status")["memory"]["processes"] == {"released": 1}
            captured = agent.run("capture", NAME, "--pid", pid, "--stop")
            assert captured["external_bytes"] >= EXTERNAL_MIB * MIB
            server.end()


def codes(agent: Agent, pid: str, *options: str) -> set[str]:
    """Return what preflight says of external memory."""
    document = agent.preflight(pid, *options)
    found = {one["code"] for one in document["obstacles"] if one["blocking"]}
    assert document["possible"] == (not found)
    return {code for code in found if code.startswith("external")}
