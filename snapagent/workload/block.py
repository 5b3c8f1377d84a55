"""One allocation: its bytes as a buffer, a numpy array or a torch tensor."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

from snapagent.workload.mappings import array_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    Shape = SupportsIndex | Sequence[SupportsIndex]

__all__ = ["Block", "Home"]


class Home(Protocol):
    """Where a block comes from."""

    def check_mapped(self) -> None:
        """Raise unless the memory can be touched."""

    def take_back(self, address: int) -> None:
        """Give the block at this address back."""

    def drop(self, address: int) -> None:
        """Take note that nobody has the block at this address any more; never waits."""


class Block:
    """Some bytes of external memory. Methods may be called from any thread.

    Views of it, however they were made, keep it allocated. It goes back when it and all of its
    views are gone, or with `free`, after which no view may be touched: other blocks get its bytes.
    """

    def __init__(self, home: Home, address: int, size_bytes: int) -> None:
        """Only `HostMemory.allocate` makes one."""
        self._home = home
        # Whoever takes it out frees the block: only one of several threads can.
        self._to_free = [address]
        self.address = address
        self.size_bytes = size_bytes

    @property
    def buffer(self) -> memoryview:
        """All of its bytes, writable.

        Raises:
            MemoryReleased: It is not mapped now. Views that were made before must not be touched
                either: that is SIGSEGV.
            ValueError: It was freed.
        """
        if not self._to_free:
            raise ValueError(f"the block at {self.address:#x} was freed")
        self._home.check_mapped()
        memory = array_at(self.address, self.size_bytes)
        # So that no view is left when the block goes.
        memory.block = self  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def numpy(self, dtype: Any, shape: Shape, *, offset: int = 0) -> Any:  # noqa: ANN401 - optional
        """Return a numpy array that is some of its bytes.

        Args:
            dtype: Of the elements.
            shape: Of the array.
            offset: Where in the block it begins, in bytes.

        Raises:
            MemoryReleased: It is not mapped now.
            ValueError: The block is too small for that.
        """
        import numpy as np  # noqa: PLC0415 - optional

        kind = np.dtype(dtype)
        sizes = _sizes(shape)
        part = self._part(offset, math.prod(sizes) * kind.itemsize)
        return np.frombuffer(part, dtype=kind).reshape(sizes)

    def torch(self, dtype: Any, shape: Shape, *, offset: int = 0) -> Any:  # noqa: ANN401 - optional
        """Return a torch tensor on the CPU that is some of its bytes; see `numpy`."""
        import torch  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415 - optional

        sizes = _sizes(shape)
        part = self._part(offset, math.prod(sizes) * dtype.itemsize)
        if not part:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(part, dtype=dtype).reshape(sizes)

    def free(self) -> None:
        """Give the block back at once. Idempotent.

        Raises:
            MemoryReleased: It is not mapped now.
            NotTheOwner: This process is a child of the one that allocated it.
        """
        try:
            address = self._to_free.pop()
        except IndexError:
            return
        try:
            self._home.take_back(address)
        except BaseException:
            self._to_free.append(address)
            raise

    def __del__(self) -> None:
        if getattr(self, "_to_free", None):
            self._home.drop(self.address)

    def _part(self, offset: int, length: int) -> memoryview:
        if offset < 0 or offset + length > self.size_bytes:
            raise ValueError(f"a block of {self.size_bytes} bytes has no {length} at {offset}")
        return self.buffer[offset : offset + length]


def _sizes(shape: Shape) -> tuple[int, ...]:
    """Return a shape as numbers, also of one that has numbers of numpy."""
    given = (shape,) if isinstance(shape, SupportsIndex) else shape
    sizes = tuple(operator.index(size) for size in given)
    if any(size < 0 for size in sizes):
        raise ValueError(f"there is no shape {sizes}: how much it takes has to be said")
    return sizes
