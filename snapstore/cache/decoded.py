"""Contents of files, decoded and checked, in files in memory (N1, N2, N4, N5).

A cache file begins with the content, every byte at the offset that it has there, so that it can be
read, mapped, registered with a device and copied from without the processor's help. Behind it, at
the next block of the file system, follow a header and one byte for each page: whether it is there.
The file's name is the digest of the content's chunks and its length.

On tmpfs pages are written; on hugetlbfs, which takes no writes, through a mapping. A file is kept
from being removed by a shared lock of everybody who has it open.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import errno
import logging
import mmap
import os
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from snapstore.backend.direct import copy_bytes, page_aligned
from snapstore.cache.contents import CacheEntry, CacheTier
from snapstore.cache.locks import Patience, claim, try_lock_file
from snapstore.cache.room import Room
from snapstore.units import MIB, PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from snapstore.cache.directory import CacheDirectory, Occupant
    from snapstore.clock import Clock

__all__ = ["Cells", "Content", "DecodedFile", "DecodedTier", "FileKey"]

FILL_BYTES_MAX = 16 * MIB
"""What is fetched at a time. Frames at either end are decoded to memory of their own, which costs a
tenth of the whole here and a fifth with half of it; more keeps others waiting for longer."""

_log = logging.getLogger("snapstore.cache")

_MAGIC = b"SNAPDEC1"
_HEADER = struct.Struct("<8s32sQ")
_HEADER_BYTES = PAGE_BYTES
_LABEL_AT = 512
_LABEL_BYTES_MAX = 1024
_THERE = b"\1"
_MISSING = b"\0"

_CONTENT_BYTES_MAX = 1 << 50
"""No file of a snapshot is longer; a name that says so is none of ours."""

_OPEN_TRIES = 100
_PATIENCE_S = 60.0
"""More than fetching a part takes where the storage answers at all."""


class FileKey(NamedTuple):
    """What content it is: the digest of what is known of it, and its length."""

    digest: bytes
    size_bytes: int

    @property
    def name(self) -> str:
        """The name of its cache file."""
        return f"{self.digest.hex()}-{self.size_bytes}"

    @classmethod
    def of_name(cls, name: str) -> FileKey | None:
        """Read a name; None of what is none."""
        digest, _, size = name.partition("-")
        try:
            key = cls(bytes.fromhex(digest), int(size))
        except ValueError:
            return None
        return key if key.name == name and key.size_bytes <= _CONTENT_BYTES_MAX else None


class Cells:
    """How content is best divided: the cells cover it in order and begin at pages. Immutable.

    Attributes:
        is_zeros: Which are zeros, of which nothing is stored.
        count: How many there are.
    """

    def __init__(self, starts: Sequence[int], is_zeros: Sequence[bool]) -> None:
        """Take where each begins, and at the end the length of all."""
        self._starts = array.array("q", starts)
        self.is_zeros = bytes(is_zeros)
        self.count = len(self.is_zeros)

    def begin(self, row: int) -> int:
        """Where a cell begins; of the one after the last, where the content ends."""
        return self._starts[row]

    def at(self, offset: int) -> int:
        """The cell that holds a byte."""
        return bisect.bisect_right(self._starts, offset) - 1

    def has_data(self, offset: int) -> bool:
        """Whether anything is stored of the cell that holds a byte."""
        return not self.is_zeros[self.at(offset)]

    def joined(self, row: int, end: int, bytes_max: int) -> int:
        """Up to which cell to go at once from `row` on, and not beyond what begins before `end`."""
        last = row + 1
        if self.is_zeros[row]:
            return last
        while (
            last < self.count
            and self._starts[last] < end
            and not self.is_zeros[last]
            and self._starts[last + 1] - self._starts[row] <= bytes_max
        ):
            last += 1
        return last

    def parts(self, bytes_max: int) -> list[tuple[int, int]]:
        """Offset and length of what is joined from the first cell to the last."""
        found = []
        row = 0
        while row < self.count:
            last = self.joined(row, self._starts[-1], bytes_max)
            found.append((self._starts[row], self._starts[last] - self._starts[row]))
            row = last
        return found


class Content(Protocol):
    """Where the content of a file comes from. Thread-safe."""

    @property
    def key(self) -> FileKey:
        """Which content."""
        ...

    @property
    def label(self) -> str:
        """What people call it."""
        ...

    @property
    def cells(self) -> Cells:
        """How to divide it."""
        ...

    def fetch(self, offset: int, into: memoryview) -> None:
        """Fill `into` with checked bytes from `offset` on; raises `SnapError`."""
        ...


class DecodedTier:
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
        """Take over a directory in memory; `state` has room for a small file.

        Raises:
            OSError: That cannot be used.
        """
        self.directory = directory
        self.clock = clock
        self.block_bytes = max(PAGE_BYTES, directory.block_bytes)
        self.takes_writes = directory.file_system != "hugetlbfs"
        self.large_page_bytes = directory.large_page_bytes
        self._is_pinned = is_pinned
        self.room = Room(
            state, "decoded.room", budget_bytes, clock, survey=self.occupants, evict=self.evict
        )

    @property
    def has_large_pages(self) -> bool:
        """Whether its files get large pages."""
        return bool(self.large_page_bytes) or not self.takes_writes

    def open(self, content: Content) -> DecodedFile:
        """Open the cache file of some content, or make it.

        Raises:
            OSError: It cannot be had, or there is no room.
        """
        for _ in range(_OPEN_TRIES):
            fd = self._open_locked(content.key)
            try:
                file = DecodedFile(self, content, fd)
            except _Foreign:
                os.close(fd)
                self.directory.unlink(content.key.name)
                continue
            except BaseException:
                os.close(fd)
                raise
            return file
        raise OSError(f"{content.key.name} is removed again and again")

    def find(self, key: FileKey) -> FoundFile | None:
        """Open the cache file of some content for reading what is filled, if there is one."""
        try:
            fd = self.directory.open_file(key.name, write=False)
        except OSError:
            return None
        try:
            if try_lock_file(fd, shared=True) and self.directory.is_named(fd, key.name):
                return FoundFile(fd, key, self.block_bytes)
        except (OSError, _Foreign):
            _log.debug("%s is no use", key.name)
        os.close(fd)
        return None

    def _open_locked(self, key: FileKey) -> int:
        patience = Patience(self.clock, _PATIENCE_S)
        while True:
            fd = self.directory.open_file(key.name, create=True)
            try:
                locked = try_lock_file(fd, shared=True)
                if locked and self.directory.is_named(fd, key.name):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            # Locked or gone: it is being removed.
            if not patience.wait():
                raise OSError(f"{key.name} stays locked")

    def occupants(self) -> list[Occupant]:
        """Give the cache files, the one that was unused longest first."""
        return [one for one in self.directory.occupants() if FileKey.of_name(one.name)]

    def entries(self) -> list[CacheEntry]:
        """What is there, what was unused longest first."""
        return [self._entry(occupant) for occupant in self.occupants()]

    def _entry(self, occupant: Occupant) -> CacheEntry:
        key = FileKey.of_name(occupant.name)
        assert key is not None, occupant.name
        meta, total = _lengths(key, self.block_bytes)
        label, held = b"", 0
        with contextlib.suppress(OSError):
            fd = self.directory.open_file(occupant.name, write=False)
            try:
                if os.fstat(fd).st_size == total:
                    label = os.pread(fd, _LABEL_BYTES_MAX, meta + _LABEL_AT).rstrip(b"\0")
                    held = _count_marks(fd, meta + _HEADER_BYTES, total) * PAGE_BYTES
            finally:
                os.close(fd)
        return CacheEntry(
            tier=CacheTier.DECODED,
            name=occupant.name,
            label=os.fsdecode(label),
            size_bytes=key.size_bytes,
            held_bytes=min(held, key.size_bytes),
            used_ns=occupant.used_ns,
            is_pinned=self._is_pinned(occupant.name),
        )

    def evict(self, occupant: Occupant) -> bool:
        """Remove a file unless somebody has it open or pinned it; says whether it did."""
        if self._is_pinned(occupant.name):
            return False
        try:
            fd = self.directory.open_file(occupant.name)
        except OSError:
            return False
        try:
            if not try_lock_file(fd):
                return False
            # Never cut: who has mapped it without keeping it open must not lose pages.
            self.directory.unlink(occupant.name)
            return True
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of the directory."""
        self.room.close()
        self.directory.close()


def _count_marks(fd: int, begin: int, end: int) -> int:
    """How many pages are there, by the marks in a range of the file; holes have none."""
    found = 0
    with contextlib.suppress(OSError):  # Of which one says that nothing but a hole follows.
        while begin < end:
            begin = os.lseek(fd, begin, os.SEEK_DATA)
            marks = os.pread(fd, min(MIB, max(end - begin, 0)), begin)
            if not marks:
                break
            found += marks.count(_THERE)
            begin += len(marks)
    return found


class _Foreign(Exception):
    """The file is not what its name says."""


class _Scratch(threading.local):
    """Memory of one thread for what is being fetched."""

    def __init__(self) -> None:
        self._memory = page_aligned(0)

    def take(self, size_bytes: int) -> memoryview:
        if len(self._memory) < size_bytes:
            self._memory = page_aligned(size_bytes)
        return self._memory[:size_bytes].data


_scratch = _Scratch()


class FoundFile:
    """A cache file that is there, for reading. Thread-safe; while it is open it is not removed."""

    def __init__(self, fd: int, key: FileKey, block_bytes: int) -> None:
        """Take over a descriptor that has the shared lock, unless this fails.

        Raises:
            OSError: It cannot be used.
        """
        meta, total = _lengths(key, block_bytes)
        header = _HEADER.pack(_MAGIC, key.digest, key.size_bytes)
        # Read before it is mapped: the page may not be there, and then there may be no room for it.
        if os.fstat(fd).st_size != total or os.pread(fd, _HEADER.size, meta) != header:
            raise _Foreign
        self._marks = mmap.mmap(fd, total - meta, prot=mmap.PROT_READ, offset=meta)
        self._fd = fd

    def filled(self, offset: int, length: int) -> bool:
        """Whether all of a range, which lies in the content, is there."""
        first, last = offset // PAGE_BYTES, -(-(offset + length) // PAGE_BYTES)
        return self._marks.find(_MISSING, _HEADER_BYTES + first, _HEADER_BYTES + last) < 0

    def read(self, offset: int, into: memoryview) -> bool:
        """Fill `into` from `offset` on, which must be filled; False if that cannot be read."""
        try:
            return os.preadv(self._fd, (into,), offset) == into.nbytes
        except OSError:
            return False

    def close(self) -> None:
        """Let it be removed when its turn comes. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._marks.close()
            os.close(fd)


def _lengths(key: FileKey, block_bytes: int) -> tuple[int, int]:
    """Where the marks of a cache file begin, with their header, and how long it is."""
    meta = align_up(key.size_bytes, block_bytes)
    pages = -(-key.size_bytes // PAGE_BYTES)
    return meta, align_up(meta + _HEADER_BYTES + pages, block_bytes)


class _Reading:
    """Owns a descriptor for reading: it is closed when nobody refers to this any more.

    So the many small reads need no lock to be safe from a `close` beside them.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        # Descriptors are the system's own to close when the interpreter is about to end.
        with contextlib.suppress(OSError, TypeError, AttributeError):
            os.close(self.fd)


class DecodedFile:
    """One cache file, open. Thread-safe; while it is open it is not removed.

    Attributes:
        fd: For reading; offsets are those of the content.
        size_bytes: Length of the content.
    """

    def __init__(self, tier: DecodedTier, content: Content, fd: int) -> None:
        """Take over a descriptor that has the shared lock, unless this fails.

        Raises:
            OSError: There is no room for its marks.
        """
        key = content.key
        self.size_bytes = key.size_bytes
        self.fd = -1
        self._tier = tier
        self._content = content
        self._name = key.name
        self._lock = threading.Lock()
        self._users = 0
        self._is_closed = False
        self._memory: mmap.mmap | None = None
        self._meta, self._total = _lengths(key, tier.block_bytes)
        self._marks = self._prepare(fd)
        self._reading: _Reading | None = _Reading(tier.directory.open_file(self._name, write=False))
        self.fd = self._reading.fd
        self._fd = fd
        os.utime(fd)

    def _prepare(self, fd: int) -> mmap.mmap:
        """Make header and marks, or check that they are there."""
        tier, key = self._tier, self._content.key
        size = os.fstat(fd).st_size
        if size not in {0, self._total}:
            raise _Foreign
        if not size:
            if not tier.room.take(align_up(self._total - self._meta, tier.large_page_bytes or 1)):
                raise OSError(errno.ENOSPC, f"no room in {tier.directory.path}")
            os.ftruncate(fd, self._total)
        # What is touched through a mapping and has no room would kill the process.
        os.posix_fallocate(fd, self._meta, self._total - self._meta)
        marks = mmap.mmap(fd, self._total - self._meta, offset=self._meta)
        header = _HEADER.pack(_MAGIC, key.digest, key.size_bytes)
        found = marks[: _HEADER.size]
        if found == bytes(_HEADER.size):
            label = os.fsencode(self._content.label)[:_LABEL_BYTES_MAX]
            marks[_LABEL_AT : _LABEL_AT + len(label)] = label
            marks[: _HEADER.size] = header
        elif found != header:
            marks.close()
            raise _Foreign
        return marks

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._tier.directory.path / self._name

    def filled(self, offset: int, length: int) -> bool:
        """Whether all of a range, which is cut at the end of the content, is there."""
        end = min(offset + length, self.size_bytes)
        # A search in C, a nanosecond a page. What others mark is seen at once.
        first, last = offset // PAGE_BYTES, -(-end // PAGE_BYTES)
        return self._marks.find(_MISSING, _HEADER_BYTES + first, _HEADER_BYTES + last) < 0

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`, which lies in the content, from here or from where the content comes.

        Raises:
            SnapError: What is missing cannot be had.
        """
        length = into.nbytes
        if not self.filled(offset, length):
            with self._kept_open():
                self._walk(offset, length, into)
            return
        # What is there costs a look and a system call: small reads are many.
        reading = self._reading
        try:
            if reading is not None and os.preadv(reading.fd, (into,), offset) == length:
                return
        except OSError as error:
            _log.warning("cannot read %s: %s", self.path, error)
        self._pread(offset, into)

    def fill(self, offset: int, length: int) -> bool:
        """Fetch what is missing of a range that lies in the content.

        Returns:
            False if there is no room to keep it.

        Raises:
            SnapError: What is missing cannot be had.
        """
        with self._kept_open():
            return self.filled(offset, length) or self._walk(offset, length, None)

    def hold(self) -> int:
        """Return a writable descriptor that keeps the file from being removed.

        Raises:
            OSError: There are too many open files, or this is closed.
        """
        with self._lock:
            if self._is_closed:
                raise OSError(errno.EBADF, f"{self.path} is closed")
            # A duplicate has the shared lock as well.
            return os.dup(self._fd)

    def discard(self) -> None:
        """Take its name away, if it still has it."""
        with self._lock, contextlib.suppress(OSError):
            if self._fd >= 0 and self._tier.directory.is_named(self._fd, self._name):
                self._tier.directory.unlink(self._name)

    def close(self) -> None:
        """Let it be removed when its turn comes, and nobody fills it any more. Idempotent."""
        with self._lock:
            self._is_closed = True
            if not self._users:
                self._release()

    def _release(self) -> None:
        """Close what is open; with the lock."""
        fd, self.fd, self._fd = self._fd, -1, -1
        if fd < 0:
            return
        with contextlib.suppress(OSError):
            os.utime(fd)
        os.close(fd)
        # Who is reading has it still.
        self._reading = None
        self._marks.close()
        self._memory = None

    @contextlib.contextmanager
    def _kept_open(self) -> Iterator[None]:
        """Put off what `close` does to the end of the block: no number is used that is closed."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._is_closed and not self._users:
                    self._release()

    def _pread(self, offset: int, into: memoryview) -> None:
        reading = self._reading
        try:
            while into.nbytes:
                if reading is None:
                    raise OSError(errno.EBADF, f"{self.path} is closed")  # noqa: TRY301
                count = os.preadv(reading.fd, [into], offset)
                if not count:
                    raise OSError(f"{self.path} ends before offset {offset}")  # noqa: TRY301
                into, offset = into[count:], offset + count
        except OSError:
            self._content.fetch(offset, into)

    def _walk(self, offset: int, length: int, into: memoryview | None) -> bool:
        """Go through the cells of a range: read those that are there, fetch the others."""
        cells = self._content.cells
        end = offset + length
        patience = None
        row = cells.at(offset)
        while row < cells.count and (begin := cells.begin(row)) < end:
            if self._has(row):
                last = row + 1
                if into is not None:
                    self._pread(*_within(begin, cells.begin(last), offset, into))
            else:
                last = self._fetch_some(row, end, offset, into)
            if last == row:
                # Somebody else fetches it.
                patience = patience or Patience(self._tier.clock, _PATIENCE_S)
                if patience.wait():
                    continue
            if last <= row:
                return self._go_past(begin, offset, into)
            row, patience = last, None
        return True

    def _has(self, row: int) -> bool:
        begin = self._content.cells.begin(row)
        return self.filled(begin, self._content.cells.begin(row + 1) - begin)

    def _go_past(self, begin: int, offset: int, into: memoryview | None) -> bool:
        """Read the rest of a range without keeping it."""
        if into is not None:
            begin = max(begin, offset)
            self._content.fetch(begin, into[begin - offset :])
        return False

    def _fetch_some(self, row: int, end: int, offset: int, into: memoryview | None) -> int:
        """Claim and fetch some cells from `row` on.

        Returns:
            Up to which cell that was done: `row` if somebody else has claimed it, and less if
            nothing can be kept.
        """
        cells = self._content.cells
        stop = cells.joined(row, end, FILL_BYTES_MAX)
        try:
            with claim(self._reopen, cells.begin(row), cells.begin(stop)) as claimed:
                return self._fetch_claimed(row, cells.at(claimed), offset, into)
        except OSError:
            return row - 1

    def _fetch_claimed(self, row: int, stop: int, offset: int, into: memoryview | None) -> int:
        """Fetch the first cells of a claim, up to one that somebody has filled meanwhile."""
        cells = self._content.cells
        stop = next((at for at in range(row, stop) if self._has(at)), stop)
        if stop <= row:
            return row
        begin, end = cells.begin(row), cells.begin(stop)
        if cells.is_zeros[row]:
            if not self._keep_zeros(begin, end):
                return row - 1
            if into is not None:
                _, target = _within(begin, end, offset, into)
                np.frombuffer(target, np.uint8)[:] = 0
            return stop
        # Not in memory of the reader's: who has that as well could change it between the check of
        # it here and its way to other readers.
        data = _scratch.take(end - begin)
        self._content.fetch(begin, data)
        is_kept = self._keep(begin, data)
        if into is not None:
            at, target = _within(begin, end, offset, into)
            copy_bytes(target, data[at - begin : at - begin + target.nbytes])
        return stop if is_kept or into is not None else row - 1

    def _reopen(self) -> int:
        return self._tier.directory.open_file(self._name)

    def _keep(self, begin: int, data: memoryview) -> bool:
        """Write checked bytes and mark them as there; False if there is no room."""
        room = self._tier.room
        for _ in range(2):
            cost = self._cost(begin, data.nbytes)
            if not room.take(cost):
                return False
            try:
                self._write(begin, data)
            except OSError as error:
                room.give_back(cost)
                if error.errno not in {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT}:
                    return False
                # Others fill this file system as well.
                room.shrink(2 * data.nbytes)
                continue
            self._mark(begin, begin + data.nbytes)
            return True
        return False

    def _cost(self, begin: int, length: int) -> int:
        """What a range takes of the memory, at most: a whole large page where nothing is yet."""
        large = self._tier.large_page_bytes
        if not large:
            return length
        cost, pages = 0, large // PAGE_BYTES
        for number in range(begin // large, -(-(begin + length) // large)):
            first = _HEADER_BYTES + number * pages
            if self._marks.find(_THERE, first, first + pages) < 0:
                cost += large
        return cost

    def _keep_zeros(self, begin: int, end: int) -> bool:
        """Mark zeros as there; where nothing was ever written there are some."""
        try:
            is_hole = self._tier.takes_writes and os.lseek(self._fd, begin, os.SEEK_DATA) >= end
        except OSError as error:
            is_hole = error.errno == errno.ENXIO
        if is_hole:
            self._mark(begin, end)
            return True
        zeros = memoryview(bytes(min(end - begin, MIB)))
        return all(
            self._keep(at, zeros[: min(len(zeros), end - at)])
            for at in range(begin, end, len(zeros))
        )

    def _write(self, begin: int, data: memoryview) -> None:
        if self._tier.takes_writes:
            while data.nbytes:
                count = os.pwrite(self._fd, data, begin)
                begin, data = begin + count, data[count:]
            return
        os.posix_fallocate(self._fd, begin, data.nbytes)
        with self._lock:
            if self._memory is None:
                self._memory = mmap.mmap(self._fd, self._meta)
        with memoryview(self._memory) as view, view[begin : begin + data.nbytes] as target:
            copy_bytes(target, data)

    def _mark(self, begin: int, end: int) -> None:
        # The system calls and locks before this order it after the bytes that it stands for.
        first, last = begin // PAGE_BYTES, -(-end // PAGE_BYTES)
        self._marks[_HEADER_BYTES + first : _HEADER_BYTES + last] = _THERE * (last - first)


def _within(begin: int, end: int, offset: int, into: memoryview) -> tuple[int, memoryview]:
    """What a cell has of a range: where it begins in the content, and where it belongs."""
    at = max(begin, offset)
    return at, into[at - offset : max(min(end, offset + into.nbytes) - offset, 0)]
