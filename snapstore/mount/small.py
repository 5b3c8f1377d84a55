"""Small files, kept whole: a block would hold many times what they have."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from snapstore.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapstore.repository.file_reader import SnapshotFile

__all__ = ["SMALL_BYTES_MAX", "SmallContent", "SmallMemory"]

SMALL_BYTES_MAX = 64 * KIB

_HELD_BYTES_MAX = 16 * MIB


class SmallMemory:
    """What small files hold together; who was read first goes first."""

    def __init__(self) -> None:
        self._held: collections.OrderedDict[SmallContent, None] = collections.OrderedDict()
        self._held_bytes = 0

    def add(self, content: SmallContent) -> None:
        """Note that a file is there, and let others go for it."""
        self._held[content] = None
        self._held_bytes += content.size_bytes
        while self._held_bytes > _HELD_BYTES_MAX:
            oldest = next(iter(self._held))
            self.remove(oldest)
            oldest.data = None

    def remove(self, content: SmallContent) -> None:
        """Note that a file is there no more, if it was."""
        if content in self._held:
            del self._held[content]
            self._held_bytes -= content.size_bytes


class SmallContent:
    """A small file, all of it or nothing (`Content`)."""

    outlives_readers = True
    # What is taken away for it are small files of before, not what was fetched of large ones.
    is_bounded = False

    def __init__(self, file: SnapshotFile, memory: SmallMemory) -> None:
        self._file = file
        self._memory = memory
        self.size_bytes = file.size_bytes
        self.data: bytes | None = None
        self._filling: list[bytes] = []

    def peek(self, offset: int, length: int) -> bytes | None:
        """See `Content.peek`."""
        data = self.data
        return None if data is None else data[offset : offset + length]

    def has(self, block: int) -> bool:
        """See `Content.has`."""
        del block
        return self.data is not None

    def begin(self, first: int, count: int, *, in_order: bool) -> Callable[[], None]:
        """See `Content.begin`."""
        del first, count, in_order
        filling = self._filling = []
        return lambda: filling.append(self.read(0, self.size_bytes))

    def end(self, first: int, count: int, *, is_filled: bool) -> None:
        """See `Content.end`."""
        del first, count
        if is_filled:
            (self.data,) = self._filling
            self._memory.add(self)

    def together(self, first: int) -> int:
        """See `Content.together`."""
        del first
        return 1

    def read(self, offset: int, length: int) -> bytes:
        """See `Content.read`."""
        return self._file.read_exactly(offset, length)

    def close(self) -> None:
        """See `Content.close`."""
        self._memory.remove(self)
        self.data = None
        self._file.close()
