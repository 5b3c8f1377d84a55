"""Decoded bytes of files in memory: blocks that come and go, within a budget of bytes.

A file has its own range of addresses, laid out as the file is, so that what lies together is
together here as well: it is fetched in one piece and handed to the kernel without a copy. Blocks
that are given up leave their memory to the system. Used by one thread, but for the bytes of blocks
that are being filled, which belong to whoever fills them.
"""

from __future__ import annotations

import collections
import mmap

import numpy as np

from snapstore.units import GIB, MIB

__all__ = ["BLOCK_BYTES", "BlockMemory", "FileBlocks"]

BLOCK_BYTES = 2 * MIB
"""A huge page, so that fresh memory is paid for once a block and not once a page. What is read in
order is fetched several at a time."""

_WINDOW_BYTES = 1 * GIB

_MAP_NORESERVE = 0x4000
"""Addresses are no promise of memory. Python has a name for it from 3.13 on."""

_WINDOW_BLOCKS = _WINDOW_BYTES // BLOCK_BYTES


class _Window:
    """A gibibyte of the addresses of a file; memory is only behind blocks that are filled."""

    __slots__ = ("_begin", "_map", "used", "view")

    def __init__(self, *, is_large: bool) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, _WINDOW_BYTES + BLOCK_BYTES, flags=flags)
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._begin = -address % BLOCK_BYTES
        # A huge page behind a small file would hold more than the file.
        self._map.madvise(mmap.MADV_HUGEPAGE if is_large else mmap.MADV_NOHUGEPAGE)
        self.view = memoryview(self._map)[self._begin : self._begin + _WINDOW_BYTES]
        self.used = 0

    def give_up(self, offset: int) -> None:
        self._map.madvise(mmap.MADV_DONTNEED, self._begin + offset, BLOCK_BYTES)
        self.used -= 1


class FileBlocks:
    """The blocks of one file that are in memory."""

    def __init__(self, memory: BlockMemory, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.count = -(-size_bytes // BLOCK_BYTES)
        self._memory = memory
        self._windows: dict[int, _Window] = {}
        self._filled: set[int] = set()

    def peek(self, offset: int, length: int) -> memoryview | bytes | None:
        """Give a range that is within the file; None if some of it is not here.

        A view stays right until this thread does anything else with the memory.
        """
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        filled, memory = self._filled, self._memory
        for block in range(first, last + 1):
            if block not in filled:
                return None
            memory.touch(self, block)
        window, begin = divmod(offset, _WINDOW_BYTES)
        if begin + length <= _WINDOW_BYTES:
            return self._windows[window].view[begin : begin + length]
        head = self._windows[window].view[begin:]
        return b"".join((head, self._windows[window + 1].view[: length - len(head)]))

    def has(self, block: int) -> bool:
        """Whether a block is here."""
        return block in self._filled

    def blocks(self) -> list[int]:
        """The numbers of the blocks that are here."""
        return [*self._filled]

    def room(self, first: int, count: int) -> memoryview:
        """Give the memory of blocks that are to be filled, all of one window, up to the file's end.

        `BlockMemory.reserve` must have made room for them.
        """
        number, within = divmod(first, _WINDOW_BLOCKS)
        assert within + count <= _WINDOW_BLOCKS, (first, count)
        window = self._windows.get(number)
        if window is None:
            window = self._windows[number] = _Window(is_large=self.size_bytes >= BLOCK_BYTES)
        window.used += count
        begin = within * BLOCK_BYTES
        length = min(count * BLOCK_BYTES, self.size_bytes - first * BLOCK_BYTES)
        return window.view[begin : begin + length]

    def fill(self, first: int, count: int) -> None:
        """Take blocks whose memory was filled into use."""
        self._filled.update(range(first, first + count))

    def give_up(self, block: int) -> None:
        """Let the memory of a block go."""
        self._filled.discard(block)
        number, within = divmod(block, _WINDOW_BLOCKS)
        window = self._windows[number]
        window.give_up(within * BLOCK_BYTES)
        if not window.used:
            del self._windows[number]

    @staticmethod
    def blocks_together(first: int) -> int:
        """How many blocks from this one on can be filled as one."""
        return _WINDOW_BLOCKS - first % _WINDOW_BLOCKS


class BlockMemory:
    """The budget that the blocks of all files share; the least recently read go first."""

    def __init__(self, *, budget_bytes: int) -> None:
        self.blocks_max = budget_bytes // BLOCK_BYTES
        self._recent: collections.OrderedDict[tuple[FileBlocks, int], None] = (
            collections.OrderedDict()
        )
        self._filling = 0

    @property
    def held_bytes(self) -> int:
        """What is in memory now, filled or being filled."""
        return (len(self._recent) + self._filling) * BLOCK_BYTES

    def touch(self, file: FileBlocks, block: int) -> None:
        """Note that a block was read."""
        self._recent.move_to_end((file, block))

    def reserve(self, count: int) -> bool:
        """Make room for blocks to be filled; False if others are filling too many."""
        if self._filling + count > self.blocks_max:
            return False
        while len(self._recent) + self._filling + count > self.blocks_max:
            (file, block), _ = self._recent.popitem(last=False)
            file.give_up(block)
        self._filling += count
        return True

    def filled(self, file: FileBlocks, first: int, count: int) -> None:
        """Take blocks into use."""
        self._filling -= count
        file.fill(first, count)
        for block in range(first, first + count):
            self._recent[file, block] = None

    def failed(self, file: FileBlocks, first: int, count: int) -> None:
        """Let the memory of blocks that could not be filled go."""
        self._filling -= count
        for block in range(first, first + count):
            file.give_up(block)

    def forget(self, file: FileBlocks) -> None:
        """Let all of a file go."""
        for block in file.blocks():
            del self._recent[file, block]
            file.give_up(block)
