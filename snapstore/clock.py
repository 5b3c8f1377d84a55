"""The only reader of time, so that tests and simulations can bring their own.

Clocks decide when something is tried, never who wins (`format_spec/SEMANTICS.md`, section 4).
"""

from __future__ import annotations

import datetime as dt
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock", "format_utc"]


class Clock(Protocol):
    """What the library needs to know about time. Implementations are thread-safe."""

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch, UTC; may jump."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...

    def sleep_s(self, seconds: float) -> None:
        """Block the calling thread for about that long."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch, UTC; may jump."""
        return time.time_ns()

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        return time.monotonic()

    def sleep_s(self, seconds: float) -> None:
        """Block the calling thread for about that long."""
        time.sleep(seconds)


def format_utc(ns: int) -> str:
    """Write a time as RFC 3339 in UTC with whole seconds, the form all stored documents use."""
    moment = dt.datetime.fromtimestamp(ns // 1_000_000_000, tz=dt.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
