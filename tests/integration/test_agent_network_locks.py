"""Shows that captures leave no network lock behind, except where connections need it."""

import os
import signal
from pathlib import Path

import pytest

from snapagent.linux import processes
from tests.support.agent import Agent, failed
from tests.support.doomed import gate_before
from tests.support.network_locks import network_locks, without_network_locks
from tests.support.placeholder import placeholder_container
from tests.support.processes import await_free_ids, processes_in
from tests.support.supervised import inside_network
from tests.support.tree import ProcessTree
from tools import seaweed
from tools.live_process import LiveProcess

pytestmark = [pytest.mark.criu, pytest.mark.slow]


@pytest.fixture
def home(work_dir: Path) -> Path:
    """Return the folder of the processes."""
    home = work_dir / "home"
    home.mkdir()
    return home


@pytest.mark.parametrize("options", [(), ("--stop",)])
def test_no_connections(agent: Agent, home: Path, options: tuple[str, ...]) -> None:
    """CRIU leaves a table all the same if the processes end; the agent does not."""
    with LiveProcess(home, size_mib=1) as process, agent.nothing_left():
        document = agent.run("capture", "one", "--pid", str(process.pid), *options)
        assert document["network_lock"] is None


def test_connections_are_locked_until_they_live(agent: Agent, process_tree: ProcessTree) -> None:
    """Goal: the lock that is told of is there, under that name, until the tree is.

    Method: capture a tree with connections, which goes on; then to its end. A restore that fails
    does not remove it: the next one needs it still.
    """
    tree = process_tree
    before = network_locks()
    document = agent.run("capture", "tree", "--pid", str(tree.pid))
    assert document["network_lock"] is None
    assert network_locks() == before
    document = agent.capture_and_stop("tree", tree.pid, tree.processes())
    family, name = document["network_lock"].split(" ")
    assert family == "inet"
    assert network_locks() - before == {name}
    kept = tree.home / "kept-0.txt"
    kept.rename(tree.home / "away")
    agent.fails("restore", "tree", "--force", code=1)
    assert name in network_locks()
    (tree.home / "away").rename(kept)
    agent.run("restore", "tree")
    assert network_locks() == before
    tree.check()


def test_in_a_container(agent: Agent, home: Path, work_dir: Path) -> None:
    """The network is that of the processes, which is gone from the agent's sight with them."""
    with (
        LiveProcess(home, size_mib=1) as process,
        placeholder_container(work_dir / "container", also=[home]) as container,
    ):
        agent.run("capture", "one", "--pid", str(process.pid), "--stop")
        process.reap()
        root = agent.run("restore", "one", "--into-pid", str(container.pid))["root_pid"]
        document = agent.run("capture", "one", "--pid", str(root), "--stop")
        assert document["network_lock"] is None
        assert not inside_network(container.pid, network_locks)


@pytest.mark.s3
def test_criu_is_killed(
    s3_agent: Agent, s3: seaweed.S3Server, s3_bucket: str, home: Path, tmp_path: Path
) -> None:
    """Goal: what a CRIU that was killed in a dump has left is removed, though it had connections.

    Method: kill it while the store takes nothing. The tree, in which its code is then, is ended.
    """
    with without_network_locks(), ProcessTree(home) as tree:
        ids = processes_in(home)
        with gate_before(s3.endpoint, tmp_path) as gate, s3_agent.nothing_left():
            gate.closed = True
            gated = s3_agent.at(s3.url(s3_bucket, endpoint=gate.proxy.endpoint))
            before = network_locks()
            process = gated.start("capture", "tree", "--pid", str(tree.pid), "--stop")
            gate.await_held(process)
            assert network_locks() > before
            (criu,) = processes.children(s3_agent.process_named("snapagent-keep"))
            os.kill(criu, signal.SIGKILL)
            gate.open()
            assert "killed by signal 9" in failed(process, code=1)["message"]
            tree.end()
            await_free_ids(ids)
