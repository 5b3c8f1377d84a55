"""Files of a node cache whose pages are locked, so that GPUs fetch them without the processor.

Locking takes a tenth of a second for each gibibyte, so a file that was locked stays so for the next
restore, as long as the budget lasts.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from snapagent.errors import GpuFailed
from snapagent.gpu.driver import address_of
from snapstore.units import PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapagent.gpu.driver import Gpu

__all__ = ["CachedBytes", "RegisteredFile", "RegisteredFiles"]

_Key = tuple[int, int, int]
"""Device, inode and length of a file."""


class CachedBytes(Protocol):
    """A file that a cache keeps: decoded, checked, and as long as it is used not taken away."""

    @property
    def fd(self) -> int:
        """Descriptor of it, -1 if it is not kept; offset in it is offset in the snapshot's file."""
        ...

    @property
    def size_bytes(self) -> int:
        """Length of the snapshot's file."""
        ...

    def filled(self, offset: int, length: int) -> bool:
        """Tell whether all of a range is there."""
        ...


@dataclass(eq=False, slots=True)
class RegisteredFile:
    """A mapped file with locked pages.

    Attributes:
        address: Where its first byte is.
        length: Bytes that are locked.
    """

    address: int
    length: int
    mapping: mmap.mmap
    gpu: Gpu
    users: int = 0


class RegisteredFiles:
    """Files that are locked, the least recently used given up first. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        """Prepare.

        Args:
            budget_bytes: How much may be locked; 0 for nothing.
        """
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._files: collections.OrderedDict[_Key, RegisteredFile] = collections.OrderedDict()
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up all that nobody uses. Idempotent."""
        with self._lock:
            self._make_room(self._budget_bytes)

    @contextlib.contextmanager
    def lend(self, cached: CachedBytes, gpu: Gpu) -> Iterator[RegisteredFile | None]:
        """Lend a file that is wholly in the cache; None if it is not, or there is no room.

        Locks its pages if they are not locked yet, which takes its time. All GPUs can use it.

        Args:
            cached: Stays open meanwhile.
            gpu: By which to lock it.
        """
        found = self._take(cached, gpu)
        try:
            yield found
        finally:
            if found is not None:
                with self._lock:
                    found.users -= 1

    def _take(self, cached: CachedBytes, gpu: Gpu) -> RegisteredFile | None:
        if cached.fd < 0 or not cached.size_bytes or not cached.filled(0, cached.size_bytes):
            return None
        stat = os.fstat(cached.fd)
        length = align_up(cached.size_bytes, PAGE_BYTES)
        if stat.st_size < length:
            return None  # It could not be mapped to its end.
        key = (stat.st_dev, stat.st_ino, length)
        with self._lock:
            found = self._files.get(key)
            if found is None:
                if not self._make_room(length):
                    return None
                found = _register(cached.fd, length, gpu)
                if found is None:
                    return None
                self._files[key] = found
                self._bytes += length
            self._files.move_to_end(key)
            found.users += 1
            return found

    def _make_room(self, length: int) -> bool:
        """Give up what nobody uses until there is room; returns whether there is."""
        for key in [*self._files]:
            if self._bytes + length <= self._budget_bytes:
                break
            if not self._files[key].users:
                given_up = self._files.pop(key)
                self._bytes -= given_up.length
                given_up.gpu.host_unregister(given_up.address)
                given_up.mapping.close()
        return self._bytes + length <= self._budget_bytes


def _register(fd: int, length: int, gpu: Gpu) -> RegisteredFile | None:
    # Only pages that can be written to are locked without being copied; nobody does write.
    try:
        writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        mapping = mmap.mmap(writable, length)
    finally:
        os.close(writable)
    address = address_of(memoryview(mapping))
    try:
        gpu.host_register(address, length)
    except GpuFailed:
        mapping.close()
        return None
    return RegisteredFile(address, length, mapping, gpu)
