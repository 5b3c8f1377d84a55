"""Ranges of stored objects on disk, in blocks, as the store has them (N1 to N6).

A cache file holds one object: a header, a table with the checksum of each block that is there, and
the blocks, each in a place of its own, so that the file is as sparse as what was read. Nothing is
flushed: after a power loss a block may be lost whose checksum is there, or the other way round, and
either is noticed. A file that is removed is cut as well, so that its room is free at once; readers
notice that too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
from blake3 import blake3

from snapstore.backend.descriptors import DescriptorCache
from snapstore.backend.direct import copy_bytes, page_aligned
from snapstore.cache.contents import CacheEntry, CacheTier
from snapstore.cache.locks import Patience, claim
from snapstore.cache.room import Room
from snapstore.units import KIB, MIB, PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from snapstore.cache.directory import CacheDirectory, Occupant
    from snapstore.clock import Clock

__all__ = ["BLOCK_BYTES", "StoredObject", "StoredTier"]

_log = logging.getLogger("snapstore.cache")

BLOCK_BYTES = 64 * KIB
"""What is read besides what was asked for is less than that at either end."""

_MAGIC = b"SNAPBLK1"
_HEADER = struct.Struct("<8sQ32s")
_TABLE_AT = PAGE_BYTES
_ENTRY = np.dtype("<u8")
_ABSENT = 0

_OBJECT_BYTES_MAX = 64 * 1024 * MIB
"""No object that is worth it is longer; its table would be."""

_SEED_MAX = (1 << 64) - 1
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_PATIENCE_S = 60.0
_USED_S_MIN = 1.0
_OPEN_TRIES = 100


class StoredObject(NamedTuple):
    """An object of a store.

    Attributes:
        name: Of its cache file; never that of an object with other bytes.
        title: For messages.
        length: Finds out how long it is; may raise what the store raises.
        fetch: Fills a buffer with its bytes from an offset on; likewise.
    """

    name: str
    title: str
    length: Callable[[], int]
    fetch: Callable[[int, memoryview], None]


class StoredTier:
    """The directory of the cache files. Thread-safe and safe among processes."""

    def __init__(
        self,
        directory: CacheDirectory,
        state: CacheDirectory,
        budget_bytes: int,
        clock: Clock,
        *,
        is_pinned: Callable[[str], bool],
    ) -> None:
        """Take over a directory; `state` has room for a small file.

        Raises:
            OSError: That cannot be used.
        """
        self.directory = directory
        self.clock = clock
        self._is_pinned = is_pinned
        self._used_s: dict[str, float] = {}
        self.room = Room(
            state, "packs.room", budget_bytes, clock, survey=self.occupants, evict=self.evict
        )
        self._descriptors = DescriptorCache(self._open, os.close, clock)

    def read(self, wanted: StoredObject, offset: int, into: memoryview) -> None:
        """Fill `into` with an object's bytes from `offset` on.

        Raises what the store raises when it is asked.
        """
        try:
            with self._lend(wanted) as file:
                _Reading(self, wanted, file, offset, into).run()
        except OSError as error:
            _log.warning("reading %s past the cache: %s", wanted.title, error)
            wanted.fetch(offset, into)

    def forget(self, name: str, offset: int, length: int) -> None:
        """Drop blocks that turned out to be wrong though they are what the store once gave."""
        with contextlib.suppress(OSError):
            fd = self.directory.open_file(name)
            try:
                first, last = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
                os.pwrite(fd, bytes(_ENTRY.itemsize * (last - first)), _entry_at(first))
            finally:
                os.close(fd)

    def occupants(self) -> list[Occupant]:
        """Give the cache files, the one that was unused longest first."""
        return self.directory.occupants()

    def holds(self, name: str, offset: int, length: int) -> bool:
        """Whether all of a range is there; it is not checked."""
        _, entries = self._look(name, offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES))
        return len(entries) > 0 and bool((entries != _ABSENT).all())

    def entries(self) -> list[CacheEntry]:
        """What is there, what was unused longest first."""
        found = []
        for occupant in self.occupants():
            length, entries = self._look(occupant.name, 0, None)
            _, _, label = occupant.name.partition("-")
            found.append(
                CacheEntry(
                    tier=CacheTier.PACKS,
                    name=occupant.name,
                    label=label,
                    size_bytes=length,
                    held_bytes=min(int(np.count_nonzero(entries)) * BLOCK_BYTES, length),
                    used_ns=occupant.used_ns,
                    is_pinned=self._is_pinned(occupant.name),
                )
            )
        return found

    def _look(self, name: str, first: int, last: int | None) -> tuple[int, npt.NDArray[np.uint64]]:
        """The length of an object and the checksums of some blocks; none of what is not there."""
        try:
            fd = self.directory.open_file(name, write=False)
        except OSError:
            return 0, np.zeros(0, _ENTRY)
        try:
            length = _read_length(fd, name)
            end = -(-length // BLOCK_BYTES)
            return length, _read_entries(fd, first, end if last is None else min(last, end))
        except (OSError, _Damaged):
            return 0, np.zeros(0, _ENTRY)
        finally:
            os.close(fd)

    def evict(self, occupant: Occupant) -> bool:
        """Remove a file unless it is pinned; says whether it did."""
        if self._is_pinned(occupant.name):
            return False
        try:
            fd = self.directory.open_file(occupant.name)
        except OSError:
            return False
        try:
            self.directory.unlink(occupant.name)
            os.ftruncate(fd, 0)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def close(self) -> None:
        """Let go of everything."""
        self._descriptors.close()
        self.room.close()
        self.directory.close()

    @contextlib.contextmanager
    def _lend(self, wanted: StoredObject) -> Iterator[_CacheFile]:
        for _ in range(_OPEN_TRIES):
            with self._descriptors.lend(wanted.name) as fd:
                if not os.fstat(fd).st_nlink:
                    self._descriptors.forget(wanted.name)
                    continue
                try:
                    length = self._prepare(wanted, fd)
                except _Damaged:
                    _log.warning("%s: the cache file %s is damaged", wanted.title, wanted.name)
                    self.directory.unlink(wanted.name)
                    self._descriptors.forget(wanted.name)
                    continue
                self._note_use(wanted.name, fd)
                yield _CacheFile(fd, length)
                return
        raise OSError(f"{wanted.name} is removed again and again")

    def _open(self, name: str) -> int:
        return self.directory.open_file(name, create=True)

    def _prepare(self, wanted: StoredObject, fd: int) -> int:
        """Find out how long the object is; a new file is told."""
        length = _read_length(fd, wanted.name)
        if not length:
            try:
                length = wanted.length()
            except BaseException:
                self.directory.unlink(wanted.name)
                raise
            if not 0 < length <= _OBJECT_BYTES_MAX:
                raise OSError(f"no room for {length} bytes")
            # Two who do this at once write the same.
            os.ftruncate(fd, _block_at(length, 0) + align_up(length, BLOCK_BYTES))
            os.pwrite(fd, _header(wanted.name, length), 0)
        return length

    def _note_use(self, name: str, fd: int) -> None:
        now_s = self.clock.monotonic_s()
        if now_s - self._used_s.get(name, -_USED_S_MIN) >= _USED_S_MIN:
            if len(self._used_s) > 1024:
                self._used_s.clear()
            self._used_s[name] = now_s
            os.utime(fd)


class _Damaged(Exception):
    """The file is not what its name says."""


class _CacheFile(NamedTuple):
    fd: int
    length: int


class _Scratch(threading.local):
    """Memory of one thread: a block for either end, and what is being fetched."""

    def __init__(self) -> None:
        self.ends = page_aligned(2 * BLOCK_BYTES).data
        self._memory = page_aligned(0)

    def take(self, size_bytes: int) -> memoryview:
        if len(self._memory) < size_bytes:
            self._memory = page_aligned(size_bytes)
        return self._memory[:size_bytes].data


_scratch = _Scratch()


class _Reading:
    """One range that is being read. Used by one thread."""

    def __init__(
        self,
        tier: StoredTier,
        wanted: StoredObject,
        file: _CacheFile,
        offset: int,
        into: memoryview,
    ) -> None:
        self._tier = tier
        self._wanted = wanted
        self._fd, self._length = file
        self._offset = offset
        self._into = into
        self._seed = _seed_of(wanted.name)

    def run(self) -> None:
        """Go through the blocks: read those that are there, fetch the others."""
        end = self._offset + self._into.nbytes
        if self._offset < 0 or end > self._length:
            # The store says what is wrong with that.
            self._wanted.fetch(self._offset, self._into)
            return
        block, last = self._offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        patience = None
        while block < last:
            entries = _read_entries(self._fd, block, last)
            count = _run_length(entries != _ABSENT)
            if entries[0] != _ABSENT:
                done = self._read_some(block, entries[:count])
            else:
                done = self._fetch_some(block, block + count)
            if not done and entries[0] == _ABSENT:
                # Somebody else fetches it.
                patience = patience or Patience(self._tier.clock, _PATIENCE_S)
                if not patience.wait():
                    begin = max(block * BLOCK_BYTES, self._offset)
                    self._wanted.fetch(begin, self._into[begin - self._offset :])
                    return
            elif done:
                block, patience = block + done, None

    def _read_some(self, first: int, entries: npt.NDArray[np.uint64]) -> int:
        """Read blocks that are there; gives how many are right, and drops the next one."""
        begin = first * BLOCK_BYTES
        end = min(begin + len(entries) * BLOCK_BYTES, self._length)
        views = self._views(begin, end)
        count = os.preadv(self._fd, views, _block_at(self._length, first))
        done = 0
        position = begin
        for view in views:
            for at in range(0, view.nbytes, BLOCK_BYTES):
                data = view[at : at + BLOCK_BYTES]
                position += data.nbytes
                is_there = position - begin <= count
                if not is_there or self._checksum(first + done, data) != entries[done]:
                    self._drop(first + done)
                    return done
                self._hand_out(first + done, data)
                done += 1
        return done

    def _views(self, begin: int, end: int) -> list[memoryview]:
        """Where blocks are read to: to the reader, and those that it wants a part of to our own."""
        low, high = self._offset, self._offset + self._into.nbytes
        head = min(begin + BLOCK_BYTES, end) if begin < low else begin
        tail = max(end - 1, 0) // BLOCK_BYTES * BLOCK_BYTES if end > high else end
        tail = max(tail, head)
        views = [
            _scratch.ends[: head - begin],
            self._into[head - low : tail - low],
            _scratch.ends[BLOCK_BYTES : BLOCK_BYTES + end - tail],
        ]
        return [view for view in views if view.nbytes]

    def _hand_out(self, block: int, data: memoryview) -> None:
        """Give the reader its part of a block that was read to memory of our own."""
        begin = block * BLOCK_BYTES
        low, high = self._offset, self._offset + self._into.nbytes
        if begin < low or begin + data.nbytes > high:
            at, end = max(begin, low), min(begin + data.nbytes, high)
            copy_bytes(self._into[at - low : end - low], data[at - begin : end - begin])

    def _fetch_some(self, first: int, stop: int) -> int:
        """Claim and fetch some blocks from the first on; how many: none if others fetch it."""
        at = _block_at(self._length, 0)
        begin, end = at + first * BLOCK_BYTES, at + stop * BLOCK_BYTES
        with claim(self._reopen, begin, end) as claimed:
            stop = (claimed - at) // BLOCK_BYTES
            if stop <= first:
                return 0
            # Whoever had it before may have fetched it.
            count = _run_length(_read_entries(self._fd, first, stop) != _ABSENT, of=False)
            if not count:
                return 0
            begin = first * BLOCK_BYTES
            end = min(begin + count * BLOCK_BYTES, self._length)
            data = _scratch.take(end - begin)
            self._wanted.fetch(begin, data)
            low, high = self._offset, self._offset + self._into.nbytes
            at, until = max(begin, low), min(end, high)
            copy_bytes(self._into[at - low : until - low], data[at - begin : until - begin])
            self._keep(first, data)
            return count

    def _keep(self, first: int, data: memoryview) -> None:
        """Write blocks and then their checksums, if there is room."""
        sums = [
            self._checksum(number, data[at : at + BLOCK_BYTES])
            for number, at in enumerate(range(0, data.nbytes, BLOCK_BYTES), first)
        ]
        room = self._tier.room
        for _ in range(2):
            # A file that was removed has no room that is counted.
            if not os.fstat(self._fd).st_nlink or not room.take(data.nbytes):
                return
            try:
                _write_all(self._fd, data, _block_at(self._length, first))
                _write_all(self._fd, np.array(sums, _ENTRY).view(np.uint8).data, _entry_at(first))
            except OSError as error:
                room.give_back(data.nbytes)
                if error.errno not in _FULL:
                    raise
                # Others fill this file system as well.
                room.shrink(2 * data.nbytes)
                continue
            return

    def _drop(self, block: int) -> None:
        """Drop a block that is not what was written, unless that is because the file is gone."""
        if os.fstat(self._fd).st_nlink:
            _log.warning(
                "%s: block at offset %d is damaged in the cache file %s; fetching it again",
                self._wanted.title,
                block * BLOCK_BYTES,
                self._tier.directory.path / self._wanted.name,
            )
        os.pwrite(self._fd, bytes(_ENTRY.itemsize), _entry_at(block))

    def _reopen(self) -> int:
        return self._tier.directory.open_file(self._wanted.name)

    def _checksum(self, block: int, data: memoryview) -> int:
        # One that means that there is nothing stands for another one as well: no harm is done.
        return xxhash.xxh3_64_intdigest(data, self._seed + block & _SEED_MAX) or 1


def _seed_of(name: str) -> int:
    """Checksums depend on where a block belongs, so that one in another's place is noticed."""
    return xxhash.xxh3_64_intdigest(name.encode())


def _header(name: str, length: int) -> bytes:
    return _HEADER.pack(_MAGIC, length, blake3(f"{name} {length}".encode()).digest())


def _read_length(fd: int, name: str) -> int:
    """The length of the object that a cache file is for; 0 if the file is new.

    Raises:
        _Damaged: It is no such file.
    """
    head = os.pread(fd, _HEADER.size, 0)
    if not head.strip(b"\0"):
        return 0
    if len(head) == _HEADER.size:
        length = int(_HEADER.unpack(head)[1])
        if head == _header(name, length):
            return length
    raise _Damaged


def _block_at(length: int, block: int) -> int:
    """Where a block lies in the cache file of an object."""
    table_end = _TABLE_AT + _ENTRY.itemsize * -(-length // BLOCK_BYTES)
    return align_up(table_end, BLOCK_BYTES) + block * BLOCK_BYTES


def _entry_at(block: int) -> int:
    return _TABLE_AT + _ENTRY.itemsize * block


def _read_entries(fd: int, first: int, last: int) -> npt.NDArray[np.uint64]:
    """The checksums of some blocks; of a file that was cut, none are there."""
    wanted = _ENTRY.itemsize * (last - first)
    data = os.pread(fd, wanted, _entry_at(first))
    return np.frombuffer(data.ljust(wanted, b"\0"), _ENTRY)


def _run_length(there: npt.NDArray[np.bool_], *, of: bool | None = None) -> int:
    """How many of the first are as the first is, or as is said."""
    value = there[0] if of is None else of
    other = np.flatnonzero(there != value)
    return int(other[0]) if len(other) else len(there)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
