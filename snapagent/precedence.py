"""Urgent work goes first: what else is done at the same time pauses between two pieces of it.

Python's interpreter runs one thread at a time. Threads that fill memory hand it over many thousand
times a second, so that two kinds of such work take longer beside each other than one after the
other.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Precedence"]

_LOOK_S = 0.05
"""How often somebody who waits looks whether to give up; not how long the wait is."""


class Precedence:
    """Of one kind of work over all others that ask. Thread-safe."""

    def __init__(self) -> None:
        self._is_free = threading.Event()
        self._is_free.set()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Let others wait for the length of a `with` block; not twice at once."""
        self._is_free.clear()
        try:
            yield
        finally:
            self._is_free.set()

    def give_way(self, is_over: Callable[[], bool]) -> None:
        """Return when nothing urgent is done any more, or soon after `is_over` says so."""
        while not self._is_free.is_set() and not is_over():
            self._is_free.wait(_LOOK_S)
