"""Shows of restores by one program that stays: nothing grows, and what was learnt is used."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapstore
from snapagent.control import Control, State
from snapagent.linux import processes
from snapagent.restore import Restoration, RestoreRequest
from snapagent.supervision import Place
from snapstore import Store, StoreOptions
from snapstore.options import MEMORY_BYTES_MIN
from snapstore.units import MIB, PAGE_BYTES
from tests.support.agent import Agent
from tests.support.network_locks import without_network_locks
from tests.support.processes import open_fds
from tests.support.s3_proxy import Proxy
from tests.support.supervised import has_ended, inside_network
from tests.support.tree import ProcessTree, TreeSizes
from tests.support.waiting import wait_until
from tools import seaweed
from tools.live_process import LiveProcess

pytestmark = [pytest.mark.criu, pytest.mark.slow]

FRESH = Place(network="fresh", pids="fresh")
RESTORES = 50
WARM_UP = 25
"""Until then the allocator may still take more arenas for threads that come and go."""

GROWTH_BYTES_MAX = 8 * MIB
"""Of the rest, some ten MiB each: had each kept a twentieth of that, it would be more."""

BLOCKS = 4
SLOW_S = 0.1


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def restore_check_and_kill(agent: Agent, store: Store, process: LiveProcess, memory: str) -> None:
    request = RestoreRequest(name="one", place=FRESH)
    with Restoration(store, request, agent.config) as restoration:
        restoration.start()
        restoration.wait_filled()
        root = restoration.release().root_pid
    state = processes.read_state(root)
    assert state is not None
    try:
        assert inside_network(root, process.memory_hash) == memory
    finally:
        os.kill(root, signal.SIGKILL)
    # The init of its namespace is its parent, and ends with the last process.
    wait_until(has_ended(state.parent), "the end of what was restored")


def test_fifty_restores_leave_nothing(agent: Agent, work_dir: Path) -> None:
    home = work_dir / "home"
    home.mkdir()
    with without_network_locks(), LiveProcess(home, size_mib=2) as process:
        memory = process.memory_hash()
        agent.run("capture", "one", "--pid", str(process.pid), "--stop")
        process.reap()
        options = StoreOptions(memory_bytes=MEMORY_BYTES_MIN)
        with agent.nothing_left(home), snapstore.open_store(agent.url, options) as store:
            for number in range(RESTORES):
                restore_check_and_kill(agent, store, process, memory)
                if number == WARM_UP:
                    before = (resident_bytes(), open_fds(), threading.active_count())
            # The last threads of the last restore may be about to end.
            wait_until(
                lambda: open_fds() <= before[1] and threading.active_count() <= before[2],
                "no more descriptors and threads than before",
            )
            assert resident_bytes() - before[0] < GROWTH_BYTES_MAX


def test_who_is_in_releasing_cannot_be_cancelled(agent: Agent, work_dir: Path) -> None:
    """Goal: there is no moment in which a restore is cancelled that has said `releasing`.

    Method: cancel in the very moment in which it says so.
    """
    home = work_dir / "home"
    home.mkdir()
    told: list[State] = []

    def cancel(state: State) -> None:
        told.append(state)
        if state == "releasing":
            assert not control.cancel()

    control = Control(cancel)
    with without_network_locks(), LiveProcess(home, size_mib=2) as process:
        memory = process.memory_hash()
        agent.run("capture", "one", "--pid", str(process.pid), "--stop")
        process.reap()
        request = RestoreRequest(name="one", place=FRESH)
        with (
            snapstore.open_store(agent.url) as store,
            Restoration(store, request, agent.config, control=control) as restoration,
        ):
            root = restoration.run().root_pid
        try:
            assert told[-1] == "releasing"
            assert inside_network(root, process.memory_hash) == memory
        finally:
            os.kill(root, signal.SIGKILL)


# -- hints ----------------------------------------------------------------------------------------


@pytest.fixture
def big_tree(work_dir: Path) -> Iterator[ProcessTree]:
    """Start a tree of whose memory a check of some blocks touches a small part."""
    home = work_dir / "tree"
    home.mkdir()
    sizes = TreeSizes(first_bytes=12 * MIB, bytes=12 * MIB)
    with without_network_locks(), ProcessTree(home, sizes) as tree:
        yield tree


@pytest.mark.s3
def test_a_recorded_order_saves_faults(
    s3_agent: Agent, s3: seaweed.S3Server, s3_bucket: str, big_tree: ProcessTree
) -> None:
    """Goal: with the hint, what was touched after one restore is there before the next one asks.

    Method: a tree that chooses its blocks by random numbers chooses the same ones in each of its
    lives. Record while it verifies some; then, from a slow store, wait until as many bytes as were
    recorded are filled, and let it verify the same ones.
    """
    agent, tree = s3_agent, big_tree
    agent.capture_and_stop("tree", tree.pid, tree.processes())
    with snapstore.open_store(agent.url) as store:
        request = RestoreRequest(name="tree", place=FRESH, record_s=0.0)
        with Restoration(store, request, agent.config) as restoration:
            restoration.start()
            faults = restoration._lazy.stats.faults
            tree.check(blocks=BLOCKS)
            without = restoration._lazy.stats.faults - faults
            recorded = sum(run.page_count for run in restoration._lazy.recorded_order) * PAGE_BYTES
            restoration.record(0.0)
            restoration.wait_filled()
            restoration.release()
        tree.end()
    with Proxy(s3.endpoint).running() as proxy:
        url = s3.url(s3_bucket, endpoint=proxy.endpoint)
        with snapstore.open_store(url, StoreOptions(threads=1)) as store:
            request = RestoreRequest(name="tree", place=FRESH)
            with Restoration(store, request, agent.config) as restoration:
                proxy.delay_s = SLOW_S
                restoration.start()
                lazy = restoration._lazy
                wait_until(lambda: lazy.stats.fill_bytes >= recorded, "the recorded pages")
                total = lazy.stats
                tree.check(blocks=BLOCKS)
                with_hint = lazy.stats.faults - total.faults
                proxy.delay_s = 0
                restoration.wait_filled()
                done = restoration.release().lazy
            assert done.fill_bytes > total.fill_bytes, "all was filled before it was asked"
            tree.end()
    assert with_hint < without / 2
