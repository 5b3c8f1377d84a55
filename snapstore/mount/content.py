"""The bytes of an open file as the file system sees them: what is at hand, and how to fetch more.

`Content` is all that the reading side knows of where bytes are kept. All methods but `read`
and what `begin` gives are for the one thread that answers the kernel, and none of them blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from snapstore.mount.blocks import BLOCK_BYTES, BlockMemory, FileBlocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapstore.repository.file_reader import SnapshotFile

__all__ = ["Content", "OwnContent"]


class Content(Protocol):
    """One file, in blocks of `BLOCK_BYTES`."""

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        ...

    @property
    def is_bounded(self) -> bool:
        """Whether what is fetched makes room by taking something else away."""
        ...

    @property
    def outlives_readers(self) -> bool:
        """Whether to keep it for a while when nobody has the file open."""
        ...

    def peek(self, offset: int, length: int) -> memoryview | bytes | None:
        """Give a range within the file if all of it is at hand.

        A view is right until this thread does anything else.
        """
        ...

    def has(self, block: int) -> bool:
        """Whether a block is at hand."""
        ...

    def begin(self, first: int, count: int, *, in_order: bool) -> Callable[[], None] | None:
        """Get ready to fetch blocks, of which none is at hand or being fetched.

        Args:
            first: The first of them.
            count: How many; no more than `together` says.
            in_order: They are read once, from front to back.

        Returns:
            What fetches them; `end` has to follow it. None if there is no room at present.
        """
        ...

    def end(self, first: int, count: int, *, is_filled: bool) -> None:
        """Take blocks into use that were fetched, or forget about them."""
        ...

    def together(self, first: int) -> int:
        """How many blocks from one on can be fetched at once."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Fetch just these bytes, for once; blocks, and may be called on any thread."""
        ...

    def close(self) -> None:
        """Let go of it; nothing is on the way."""
        ...


class OwnContent:
    """A file whose blocks are in the memory of this mount alone."""

    def __init__(self, file: SnapshotFile, memory: BlockMemory) -> None:
        self._file = file
        self._memory = memory
        self._blocks = FileBlocks(memory, file.size_bytes)
        self.size_bytes = file.size_bytes
        self.is_bounded = self.outlives_readers = True
        self.peek = self._blocks.peek
        self.has = self._blocks.has

    def begin(self, first: int, count: int, *, in_order: bool) -> Callable[[], None] | None:
        """See `Content.begin`."""
        if not self._memory.reserve(count):
            return None
        room = self._blocks.room(first, count)
        file = self._file

        def fill() -> None:
            # In order, frames go straight into place; here and there, they are kept whole for
            # whoever wants what is beside these bytes.
            file.read_into(first * BLOCK_BYTES, room, streaming=in_order)

        return fill

    def end(self, first: int, count: int, *, is_filled: bool) -> None:
        """See `Content.end`."""
        if is_filled:
            self._memory.filled(self._blocks, first, count)
        else:
            self._memory.failed(self._blocks, first, count)

    def together(self, first: int) -> int:
        """See `Content.together`."""
        return self._blocks.blocks_together(first)

    def read(self, offset: int, length: int) -> bytes:
        """See `Content.read`."""
        return self._file.read_exactly(offset, length)

    def close(self) -> None:
        """See `Content.close`."""
        self._memory.forget(self._blocks)
        self._file.close()
