"""SIGKILL of a daemon with a broker, in every state: workloads have all of their memory again.

Method: as in `test_daemon_kills`. What is captured has released its memory by then, so that the
broker and its holder alone have it; what is restored gets its memory from the broker.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import snapstore
from snapagent.control import CAPTURE_STATES, ENDED, RESTORE_STATES
from tests.support.agent import Agent, Document, agent_folder
from tests.support.daemon import Daemon, held_criu, running_daemon
from tests.support.external import ExternalWorkload
from tests.support.held_work import CAPTURE, CASES, FRESH, HELD, RESTORE, STORED, HeldWork
from tests.support.network_locks import without_network_locks
from tests.support.s3_proxy import Proxy
from tests.support.waiting import wait_until
from tools import seaweed
from tools.live_process import Criu

pytestmark = [pytest.mark.criu, pytest.mark.s3, pytest.mark.slow]

SIZE_MIB = 16


@dataclass(frozen=True)
class StoredWorkload:
    """A workload with external memory that is in a bucket; where it lives and what it had."""

    bucket: str
    folder: Path
    workload: ExternalWorkload
    digest: str

    @property
    def config(self) -> str:
        """All daemons have their brokers where workloads of all lives look for them."""
        return f'broker_socket = "{self.folder}/memory.sock"\n'

    @contextlib.contextmanager
    def living(self, name: str) -> Iterator[ExternalWorkload]:
        """Start another one, which needs a broker."""
        home = self.folder / name
        home.mkdir()
        path = self.folder / "memory.sock"
        with ExternalWorkload(home, path, size_mib=SIZE_MIB) as workload:
            yield workload


@pytest.fixture(scope="module")
def stored(criu: Criu, s3: seaweed.S3Server) -> Iterator[StoredWorkload]:
    """Capture a workload to its end, once for all tests here."""
    with (
        without_network_locks(),
        s3.bucket() as bucket,
        agent_folder() as folder,
        agent_folder() as other,
    ):
        agent = Agent(s3.url(bucket), other)
        snapstore.init_store(agent.url).close()
        unfinished = StoredWorkload(bucket, folder, None, "")  # type: ignore[arg-type]
        with (
            running_daemon(agent, unfinished.config) as daemon,
            unfinished.living("stored") as workload,
        ):
            digest = workload.ask("digest")
            assert workload.ask("release") == "released"
            job = daemon.begin(CAPTURE, name=STORED, pid=workload.pid, stop=True)
            assert_done(daemon.await_end(job))
            workload.end()
            whole = replace(unfinished, workload=workload, digest=digest)
            await_no_memory(daemon)
        yield whole


@pytest.fixture
def work(stored: StoredWorkload, s3: seaweed.S3Server, criu: Criu) -> Iterator[HeldWork]:
    with (
        Proxy(s3.endpoint).running() as proxy,
        agent_folder() as folder,
        held_criu(criu.program) as held,
    ):
        agent = Agent(s3.url(stored.bucket, endpoint=proxy.endpoint), folder)
        yield HeldWork(agent, proxy, held, 0)
    stored.workload.end()


def test_all_states_are_here() -> None:
    assert {state for target, state in CASES if target == CAPTURE} == set(CAPTURE_STATES) - ENDED
    assert {state for target, state in CASES if target == RESTORE} == set(RESTORE_STATES) - ENDED


def assert_done(job: Document) -> None:
    assert job["state"] == "done", job["error"]


def await_no_memory(daemon: Daemon) -> None:
    wait_until(lambda: not daemon.get("/v1/status")["memory"]["processes"], "memory is freed")


def kill_in(work: HeldWork, stored: StoredWorkload, daemon: Daemon, case: tuple[str, str]) -> str:
    """Bring work into a state, kill the daemon there, and return which job it was."""
    target, state = case
    with HELD[target][state](work, daemon, target) as job:
        daemon.await_state(job, state)
        daemon.kill()
    work.open()
    return job


def config_of(stored: StoredWorkload, state: str) -> str:
    return stored.config + ("jobs_at_once = 1\n" if state == "queued" else "")


@pytest.mark.parametrize("state", [state for target, state in CASES if target == CAPTURE])
def test_killed_in_a_capture(work: HeldWork, stored: StoredWorkload, state: str) -> None:
    """Goal: the source maps all of its memory again, with the next daemon, and can be captured."""
    with work.agent.nothing_left(), contextlib.ExitStack() as stack:
        daemon = stack.enter_context(work.daemon(config_of(stored, state)))
        source = stack.enter_context(stored.living(f"source-{state}"))
        work.pid = source.pid
        before = source.ask("digest")
        assert source.ask("release") == "released"
        job = kill_in(work, stored, daemon, (CAPTURE, state))
        after = stack.enter_context(work.daemon(stored.config))
        assert after.get(job)["state"] == "interrupted"
        assert after.get("/v1/status")["memory"]["processes"] == {"released": 1}
        assert source.ask("resume") == "resumed"
        assert source.ask("digest") == before
        assert source.ask("release") == "released"
        again = after.begin(CAPTURE, name="once-more", pid=source.pid)
        assert_done(after.await_end(again))
        assert source.ask("resume") == "resumed"
        assert source.ask("digest") == before
        source.end()
        await_no_memory(after)


@pytest.mark.parametrize("state", [state for target, state in CASES if target == RESTORE])
def test_killed_in_a_restore(work: HeldWork, stored: StoredWorkload, state: str) -> None:
    """Goal: nothing of the tree and its memory is left, or all of it; the next restore is whole."""
    copy = stored.workload
    with work.agent.nothing_left():
        with work.daemon(config_of(stored, state)) as daemon:
            job = kill_in(work, stored, daemon, (RESTORE, state))
        with work.daemon(stored.config) as after:
            assert after.get(job)["state"] == "interrupted"
            if state == "releasing" and copy.pids:
                assert_whole(copy, stored)
            wait_until(lambda: not copy.pids, "nothing restored is left")
            await_no_memory(after)
            again = after.begin(RESTORE, name=STORED, **FRESH)
            assert_done(after.await_end(again))
            assert_whole(copy, stored)
            await_no_memory(after)


@pytest.mark.parametrize("ends", ["killed", "stopped"])
def test_ended_after_a_restore(work: HeldWork, stored: StoredWorkload, ends: str) -> None:
    """Goal: a copy that has not come for its memory yet gets it of the next daemon."""
    copy = stored.workload
    with work.agent.nothing_left():
        with work.daemon(stored.config) as daemon:
            job = daemon.begin(RESTORE, name=STORED, **FRESH)
            assert_done(daemon.await_end(job))
            if ends == "killed":
                daemon.kill()
        assert copy.ask("resume").startswith("BrokerUnreachable")
        with work.daemon(stored.config) as after:
            assert_whole(copy, stored)
            await_no_memory(after)


def test_holder_killed_and_then_the_daemon(work: HeldWork, stored: StoredWorkload) -> None:
    """Goal: what is released outlives both, one after the other.

    Method: kill the holder while a workload has released its memory; once the daemon has another
    one, kill the daemon, and let the workload resume with the next.
    """
    with work.agent.nothing_left(), contextlib.ExitStack() as stack:
        daemon = stack.enter_context(work.daemon(stored.config))
        source = stack.enter_context(stored.living("holder"))
        before = source.ask("digest")
        assert source.ask("release") == "released"
        first = daemon.get("/v1/status")["memory"]["holder_pid"]
        os.kill(first, signal.SIGKILL)

        def is_held() -> bool:
            now = daemon.get("/v1/status")["memory"]["holder_pid"]
            return now not in {None, first}

        wait_until(is_held, "another holder")
        assert daemon.get("/v1/health")["memory_is_held"]
        daemon.kill()
        after = stack.enter_context(work.daemon(stored.config))
        assert source.ask("resume") == "resumed"
        assert source.ask("digest") == before
        source.end()
        await_no_memory(after)


def assert_whole(copy: ExternalWorkload, stored: StoredWorkload) -> None:
    """Let a copy have its memory, look at all of it, and end it."""
    assert copy.ask("resume") == "resumed"
    assert copy.ask("digest") == stored.digest
    copy.end()
