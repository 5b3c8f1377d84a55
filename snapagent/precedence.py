"""Urgent work goes first: what else is done at the same time pauses between two pieces of it.

Python's interpreter runs one thread at a time. Threads that fill memory hand it over many thousand
times a second, so that two kinds of such work take longer beside each other than one after the
other.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from snapstore.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapstore.clock import Clock

__all__ = ["Precedence"]

_LOOK_S = 0.05
"""How often somebody who waits looks whether to give up; not how long the wait is."""

_AHEAD_S = _BEHIND_S = 5.0
"""Longer than most memory of processes takes to be filled, and no longer than a restore may be kept
from its GPUs by others."""


class Precedence:
    """Of one kind of work over all others that ask. Thread-safe.

    Nobody starves: where urgent work never ends, since there is always somebody who does it, it
    goes ahead for some time, then everybody works for some time, and so on.
    """

    def __init__(
        self,
        *,
        ahead_s: float = _AHEAD_S,
        behind_s: float = _BEHIND_S,
        clock: Clock | None = None,
    ) -> None:
        """Nothing urgent is done yet.

        Args:
            ahead_s: For how long at a time others wait.
            behind_s: For how long they work then, although something urgent is done still.
            clock: For tests.
        """
        self._ahead_s = ahead_s
        self._period_s = ahead_s + behind_s
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._count = 0
        self._since_s = 0.0
        self._is_free = threading.Event()
        self._is_free.set()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Let others wait for the length of a `with` block. Any number may do so at once."""
        with self._lock:
            if not self._count:
                self._since_s = self._clock.monotonic_s()
                self._is_free.clear()
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._is_free.set()

    def give_way(self, is_over: Callable[[], bool]) -> None:
        """Return when something less urgent may be done, or soon after `is_over` says so."""
        while not self._is_free.is_set() and self._is_ahead() and not is_over():
            # Whoever saw it free goes on, also if it was taken again at once.
            if self._is_free.wait(_LOOK_S):
                return

    def _is_ahead(self) -> bool:
        return (self._clock.monotonic_s() - self._since_s) % self._period_s < self._ahead_s
