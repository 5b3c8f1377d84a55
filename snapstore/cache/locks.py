"""Claims that end with whoever made them: locks of the kernel on ranges of files, and on files.

A range is locked through a descriptor of its own (an *open file description* lock), so threads of
one process keep each other out as processes do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapstore.clock import Clock

__all__ = ["Patience", "claim", "try_lock_file", "unlock_file"]

# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")
_BUSY = frozenset({errno.EAGAIN, errno.EACCES})

_PAUSE_S_FIRST = 0.0002
_PAUSE_S_MAX = 0.004
"""Short beside fetching anything, long enough that many who wait cost nothing to speak of."""


class Patience:
    """How long somebody waits for others. Used by one thread.

    Asking again and again, instead of sleeping in the kernel: who holds a lock may be frozen, by a
    debugger or a container runtime, and then nobody must wait for ever.
    """

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self._clock = clock
        self._end_s = clock.monotonic_s() + limit_s
        self._pause_s = _PAUSE_S_FIRST

    def wait(self) -> bool:
        """Wait a moment; False when there was enough of it."""
        if self._clock.monotonic_s() >= self._end_s:
            return False
        self._clock.sleep_s(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
        return True


@contextlib.contextmanager
def claim(reopen: Callable[[], int], begin: int, end: int) -> Iterator[int]:
    """Claim bytes of a file for the length of a `with` block.

    The block is told up to where it has them: `end`, or where others have the rest; `begin` if they
    have the first byte.

    Args:
        reopen: Gives a new descriptor of the file, open for writing, which is closed at the end.
        begin: The first byte.
        end: One after the last.

    Raises:
        OSError: The file system knows no such locks, or the file cannot be opened.
    """
    fd = reopen()
    try:
        while begin < end and not _try_lock(fd, begin, end):
            end = max(_locked_from(fd, begin, end), begin)
        yield end
    finally:
        os.close(fd)


def _try_lock(fd: int, begin: int, end: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _wanted(begin, end))
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def _locked_from(fd: int, begin: int, end: int) -> int:
    """Where the first bytes are that others have; `end` if they have let go of all meanwhile."""
    kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _wanted(begin, end)))
    return end if kind == fcntl.F_UNLCK else int(start)


def _wanted(begin: int, end: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, end - begin, 0)


def try_lock_file(fd: int, *, shared: bool = False) -> bool:
    """Lock a whole file, for as long as the descriptor and its duplicates are open.

    Raises:
        OSError: The file system knows no such locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def unlock_file(fd: int) -> None:
    """Unlock what `try_lock_file` locked."""
    fcntl.flock(fd, fcntl.LOCK_UN)
