"""What filling the memory of a restore has done so far, and in which order it was asked for."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from snapstore import PageRun
from snapstore.clock import SystemClock

__all__ = ["LazyStats", "PageRun", "Recorder", "Tally"]


@dataclasses.dataclass(frozen=True, slots=True)
class LazyStats:
    """Counts since the start. Times are in seconds since then, none if it has not happened.

    Attributes:
        fault_bytes: Copied because somebody waited for it.
        fill_bytes: Copied in the background.
        zero_bytes: Not copied, since the store knows that they are zeros.
        dropped_bytes: Not copied, since the process has nothing mapped there any more.
        faults: How often a thread waited for a page.
        zero_faults: How often of these the page was not in the image.
        events: How often a process forked, moved, discarded or unmapped memory.
        queue_max: How many threads waited at once at most.
        tasks: Restored processes and forked ones so far.
        read_s: What threads spent on reading for the background, all added up.
        copy_s: Likewise on copying what they had read into the processes.
        first_fault_s: When a thread waited first.
        restored_s: When CRIU had restored all tasks.
        filled_s: When nothing was missing any more.
    """

    fault_bytes: int = 0
    fill_bytes: int = 0
    zero_bytes: int = 0
    dropped_bytes: int = 0
    faults: int = 0
    zero_faults: int = 0
    events: int = 0
    queue_max: int = 0
    tasks: int = 0
    read_s: float = 0.0
    copy_s: float = 0.0
    first_fault_s: float | None = None
    restored_s: float | None = None
    filled_s: float | None = None

    @property
    def filling_s(self) -> float:
        """From when all tasks were there until nothing was missing; 0 until then."""
        if self.restored_s is None or self.filled_s is None:
            return 0.0
        return self.filled_s - self.restored_s


class Tally:
    """Adds up `LazyStats` from now on. Thread-safe."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._start_s = self._clock.monotonic_s()
        self._lock = threading.Lock()
        self._stats = LazyStats()

    def add(self, **counts: float) -> None:
        """Count something."""
        with self._lock:
            old = self._stats
            new = {name: getattr(old, name) + count for name, count in counts.items()}
            self._stats = dataclasses.replace(old, **new)

    def queued(self, length: int) -> None:
        """Note how many wait now."""
        with self._lock:
            if length > self._stats.queue_max:
                self._stats = dataclasses.replace(self._stats, queue_max=length)

    def happened(self, name: str) -> None:
        """Note that something happened now, if it has not before."""
        with self._lock:
            if getattr(self._stats, name) is None:
                new: dict[str, Any] = {name: self._clock.monotonic_s() - self._start_s}
                self._stats = dataclasses.replace(self._stats, **new)

    def read(self) -> LazyStats:
        """Return the counts of now."""
        with self._lock:
            return self._stats


class Recorder:
    """Keeps the order in which pages were first asked for. Thread-safe."""

    def __init__(self, runs_max: int) -> None:
        self._runs_max = runs_max
        self._lock = threading.Lock()
        self._runs: list[PageRun] = []
        self._begun: set[tuple[str, int]] = set()

    def add(self, run: PageRun) -> None:
        """Append pages; those that go on where the last ones ended join them.

        Pages that two threads wait for at once come twice and are kept once.
        """
        with self._lock:
            if run[:2] in self._begun or len(self._begun) == self._runs_max:
                return
            self._begun.add(run[:2])
            last = self._runs[-1] if self._runs else None
            if last and (last.path, last.first_page + last.page_count) == run[:2]:
                self._runs[-1] = last._replace(page_count=last.page_count + run.page_count)
            else:
                self._runs.append(run)

    def read(self) -> list[PageRun]:
        """Return what was kept."""
        with self._lock:
            return list(self._runs)
