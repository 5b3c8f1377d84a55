"""SIGKILL of the daemon in every state of captures and restores: the next start cleans up.

Method: hold the work in a state from outside, by a store that does not answer, by a CRIU that
waits, or by a helper process that is stopped; kill; start the next daemon; look for what is left.
"""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import snapstore
from snapagent.control import CAPTURE_STATES, ENDED, RESTORE_STATES
from tests.support.agent import AGENT_S_MAX, Agent, agent_folder, failed
from tests.support.agent import FRESH as FRESH_OPTIONS
from tests.support.daemon import held_criu
from tests.support.held_work import CANCELLED, CAPTURE, CASES, HELD, RESTORE, HeldWork, in_filling
from tests.support.network_locks import without_network_locks
from tests.support.processes import await_free_ids, stop_process
from tests.support.s3_proxy import Proxy
from tests.support.tree import ProcessTree
from tests.support.waiting import wait_until
from tools import seaweed
from tools.live_process import Criu

pytestmark = [pytest.mark.criu, pytest.mark.s3, pytest.mark.slow]


@dataclass
class World(HeldWork):
    """A tree that lives, and one that is stored."""

    tree: ProcessTree
    stored: ProcessTree

    def restored(self) -> list[int]:
        """Return what was restored and lives."""
        return self.stored.processes()

    def end_restored(self) -> None:
        """End it, and its namespace with it."""
        pids = self.restored()
        self.stored.end()
        await_free_ids(pids)


@dataclass(frozen=True)
class Trees:
    """Two trees, in two folders, since a restored one takes over the sockets in its own."""

    living: ProcessTree
    stored: ProcessTree
    bucket: str


@pytest.fixture(scope="module")
def trees(
    criu: Criu, s3: seaweed.S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trees]:
    """Start a tree, and capture another one to its end, once for all tests here."""
    homes = [tmp_path_factory.mktemp("daemon") / name for name in ("living", "stored")]
    for home in homes:
        home.mkdir()
    with without_network_locks(), s3.bucket() as bucket, agent_folder() as folder:
        agent = Agent(s3.url(bucket), folder)
        snapstore.init_store(agent.url).close()
        with ProcessTree(homes[0]) as living, ProcessTree(homes[1]) as stored:
            agent.capture_and_stop("tree", stored.pid, stored.processes())
            yield Trees(living, stored, bucket)


@pytest.fixture
def world(trees: Trees, criu: Criu, s3: seaweed.S3Server) -> Iterator[World]:
    with (
        Proxy(s3.endpoint).running() as proxy,
        agent_folder() as folder,
        held_criu(criu.program) as held,
    ):
        agent = Agent(s3.url(trees.bucket, endpoint=proxy.endpoint), folder)
        pid = trees.living.pid
        yield World(agent, proxy, held, pid, tree=trees.living, stored=trees.stored)
    trees.stored.end()


def test_all_states_are_here() -> None:
    assert set(HELD[CAPTURE]) == set(CAPTURE_STATES) - ENDED
    assert set(HELD[RESTORE]) == set(RESTORE_STATES) - ENDED


def assert_unharmed(world: World, target: str, *, released: bool = False) -> None:
    """The source goes on and verifies itself; nothing restored is left, or all of it lives."""
    assert world.tree.wrong_memory() == ""
    if released and world.restored():
        world.end_restored()
    wait_until(lambda: not world.restored(), "nothing restored is left")
    assert world.stored.wrong_memory() == ""
    if target == CAPTURE:
        world.tree.check()


@pytest.mark.parametrize(("target", "state"), CASES)
def test_killed(world: World, target: str, state: str) -> None:
    """Goal: in each state, nothing is left, the source goes on, and the next start tells of it."""
    config = "jobs_at_once = 1\n" if state == "queued" else ""
    with world.agent.nothing_left():
        with world.daemon(config) as daemon, HELD[target][state](world, daemon, target) as job:
            daemon.await_state(job, state)
            daemon.kill()
        world.open()
        with world.daemon() as after:
            found = after.get("/v1/status")["found_at_start"]
            assert job.rpartition("/")[2] in found["jobs"]
            assert found["stale_socket"]
            told = after.get(job)
            assert [step["state"] for step in told["steps"]][-2:] == [state, "interrupted"]
            assert told["error"]["retryable"]
            entries = {entry["id"]: entry for entry in after.get("/v1/history")["entries"]}
            # Of what has not begun there is no entry.
            if state not in {"queued", "preflight"}:
                assert entries[told["id"]]["result"] == "interrupted"
            said = after.stop()
            assert f"the agent was killed in {state}" in said
        assert_unharmed(world, target, released=state == "releasing")
        assert not list((world.agent.folder / "state" / "jobs").iterdir())


@pytest.mark.parametrize(("target", "state"), CANCELLED)
def test_cancelled(world: World, target: str, state: str) -> None:
    """Goal: in each state, cancelling really ends it: the source goes on, the tree is ended."""
    config = "jobs_at_once = 1\n" if state == "queued" else ""
    with world.agent.nothing_left(), world.daemon(config) as daemon:
        with HELD[target][state](world, daemon, target) as job:
            daemon.await_state(job, state)
            assert daemon.ask("DELETE", job).status == 200
            if state in {"preflight", "preparing", "committing"}:
                # The store is asked: it is cancelled when it answers or is given up.
                assert daemon.get(job)["cancelling"]
                # But nobody stands still until then.
                world.tree.check()
                world.open()
        if state in {"queued", "preflight"}:
            world.open()
        ended = daemon.await_end(job)
        assert ended["state"] == "cancelled", ended
        assert ended["error"]["exit_code"] == 130
        for other in daemon.get(RESTORE)["restores"]:
            daemon.ask("DELETE", f"{RESTORE}/{other['id']}")
        world.open()
        assert_unharmed(world, target)


def test_stopped_while_filling(world: World) -> None:
    """Goal: SIGTERM ends a restore that is not whole when its time is up; exit code 0."""
    with world.agent.nothing_left(), world.daemon("stop_s = 0.1\n") as daemon:
        with in_filling(world, daemon, RESTORE):
            daemon.stop()
        assert_unharmed(world, RESTORE)


def test_commands_ask_the_daemon(world: World) -> None:
    """Goal: captures and restores by commands are the daemon's, with the same output.

    Method: compare the keys of what both print; look for the job in the daemon.
    """
    agent = world.agent
    with agent.nothing_left(), world.daemon() as daemon:
        captured = agent.run("capture", "mine", "--pid", str(world.tree.pid))
        restored = agent.run("restore", "tree", *FRESH_OPTIONS)
        world.stored.check()
        world.end_restored()
        again = agent.run("restore", "tree", *FRESH_OPTIONS, "--no-daemon")
        world.end_restored()
        assert set(restored) == set(again)
        assert restored["snapshot"] == again["snapshot"]
        (job,) = daemon.get(CAPTURE)["captures"]
        assert job["result"] == captured
        stored = job["progress"]
        assert stored["total_bytes"] == stored["done_bytes"] > captured["page_bytes"]
        assert not stored["total_is_estimate"]
        (job,) = daemon.get(RESTORE)["restores"]
        assert job["result"] == restored
        states = [step["state"] for step in job["steps"]]
        assert states == [
            "queued",
            "preflight",
            "preparing",
            "restoring",
            "filling",
            "releasing",
            "done",
        ]
        assert 'phase="first_answer"' in daemon.ask("GET", "/v1/metrics").body.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_interrupted(world: World, number: signal.Signals) -> None:
    """Goal: Ctrl-C of a command that asked the daemon cancels the restore; 130."""

    with world.agent.nothing_left(), world.daemon() as daemon:
        command = world.agent.start(
            "restore", "tree", "--record", "1000", "--pids", "fresh", "--network", "fresh"
        )
        wait_until(lambda: bool(daemon.get(RESTORE)["restores"]), "a job")
        job = f"{RESTORE}/{daemon.get(RESTORE)['restores'][0]['id']}"
        daemon.await_state(job, "filling")
        command.send_signal(number)
        assert failed(command, code=130)["code"] == "Interrupted"
        assert daemon.state(job) == "cancelled"
        assert_unharmed(world, RESTORE)


def test_command_interrupted_too_late(world: World) -> None:
    """Goal: Ctrl-C while a restore is released is no "interrupted": its processes go on.

    Method: stop the supervisor, so that the daemon waits for it in `releasing`.
    """
    with world.agent.nothing_left(), world.daemon() as daemon:
        command = world.agent.start("restore", "tree", "--record", "2", *FRESH_OPTIONS)
        wait_until(lambda: bool(daemon.get(RESTORE)["restores"]), "a job")
        job = f"{RESTORE}/{daemon.get(RESTORE)['restores'][0]['id']}"
        daemon.await_state(job, "filling")
        supervisor = world.agent.process_named("snapagent-super")
        stop_process(supervisor)
        try:
            daemon.await_state(job, "releasing")
            command.send_signal(signal.SIGINT)
            assert command.stderr is not None
            assert any("too late" in line for line in command.stderr)
        finally:
            os.kill(supervisor, signal.SIGCONT)
        out, err = command.communicate(timeout=AGENT_S_MAX)
        assert command.returncode == 0, err
        assert json.loads(out)["snapshot"]
        assert daemon.state(job) == "done"
        world.stored.check()
        world.end_restored()
