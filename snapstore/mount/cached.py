"""Content in the cache of the node, which all mounts and restores of a machine share."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from snapstore.mount.blocks import BLOCK_BYTES, BlockMemory
from snapstore.mount.content import Content, OwnContent
from snapstore.mount.small import SMALL_BYTES_MAX, SmallContent, SmallMemory
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapstore.cache.node_cache import CachedFile, NodeCache
    from snapstore.repository.file_reader import SnapshotFile

__all__ = ["CachedContent", "Opener"]

_ANSWER_BYTES_MAX = 1 * MIB
"""The kernel asks for no more at once."""

_answer = memoryview(mmap.mmap(-1, _ANSWER_BYTES_MAX))
"""Where answers are put together: one at a time, and sent before the next. Fresh memory for each
would be paid for page by page. A mapping of the cache file, which would spare the copy, costs more
than that in page faults, and takes memory for holes."""


class Opener:
    """Opens files of snapshots, each where its bytes are best kept."""

    def __init__(self, cache: NodeCache | None, memory: BlockMemory) -> None:
        self._cache = cache if cache is not None and cache.has_decoded else None
        self._memory = memory
        self._small = SmallMemory()

    def may_block(self, size_bytes: int) -> bool:
        """Whether opening a file of this length may take long."""
        return self._cache is not None and size_bytes > SMALL_BYTES_MAX

    def open(self, file: SnapshotFile) -> Content:
        """Open a file; may be called on any thread.

        Raises:
            IntegrityError: The tables of its rank are damaged or gone.
        """
        if file.size_bytes <= SMALL_BYTES_MAX:
            return SmallContent(file, self._small)
        own = OwnContent(file, self._memory)
        if self._cache is None:
            return own
        cached = self._cache.file(file)
        if not cached.is_kept:
            cached.close()
            return own
        return CachedContent(cached, own)


class CachedContent:
    """A file in the node's cache (`Content`); what has no room there is in memory of the mount."""

    def __init__(self, cached: CachedFile, own: OwnContent) -> None:
        self._cached = cached
        self._own = own
        self._is_full = False
        self._begun_own: set[int] = set()
        self.size_bytes = cached.size_bytes
        # While it is open the cache cannot give it up.
        self.outlives_readers = False

    @property
    def is_bounded(self) -> bool:
        """See `Content.is_bounded`."""
        return self._is_full

    def peek(self, offset: int, length: int) -> memoryview | bytes | None:
        """See `Content.peek`."""
        if length <= _ANSWER_BYTES_MAX and self._cached.filled(offset, length):
            answer = _answer[:length]
            if os.preadv(self._cached.fd, [answer], offset) == length:
                return answer
        return self._own.peek(offset, length) if self._is_full else None

    def has(self, block: int) -> bool:
        """See `Content.has`."""
        if self._cached.filled(block * BLOCK_BYTES, BLOCK_BYTES):
            return True
        return self._is_full and self._own.has(block)

    def begin(self, first: int, count: int, *, in_order: bool) -> Callable[[], None] | None:
        """See `Content.begin`."""
        if self._is_full:
            fill = self._own.begin(first, count, in_order=in_order)
            if fill is not None:
                self._begun_own.add(first)
            return fill
        begin = first * BLOCK_BYTES
        length = min(count * BLOCK_BYTES, self.size_bytes - begin)

        def ensure() -> None:
            if not self._cached.ensure(begin, length):
                # From the next time on; whoever waits for these bytes asks for them again.
                self._is_full = True

        return ensure

    def end(self, first: int, count: int, *, is_filled: bool) -> None:
        """See `Content.end`."""
        if first in self._begun_own:
            self._begun_own.remove(first)
            self._own.end(first, count, is_filled=is_filled)

    def together(self, first: int) -> int:
        """See `Content.together`."""
        return self._own.together(first)

    def read(self, offset: int, length: int) -> bytes:
        """See `Content.read`."""
        return self._own.read(offset, length)

    def close(self) -> None:
        """See `Content.close`."""
        self._cached.close()
        self._own.close()
