"""Slowing down when a server asks for it: one pace for all requests of a client.

Retrying alone makes an overloaded server worse: every thread comes back with its own delays. Here
all of them share the time between the starts of two requests. It doubles whenever the server says
*slow down* and shrinks with each answer that it gives.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapstore.clock import Clock

__all__ = ["Pacer"]

_INTERVAL_S_FIRST = 0.02
_INTERVAL_S_MAX = 2.0
_INTERVAL_S_NONE = 0.002
"""Below this the server is left alone with what the threads ask by themselves."""

_SHRINK = 0.9


class Pacer:
    """Spreads the starts of requests. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._interval_s = 0.0
        self._next_s = 0.0

    @property
    def interval_s(self) -> float:
        """Seconds between two starts at present; 0 while nobody complains."""
        return self._interval_s

    def wait(self) -> None:
        """Block until it is this request's turn."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            start_s = max(now_s, self._next_s)
            self._next_s = start_s + self._interval_s
        if start_s > now_s:
            self._clock.sleep_s(start_s - now_s)

    def slow_down(self) -> None:
        """The server asked for fewer requests."""
        with self._lock:
            self._interval_s = min(max(2 * self._interval_s, _INTERVAL_S_FIRST), _INTERVAL_S_MAX)

    def answered(self) -> None:
        """The server answered."""
        if not self._interval_s:
            return
        with self._lock:
            self._interval_s *= _SHRINK
            if self._interval_s < _INTERVAL_S_NONE:
                self._interval_s = 0.0
