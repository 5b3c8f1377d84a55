"""Files of a node cache whose pages are locked, so that GPUs fetch them without the processor.

Locking takes a tenth of a second for each gibibyte, more than reading it once, so nobody waits for
it: it is done after a restore, for the next ones, and stays as long as the budget lasts.
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
    """A file as a cache keeps it: decoded, checked, and as long as it is open not taken away."""

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

    def hold(self) -> int:
        """Return a writable descriptor with which it is not taken away; raises `OSError`."""
        ...

    def discard(self) -> None:
        """Forget it: it is damaged."""
        ...


@dataclass(eq=False, slots=True)
class RegisteredFile:
    """A mapped file with locked pages, which its cache keeps for as long.

    Attributes:
        address: Where its first byte is.
        length: Bytes that are locked.
    """

    address: int
    length: int
    mapping: mmap.mmap
    fd: int
    gpu: Gpu
    users: int = 0
    is_dropped: bool = False

    def give_up(self) -> None:
        """Unlock and unmap it, and then let its cache have it."""
        self.gpu.host_unregister(self.address)
        self.mapping.close()
        os.close(self.fd)


class RegisteredFiles:
    """Files that are locked, the least recently used given up first. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        """Prepare.

        Args:
            budget_bytes: How much may be locked; 0 for nothing.
        """
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._files: collections.OrderedDict[_Key, RegisteredFile] = collections.OrderedDict()
        self._coming: set[_Key] = set()
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def locked_bytes(self) -> int:
        """How much is locked now, or about to be."""
        with self._lock:
            return self._bytes

    def close(self) -> None:
        """Give up all that nobody uses. Idempotent."""
        self._give_up(self._unused(self.budget_bytes))

    @contextlib.contextmanager
    def lend(self, cached: CachedBytes) -> Iterator[RegisteredFile | None]:
        """Lend a file if it is locked. Waits for nothing. All GPUs can use it.

        Args:
            cached: Stays open meanwhile.
        """
        key = _key_of(cached)
        with self._lock:
            found = None if key is None else self._files.get(key)
            if found is not None and key is not None:
                self._files.move_to_end(key)
                found.users += 1
        try:
            yield found
        finally:
            if found is not None:
                with self._lock:
                    found.users -= 1
                    is_last = found.is_dropped and not found.users
                if is_last:
                    found.give_up()

    def add(self, cached: CachedBytes, gpu: Gpu) -> bool:
        """Lock a file that is wholly in the cache, which takes its time; others need not wait.

        All of it takes memory then, holes as well.

        Args:
            cached: May be closed afterwards.
            gpu: By which to lock it; stays open for as long as this does.

        Returns:
            Whether it is locked now.
        """
        key = _key_of(cached)
        if key is None or not cached.filled(0, cached.size_bytes):
            return False
        length = key[2]
        with self._lock:
            if key in self._files or key in self._coming:
                return key in self._files
            if length > self.budget_bytes:
                return False
            given_up = self._take_unused(length)
            if self._bytes + length > self.budget_bytes:
                # What was taken away stays so: its turn had come.
                length = 0
            self._bytes += length
            self._coming.add(key)
        made = None
        try:
            self._give_up(given_up)
            made = _register(cached, length, gpu) if length else None
        finally:
            with self._lock:
                self._coming.discard(key)
                if made is not None:
                    self._files[key] = made
                else:
                    self._bytes -= length
        return made is not None

    def drop(self, cached: CachedBytes) -> None:
        """Give a file up, as soon as nobody uses it: it is damaged."""
        key = _key_of(cached)
        with self._lock:
            found = None if key is None else self._files.pop(key, None)
            if found is None:
                return
            self._bytes -= found.length
            found.is_dropped = True
            is_unused = not found.users
        if is_unused:
            found.give_up()

    def _unused(self, length: int) -> list[RegisteredFile]:
        with self._lock:
            return self._take_unused(length)

    def _take_unused(self, length: int) -> list[RegisteredFile]:
        """Take away what nobody uses until there is room, or nothing is left to take."""
        taken = []
        for key in [*self._files]:
            if self._bytes + length <= self.budget_bytes:
                break
            if not self._files[key].users:
                taken.append(self._files.pop(key))
                self._bytes -= taken[-1].length
        return taken

    @staticmethod
    def _give_up(files: list[RegisteredFile]) -> None:
        for one in files:
            one.give_up()


def _key_of(cached: CachedBytes) -> _Key | None:
    if cached.fd < 0 or not cached.size_bytes:
        return None
    stat = os.fstat(cached.fd)
    # A mapping of huge pages has whole ones.
    length = align_up(cached.size_bytes, max(PAGE_BYTES, os.fstatvfs(cached.fd).f_bsize))
    # Else it could not be mapped to its end.
    return (stat.st_dev, stat.st_ino, length) if stat.st_size >= length else None


def _register(cached: CachedBytes, length: int, gpu: Gpu) -> RegisteredFile | None:
    with contextlib.ExitStack() as stack:
        try:
            fd = cached.hold()
            stack.callback(os.close, fd)
            mapping = mmap.mmap(fd, length)
            stack.callback(mapping.close)
            address = address_of(memoryview(mapping))
            gpu.host_register(address, length)
        except (OSError, GpuFailed):
            return None
        stack.pop_all()
        return RegisteredFile(address, length, mapping, fd, gpu)
