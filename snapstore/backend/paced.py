"""A backend that reads no faster than it was told to, for work that is in no hurry."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from typing_extensions import override

from snapstore.backend.forwarding import ForwardingBackend
from snapstore.errors import Interrupted

if TYPE_CHECKING:
    from snapstore.backend.base import Backend, ObjectKind
    from snapstore.clock import Clock

__all__ = ["PacedBackend"]

_TICK_S = 1e-6
_PAUSE_S_MAX = 0.1
"""How soon somebody who waits for his turn notices that all is to stop."""


class PacedBackend(ForwardingBackend):
    """Spreads reads so that their bytes keep to a rate (`Backend`). Thread-safe.

    A read begins when the bytes of those before it have had their time. Other verbs are not held
    up. Closing it leaves the other backend open.
    """

    def __init__(self, inner: Backend, clock: Clock, *, bytes_per_s: float) -> None:
        super().__init__(inner)
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = clock.monotonic_s()
        self._stopped = False

    def stop(self) -> None:
        """Let nobody wait any longer; reads that have not begun fail with `Interrupted`."""
        self._stopped = True

    @override
    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        with self._lock:
            begin_s = max(self._free_s, self._clock.monotonic_s())
            self._free_s = begin_s + into.nbytes / self._bytes_per_s
        while (left_s := begin_s - self._clock.monotonic_s()) > _TICK_S and not self._stopped:
            self._clock.sleep_s(min(left_s, _PAUSE_S_MAX))
        if self._stopped:
            raise Interrupted("stopped while waiting to read")
        self._inner.get_range(kind, name, offset, into)
