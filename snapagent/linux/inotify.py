"""Inotify: being told of changes in directories. The kernel's queue, as it is.

Imports the standard library only, since it runs inside of workloads.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["APPEARED", "ITSELF_CHANGED", "LOST_TRACK", "Event", "Inotify"]

_MOVED_TO: Final = 0x80
_CREATE: Final = 0x100
_DELETE_SELF: Final = 0x400
_MOVE_SELF: Final = 0x800
_UNMOUNT: Final = 0x2000
_Q_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_ONLYDIR: Final = 0x01000000

APPEARED: Final = _CREATE | _MOVED_TO
"""A name came into being in a watched directory."""
ITSELF_CHANGED: Final = _DELETE_SELF | _MOVE_SELF
"""The watched directory was removed or is now somewhere else."""
LOST_TRACK: Final = ITSELF_CHANGED | _UNMOUNT | _Q_OVERFLOW | _IGNORED
"""Set in events after which the watches no longer tell all that happens at a path."""

_HEADER: Final = struct.Struct("=iIII")
_READ_BYTES: Final = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class Event(NamedTuple):
    """One entry of the queue; `watch` is -1 if the queue overflowed, and events are missing."""

    watch: int
    mask: int
    name: bytes


class Inotify:
    """One queue with its watches. Reads never block; wait with `poll` on its descriptor."""

    def __init__(self) -> None:
        """Make an empty queue.

        Raises:
            OSError: this user has too many of them (EMFILE), or the kernel has none.
        """
        self._fd = int(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        if self._fd < 0:
            raise _error("inotify")

    def add(self, directory: str, mask: int) -> int:
        """Watch a directory; the same directory gives the same number again.

        Raises:
            OSError: it is not there, is no directory or cannot be read, or there are too many
                watches (ENOSPC).
        """
        watch = int(_libc.inotify_add_watch(self._fd, os.fsencode(directory), mask | _ONLYDIR))
        if watch < 0:
            raise _error(directory)
        return watch

    def read(self) -> list[Event]:
        """Return what has happened since the last time, nothing if nothing has."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return []
        events = []
        offset = 0
        while offset < len(data):
            watch, mask, _, length = _HEADER.unpack_from(data, offset)
            offset += _HEADER.size
            events.append(Event(watch, mask, data[offset : offset + length].rstrip(b"\0")))
            offset += length
        return events

    def fileno(self) -> int:
        """Return the descriptor, to poll."""
        return self._fd

    def close(self) -> None:
        """End all watches. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
