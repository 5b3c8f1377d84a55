"""What this machine keeps of large indexes: checksums of their blocks, and copies of remote ones.

A directory that processes share, bounded in size, least recently used first to go. It is never
needed and never believed: a record that does not fit its own digest is made anew, and every block
of a copy is compared with its checksum when it is used. Where the directory cannot be written or
the disk is full, work goes on without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import struct
from typing import TYPE_CHECKING, Self

import numpy as np
from blake3 import blake3

from snapstore.errors import BackendError, RangeNotSatisfiable
from snapstore.options import StoreOptions, index_cache_default
from snapstore.repository.index_blocks import block_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from snapstore.clock import Clock
    from snapstore.format.tables import U64

__all__ = ["CachedCopy", "CachedIndex", "IndexCache"]

_HEAD = struct.Struct("<8s32sQ")
_MAGIC = b"SNAPSUM1"
_DIGEST_BYTES = 32

_SUMS = ".sums"
_COPY = ".index"
_PART = ".part"
_ABANDONED_AGE_NS = 24 * 3600 * 1_000_000_000
"""After this long nobody is still writing a file that is not locked."""


@dataclasses.dataclass(frozen=True, slots=True)
class CachedIndex:
    """What is known of one index.

    Attributes:
        sums: The checksum of each block, taken when the index was verified.
        copy: Its bytes on this machine, if there is a copy.
    """

    sums: U64
    copy: CachedCopy | None


class CachedCopy:
    """A copy of an index (`Source`). Thread-safe; closed when nothing refers to it."""

    def __init__(self, path: Path, length: int) -> None:
        """Open a copy.

        Raises:
            OSError: There is none that can be read, or it has another length.
        """
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            is_whole = os.fstat(self._fd).st_size == length
            os.utime(self._fd)
        except BaseException:
            self.close()
            raise
        if not is_whole:
            self.close()
            raise OSError(f"{path} has another length than its index")

    def __del__(self) -> None:
        self.close()

    def read(self, offset: int, into: memoryview) -> None:
        """See `Source.read`."""
        while into.nbytes:
            try:
                count = os.preadv(self._fd, [into], offset)
            except OSError as error:
                raise BackendError(f"read {self._path}: {error.strerror}") from error
            if not count:
                raise RangeNotSatisfiable(f"{self._path} ends before offset {offset}")
            into, offset = into[count:], offset + count

    def distrust(self) -> None:
        """See `Source.distrust`: the next to ask fetches the index again."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)


class IndexCache:
    """A directory with checksums and copies of indexes. Thread-safe and safe among processes."""

    def __init__(self, directory: Path, budget_bytes: int, clock: Clock) -> None:
        """Nothing is read or made before it is needed."""
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._clock = clock

    @classmethod
    def of(cls, options: StoreOptions, clock: Clock) -> Self | None:
        """The cache that these options ask for, if any."""
        directory = options.index_cache or index_cache_default()
        if directory is None or not options.index_cache_bytes:
            return None
        return cls(directory, options.index_cache_bytes, clock)

    def require(
        self,
        name: str,
        length: int,
        survey: Callable[[Callable[[memoryview], None] | None], U64],
        *,
        copy: bool,
    ) -> CachedIndex:
        """Find what is known of an index, or verify it now and keep what is learned.

        Of several processes that ask for a copy at the same time one fetches it.

        Args:
            name: Of the index.
            length: Its length.
            survey: Verifies it and returns its checksums; hands its bytes in order to the function
                that it is given, if it is given one.
            copy: Whether a copy is wanted; there is none of an index larger than the budget.
        """
        is_wanted = copy and length + length // 64 <= self._budget_bytes
        found = self._find(name, length, copy=is_wanted)
        if found is not None:
            return found
        if not is_wanted:
            sums = survey(None)
            self._save_sums(name, length, sums)
            return CachedIndex(sums, None)
        with self._part(name, length) as part:
            # Whoever held it before may have fetched the index.
            found = self._find(name, length, copy=True)
            if found is not None:
                return found
            sums = survey(None if part is None else part.write)
            if part is not None:
                part.publish(self._path(name, _COPY))
        self._save_sums(name, length, sums)
        return CachedIndex(sums, self._open_copy(name, length))

    def _find(self, name: str, length: int, *, copy: bool) -> CachedIndex | None:
        sums = self._load_sums(name, length)
        if sums is None or not copy:
            return None if sums is None else CachedIndex(sums, None)
        opened = self._open_copy(name, length)
        return None if opened is None else CachedIndex(sums, opened)

    def _path(self, name: str, suffix: str) -> Path:
        return self._directory / (name + suffix)

    def _open_copy(self, name: str, length: int) -> CachedCopy | None:
        try:
            return CachedCopy(self._path(name, _COPY), length)
        except OSError:
            return None

    def _load_sums(self, name: str, length: int) -> U64 | None:
        """The checksums of an index, if the record of them is whole and about this index."""
        path = self._path(name, _SUMS)
        head = _HEAD.pack(_MAGIC, bytes.fromhex(name), length)
        expected = len(head) + 8 * block_count(length) + _DIGEST_BYTES
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != expected:
                    return None
                data = file.read(expected)
                os.utime(file.fileno())
        except OSError:
            return None
        body = memoryview(data)[:-_DIGEST_BYTES]
        if body[: len(head)] != head or blake3(body).digest() != data[-_DIGEST_BYTES:]:
            return None
        return np.frombuffer(body[len(head) :], "<u8").astype(np.uint64, copy=False)

    def _save_sums(self, name: str, length: int, sums: U64) -> None:
        """Keep the checksums of an index for the next time, if there is room."""
        head = _HEAD.pack(_MAGIC, bytes.fromhex(name), length)
        body = sums.astype("<u8", copy=False).view(np.uint8).data
        hasher = blake3(head)
        hasher.update(body)
        part = self._directory / f"{name}-{secrets.token_hex(8)}{_PART}"
        try:
            self._make_room(len(head) + len(body) + _DIGEST_BYTES, keep=name)
            with part.open("xb") as file:
                for piece in (head, body, hasher.digest()):
                    file.write(piece)
            part.replace(self._path(name, _SUMS))
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()

    @contextlib.contextmanager
    def _part(self, name: str, length: int) -> Iterator[_Part | None]:
        """An empty file to fill that nobody else fills, or nothing where that is not possible.

        Waits for whoever fills it now. What is not published by the end is removed.
        """
        try:
            self._make_room(length, keep=name)
            part = _Part(self._path(name, _PART))
        except OSError:
            yield None
            return
        try:
            yield part
        finally:
            part.close()

    def _make_room(self, needed: int, *, keep: str) -> None:
        """Remove what was not used for longest until there is room; nothing of `keep`.

        Raises:
            OSError: The directory cannot be used, or has no room all the same.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = []
        for entry in os.scandir(self._directory):
            if entry.name.endswith((_SUMS, _COPY, _PART)):
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    files.append((stat.st_mtime_ns, entry.name, stat.st_size))
        total = sum(size for _, _, size in files)
        abandoned_ns = self._clock.now_ns() - _ABANDONED_AGE_NS
        for used_ns, file_name, size in sorted(files):
            is_part = file_name.endswith(_PART)
            is_abandoned = is_part and used_ns < abandoned_ns
            is_surplus = not is_part and total + needed > self._budget_bytes
            if is_abandoned or (is_surplus and not file_name.startswith(keep)):
                (self._directory / file_name).unlink(missing_ok=True)
                total -= size
        if total + needed > self._budget_bytes:
            raise OSError(f"no room for {needed} bytes in {self._directory}")


class _Part:
    """A file that is being filled, under a lock that goes away with this process."""

    def __init__(self, path: Path) -> None:
        """Create the file, or take over what a dead process left; waits for a living one.

        Raises:
            OSError: It cannot be written or locked.
        """
        self._path = path
        while True:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                if self._is_named():
                    os.ftruncate(self._fd, 0)
                    break
            except BaseException:
                os.close(self._fd)
                raise
            # It was published or removed while we waited: this is another file now.
            os.close(self._fd)
        self._failed = False

    def write(self, piece: memoryview) -> None:
        """Append to the file; after an error it is given up, and whoever writes goes on."""
        try:
            while piece.nbytes and not self._failed:
                piece = piece[os.write(self._fd, piece) :]
        except OSError:
            self._failed = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)

    def publish(self, path: Path) -> None:
        """Give the file its name, unless it is not whole."""
        if not self._failed:
            with contextlib.suppress(OSError):
                self._path.replace(path)

    def close(self) -> None:
        """Remove the file if it was not published, and let the next one try."""
        with contextlib.suppress(OSError):
            if self._is_named():
                self._path.unlink()
        os.close(self._fd)

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        except FileNotFoundError:
            return False
