"""Shows of what is left when something is killed in the middle of a restore or a capture: nothing.

The store is a real S3 server behind a gate, so that "in the middle" is no matter of luck.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import snapstore
from snapagent.linux import processes
from tests.support.agent import (
    FRESH,
    Agent,
    Asking,
    agent_folder,
    failed,
    killed,
    waits_for_memory,
)
from tests.support.doomed import Gate, gate_before
from tests.support.network_locks import without_network_locks
from tests.support.processes import await_free_ids
from tests.support.tree import MEMBERS, ProcessTree
from tests.support.waiting import wait_until
from tools import seaweed
from tools.live_process import Criu

pytestmark = [pytest.mark.criu, pytest.mark.s3, pytest.mark.slow]

# Connections that have ended keep their addresses for a while, so never in the present network.
HERE = ("--network", "fresh")
FOREVER = ("--record", "1000")
"""Nothing is filled but what is touched: the rest stays missing until somebody touches it."""


@dataclass(frozen=True)
class Stored:
    """A tree that was captured to its end, and everything needed to restore it."""

    tree: ProcessTree
    ids: list[int]
    bucket: str
    server: seaweed.S3Server
    agent: Agent

    def through(self, gate: Gate) -> Agent:
        """Return the program with the gate before its store."""
        return self.agent.at(self.server.url(self.bucket, endpoint=gate.proxy.endpoint))


@pytest.fixture(scope="module")
def stored(
    criu: Criu, s3: seaweed.S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stored]:
    """Capture one tree for all tests here."""
    home = tmp_path_factory.mktemp("killed") / "tree"
    home.mkdir()
    with without_network_locks(), s3.bucket() as bucket, agent_folder() as folder:
        agent = Agent(s3.url(bucket), folder)
        snapstore.init_store(agent.url).close()
        with ProcessTree(home) as tree:
            ids = tree.processes()
            agent.capture_and_stop("tree", tree.pid, ids)
            yield Stored(tree, ids, bucket, s3, agent)


@pytest.fixture
def gate(stored: Stored) -> Iterator[Gate]:
    """Put a gate before the store."""
    with gate_before(stored.server.endpoint, stored.agent.run_directory) as gate:
        yield gate
    stored.tree.end()
    # Others reap what was killed, and the next restore wants the same ids.
    await_free_ids(stored.ids)


def keeper_in(place: tuple[str, ...]) -> str:
    return "snapagent-keep" if place == HERE else "snapagent-init"


def kill(agent: Agent, name: str) -> None:
    os.kill(agent.process_named(name), signal.SIGKILL)


# -- restores -------------------------------------------------------------------------------------


def restore_stuck(
    stored: Stored, gate: Gate, place: tuple[str, ...]
) -> tuple[subprocess.Popen[str], Asking]:
    """Restore the tree up to where it runs and waits for memory that the store does not give.

    Method: fill nothing in the background; close the gate once the tree answers, and let it verify
    all of its memory.
    """
    tree = stored.tree
    process = stored.through(gate).start("restore", "tree", *FOREVER, *place)
    wait_until(lambda: process.poll() is not None or tree.answers(), "the tree listens")
    assert process.poll() is None, process.communicate()
    tree.ask("ping")
    gate.closed = True
    asking = Asking(tree.check)
    gate.await_held(process)
    wait_until(lambda: waits_for_memory(tree.processes()), "a process waits for memory")
    return process, asking


def assert_never_wrong(tree: ProcessTree, asking: Asking) -> None:
    """The question ended with the connection, not with an answer, least of all a wrong one."""
    assert isinstance(asking.wait(), ConnectionError)
    assert tree.wrong_memory() == ""


KILLED = {
    "snapagent-super": "the supervisor was killed",
    "snapagent-keep": "the keeper of the processes was killed",
    "snapagent-init": "the keeper of the processes was killed",
}


@pytest.mark.parametrize("place", [HERE, FRESH], ids=["here", "fresh"])
def test_agent_killed_while_memory_is_missing(
    stored: Stored, gate: Gate, place: tuple[str, ...]
) -> None:
    """Goal: with the agent, which is the lazy daemon too, the tree ends; nobody reads zeros."""
    with stored.agent.nothing_left(stored.tree.home):
        process, asking = restore_stuck(stored, gate, place)
        killed(process)
        assert_never_wrong(stored.tree, asking)
    (entry,) = stored.agent.history(count=1)
    assert entry["result"] == "interrupted"
    assert entry["reason"] == "the agent ended without releasing it"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("snapagent-super", HERE),
        ("snapagent-init", FRESH),
    ],
)
def test_helper_killed_while_memory_is_missing(
    stored: Stored, gate: Gate, name: str, place: tuple[str, ...]
) -> None:
    """Goal: the same for the other processes, and the agent says which it was."""
    with stored.agent.nothing_left(stored.tree.home):
        process, asking = restore_stuck(stored, gate, place)
        kill(stored.agent, name)
        error = failed(process, code=1)
        assert error["code"] == "WorkloadLost"
        assert KILLED[name] in error["message"]
        assert_never_wrong(stored.tree, asking)
    (entry,) = stored.agent.history(count=1)
    assert (entry["result"], entry["outcome"]["error"]) == ("error", "WorkloadLost")


def test_restore_interrupted(stored: Stored, gate: Gate) -> None:
    """Goal: Ctrl-C ends the tree, and the program with 130."""
    with stored.agent.nothing_left(stored.tree.home):
        process, asking = restore_stuck(stored, gate, FRESH)
        process.send_signal(signal.SIGINT)
        assert failed(process, code=130)["code"] == "Interrupted"
        assert_never_wrong(stored.tree, asking)


@pytest.mark.parametrize(
    ("name", "place"),
    [("agent", HERE), ("snapagent-super", FRESH), ("keeper", HERE), ("criu", FRESH)],
)
def test_killed_while_criu_restores(
    stored: Stored, gate: Gate, name: str, place: tuple[str, ...]
) -> None:
    """Goal: what is half restored is ended, whoever was killed.

    Method: hold what CRIU has to load itself, such as shared memory.
    """
    gate.closes_with_criu = True
    with stored.agent.nothing_left(stored.tree.home):
        process = stored.through(gate).start("restore", "tree", *place)
        gate.await_held(process)
        match name:
            case "agent":
                killed(process)
            case "keeper":
                kill(stored.agent, keeper_in(place))
            case "criu":
                # What CRIU has forked so far has the keeper as parent as well, or CRIU.
                keeper = stored.agent.process_named(keeper_in(place))
                os.kill(min(processes.children(keeper)), signal.SIGKILL)
            case _:
                kill(stored.agent, name)
        if name == "criu":
            error = failed(process, code=1)
            assert error["code"] == "CriuFailed"
            assert "criu restore was killed by signal 9" in error["message"]
        elif name != "agent":
            assert failed(process, code=1)["code"] == "WorkloadLost"
    assert stored.tree.wrong_memory() == ""


@pytest.mark.parametrize(
    ("name", "place"),
    [("agent", HERE), ("agent", FRESH), ("snapagent-super", HERE), ("keeper", FRESH)],
)
def test_killed_while_all_memory_is_filled_first(
    stored: Stored, gate: Gate, name: str, place: tuple[str, ...]
) -> None:
    """Goal: what is filled before it runs never runs then, and is ended, whoever was killed.

    Method: hold what is read once CRIU has handed over all processes, which wait for it.
    """
    with stored.agent.nothing_left(stored.tree.home):
        process = stored.through(gate).start("restore", "tree", "--eager", *place)
        gate.closes_when = lambda: userfaultfds(process.pid) >= MEMBERS
        gate.await_held(process)
        asking = Asking(lambda: stored.tree.ask("ping"))
        match name:
            case "agent":
                killed(process)
            case "keeper":
                kill(stored.agent, keeper_in(place))
            case _:
                kill(stored.agent, name)
        if name != "agent":
            assert failed(process, code=1)["code"] == "WorkloadLost"
        assert isinstance(asking.wait(), ConnectionError)
    assert stored.tree.wrong_memory() == ""


def userfaultfds(pid: int) -> int:
    """Return how many a process has open."""
    count = 0
    # It may end, or close some, meanwhile.
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                count += str(path.readlink()) == "anon_inode:[userfaultfd]"
    return count
