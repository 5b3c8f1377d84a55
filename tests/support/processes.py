"""Find, end and await the processes of a workload, whatever life they are in by then.

A restored process is a child of somebody else, and its ids may be those of another namespace. What
stays is its working directory, so processes are found by that.
"""

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

from snapstore.clock import SystemClock
from tests.support.waiting import wait_until

CLOCK = SystemClock()
DEAD_S_MAX = 30
# Where nobody nearer reaps, the first process of the machine does, and that may take seconds.
REAPED_S_MAX = 30


def open_fds() -> int:
    """Count what this process has open; tests that ran in it before may have left some."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only how many


def processes_in(directory: Path) -> list[int]:
    """Return all processes whose working directory is this one or below it, as seen from here.

    They may have been restored into other namespaces. The dead that nobody has reaped do not count.
    """
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - only the names
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                where = os.readlink(f"/proc/{name}/cwd")  # noqa: PTH115 - it may be gone
                if Path(where).is_relative_to(directory):
                    found.append(int(name))
    return sorted(found)


def open_files(pid: int) -> list[str]:
    """Return what the descriptors of a process lead to; it may open and close some meanwhile."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return found


def stop_process(pid: int) -> None:
    """Stop a process; returns when none of its threads runs any more, which takes a moment."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _states(pid) <= set("TZX"), f"process {pid} stands", seconds=DEAD_S_MAX)


def _states(pid: int) -> set[str]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        # Of a thread that ends meanwhile there is nothing.
        with contextlib.suppress(OSError):
            found.add((task / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0])
    return found


@contextlib.contextmanager
def watched(pids: list[int]) -> Iterator[list[int]]:
    """Give a descriptor for each process that still exists; ids may be reused, these are not."""
    descriptors: list[int] = []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptors.append(os.pidfd_open(pid))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def is_reaped(descriptor: int) -> bool:
    """Tell whether the process of a descriptor is gone for good, so that its id is free."""
    try:
        signal.pidfd_send_signal(descriptor, 0)
    except ProcessLookupError:
        return True
    return False


def await_death(descriptors: list[int]) -> None:
    """Wait until all these processes have ended, reaped or not."""
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(DEAD_S_MAX * 1000):
            raise TimeoutError(f"a process lives on {DEAD_S_MAX} s after it was to end")


def await_free_ids(pids: list[int]) -> None:
    """Wait until processes that are ending are gone and reaped, by us where they are our children.

    Only then can a restore give them back the ids they had.
    """

    def all_reaped(descriptors: list[int]) -> bool:
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return all(is_reaped(descriptor) for descriptor in descriptors)

    with watched(pids) as descriptors:
        await_death(descriptors)
        wait_until(lambda: all_reaped(descriptors), f"{pids} are free", seconds=REAPED_S_MAX)


def end_processes_in(directory: Path) -> None:
    """Kill everything whose working directory is below this one; returns when it is dead.

    Children of ours are reaped. May be called at any time and again.
    """
    while pids := processes_in(directory):
        with watched(pids) as descriptors:
            for descriptor in descriptors:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            await_death(descriptors)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
