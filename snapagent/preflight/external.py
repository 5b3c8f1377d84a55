"""Check whether the external memory of a process tree can be captured with it, here and now."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapagent.linux import processes
from snapagent.linux.memfds import has_open
from snapagent.memory.held import find_owners
from snapagent.preflight.obstacles import Obstacle, Obstacles
from snapagent.preflight.procfs import process_name

if TYPE_CHECKING:
    from pathlib import Path

    from snapagent.memory.broker import MemoryBroker

__all__ = ["check_external"]


def check_external(pid: int, broker: MemoryBroker | None, path: Path) -> list[Obstacle]:
    """Tell what stands in the way of external memory; nothing is changed.

    Args:
        pid: Root of the tree.
        broker: Of the agent that is about to capture it.
        path: Where the broker of this node listens, if there is one.

    Raises:
        AgentError: The broker of this node is there and does not answer.
    """
    found = Obstacles()
    pids = [pid, *processes.descendants(pid)]
    if broker is None:
        _check_without(found, pids, path)
    else:
        _check_released(found, pids, broker)
    return found.result()


def _check_without(found: Obstacles, pids: list[int], path: Path) -> None:
    """What is released is not to be seen in the process: only who has it can tell."""
    owners = find_owners(path, pids)
    for one in pids:
        if one in owners or (one != os.getpid() and has_open(one)):
            found.block(
                "external-no-broker",
                f"{_title(one)} has external memory, and this agent has no memory broker: the copy "
                "could never resume",
                "let the daemon that has the memory capture it: `snapagent run`, and `capture` "
                "without --no-daemon",
            )


def _check_released(found: Obstacles, pids: list[int], broker: MemoryBroker) -> None:
    states = broker.states(pids)
    # The broker and its holder have all of it open, of course.
    ours = {os.getpid(), broker.holder_pid}
    for one in pids:
        if one not in ours and has_open(one):
            found.block(
                "external-mapped",
                f"{_title(one)} has external memory mapped, which CRIU would copy",
                "let the workload call release, also in children of fork, and wait for it",
            )
        elif states.get(one, "released") != "released":
            found.block(
                "external-busy",
                f"the external memory of {_title(one)} is {states[one]}",
                "let the workload call release, and wait for other captures to end",
            )


def _title(pid: int) -> str:
    return f"process {pid} ({process_name(pid)})"
