"""The cache of a node: one directory for all mounts, pulls, restores and processes of a user.

See `docs/node-cache.md`; the invariants are in `snapstore.cache`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from snapstore.cache.cached_backend import CachedBackend
from snapstore.cache.config import (
    CacheConfig,
    check_config,
    read_config,
    require_cache,
    write_config,
)
from snapstore.cache.contents import CacheEntry, CacheStats, CacheTier, TierStats
from snapstore.cache.decoded import FILL_BYTES_MAX, DecodedTier
from snapstore.cache.directory import CacheDirectory, unusable
from snapstore.cache.pins import Pin, Pins
from snapstore.cache.stored import StoredTier
from snapstore.clock import Clock, SystemClock
from snapstore.errors import AccessDenied, OutOfSpace, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from types import TracebackType

    from typing_extensions import Buffer

    from snapstore.backend.base import Backend
    from snapstore.cache.decoded import Content, DecodedFile, FileKey, FoundFile

__all__ = ["CachedFile", "NodeCache"]

_log = logging.getLogger("snapstore.cache")

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "hugetlbfs"})
_PINS = "pins"
_STORED = "packs"


class HasContent(Protocol):
    """A file of a snapshot, as far as the cache needs to know it."""

    def content(self) -> Content:
        """Where its bytes come from."""
        ...


class CachedFile:
    """A file of a snapshot, read through the part of the cache that is in memory. Thread-safe.

    While it is open, what the cache has of the file stays there. A context manager.

    Attributes:
        size_bytes: Length of the file.
    """

    def __init__(self, content: Content, decoded: DecodedFile | None) -> None:
        self._content = content
        self._decoded = decoded
        self.size_bytes = content.key.size_bytes

    @property
    def is_kept(self) -> bool:
        """Whether anything of it can be kept; else every read goes to the store."""
        return self._decoded is not None

    @property
    def fd(self) -> int:
        """A descriptor for reading what is `filled`, and for mapping it; -1 if nothing is kept.

        Offsets are those of the file; what follows its end is not content. It is closed with this
        object. A mapping outlives that, but should not: its memory is not counted then.
        """
        return -1 if self._decoded is None else self._decoded.fd

    @property
    def path(self) -> Path | None:
        """Where the cache has it."""
        return None if self._decoded is None else self._decoded.path

    def filled(self, offset: int, length: int) -> bool:
        """Whether a range was fetched and checked, so that it can be read from `fd`.

        The range is cut at the end of the file. Makes no system call, and never becomes False
        again. Zeros of which nothing is stored are holes: reading them costs nothing, touching
        them in a mapping takes memory.
        """
        return self._decoded is not None and self._decoded.filled(offset, length)

    def parts(self) -> list[tuple[int, int]]:
        """Divide the file into ranges, offset and length, that are best ensured each as one.

        They cover the file in order and are of 16 MiB at most, but for zeros that are not stored.
        """
        return self._content.cells.parts(FILL_BYTES_MAX)

    def has_data(self, offset: int) -> bool:
        """Whether anything is stored of the part that begins there; else it is zeros."""
        return self._content.cells.has_data(offset)

    def ensure(self, offset: int, length: int) -> bool:
        """Fetch what is missing of a range. Whoever wants the same meanwhile waits for it.

        Returns:
            False if there is no room to keep it; `read_into` reads it all the same.

        Raises:
            UsageError: The range does not lie within the file.
            IntegrityError: Bytes are damaged or gone.
        """
        self._require_within(offset, length)
        return self._decoded is not None and self._decoded.fill(offset, length)

    def read_into(self, offset: int, buffer: Buffer) -> None:
        """Fill all of a buffer with the file's bytes from `offset` on, fetching what is missing.

        Raises:
            UsageError: The range does not lie within the file.
            TypeError: The buffer cannot be written.
            IntegrityError: Bytes are damaged or gone; the buffer's content is undefined.
        """
        with memoryview(buffer) as view:
            if view.readonly:
                raise TypeError("cannot read into a buffer that is read-only")
            self._require_within(offset, view.nbytes)
            into = view.cast("B")
            if self._decoded is None:
                self._content.fetch(offset, into)
            else:
                self._decoded.read(offset, into)

    def hold(self) -> int:
        """Return a descriptor, the caller's to close, by which what is there can be mapped.

        As long as it is open the cache does not remove the file, whether this object and the store
        are open or not. It can be written to, since only such a mapping can have its pages locked
        in place; nobody may write.

        Raises:
            OSError: Nothing is kept, or there are too many open files.
        """
        if self._decoded is None:
            raise OSError(errno.ENOENT, f"{self._content.label} is not kept")
        return self._decoded.hold()

    def discard(self) -> None:
        """Forget what is there, because it was found to be damaged; it is named in the log (N3).

        Who opens the file next fetches all of it. This object goes on with what it has.
        """
        if self._decoded is not None:
            _log.warning("%s is damaged in %s: forgotten", self._content.label, self._decoded.path)
            self._decoded.discard()

    def close(self) -> None:
        """Let the cache remove it when its turn comes. Idempotent."""
        if self._decoded is not None:
            self._decoded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # An object that could not be made has nothing to close.
        with contextlib.suppress(AttributeError):
            self.close()

    def _require_within(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise UsageError(
                f"{self._content.label} has {self.size_bytes} bytes, so it has no {length} bytes "
                f"at {offset}",
                next_step="read within the file; `size_bytes` says where it ends",
            )


class NodeCache:
    """An open cache. Thread-safe, and safe among processes; a context manager.

    Attributes:
        config: Its settings when it was opened.
    """

    def __init__(
        self, directory: Path | str, *, create: bool = True, clock: Clock | None = None
    ) -> None:
        """Open a cache.

        Args:
            directory: Where.
            create: Make it with default settings where there is none.
            clock: For tests.

        Raises:
            PolicyRefused: Somebody else could have prepared the directory.
            UsageError: It holds other things, or its settings cannot be meant, or there is none.
            CacheUnusable: It cannot be used now, an `AccessDenied`; without it all goes on.
            AccessDenied: This user may not use it.
        """
        self._clock = clock or SystemClock()
        with contextlib.ExitStack() as opened:
            self._directory = CacheDirectory.open(Path(directory), create=create)
            opened.callback(self._directory.close)
            try:
                if not create:
                    require_cache(self._directory)
                self.config = read_config(self._directory)
                self._pins_directory = self._directory.below(_PINS)
                opened.callback(self._pins_directory.close)
                self._pins = Pins(self._pins_directory)
                self._stored = self._open_stored()
                if self._stored is not None:
                    opened.callback(self._stored.close)
                self._decoded = self._open_decoded()
                if self._decoded is not None:
                    opened.callback(self._decoded.close)
            except OSError as error:
                raise unusable(self._directory.path, error) from error
            self._opened = opened.pop_all()

    @classmethod
    def init(
        cls,
        directory: Path | str,
        *,
        budget_bytes: int | None = None,
        memory: Path | str | None = None,
        memory_budget_bytes: int = 0,
        clock: Clock | None = None,
    ) -> Self:
        """Make a cache, or change the settings of one, and open it.

        Processes that have it open keep the settings that they found.

        Args:
            directory: Where; made if it is missing.
            budget_bytes: What ranges of stored objects may take there; None for the default, half
                of what is free when the cache is made, and 0 to keep none.
            memory: A directory on tmpfs or hugetlbfs for decoded files; made if it is missing.
            memory_budget_bytes: What those may take.
            clock: For tests.

        Raises:
            PolicyRefused: Somebody else could have prepared one of the directories.
            UsageError: A setting cannot be meant.
            AccessDenied: A directory cannot be written.
        """
        opened = CacheDirectory.open(Path(directory), create=True)
        try:
            if budget_bytes is None:
                budget_bytes = read_config(opened).bytes
            config = CacheConfig(
                bytes=budget_bytes,
                memory=None if memory is None else str(Path(memory).absolute()),
                memory_bytes=memory_budget_bytes,
            )
            check_config(opened, config)
            if config.memory is not None:
                # Before it is written: who has the cache already keeps settings that work.
                _open_memory(config.memory).close()
            write_config(opened, config, replace=True)
        except OSError as error:
            kind = OutOfSpace if error.errno in {errno.ENOSPC, errno.EDQUOT} else AccessDenied
            raise kind(
                f"cannot write to the cache at {opened.path}: {error.strerror or error}"
            ) from error
        finally:
            opened.close()
        return cls(directory, clock=clock)

    @property
    def directory(self) -> Path:
        """Where it is."""
        return self._directory.path

    @property
    def has_decoded(self) -> bool:
        """Whether it keeps decoded files in memory."""
        return self._decoded is not None

    @property
    def has_large_pages(self) -> bool:
        """Whether decoded files get large pages, which are read about three times as fast."""
        return self._decoded is not None and self._decoded.has_large_pages

    def has(self, tier: CacheTier) -> bool:
        """Whether it has this part."""
        return self._part(tier) is not None

    def file(self, file: HasContent) -> CachedFile:
        """Read a file of a snapshot through the part of the cache that is in memory.

        Files with the same chunks are one in the cache, whatever their names. If there is no such
        part, or no room in it, reads go to the store.

        Args:
            file: A `SnapshotFile`; its store stays open for as long as the result is used.

        Raises:
            IntegrityError: The tables of the file's rank are damaged or gone.
        """
        return self.open_content(file.content())

    def backend(self, inner: Backend, store_id: str) -> Backend:
        """Read what a store has through the part of the cache that is on disk, if there is one."""
        return inner if self._stored is None else CachedBackend(inner, self._stored, store_id)

    def open_content(self, content: Content) -> CachedFile:
        """See `file`."""
        decoded = None
        if self._decoded is not None and content.key.size_bytes:
            try:
                decoded = self._decoded.open(content)
            except OSError as error:
                _log.debug("%s is not kept in memory: %s", content.label, error)
        return CachedFile(content, decoded)

    def find(self, key: FileKey) -> FoundFile | None:
        """Open what is in memory of some content, if there is anything."""
        return None if self._decoded is None else self._decoded.find(key)

    def entries(self) -> list[CacheEntry]:
        """What is in it, of each part what was unused longest first.

        Raises:
            AccessDenied: It cannot be read.
        """
        with self._access("read"):
            stored = [] if self._stored is None else self._stored.entries()
            decoded = [] if self._decoded is None else self._decoded.entries()
            return stored + decoded

    def stats(self) -> CacheStats:
        """How much is in it.

        Raises:
            AccessDenied: It cannot be read.
        """
        with self._access("read"):
            return CacheStats(
                packs=self._tier_stats(self._stored),
                decoded=self._tier_stats(self._decoded),
                pins=len(self._pins.all()),
            )

    def pins(self) -> list[Pin]:
        """What is pinned.

        Raises:
            AccessDenied: It cannot be read.
        """
        with self._access("read"):
            return self._pins.all()

    def pin(self, pin: Pin) -> None:
        """Keep what a snapshot needs; `Store.pin` knows what that is.

        Raises:
            AccessDenied: It cannot be written.
        """
        with self._access("write to"):
            self._pins.add(pin)

    def unpin(self, snapshot: str) -> bool:
        """Let what a snapshot needs go when its turn comes; says whether it was pinned.

        Args:
            snapshot: Its id, in hex.

        Raises:
            AccessDenied: It cannot be written.
        """
        with self._access("write to"):
            return self._pins.remove(snapshot)

    def evict(
        self,
        *,
        names: Collection[str] | None = None,
        tiers: Collection[CacheTier] = tuple(CacheTier),
        keep_bytes: int = 0,
    ) -> int:
        """Remove what is neither pinned nor open; gives how many bytes were freed.

        Args:
            names: Of the cache files that may go; by default all.
            tiers: Of which parts.
            keep_bytes: What may stay in each of them: of what was used last.

        Raises:
            AccessDenied: It cannot be written.
        """
        among = None if names is None else frozenset(names)
        freed = 0
        with self._access("write to"):
            if self._stored is not None and CacheTier.PACKS in tiers:
                freed += self._stored.room.evict(keep_bytes, among=among)
            if self._decoded is not None and CacheTier.DECODED in tiers:
                freed += self._decoded.room.evict(keep_bytes, among=among)
        return freed

    def fitting(self, tier: CacheTier, wanted_bytes: int, names: Collection[str]) -> int:
        """How many of so many bytes a part can keep at once, without what is pinned of others.

        Args:
            tier: Which part; there has to be one.
            wanted_bytes: How many.
            names: Of the cache files that they are for.

        Raises:
            AccessDenied: It cannot be read.
        """
        part = self._part(tier)
        assert part is not None, tier
        with self._access("read"):
            kept = sum(
                file.size_bytes
                for file in part.occupants()
                if file.name not in names and self._pins.holds(file.name)
            )
        return part.room.fitting(wanted_bytes, kept)

    def trim(self, tier: CacheTier) -> None:
        """Remove what a part has above its budget, if anything."""
        part = self._part(tier)
        if part is not None:
            part.room.trim()

    def _part(self, tier: CacheTier) -> StoredTier | DecodedTier | None:
        return self._stored if tier is CacheTier.PACKS else self._decoded

    def close(self) -> None:
        """Let go of it; files that are open stay so. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _tier_stats(self, tier: StoredTier | DecodedTier | None) -> TierStats:
        if tier is None:
            return TierStats(directory=None, budget_bytes=0, used_bytes=0, pinned_bytes=0, files=0)
        files = tier.occupants()
        return TierStats(
            directory=str(tier.directory.path),
            budget_bytes=tier.room.budget_bytes,
            used_bytes=sum(file.size_bytes for file in files),
            pinned_bytes=sum(file.size_bytes for file in files if self._pins.holds(file.name)),
            files=len(files),
        )

    @contextlib.contextmanager
    def _access(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise AccessDenied(
                f"cannot {doing} the cache at {self.directory}: {error.strerror or error}"
            ) from error

    def _open_stored(self) -> StoredTier | None:
        if not self.config.bytes:
            return None
        directory = self._directory.below(_STORED)
        try:
            return StoredTier(
                directory,
                self._directory,
                self.config.bytes,
                self._clock,
                is_pinned=self._pins.holds,
            )
        except BaseException:
            directory.close()
            raise

    def _open_decoded(self) -> DecodedTier | None:
        if self.config.memory is None:
            return None
        directory = _open_memory(self.config.memory)
        try:
            return DecodedTier(
                directory,
                self._directory,
                self.config.memory_bytes,
                self._clock,
                is_pinned=self._pins.holds,
            )
        except BaseException:
            directory.close()
            raise


def _open_memory(path: str) -> CacheDirectory:
    """Open the directory for decoded files, which has to be in memory; the caller's to close."""
    directory = CacheDirectory.open(Path(path), create=True)
    found = directory.file_system
    if found in _MEMORY_FILE_SYSTEMS:
        return directory
    directory.close()
    raise UsageError(
        f"{directory.path} is on {found or 'an unknown file system'}, not in memory",
        next_step="name a directory on tmpfs, such as one below /dev/shm, or on hugetlbfs",
    )
