"""A lock that many may hold at once, or one alone."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SharedLock"]


class SharedLock:
    """Held by any number of sharers or by one owner; who waits to own it goes before new sharers.

    It cannot be taken twice by one thread. Made for holds of at most a millisecond.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._sharers = 0
        self._waiting = 0
        self._is_owned = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Hold it together with others."""
        with self._changed:
            self._changed.wait_for(self._is_free_to_share)
            self._sharers += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharers -= 1
                if not self._sharers and self._waiting:
                    self._changed.notify_all()

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Hold it alone."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(self._is_free_to_own)
            self._waiting -= 1
            self._is_owned = True
        try:
            yield
        finally:
            with self._changed:
                self._is_owned = False
                self._changed.notify_all()

    def _is_free_to_share(self) -> bool:
        return not self._is_owned and not self._waiting

    def _is_free_to_own(self) -> bool:
        return not self._is_owned and not self._sharers
