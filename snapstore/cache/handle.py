"""A descriptor that its last user closes, so that nobody finds another file behind its number."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Handle"]


class Handle:
    """Owns a descriptor. Thread-safe.

    A cache may be closed while threads still read through it, such as after Ctrl-C. They keep the
    descriptor up to the end of what they do at that moment; what they begin later is refused.
    """

    def __init__(self, fd: int) -> None:
        """Take over a descriptor."""
        self._fd = fd
        self._lock = threading.Lock()
        self._users = 0
        self._is_closed = False

    @contextlib.contextmanager
    def used(self) -> Iterator[int]:
        """Lend the descriptor for the length of a `with` block.

        Raises:
            OSError: It is closed.
        """
        with self._lock:
            if self._is_closed:
                raise OSError(errno.EBADF, "the cache was closed")
            self._users += 1
        try:
            yield self._fd
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._is_closed and not self._users
        if is_last:
            os.close(self._fd)

    def close(self) -> None:
        """Close it now, or when its last user is done. Idempotent."""
        with self._lock:
            is_last = not self._is_closed and not self._users
            self._is_closed = True
        if is_last:
            os.close(self._fd)
