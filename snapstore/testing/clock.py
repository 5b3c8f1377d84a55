"""A clock that moves only when it is told to."""

from __future__ import annotations

import threading

__all__ = ["ManualClock"]

_START_NS = 1_790_000_000_000_000_000


class ManualClock:
    """Time for tests (`snapstore.clock.Clock`): sleeping advances it and never blocks."""

    def __init__(self, *, start_ns: int = _START_NS) -> None:
        self._start_ns = start_ns
        self._elapsed_ns = 0
        self._lock = threading.Lock()
        self.slept_s: list[float] = []

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        with self._lock:
            return self._start_ns + self._elapsed_ns

    def monotonic_s(self) -> float:
        """Seconds since this clock was made."""
        with self._lock:
            return self._elapsed_ns / 1e9

    def sleep_s(self, seconds: float) -> None:
        """Advance, and remember the pause in `slept_s`."""
        self.slept_s.append(seconds)
        self.advance_s(seconds)

    def advance_s(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self._elapsed_ns += int(seconds * 1e9)
