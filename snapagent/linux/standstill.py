"""Sleeping so that one is woken by having been frozen, and telling a restored life from the first.

A process that CRIU dumps is stopped, and so it is when it begins its next life. Most system calls
hide that: they are restarted. `epoll_wait` does not, see signal(7): it ends with `EINTR` whenever
the thread was stopped, be it by a debugger, a control group or a signal. Python restarts it, which
is why it is called directly here. Nothing that CRIU would have to recreate elsewhere is open
meanwhile, but an epoll and an eventfd.

Imports the standard library only, since it runs inside of workloads.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import select
from typing import Final, NamedTuple

__all__ = ["Life", "Sleeper", "Woken", "present_life"]

_EVENT_BYTES: Final = 16
_START_TIME_FIELD: Final = 19
"""Counted from the state, which follows the name in brackets."""

_libc = ctypes.CDLL(None, use_errno=True)


class Woken(enum.Enum):
    """Why a sleep ended."""

    TIME = "the time was over"
    STOPPED = "this thread was stopped, or got a signal"
    CALLED = "somebody called `wake`"


class Sleeper:
    """One thread sleeps, any other may wake it."""

    def __init__(self) -> None:
        """Make the two descriptors of it."""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)

    @property
    def bell(self) -> int:
        """A descriptor that is readable once somebody has called `wake`, for other waits."""
        return self._bell

    def sleep(self, seconds: float) -> Woken:
        """Sleep until something of `Woken` happens."""
        event = ctypes.create_string_buffer(_EVENT_BYTES)
        milliseconds = max(0, int(seconds * 1000))
        # A foreign call: it lets other threads run meanwhile, and is not repeated after EINTR.
        count = int(_libc.epoll_wait(self._epoll.fileno(), event, 1, milliseconds))
        if count > 0:
            return Woken.CALLED
        if count == 0:
            return Woken.TIME
        number = ctypes.get_errno()
        if number == errno.EINTR:
            return Woken.STOPPED
        raise OSError(number, os.strerror(number), "epoll_wait")

    def wake(self) -> None:
        """End this sleep and all later ones."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Give the descriptors back; nobody may sleep or wake any more."""
        self._epoll.close()
        os.close(self._bell)


class Life(NamedTuple):
    """What is another after a restore, whatever else comes back as it was."""

    machine: str
    """The machine's boot."""
    namespace: str
    """The namespace of process ids."""
    start: str
    """When the kernel made this process, which no restore can choose."""


def present_life() -> Life:
    """Return what tells this life of the process from one before.

    Raises:
        OSError: there is no `/proc`, or it is that of another namespace of process ids.
    """
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    with open("/proc/sys/kernel/random/boot_id") as file:
        machine = file.read().strip()
    return Life(machine, os.readlink("/proc/self/ns/pid"), fields[_START_TIME_FIELD])
