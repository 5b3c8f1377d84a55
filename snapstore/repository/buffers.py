"""The byte budget of one operation: buffers are borrowed and given back, never just made."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from snapstore.backend.direct import page_aligned
from snapstore.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BufferPool"]

ByteArray = npt.NDArray[np.uint8]


class BufferPool:
    """A number of equal buffers, page-aligned, made when first needed and then reused.

    Reuse matters twice: the budget holds, and fresh memory would be paid for page by page.
    Thread-safe. Who borrows must not wait for anything that needs another buffer of this pool.
    """

    def __init__(self, *, count: int, size_bytes: int) -> None:
        assert count >= 1, count
        self.size_bytes = size_bytes
        self._unmade = count
        self._free: list[ByteArray] = []
        self._surplus = 0
        self._closed = False
        self._changed = threading.Condition()

    def acquire(self) -> ByteArray:
        """Borrow a buffer; blocks until one is free. Its content is undefined.

        Raises:
            Interrupted: The pool was closed in the meantime.
        """
        with self._changed:
            while not self._free and not self._unmade and not self._closed:
                self._changed.wait()
            if self._closed:
                raise Interrupted("the operation was stopped")
            if self._free:
                return self._free.pop()
            self._unmade -= 1
        return page_aligned(self.size_bytes)

    def try_acquire(self) -> ByteArray | None:
        """Borrow a buffer if one is free.

        Raises:
            Interrupted: The pool was closed.
        """
        with self._changed:
            if not self._free and not self._unmade and not self._closed:
                return None
        return self.acquire()

    def release(self, buffer: ByteArray) -> None:
        """Give a borrowed buffer back."""
        assert len(buffer) == self.size_bytes, len(buffer)
        with self._changed:
            if self._surplus:
                self._surplus -= 1
                return
            if not self._closed:
                self._free.append(buffer)
            self._changed.notify()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[ByteArray]:
        """Borrow for the length of a `with` block."""
        buffer = self.acquire()
        try:
            yield buffer
        finally:
            self.release(buffer)

    def widen(self) -> None:
        """Allow one buffer more."""
        with self._changed:
            self._unmade += 1
            self._changed.notify()

    def narrow(self) -> None:
        """Allow one buffer less, from the moment at which that many are not lent any more."""
        with self._changed:
            if self._unmade:
                self._unmade -= 1
            elif self._free:
                self._free.pop()
            else:
                self._surplus += 1

    def trim(self) -> None:
        """Let the memory of free buffers go; they are made anew when they are needed."""
        with self._changed:
            self._unmade += len(self._free)
            self._free.clear()

    def close(self) -> None:
        """Wake everybody who waits, with `Interrupted`, and let the memory go. Idempotent."""
        with self._changed:
            self._closed = True
            self._free.clear()
            self._changed.notify_all()
