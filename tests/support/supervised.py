"""For tests of supervisors: what must not be left behind, and programs that are hard to end."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import pytest

from snapagent.linux import namespaces, processes
from snapagent.supervision import Place
from tests.support.waiting import wait_until

T = TypeVar("T")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def marked(mark: str) -> list[int]:
    """Return the living processes one of whose arguments is this mark."""
    found = []
    for pid in all_pids():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        state = processes.read_state(pid)
        if mark.encode() in command.split(b"\0") and state is not None and not state.ended:
            found.append(pid)
    return found


def stubborn_tree(mark: str) -> list[str]:
    """Return a command that ends at once and leaves processes which are hard to get rid of.

    A child, an orphan in a session of its own, and one that ignores every signal it can.
    """
    sleep = f"exec -a {mark} sleep 1000"
    script = f"""
        bash -c '{sleep}' &
        (setsid bash -c '{sleep}' &)
        bash -c 'trap "" TERM INT HUP QUIT USR1 USR2; {sleep}' &
        exit 0
    """
    return ["/bin/bash", "-c", script]


def wait_for_tree(mark: str, count: int = 3) -> list[int]:
    """Wait until all of a tree has its name, and return it."""
    wait_until(lambda: len(marked(mark)) == count, f"{count} processes {mark}")
    return marked(mark)


def namespaces_in_use() -> set[str]:
    """Return all namespaces that a process is in."""
    found = set()
    for pid in all_pids():
        for kind in ("pid", "net", "mnt"):
            found.add(namespaces.namespace_id(pid, kind) or "")
    return found


def has_ended(pid: int) -> Callable[[], bool]:
    """Return a condition: the process is gone or only waits to be reaped."""

    def ended() -> bool:
        state = processes.read_state(pid)
        return state is None or state.ended

    return ended


def inside_network(pid: int, what: Callable[[], T]) -> T:
    """Call a function in the network namespace of a process."""
    results: list[T] = []

    def work() -> None:
        with Path(f"/proc/{pid}/ns/net").open() as network:
            namespaces.set_namespace(network.fileno(), namespaces.NETWORK)
        results.append(what())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


class Agent:
    """A process that plays the agent, and what it has started."""

    def __init__(self, process: subprocess.Popen[bytes], pid: int, keeper: int) -> None:
        self.process = process
        self.supervisor_pid = pid
        self.keeper_pid = keeper


@contextmanager
def agent_role(place: Place, work: Path, argv: list[str], **more: object) -> Iterator[Agent]:
    """Run a process that plays the agent, until it is killed."""
    order = {"place": asdict(place), "work": str(work), "argv": argv, "task": "restore"}
    order |= {"directories": {}}
    order |= {"reasons": str(work.with_name("reasons")), "step": "ran"} | more
    script = Path(__file__).with_name("agent_role.py")
    with subprocess.Popen(  # noqa: S603 - this interpreter, with a script of ours.
        [sys.executable, str(script), json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        assert process.stdout is not None
        try:
            yield Agent(process, **json.loads(process.stdout.readline()))
        finally:
            process.kill()
