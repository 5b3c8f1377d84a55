"""External memory through captures and restores with CRIU: what is where, and what is left."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

import snapstore
from snapagent.capture import CaptureRequest, capture
from snapagent.control import Control
from snapagent.errors import CriuFailed, PreflightFailed
from snapagent.memory.broker import MemoryBroker
from snapagent.precedence import Precedence
from snapstore.errors import BackendError, DigestMismatch
from snapstore.testing.clock import ManualClock
from tests.support.agent import Agent
from tests.support.external import SIZE_MIB, ExternalWorkload, broker_process
from tests.support.external_lives import NAME, bring_back, restoring, take
from tests.support.network_locks import without_network_locks
from tests.support.peers import on_thread
from tests.support.processes import open_fds
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from concurrent.futures import Future

pytestmark = [pytest.mark.criu, pytest.mark.slow]

MIB = 1 << 20


def test_the_source_goes_on_and_the_copy_is_the_same(
    agent: Agent, broker: MemoryBroker, workload: ExternalWorkload, tmp_path: Path
) -> None:
    """Goal: arrays are the same before and after, in the source and in what was restored.

    Method: capture a living process; its source gets its memory back. Kill it, restore it in fresh
    namespaces twice, the second time from a capture of the first copy, which has changed.
    """
    before = workload.ask("digest")
    assert workload.ask("release") == "released"
    result = take(agent, broker, workload.pid)
    assert workload.ask("resume") == "resumed"
    assert workload.ask("digest") == before
    assert result.external_bytes >= SIZE_MIB * MIB
    assert result.page_bytes < 40 * MIB
    assert_stored_as_files(agent, tmp_path)
    assert workload.ask("change") == "changed"
    workload.end()
    wait_until(lambda: not broker.status(), "the memory of the source is freed")

    restored = bring_back(agent, broker)
    assert restored.external_bytes >= (SIZE_MIB // 4 * 3) * MIB
    assert workload.ask("buffer").startswith("MemoryReleased")
    assert workload.ask("resume") == "resumed"
    assert workload.ask("digest") == before
    assert workload.ask("fork") == "child 0"
    assert workload.ask("change") == "changed"
    changed = workload.ask("digest")
    assert workload.ask("release") == "released"
    # It is the last of its pid namespace, whose end must not take CRIU along.
    take(agent, broker, restored.root_pid, "test/external:v2", stop=True)
    assert not workload.pids
    workload.end()

    bring_back(agent, broker, "test/external:v2", eager=True)
    assert workload.ask("resume") == "resumed"
    assert workload.ask("digest") == changed
    workload.end()
    wait_until(lambda: not broker.status(), "all memory is freed")


def assert_stored_as_files(agent: Agent, folder: Path) -> None:
    with snapstore.open_store(agent.url) as store:
        store.pull(NAME, folder / "pulled")
    sizes = [path.stat().st_size for path in (folder / "pulled" / "external").iterdir()]
    assert sum(sizes) >= SIZE_MIB * MIB


def test_touching_it_before_it_is_back_is_a_clean_death(
    agent: Agent, broker: MemoryBroker, workload: ExternalWorkload
) -> None:
    """Never wrong data: the process dies of SIGSEGV, here as in a copy, and its memory is freed."""
    workload.ask("release")
    take(agent, broker, workload.pid)
    assert workload.ask("touch") == ""
    assert workload.exit_code() == -signal.SIGSEGV
    workload.end()
    with agent.nothing_left(workload.home):
        bring_back(agent, broker)
        assert broker.status()[0].state == "filled"
        assert workload.ask("touch") == ""
        wait_until(lambda: not workload.pids, "the copy is dead")
        wait_until(lambda: not broker.status(), "its memory is freed")
        (workload.home / "control").unlink()


def test_what_is_not_released_is_not_captured(
    agent: Agent, broker: MemoryBroker, workload: ExternalWorkload
) -> None:
    before = workload.ask("digest")
    with pytest.raises(PreflightFailed, match="has external memory mapped") as caught:
        take(agent, broker, workload.pid)
    assert "release" in (caught.value.next_step or "")
    assert workload.ask("digest") == before


def test_a_restore_without_a_broker_is_refused(
    agent: Agent, broker: MemoryBroker, workload: ExternalWorkload
) -> None:
    workload.ask("release")
    take(agent, broker, workload.pid)
    workload.end()
    with agent.nothing_left(workload.home), pytest.raises(PreflightFailed, match="memory broker"):
        bring_back(agent, None)


def test_a_failed_capture_leaves_the_source_its_memory(
    agent: Agent, broker: MemoryBroker, workload: ExternalWorkload
) -> None:
    """Goal: the source maps its memory again, whatever happens to a capture of it.

    Method: let the store lose its place for packs, so that nothing can be stored.
    """
    before = workload.ask("digest")
    workload.ask("release")
    packs = Path(agent.url.removeprefix("file://"), "packs")
    packs.write_bytes(b"")
    with pytest.raises(BackendError):
        take(agent, broker, workload.pid)
    assert [one.state for one in broker.status()] == ["released"]
    assert workload.ask("resume") == "resumed"
    assert workload.ask("digest") == before


def test_a_resume_in_the_middle_is_named(
    agent: Agent, broker: MemoryBroker, workload: ExternalWorkload
) -> None:
    """Goal: who resumes while CRIU takes the tree is told that, not only what CRIU says of it."""
    before = workload.ask("digest")
    workload.ask("release")
    resuming: list[Future[str]] = []

    def resume(state: str) -> None:
        if state == "dumping":
            resuming.append(on_thread(lambda: workload.ask("resume")))
            wait_until(lambda: is_connected(broker.path), "it waits for its memory")

    request = CaptureRequest(pid=workload.pid, name=NAME, broker=broker)
    with snapstore.open_store(agent.url) as store, pytest.raises(CriuFailed) as caught:
        capture(store, request, agent.config, control=Control(resume))
    assert f"process {workload.pid} asked for its external memory back" in str(caught.value)
    assert "capture is over" in (caught.value.next_step or "")
    assert any("External socket" in note for note in caught.value.__notes__)
    assert resuming[0].result(60) == "resumed"
    assert workload.ask("digest") == before


def is_connected(path: Path) -> bool:
    """Tell whether somebody has a connection at a socket; the listening one has state 01."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
    return any(line.endswith(f" {path}") and line.split()[5] == "03" for line in lines)


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
def test_damage_in_a_pack_ends_the_restore(
    agent: Agent, broker: MemoryBroker, workload: ExternalWorkload, *, eager: bool
) -> None:
    """Goal: no workload gets memory that is not right, and nothing is left of the attempt.

    Method: flip a bit in the middle of the largest pack, which holds external memory.
    """
    workload.ask("release")
    take(agent, broker, workload.pid)
    workload.end()
    packs = Path(agent.url.removeprefix("file://"), "packs").rglob("*")
    largest = max((path for path in packs if path.is_file()), key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size // 2)
    before = open_fds()
    with agent.nothing_left(workload.home), pytest.raises(DigestMismatch):
        bring_back(agent, broker, eager=eager)
    assert not broker.status()
    wait_until(lambda: open_fds() <= before, "all regions are closed")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_killed_copy_frees_its_memory(
    agent: Agent, broker: MemoryBroker, workload: ExternalWorkload
) -> None:
    """In every state: filled, and mapped again."""
    workload.ask("release")
    take(agent, broker, workload.pid)
    for resumes in (False, True):
        workload.end()
        bring_back(agent, broker)
        if resumes:
            assert workload.ask("resume") == "resumed"
            assert [one.state for one in broker.status()] == ["shared"]
    workload.end()
    wait_until(lambda: not broker.status(), "its memory is freed")


def test_a_killed_broker_takes_nothing_that_is_mapped(agent: Agent, short_dir: Path) -> None:
    """Goal: a workload outlives the broker, and the next one can capture it.

    Method: kill a broker in a process of its own, start another one at the same path; then kill
    one while the memory is released, and look for it in the next.
    """
    home = short_dir / "home"
    home.mkdir()
    path = short_dir / "memory.sock"
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_network_locks())
        first = stack.enter_context(broker_process(path))
        workload = stack.enter_context(ExternalWorkload(home, path))
        before = workload.ask("digest")
        first.kill()
        assert workload.ask("digest") == before
        assert workload.ask("release").startswith("BrokerUnreachable")
        assert workload.ask("digest") == before
        with MemoryBroker(path) as second:
            assert workload.ask("release") == "released"
            take(agent, second, workload.pid)
            assert workload.ask("resume") == "resumed"
            assert workload.ask("digest") == before
            workload.ask("release")
        with broker_process(path) as third:
            assert workload.ask("resume") == "resumed"
            assert workload.ask("release") == "released"
            third.kill()
        with MemoryBroker(path) as last:
            assert [one.state for one in last.status()] == ["released"]
            take(agent, last, workload.pid)
            assert workload.ask("resume") == "resumed"
            assert workload.ask("digest") == before


def test_an_agent_that_is_killed_in_a_capture_takes_no_memory(
    agent: Agent, short_dir: Path
) -> None:
    """Goal: the source goes on with all of its memory, although the agent alone had it.

    Method: kill an agent with its broker as soon as its capture has stored something; the next
    broker gives the memory back.
    """
    home = short_dir / "home"
    home.mkdir()
    path = short_dir / "memory.sock"
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_network_locks())
        first = stack.enter_context(broker_process(path))
        workload = stack.enter_context(ExternalWorkload(home, path))
        before = workload.ask("digest")
        first.kill()
        arguments = [str(path), agent.url, str(agent.folder), str(workload.pid), NAME]
        doomed = stack.enter_context(
            subprocess.Popen(  # noqa: S603 - this interpreter
                [sys.executable, "-m", "tests.support.programs.memory_agent", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert doomed.stdin is not None
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == b"ready\n"
        assert workload.ask("release") == "released"
        doomed.stdin.write(b"go on\n")
        doomed.stdin.flush()
        assert doomed.stdout.readline() == b"capturing\n"
        doomed.kill()
        doomed.wait()
        with MemoryBroker(path):
            assert workload.ask("resume") == "resumed"
            assert workload.ask("digest") == before
    with snapstore.open_store(agent.url) as store, pytest.raises(snapstore.SnapError):
        store.snapshot(NAME)


class Counted(Precedence):
    """Counts how often it is taken; time stands still for it, so that nobody is let through."""

    def __init__(self) -> None:
        super().__init__(clock=ManualClock())
        self.count = 0

    @override
    def taken(self) -> contextlib.AbstractContextManager[None]:
        self.count += 1
        return super().taken()


def test_restores_give_way_to_one_another(
    agent: Agent, broker: MemoryBroker, workload: ExternalWorkload
) -> None:
    """Goal: external memory waits for what processes of other restores need before they run.

    Method: one more restore is played by the test, which has precedence: the processes run, their
    external memory is not touched. Then all goes on. An eager restore takes precedence itself.
    """
    broker.precedence = precedence = Counted()
    workload.ask("release")
    take(agent, broker, workload.pid, stop=True)
    with restoring(agent, broker) as restoration:
        with precedence.taken():
            restoration.start()
            assert [one.state for one in broker.status()] == ["filling"]
        restoration.wait_filled()
        assert restoration.release().external_bytes > 0
    assert precedence.count == 1
    workload.end()
    wait_until(lambda: not broker.status(), "the memory of the copy is freed")
    bring_back(agent, broker, eager=True)
    assert precedence.count == 2
