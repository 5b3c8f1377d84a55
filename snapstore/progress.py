"""How long work tells how far it is. Values only; showing them is the caller's business."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

__all__ = ["Progress", "ProgressCallback", "ProgressMeter"]


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far an operation is.

    Attributes:
        phase: One word for what is being done, such as `store` or `commit`.
        done_bytes: Logical bytes done.
        total_bytes: Logical bytes in all, or 0 if that is not known.
        is_estimate: The total may turn out to be another one.
    """

    phase: str
    done_bytes: int
    total_bytes: int
    is_estimate: bool = False


ProgressCallback = Callable[[Progress], None]
"""Called from any thread, one at a time; must return soon. An exception ends the operation."""


class ProgressMeter:
    """Counts for one operation and tells its callback. Thread-safe."""

    def __init__(self, callback: ProgressCallback | None, total_bytes: int = 0) -> None:
        self._callback = callback
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._phase = "start"
        self._lock = threading.Lock()

    def enter(self, phase: str, total_bytes: int | None = None) -> None:
        """Begin another phase; counting goes on unless it has a total of its own."""
        with self._lock:
            self._phase = phase
            if total_bytes is not None:
                self._total_bytes, self._done_bytes = total_bytes, 0
            self._tell()

    def add(self, count_bytes: int) -> None:
        """Count bytes as done."""
        with self._lock:
            self._done_bytes += count_bytes
            self._tell()

    def _tell(self) -> None:
        if self._callback is not None:
            self._callback(Progress(self._phase, self._done_bytes, self._total_bytes))
