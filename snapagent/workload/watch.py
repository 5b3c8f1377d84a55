"""Waiting until one of some files is there, told by the kernel.

The directory of the files may not exist yet, may be replaced, or lie behind symbolic links: every
directory on the way to it is watched. What is there is decided by looking, after the watches were
set, so that nothing between looking and watching is missed; events only say when to look again.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from typing import TYPE_CHECKING, Self

from snapagent.linux.inotify import APPEARED, ITSELF_CHANGED, LOST_TRACK, Inotify

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

__all__ = ["FileWatch", "Stopped", "is_file"]


class Stopped(Exception):
    """The wait was ended by its bell."""


def is_file(path: str) -> bool:
    """Whether a regular file, and nothing that only leads to one, has this path."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


class FileWatch:
    """Watches of the files with some names in one directory. Belongs to one thread."""

    def __init__(self, directory: str, names: Sequence[str], *, whole_path: bool = True) -> None:
        """Prepare it; nothing is open before `wait`.

        Args:
            directory: Absolute path; need not exist.
            names: Files in it.
            whole_path: Whether the directory may appear or be replaced; if not, only it is watched.
        """
        self._directory = directory
        self._names = tuple(names)
        self._whole_path = whole_path
        self._inotify: Inotify | None = None
        self._wanted: dict[int, set[bytes]] = {}

    def wait(self, seconds: float | None = None, bell: int | None = None) -> str:
        """Return the first of the names that is there; it may have been there before.

        Args:
            seconds: How long at most; None waits for ever.
            bell: A descriptor that ends the wait when it can be read.

        Raises:
            TimeoutError: none of them was there in time.
            Stopped: the bell was rung.
            OSError: this user has no more inotify instances or watches.
        """
        end = None if seconds is None else _now() + seconds
        with self:
            self._watch_all()
            while True:
                found = self._found()
                if found is not None:
                    return found
                self._await_change(end, bell)

    def _found(self) -> str | None:
        present = (name for name in self._names if is_file(f"{self._directory}/{name}"))
        return next(present, None)

    def _await_change(self, end: float | None, bell: int | None) -> None:
        """Return once it may be worth looking again."""
        assert self._inotify is not None
        poll = select.poll()
        poll.register(self._inotify.fileno(), select.POLLIN)
        if bell is not None:
            poll.register(bell, select.POLLIN)
        while True:
            left = None if end is None else max(0.0, end - _now())
            ready = [fd for fd, _ in poll.poll(None if left is None else left * 1000)]
            if bell in ready:
                raise Stopped
            if not ready:
                if left is None or left > 0:
                    continue  # The kernel counts whole milliseconds.
                raise TimeoutError(errno.ETIMEDOUT, "nothing appeared", self._directory)
            if self._changed():
                return

    def _changed(self) -> bool:
        """Take the events; set the watches anew where they may no longer suffice."""
        assert self._inotify is not None
        events = self._inotify.read()
        hits = [event for event in events if event.name in self._wanted.get(event.watch, ())]
        ours = {event.name for event in hits} <= {os.fsencode(name) for name in self._names}
        if any(event.mask & LOST_TRACK for event in events) or not ours:
            self._watch_all()
            return True
        return bool(hits)

    def _watch_all(self) -> None:
        """Watch the directory and what leads to it, from the top.

        A directory that is made after it was looked for in vain is seen by the watch on the one
        above, which was set before.
        """
        self.close()
        self._inotify = Inotify()
        for directory, names in self._steps():
            try:
                watch = self._inotify.add(directory, APPEARED | ITSELF_CHANGED)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP):
                    continue
                raise
            self._wanted.setdefault(watch, set()).update(os.fsencode(name) for name in names)

    def _steps(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Give directories and what may appear in them, as written and as links lead now."""
        if self._whole_path:
            for path in dict.fromkeys((self._directory, os.path.realpath(self._directory))):
                parts = path.strip("/").split("/") if path != "/" else []
                for depth, part in enumerate(parts):
                    yield "/" + "/".join(parts[:depth]), [part]
        yield self._directory, self._names

    def close(self) -> None:
        """End all watches. May be called again."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        self._wanted.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _now() -> float:
    return time.monotonic()  # noqa: TID251 - the clock of the library is not loaded here
