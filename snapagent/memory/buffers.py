"""Memory that parts of regions are read into, shared by all restores under way."""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BUFFER_BYTES", "FillBuffers"]

BUFFER_BYTES: Final = 48 << 20


class FillBuffers:
    """As many buffers as there should be threads at work, whatever the number of restores.

    The one that was used last is given first, since it may still be in the processor's cache.
    Thread-safe.
    """

    def __init__(self, count: int) -> None:
        assert count >= 1, count
        self._free: list[mmap.mmap | None] = [None] * count
        self._returned = threading.Condition()

    @contextlib.contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """Lend a buffer to one thread; waits until there is one."""
        with self._returned:
            self._returned.wait_for(lambda: self._free)
            buffer = self._free.pop()
        try:
            # Made when first needed: most agents restore no external memory.
            buffer = buffer or mmap.mmap(-1, BUFFER_BYTES)
            yield memoryview(buffer)
        finally:
            with self._returned:
                self._free.append(buffer)
                self._returned.notify()
