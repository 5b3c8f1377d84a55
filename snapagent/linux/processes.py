"""Processes: who is below whom, ending all of them, and what a process is to the kernel.

Processes are held by pidfds while something is done to them, so that an id which was given to
another process meanwhile is never hit. Nothing here is cached; every function may be called from
any thread. Loads nothing of the library, since the small supervisor uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from snapagent.linux.namespaces import namespace_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = [
    "ProcessState",
    "Strays",
    "adopt_orphans",
    "allow_many_files",
    "be_expendable",
    "children",
    "close_all_but",
    "descendants",
    "forbid_inspection",
    "inner_pid",
    "keep_over_exec",
    "kill_descendants",
    "kill_strays",
    "name_process",
    "read_state",
    "stop_child",
    "wait_for_ends",
]

PR_SET_DUMPABLE: Final = 4
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36

OOM_SCORE_MAX: Final = 1000
STAT_BYTES_MAX: Final = 4096
ARGUMENTS_START: Final = 48 - 3
ARGUMENTS_END: Final = 49 - 3
"""Fields of /proc/PID/stat, which proc(5) counts from one, after the first two."""
PARENT: Final = 4 - 3
STARTED: Final = 22 - 3
STOP_POLL_MS: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)


# -- this process ---------------------------------------------------------------------------------


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends.

    Only of those in the same namespace of process ids: others go to the first process of theirs.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def forbid_inspection() -> None:
    """Keep other processes from tracing this one or opening its memory and files.

    For a process that goes among others that are not trusted. A program it starts can be inspected
    again, as far as its privileges allow.
    """
    _prctl(PR_SET_DUMPABLE, 0)


def allow_many_files() -> None:
    """Raise the limit on open files as far as it goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def be_expendable() -> None:
    """Let the kernel end this process before others when memory is short."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(OOM_SCORE_MAX))


def name_process(name: str, command: str) -> None:
    """Set what `ps` shows: a name of at most 15 bytes, and a command line.

    The command line is cut to the space that this process was started with.
    """
    buffer = ctypes.create_string_buffer(name.encode())
    _libc.prctl(PR_SET_NAME, buffer, 0, 0, 0)
    fields = _stat_fields(os.getpid())
    if fields is None:
        return
    start, end = int(fields[ARGUMENTS_START]), int(fields[ARGUMENTS_END])
    if not 0 < start < end:
        return
    # The last byte stays zero: the kernel takes anything else as a sign to read on behind it.
    text = command.encode()[: end - start - 1]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text.ljust(end - start, b"\0"))


def keep_over_exec(fd: int) -> None:
    """Let a program that this process becomes have the fd as well."""
    fcntl.fcntl(fd, fcntl.F_SETFD, 0)


def close_all_but(kept: Iterable[int]) -> None:
    """Close every fd of this process above 2 that is not named."""
    low = 3
    for fd in sorted({fd for fd in kept if fd >= low}):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 2**31 - 1)


# -- what /proc says ------------------------------------------------------------------------------


class ProcessState(NamedTuple):
    """What the kernel says of a process at one moment."""

    pid: int
    state: str
    """The letter that `ps` shows; `Z` is a process that has ended and was not waited for."""
    parent: int
    started_ticks: int
    """Since the machine's start, in units of `SC_CLK_TCK`."""

    @property
    def ended(self) -> bool:
        """Whether it is only an entry in the table that nobody has removed."""
        return self.state in "ZX"


def _stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of `/proc/PID/stat` behind the name, which may hold any byte."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            data = file.read(STAT_BYTES_MAX)
    except OSError:
        return None
    return data[data.rindex(b")") + 1 :].split() if b")" in data else None


def read_state(pid: int) -> ProcessState | None:
    """Return the state of a process, or None if there is none with this id."""
    fields = _stat_fields(pid)
    if fields is None:
        return None
    return ProcessState(pid, fields[0].decode(), int(fields[PARENT]), int(fields[STARTED]))


def inner_pid(pid: int) -> int | None:
    """Return the id that a process has in its own namespace of process ids, while it lives."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"NSpid:"):
                    return int(line.split()[-1])
    except OSError:
        return None
    return None


def children(pid: int) -> list[int]:
    """Return the ids of a process's children, also of those that have ended but not been reaped.

    While children come and go the list may lack one; it is exact for a process that is stopped and
    whose children are.
    """
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found  # It has ended: its children are someone else's now.
    for thread in threads:
        # A thread may have ended meanwhile; its children are another thread's then.
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/task/{thread}/children", "rb") as file,
        ):
            found += [int(child) for child in file.read().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Return the ids of everything below a process that has not ended, parents first."""
    found: dict[int, None] = {}
    unvisited = [pid]
    while unvisited:
        for child in children(unvisited.pop()):
            if child in found:
                continue
            found[child] = None
            unvisited.append(child)
    states = (read_state(child) for child in found)
    return [state.pid for state in states if state is not None and not state.ended]


# -- ending ---------------------------------------------------------------------------------------


def wait_for_ends(pidfds: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until the processes behind pidfds have ended; return the pidfds of those that have not.

    A process has ended when all its threads have, whether anyone has reaped it or not.
    """
    deadline = time.monotonic() + timeout_s
    left = set(pidfds)
    poll = select.poll()
    for pidfd in left:
        poll.register(pidfd, select.POLLIN)
    while left:
        remaining_ms = max(0, round((deadline - time.monotonic()) * 1000))
        ended = poll.poll(remaining_ms)
        if not ended:
            break
        for pidfd, _ in ended:
            poll.unregister(pidfd)
            left.discard(pidfd)
    return sorted(left)


def stop_child(pid: int, pidfd: int, timeout_s: float) -> None:
    """Stop a child of this process and wait until it is, or has ended: it starts nothing more."""
    deadline = time.monotonic() + timeout_s
    _send(pidfd, signal.SIGSTOP)
    while time.monotonic() < deadline:
        state = read_state(pid)
        if state is None or state.ended or state.state in "Tt":
            return
        wait_for_ends([pidfd], STOP_POLL_MS / 1000)


def kill_descendants(root: int, timeout_s: float) -> list[int]:
    """Kill everything below a process, which adopts orphans, and wait until all of it has ended.

    First all of it is stopped, since what is stopped starts no more processes; `root` itself is
    left alone and should start nothing meanwhile. Returns the ids of what was still alive after
    `timeout_s`: nothing, unless a process hangs in the kernel.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        held: dict[int, int] = {}
        try:
            _stop_all(root, held, deadline)
            for pidfd in held.values():
                _send(pidfd, signal.SIGKILL)
            left = set(wait_for_ends(held.values(), deadline - time.monotonic()))
        finally:
            for pidfd in held.values():
                os.close(pidfd)
        if left:
            return sorted(pid for pid, pidfd in held.items() if pidfd in left)
        alive = descendants(root)
        if not alive or time.monotonic() >= deadline:
            return alive


def _stop_all(root: int, held: dict[int, int], deadline: float) -> None:
    """Stop what is below `root` until a look finds nothing new; collect pidfds by id."""
    while time.monotonic() < deadline:
        new = [pid for pid in descendants(root) if pid not in held]
        if not new:
            return
        for pid in new:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    return  # These first; the others when they have made room.
                continue
            # If the id had been given to another process by now, its parent would be another.
            state = read_state(pid)
            if state is None or not (state.parent == root or state.parent in held):
                os.close(pidfd)
                continue
            held[pid] = pidfd
            _send(pidfd, signal.SIGSTOP)


class Strays(NamedTuple):
    """What processes are known by when those above them are gone."""

    pids: Collection[int]
    """Their ids in their own namespace of process ids."""
    namespace: str
    """That namespace; see `namespace_id`."""
    since_ticks: int
    """They started later than this; see `ProcessState`."""


def kill_strays(strays: Strays, timeout_s: float) -> list[int]:
    """Kill processes known by their ids alone, the last resort, and wait until they have ended.

    Only those whose parent is one of them, or takes in orphans: the first process of a namespace,
    or one above the caller. So nobody else's process is hit that was given such an id meanwhile,
    unless it is an orphan too. Returns the ids, as the caller sees them, of those still alive.
    """
    held: dict[int, int] = {}
    above = _ancestors(os.getpid())
    try:
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                continue
            if _is_stray(pid, strays, above | set(held)):
                held[pid] = pidfd
                _send(pidfd, signal.SIGKILL)
            else:
                os.close(pidfd)
        left = set(wait_for_ends(held.values(), timeout_s))
        return [pid for pid, pidfd in held.items() if pidfd in left]
    finally:
        for pidfd in held.values():
            os.close(pidfd)


def _is_stray(pid: int, strays: Strays, parents: Collection[int]) -> bool:
    state = read_state(pid)
    if state is None or state.ended or state.started_ticks <= strays.since_ticks:
        return False
    if inner_pid(pid) not in strays.pids or namespace_id(pid, "pid") != strays.namespace:
        return False
    return state.parent in parents or inner_pid(state.parent) == 1


def _ancestors(pid: int) -> set[int]:
    found = {pid}
    state = read_state(pid)
    while state is not None and state.parent not in found:
        found.add(state.parent)
        state = read_state(state.parent)
    return found


def _send(pidfd: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return  # It has ended.
