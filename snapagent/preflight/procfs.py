"""Read what `/proc` says of processes that may end at any moment.

A process that is gone while it is looked at is left out, except the root of a tree, without which
nothing is left to say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from snapagent.errors import NoSuchProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Task",
    "descriptors",
    "namespace_of",
    "process_name",
    "process_tree",
    "read_text",
    "status_fields",
]

PROC = Path("/proc")
TREE_MAX = 1 << 18

Namespaces = dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One process of a tree, as it was when it was looked at.

    Attributes:
        status: The fields of `/proc/<pid>/status`.
        session: The id of its session.
    """

    pid: int
    name: str
    status: dict[str, str]
    session: int

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"process {self.pid} ({self.name})"

    @property
    def is_dead(self) -> bool:
        """Whether it has ended and only waits for its parent."""
        return self.status.get("State", "").startswith(("Z", "X"))

    @property
    def is_led_from_outside_its_pids(self) -> bool:
        """Whether the leader of its session has no id in its own pid namespace."""
        # One id for each namespace, from the reader's inwards.
        return self.status.get("NSsid", "").split()[-1:] == ["0"]


def read_text(path: str) -> str:
    """Read a small file of the kernel's; bytes that are no text become escapes.

    Raises:
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:  # noqa: PTH123 - a tenth of the time, and there are thousands
        return file.read().decode("utf-8", "backslashreplace")


def status_fields(pid: int | str) -> dict[str, str]:
    """Return the fields of `/proc/<pid>/status`.

    Raises:
        OSError: The process is gone.
    """
    lines = read_text(f"/proc/{pid}/status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def process_tree(pid: int) -> list[Task]:
    """Return a process and all below it, the process itself first.

    Raises:
        NoSuchProcess: There is no such process.
    """
    found: dict[int, Task] = {}
    waiting = [pid]
    while waiting and len(found) < TREE_MAX:
        one = waiting.pop(0)
        if one in found:
            continue
        try:
            found[one] = _task(one)
            waiting.extend(_children(one))
        except OSError as error:
            if one == pid:
                raise NoSuchProcess(
                    f"there is no process {pid} here",
                    next_step="give the id that `ps` shows in this pid namespace",
                ) from error
    if pid not in found:
        raise NoSuchProcess(f"the process {pid} ended while it was looked at")
    return list(found.values())


def _task(pid: int) -> Task:
    status = status_fields(pid)
    # The name may contain anything, a closing bracket included.
    after_name = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return Task(pid, status.get("Name", "?"), status, session=int(after_name[3]))


def _children(pid: int) -> Iterator[int]:
    """Children belong to the thread that made them."""
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - names are enough
        with contextlib.suppress(OSError):
            yield from map(int, read_text(f"/proc/{pid}/task/{thread}/children").split())


def descriptors(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the open descriptors of a process with what they are links to."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are enough
    except OSError:
        return
    for name in sorted(names, key=int):
        with contextlib.suppress(OSError):
            yield int(name), os.readlink(f"{folder}/{name}")  # noqa: PTH115 - see `read_text`


def namespace_of(pid: int | str, kind: str) -> str:
    """Return what tells one namespace from another; empty if it cannot be told."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")  # noqa: PTH115 - see `read_text`
    except OSError:
        return ""


def process_name(pid: int, proc: Path = PROC) -> str:
    """Return the name of a process; a question mark if it is gone."""
    try:
        return read_text(f"{proc}/{pid}/comm").strip()
    except OSError:
        return "?"
