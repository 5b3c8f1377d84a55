"""Shows that a capture that is killed in the middle harms nothing and leaves nothing."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import snapstore
from tests.support.agent import Agent, agent_folder, failed, killed, succeeded
from tests.support.doomed import Gate, gate_before
from tests.support.network_locks import without_network_locks
from tests.support.tree import ProcessTree
from tools import seaweed
from tools.live_process import Criu

pytestmark = [pytest.mark.criu, pytest.mark.s3, pytest.mark.slow]

KILLED = {
    "snapagent-super": "the supervisor was killed",
    "snapagent-keep": "the keeper of the processes was killed",
}


@dataclass(frozen=True)
class Source:
    """A tree that is captured again and again, and never successfully."""

    tree: ProcessTree
    agent: Agent
    """Without the gate."""
    gated: Agent


@pytest.fixture(scope="module")
def living_tree(criu: Criu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessTree]:
    home = tmp_path_factory.mktemp("living") / "tree"
    home.mkdir()
    with without_network_locks(), ProcessTree(home) as tree:
        yield tree


@pytest.fixture
def gate(s3: seaweed.S3Server, s3_bucket: str, tmp_path: Path) -> Iterator[Gate]:
    with gate_before(s3.endpoint, tmp_path) as gate:
        yield gate


@pytest.fixture
def source(
    living_tree: ProcessTree, s3: seaweed.S3Server, s3_bucket: str, gate: Gate
) -> Iterator[Source]:
    with agent_folder() as folder:
        agent = Agent(s3.url(s3_bucket), folder)
        snapstore.init_store(agent.url).close()
        gated = agent.at(s3.url(s3_bucket, endpoint=gate.proxy.endpoint))
        yield Source(living_tree, agent, gated)


def capture_stuck(source: Source, gate: Gate, *options: str) -> subprocess.Popen[str]:
    """Capture up to where the store does not take what it is sent; the tree stands still."""
    gate.closed = True
    pid = str(source.tree.pid)
    process = source.gated.start("capture", "tree", "--pid", pid, *options)
    gate.await_held(process)
    return process


def assert_unharmed(source: Source) -> None:
    source.tree.check()
    source.agent.fails("preflight", "tree", code=3)


@pytest.mark.parametrize(
    ("victim", "options"),
    [("agent", ("--stop",)), ("snapagent-super", ()), ("snapagent-keep", ("--stop",))],
)
def test_killed_in_a_capture(
    source: Source, gate: Gate, victim: str, options: tuple[str, ...]
) -> None:
    """Goal: the source goes on, nobody has the name, nothing is left."""
    with source.agent.nothing_left():
        process = capture_stuck(source, gate, *options)
        if victim == "agent":
            killed(process)
        else:
            os.kill(source.agent.process_named(victim), signal.SIGKILL)
            # It goes on before the store is given up.
            source.tree.check()
            gate.open()
            assert KILLED[victim] in failed(process, code=1)["message"]
        assert_unharmed(source)


def test_capture_interrupted(source: Source, gate: Gate) -> None:
    """Goal: the same for SIGTERM, with status 130."""
    with source.agent.nothing_left():
        process = capture_stuck(source, gate)
        process.send_signal(signal.SIGTERM)
        source.tree.check()
        gate.open()
        assert failed(process, code=130)["code"] == "Interrupted"
        assert_unharmed(source)


def test_captured_twice_at_once(source: Source, gate: Gate) -> None:
    """Goal: the second is told of the first, which goes on."""
    with source.agent.nothing_left():
        process = capture_stuck(source, gate)
        pid = str(source.tree.pid)
        second = source.agent.fails("capture", "other", "--pid", pid, code=6)
        assert second["code"] == "CaptureRunning"
        gate.open()
        succeeded(process)
        source.tree.check()


def test_killed_criu_is_told(source: Source, gate: Gate) -> None:
    """Goal: who kills CRIU is told what it may have done; the name is nobody's.

    CRIU waits in its script for the commit then, so that the tree has nothing left of it.
    """
    with source.agent.nothing_left():
        process = capture_stuck(source, gate)
        os.kill(source.agent.process_named("ld.so"), signal.SIGKILL)
        gate.open()
        error = failed(process, code=1)
        assert "criu dump was killed by signal 9" in error["message"]
        assert "look at the source" in error["next_step"]
