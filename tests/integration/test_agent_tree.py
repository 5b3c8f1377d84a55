"""Shows of captures and restores of the tree of four, by the program."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import snapstore
from snapagent.linux import namespaces
from snapstore.units import GIB, MIB, parse_bytes
from tests.support.agent import AGENT_S_MAX, FRESH, Agent, succeeded
from tests.support.daemon import running_daemon
from tests.support.network_locks import without_network_locks
from tests.support.placeholder import placeholder_container
from tests.support.processes import end_processes_in, stop_process
from tests.support.s3_proxy import Proxy
from tests.support.supervised import inside_network
from tests.support.tree import MEMBERS, ProcessTree, TreeSizes
from tests.support.waiting import wait_until
from tools import seaweed
from tools.live_process import LiveProcess

pytestmark = [pytest.mark.criu, pytest.mark.slow]

SLOW_S = 0.05
READER = "snapagent-read"


@pytest.fixture(params=["agent", pytest.param("s3_agent", marks=pytest.mark.s3)])
def any_agent(request: pytest.FixtureRequest) -> Agent:
    """Return the program with each kind of store in turn."""
    found: Agent = request.getfixturevalue(request.param)
    return found


def restored(agent: Agent, tree: ProcessTree, *options: str) -> list[int]:
    """Restore the tree, let it verify itself, and return its processes as seen from here."""
    document = agent.run("restore", "tree", *options)
    found = [member["pid"] for member in tree.check()["members"]]
    assert sorted(document["pids"]) == sorted(found)
    pids = tree.processes()
    assert document["root_pid"] in pids
    return pids


def test_tree_comes_back_every_way(any_agent: Agent, process_tree: ProcessTree) -> None:
    """Goal: captures harm nothing, and restores bring everything back, five times of ten.

    Method: capture the tree, which goes on; capture it to its end and restore it here, lazily;
    capture what was restored and restore that here, eagerly; then into fresh namespaces, one life
    after the other. It verifies itself in each.
    """
    agent, tree = any_agent, process_tree
    ids = tree.processes()
    with agent.nothing_left(tree.home):
        before = tree.check()["members"]
        first = agent.run("capture", "tree", "--pid", str(tree.pid))
        assert not first["stopped"]
        assert 0 < first["frozen_s"] < first["total_s"]
        after = tree.check()["members"]
        assert all(new["ticks"] > old["ticks"] for old, new in zip(before, after, strict=True))
        agent.capture_and_stop("tree", tree.pid, ids)
        assert restored(agent, tree) == ids
        tree.ask("touch", bytes=100_000)
        second = agent.capture_and_stop("tree", tree.pid, ids)
        assert second["snapshot"] != first["snapshot"]
        assert restored(agent, tree, "--eager") == ids
        tree.end()
        for options in ((), ("--eager",), ()):
            assert not set(restored(agent, tree, *FRESH, *options)) & set(ids)
            tree.end()


def test_other_processes_read_its_memory(agent: Agent, process_tree: ProcessTree) -> None:
    """Goal: with processes of the daemon that read, the same; also when these have been killed."""
    tree = process_tree
    with without_network_locks():
        agent.capture_and_stop("tree", tree.pid, tree.processes())
    with agent.nothing_left(tree.home), running_daemon(agent, "readers = 2\n") as daemon:
        assert daemon.get("/v1/status")["readers"] == 2
        for options in ((), ("--eager",)):
            restored(agent, tree, *FRESH, *options)
            tree.end()
            killed = agent.processes_named(READER)
            assert len(killed) == 2
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        restored(agent, tree, *FRESH)
        tree.end()
        assert len(set(agent.processes_named(READER)) - set(killed)) == 2
        assert daemon.get("/v1/status")["readers"] == 2


def test_cancelled_while_those_that_read_hang(agent: Agent, process_tree: ProcessTree) -> None:
    """Goal: a restore that waits for processes that hang can be cancelled, and ends them."""
    tree = process_tree
    with without_network_locks():
        agent.capture_and_stop("tree", tree.pid, tree.processes())
    with agent.nothing_left(tree.home), running_daemon(agent, "readers = 2\n") as daemon:
        wait_until(lambda: len(agent.processes_named(READER)) == 2, "both have their name")
        hung = agent.processes_named(READER)
        for pid in hung:
            stop_process(pid)
        job = daemon.begin("/v1/restores", name="tree", network="fresh", pids="fresh", eager=True)
        wait_until(lambda: daemon.get("/v1/status")["readers"] == 0, "both are asked")
        assert daemon.ask("DELETE", job).status == 200
        assert daemon.await_end(job)["state"] == "cancelled"
        wait_until(lambda: not set(hung) & set(agent.processes()), "they are ended", seconds=10)
    assert tree.wrong_memory() == ""


def test_a_total_is_expected(agent: Agent, process_tree: ProcessTree) -> None:
    """Goal: how much there is to store is told from the start, and not far off."""
    process = agent.start("capture", "tree", "--pid", str(process_tree.pid))
    out, err = process.communicate(timeout=AGENT_S_MAX)
    assert process.returncode == 0, err
    (line,) = [line for line in err.splitlines() if line.startswith("store: about ")]
    expected = parse_bytes(line.removeprefix("store: about ").replace(" ", ""))
    assert 0.5 < expected / json.loads(out)["page_bytes"] < 2


CHANGES = [
    ("discard", {}),
    ("move", {}),
    ("grow", {"bytes": MIB}),
    ("touch", {"bytes": 100_000}),
    # The child looks at all of it, so that little is missing afterwards.
    ("fork", {}),
    ("fork", {}),
    ("release", {}),
]


@pytest.mark.s3
def test_tree_changes_while_its_memory_is_filled(
    s3_agent: Agent, s3: seaweed.S3Server, s3_bucket: str, work_dir: Path
) -> None:
    """Goal: it may fork, drop, move, map and unmap memory that is not there yet.

    Method: read from a store that takes its time for everything, with one thread, and so much that
    the tree has long answered when all is there.
    """
    home = work_dir / "tree"
    home.mkdir()
    sizes = TreeSizes(first_bytes=48 * MIB)
    with without_network_locks(), ProcessTree(home, sizes) as tree:
        s3_agent.capture_and_stop("tree", tree.pid, tree.processes())
        with s3_agent.nothing_left(home), Proxy(s3.endpoint).running() as proxy:
            proxy.delay_s = SLOW_S
            slow = s3_agent.at(s3.url(s3_bucket, endpoint=proxy.endpoint))
            process = slow.start("restore", "tree", *FRESH, "--threads", "1")
            wait_until(lambda: process.poll() is not None or tree.answers(), "the tree listens")
            for change, details in CHANGES:
                tree.ask(change, **details)
            document = succeeded(process)
            assert document["lazy"]["events"] >= len(CHANGES)
            assert document["lazy"]["tasks"] > MEMBERS
            tree.check()
            tree.end()


@pytest.mark.parametrize("count", [2, 4])
def test_restores_of_one_snapshot_at_once(agent: Agent, work_dir: Path, count: int) -> None:
    """Each in namespaces of its own, where it has the same ids and the same port."""
    home = work_dir / "home"
    home.mkdir()
    with without_network_locks(), LiveProcess(home, size_mib=4) as process:
        memory = process.memory_hash()
        agent.run("capture", "one", "--pid", str(process.pid), "--stop")
        process.reap()
        with agent.nothing_left():
            restore_at_once(agent, process, home, memory, count)


def test_restores_at_once_through_the_cache(
    agent: Agent, work_dir: Path, memory_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: restores of a node share its cache, and what is there does not come from the store.

    Method: two restores at once, and two more when the store has no packs any more.
    """
    cache = work_dir / "cache"
    snapstore.NodeCache.init(
        cache, budget_bytes=GIB, memory=memory_directory, memory_budget_bytes=GIB
    ).close()
    monkeypatch.setenv("SNAPSTORE_CACHE", str(cache))
    home = work_dir / "home"
    home.mkdir()
    with without_network_locks(), LiveProcess(home, size_mib=4) as process:
        memory = process.memory_hash()
        agent.run("capture", "one", "--pid", str(process.pid), "--stop")
        process.reap()
        with agent.nothing_left():
            restore_at_once(agent, process, home, memory, 2)
            with snapstore.NodeCache(cache) as opened:
                assert opened.stats().decoded.used_bytes > 4 * MIB
            shutil.rmtree(Path(agent.url.removeprefix("file://"), "packs"))
            restore_at_once(agent, process, home, memory, 2)


def restore_at_once(
    agent: Agent, process: LiveProcess, home: Path, memory: str, count: int
) -> None:
    started = [agent.start("restore", "one", *FRESH) for _ in range(count)]
    roots = [succeeded(one)["root_pid"] for one in started]
    try:
        for root in roots:
            assert inside_network(root, process.memory_hash) == memory
    finally:
        end_processes_in(home)
    assert len(set(roots)) == count


def test_tree_moves_into_a_container_and_out(
    agent: Agent, process_tree: ProcessTree, work_dir: Path
) -> None:
    """Goal: restored into the namespaces of a placeholder, and captured again from there."""
    tree = process_tree
    agent.capture_and_stop("tree", tree.pid, tree.processes())
    with (
        agent.nothing_left(tree.home),
        placeholder_container(work_dir / "container", also=[tree.home]) as container,
    ):
        into = ("--into-pid", str(container.pid))
        root = agent.run("restore", "tree", *into)["root_pid"]
        tree.check()
        for kind in ("mnt", "pid", "net"):
            ours = namespaces.namespace_id(root, kind)
            assert ours == namespaces.namespace_id(container.pid, kind)
        agent.capture_and_stop("tree", root, tree.processes())
        agent.run("restore", "tree", *into, "--eager")
        tree.check()
