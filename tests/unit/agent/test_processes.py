"""Who is below whom, and ending all of it."""

# ruff: noqa: S603 - it runs the shells and interpreters that are named here.

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapagent.linux import namespaces, processes
from tests.support.supervised import has_ended
from tests.support.waiting import wait_until

ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[3])}
BUSY_FORKING = """
while true; do (sleep 1000 &) ; sleep 0.01; done
"""


@pytest.fixture
def shell() -> Iterator[subprocess.Popen[bytes]]:
    """Return a shell with two children, one of which has one."""
    script = "sleep 1000 & (sleep 1000 & wait) & wait"
    with subprocess.Popen(["/bin/bash", "-c", script], start_new_session=True) as process:
        wait_until(lambda: len(processes.descendants(process.pid)) == 3, "its children")
        yield process
        # By their session, since they are orphans where the test has ended their parent.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_parents_come_first(shell: subprocess.Popen[bytes]) -> None:
    found = processes.descendants(shell.pid)
    assert set(processes.children(shell.pid)) < set(found)
    for place, pid in enumerate(found):
        state = processes.read_state(pid)
        assert state is not None
        assert state.parent in {shell.pid, *found[:place]}


def test_state_of_a_process_with_a_strange_name(tmp_path: Path) -> None:
    """Goal: the name, which may hold any byte, is not taken for one of the fields behind it."""
    program = tmp_path / ") Z 1 ("
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "1000"]) as process:
        wait_until(lambda: processes.read_state(process.pid) is not None, "its start")
        state = processes.read_state(process.pid)
        assert state is not None
        assert state.parent == os.getpid()
        assert not state.ended
        process.kill()
        process.wait()
        assert processes.read_state(process.pid) is None


@pytest.mark.slow
def test_kills_what_keeps_starting_processes() -> None:
    """Goal: a program that forks all the time, with orphans, is ended; the root itself is not."""
    role = f"""
import os, subprocess, sys
from snapagent.linux import processes
processes.adopt_orphans()
subprocess.Popen(["/bin/bash", "-c", {BUSY_FORKING!r}])
print("started", flush=True)
sys.stdin.readline()
print(processes.kill_descendants(os.getpid(), 20), flush=True)
"""
    command = [sys.executable, "-c", role]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        wait_until(lambda: len(processes.descendants(process.pid)) > 20, "many processes")
        seen = processes.descendants(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"[]\n"
        assert process.wait() == 0
    assert all(has_ended(pid)() for pid in seen)


def test_waiting_for_ends_is_bounded(shell: subprocess.Popen[bytes]) -> None:
    pidfd = os.pidfd_open(shell.pid)
    assert processes.wait_for_ends([pidfd], 0.01) == [pidfd]
    shell.kill()
    assert processes.wait_for_ends([pidfd], 20) == []
    os.close(pidfd)


def test_strays_are_told_by_id_namespace_and_start(shell: subprocess.Popen[bytes]) -> None:
    """Goal: a wrong namespace or a start before protects; a parent among them is enough."""
    found = processes.descendants(shell.pid)
    state = processes.read_state(shell.pid)
    namespace = namespaces.namespace_id(os.getpid(), "pid")
    assert state is not None
    assert namespace is not None
    before = state.started_ticks - 1
    pids = [shell.pid, *found]
    for innocent in (
        processes.Strays(pids, "pid:[1]", before),
        processes.Strays(pids, namespace, state.started_ticks + 1_000_000),
        processes.Strays([2**22], namespace, before),
        # The children without their parent, which is no one that takes in orphans.
        processes.Strays(found, namespace, before),
    ):
        assert processes.kill_strays(innocent, 1) == []
        assert not any(has_ended(pid)() for pid in pids)
    assert processes.kill_strays(processes.Strays(pids, namespace, before), 20) == []
    assert all(has_ended(pid)() for pid in pids)


def test_names_are_cut_to_fit() -> None:
    role = """
from pathlib import Path
from snapagent.linux import processes
processes.name_process("short", "long " * 1000)
print(Path("/proc/self/comm").read_text().strip())
print(len(Path("/proc/self/cmdline").read_bytes()))
"""
    command = [sys.executable, "-c", role]
    output = subprocess.run(
        command, check=True, capture_output=True, env=ENVIRONMENT
    ).stdout.split()
    assert output[0] == b"short"
    assert int(output[1]) == sum(len(argument) + 1 for argument in command)
