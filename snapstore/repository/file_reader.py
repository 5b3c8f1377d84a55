"""The files of one snapshot, to be looked at and read in place, without recreating the tree.

What a pull refuses is refused here too: the trees of the ranks must make one tree that leads
nowhere outside itself. Tables of a rank are loaded when the first file of it is read.
"""

from __future__ import annotations

import dataclasses
import io
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from typing_extensions import override

from snapstore.errors import PathNotFound, UsageError
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.fstree import show_path
from snapstore.repository.file_content import CACHED_BYTES_MIN, FileContent, content_digest
from snapstore.repository.file_pieces import FileChunks, FilePiece, FilePieces, chunks_of, pieces_of
from snapstore.repository.file_ranges import FileRange, divide_file
from snapstore.repository.frame_cache import FrameCache
from snapstore.repository.lazy import lazy
from snapstore.repository.memory import READ_BYTES
from snapstore.repository.objects import about
from snapstore.repository.range_reader import RangeReader, ReadCheck
from snapstore.repository.stream_reader import StreamReader
from snapstore.target.checks import checked_entries
from snapstore.units import KIB, MIB, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from snapstore.cache.node_cache import CachedFile
    from snapstore.format.rank import RankNumber
    from snapstore.format.tables import Rows
    from snapstore.ids import PackId
    from snapstore.options import Integrity
    from snapstore.repository.snapshot import LoadedRank, Snapshot

__all__ = ["SnapshotEntry", "SnapshotFile", "SnapshotFiles", "files_of"]

RANGE_BYTES = 8 * MIB
"""Long enough that what a range costs by itself is nothing, short enough for many threads."""

RANGE_BYTES_MIN = 64 * KIB

ZEROS_BYTES_MIN = 1 * MIB
"""Leaving zeros out saves less time than it costs to begin another range if they are fewer."""

_LINKS_MAX = 40
"""Symbolic links followed on the way to one file, as many as Linux follows."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEntry:
    """One path of a snapshot.

    Attributes:
        path: Relative, raw bytes, components joined by `/`; empty for the root.
        type: What the path is. A hard link is a further name of a file, with its size.
        rank: Whose manifest has it; of several, for a directory, the first.
        size_bytes: Length of a file; 0 for directories and symbolic links.
        mode: The 12 permission bits.
        uid: Owner.
        gid: Group.
        mtime_ns: Modification time in nanoseconds since the epoch; may be negative.
        xattrs: Extended attributes, sorted by name.
        target: What a symbolic link says, or the first name of a hard link's file.
    """

    path: bytes
    type: EntryType
    rank: RankNumber
    size_bytes: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: tuple[tuple[bytes, bytes], ...]
    target: bytes

    @property
    def name(self) -> str:
        """The path as text, in the way of `os.fsdecode`."""
        return os.fsdecode(self.path)

    @property
    def is_file(self) -> bool:
        """Whether it has bytes to read."""
        return self.type in {EntryType.FILE, EntryType.HARDLINK}


def files_of(snapshot: Snapshot, numbers: Sequence[RankNumber] = ()) -> SnapshotFiles:
    """Read the trees of the given ranks, or of all, as one tree of files to be read in place.

    Raises:
        UsageError: The snapshot has no such rank.
        FormatError: The trees of the ranks are not what a pull would recreate.
        IntegrityError: They are damaged or gone.
    """
    cache = snapshot.cache
    if cache is None:
        cache = FrameCache(budget_bytes=snapshot.options.cache_bytes)
    integrity = snapshot.options.integrity
    return SnapshotFiles(snapshot, snapshot.ranks(numbers), cache, integrity=integrity)


class _RankReaders(NamedTuple):
    """Both ways to read a rank; they share its tables."""

    cached: StreamReader
    streaming: RangeReader


class SnapshotFiles:
    """The merged tree of some ranks. Thread-safe."""

    def __init__(
        self,
        snapshot: Snapshot,
        ranks: list[LoadedRank],
        cache: FrameCache,
        *,
        integrity: Integrity,
    ) -> None:
        """Read the trees.

        Raises:
            FormatError: They are not what a pull would recreate.
        """
        self._snapshot = snapshot
        self._ranks = ranks
        self._cache = cache
        self.integrity = integrity
        # One a rank: who waits for the tables of one does not hold up readers of others.
        self._locks = [threading.Lock() for _ in ranks]
        self._readers: dict[int, _RankReaders] = {}
        self._rank_of: dict[bytes, int] = {}
        for number, rank in enumerate(ranks):
            assert rank.meta.rank == rank.number, rank.number  # and refused by then if it is not
            for entry in rank.tree:
                self._rank_of.setdefault(entry.path, number)
        with about(f"snapshot {snapshot.id.short}", next_step="open another snapshot"):
            self._entries = checked_entries(entry for rank in ranks for entry in rank.tree)

    @property
    def ranks(self) -> Sequence[LoadedRank]:
        """The ranks whose trees these are."""
        return self._ranks

    def walk(self) -> Iterator[SnapshotEntry]:
        """Give all paths in the order of their bytes, the root first."""
        return map(self._public, self._entries.values())

    def entry(self, path: str | bytes) -> SnapshotEntry:
        """Look a path up, following no symbolic link.

        Raises:
            PathNotFound: There is none.
        """
        raw = os.fsencode(path)
        found = self._entries.get(raw)
        if found is None:
            raise self._missing(raw)
        return self._public(found)

    def resolve(self, path: str | bytes) -> SnapshotEntry:
        """Look a path up, following symbolic links within the snapshot.

        Raises:
            PathNotFound: There is none, or a link leads out of the snapshot or in a circle.
        """
        asked = os.fsencode(path)
        todo = asked.split(b"/")[::-1] if asked else []
        at = b""
        links = 0
        while todo:
            name = todo.pop()
            if name == b"..":
                if not at:
                    raise self._missing(asked)
                at = at.rpartition(b"/")[0]
                continue
            if name in {b"", b"."}:
                continue
            below = at + b"/" + name if at else name
            entry = self._entries.get(below)
            if entry is None:
                raise self._missing(asked)
            if entry.type is EntryType.SYMLINK:
                links += 1
                if links > _LINKS_MAX or entry.target.startswith(b"/"):
                    raise self._missing(asked)
                todo += entry.target.split(b"/")[::-1]
            else:
                at = below
                if todo and entry.type is not EntryType.DIRECTORY:
                    raise self._missing(asked)
        return self._public(self._entries[at])

    def open(self, path: str | bytes) -> SnapshotFile:
        """Open a file for reading; symbolic links within the snapshot are followed.

        Raises:
            PathNotFound: There is none.
            UsageError: It is a directory.
        """
        entry = self.resolve(path)
        if not entry.is_file:
            raise UsageError(
                f"{show_path(entry.path)} is a directory of snapshot {self._snapshot.id.short}",
                next_step="open one of the files below it",
            )
        return SnapshotFile(self, entry)

    def read_into(self, entry: SnapshotEntry, offset: int, into: memoryview) -> int:
        """Fill `into` with a file's bytes from `offset` on; returns how many, fewer at its end.

        Raises:
            IntegrityError: Bytes are damaged or gone; the content of `into` is undefined.
        """
        file = self._first_name(self._entries[entry.path])
        count = max(0, min(into.nbytes, file.size_bytes - offset))
        if count:
            reader = self._readers_of(file).cached
            reader.read_into(file.stream, file.offset + offset, into[:count])
        return count

    def stream_into(self, entry: SnapshotEntry, offset: int, into: memoryview) -> None:
        """Fill `into` with a long range, which must be within the file.

        Raises:
            IntegrityError: Bytes are damaged or gone; the content of `into` is undefined.
        """
        file = self._first_name(self._entries[entry.path])
        reader = self._readers_of(file).streaming
        reader.read_into(file.stream, file.offset + offset, into)

    def content_digest(self, entry: SnapshotEntry, *, is_fast: bool = False) -> bytes:
        """Digest that content of the same length shares only if it has the same bytes.

        Args:
            entry: The file.
            is_fast: As whoever reads with fast integrity has it, and not as here.

        Raises:
            IntegrityError: The tables of the rank are damaged or gone.
        """
        file = self._first_name(self._entries[entry.path])
        needs_chunks = file.size_bytes and not is_fast
        verifier = self._readers_of(file).cached.verifier if needs_chunks else None
        rank = self._ranks[self._rank_of[file.path]].id
        return content_digest(verifier, rank, self._snapshot.backend.capabilities.url, file)

    def ranges(
        self, entry: SnapshotEntry, *, about_bytes: int, zeros_bytes_min: int
    ) -> list[FileRange]:
        """Divide a file; see `SnapshotFile.ranges`."""
        file = self._first_name(self._entries[entry.path])
        if not file.size_bytes:
            return []
        cached = self._readers_of(file).cached
        cached.check_zeros()
        segments = cached.segments
        return divide_file(
            segments,
            segments.base(file.stream) + file.offset,
            file.size_bytes,
            about_bytes=about_bytes,
            zeros_bytes_min=zeros_bytes_min,
        )

    def data_bytes(self, entry: SnapshotEntry) -> int:
        """Tell how many bytes of a file are stored: all that the layout does not call zeros.

        Raises:
            IntegrityError: The tables of its rank are damaged or gone.
        """
        file = self._first_name(self._entries[entry.path])
        if not file.size_bytes:
            return 0
        segments = self._readers_of(file).cached.segments
        begin = segments.base(file.stream) + file.offset
        return segments.data_bytes(begin, begin + file.size_bytes)

    def load_tables(self, number: int) -> None:
        """Read the tables of the rank at this place of the list of ranks, if that is still to do.

        Else the first who asks for bytes of a file of it waits for that.

        Raises:
            IntegrityError: They are damaged or gone.
        """
        readers = self._tables(number)
        _ = readers.cached.segments.uses

    def cached(self, file: SnapshotFile) -> CachedFile | None:
        """Open a file in the node's cache, if there is one that has a use for it."""
        cache = self._snapshot.node_cache
        if cache is None or not cache.has_decoded or file.size_bytes < CACHED_BYTES_MIN:
            return None
        return cache.file(file)

    def pieces(self, entry: SnapshotEntry) -> FilePieces:
        """Divide a file; see `SnapshotFile.pieces`."""
        file = self._first_name(self._entries[entry.path])
        segments = self._readers_of(file).cached.segments
        begin = segments.base(file.stream) + file.offset if file.size_bytes else 0
        return pieces_of(segments, begin, file.size_bytes)

    def read_piece(
        self, entry: SnapshotEntry, piece: FilePiece, into: memoryview, check: ReadCheck
    ) -> None:
        """Fill `into`, which has the length of the piece; see `SnapshotFile.read_piece`."""
        file = self._first_name(self._entries[entry.path])
        reader = self._readers_of(file).streaming
        if piece.stored is None:
            reader.read_into(file.stream, file.offset + piece.offset, into, check=check)
        else:
            offset = file.offset + piece.offset
            reader.read_frame(file.stream, offset, piece.stored, into, check=check)

    def open_pack(self, entry: SnapshotEntry, pack: PackId) -> int | None:
        """See `SnapshotFile.open_pack`."""
        file = self._first_name(self._entries[entry.path])
        return self._readers_of(file).streaming.open_pack(pack)

    def chunks(self, entry: SnapshotEntry) -> FileChunks:
        """List the chunks of a file; see `SnapshotFile.chunks`."""
        file = self._first_name(self._entries[entry.path])
        rank = self._ranks[self._rank_of[file.path]]
        row = rank.streams[file.stream]
        first = int(row["first"])
        extents = self._extents_of(file)[first : first + int(row["count"])]
        return chunks_of(extents, 0, file.offset, file.size_bytes)

    def _extents_of(self, file: TreeEntry) -> Rows:
        verifier = self._readers_of(file).cached.verifier
        if verifier is not None:
            return verifier.extents
        return self._ranks[self._rank_of[file.path]].read_extents()

    def _readers_of(self, file: TreeEntry) -> _RankReaders:
        return self._tables(self._rank_of[file.path])

    def _tables(self, number: int) -> _RankReaders:
        # Under the lock: loading the tables of a rank twice would cost twice their memory.
        with self._locks[number]:
            readers = self._readers.get(number)
            if readers is None:
                backend = self._snapshot.backend
                cached = StreamReader(
                    backend,
                    self._ranks[number],
                    self._cache,
                    integrity=self.integrity,
                    read_bytes_max=READ_BYTES,
                )
                streaming = RangeReader(backend, cached, read_bytes_max=READ_BYTES)
                readers = self._readers[number] = _RankReaders(cached, streaming)
            return readers

    def _first_name(self, entry: TreeEntry) -> TreeEntry:
        return self._entries[entry.target] if entry.type is EntryType.HARDLINK else entry

    def _public(self, entry: TreeEntry) -> SnapshotEntry:
        file = self._first_name(entry)
        return SnapshotEntry(
            path=entry.path,
            type=entry.type,
            rank=self._ranks[self._rank_of[entry.path]].number,
            size_bytes=file.size_bytes,
            mode=file.mode,
            uid=file.uid,
            gid=file.gid,
            mtime_ns=file.mtime_ns,
            xattrs=file.xattrs,
            target=entry.target,
        )

    def _missing(self, path: bytes) -> PathNotFound:
        return PathNotFound(
            f"snapshot {self._snapshot.id.short} has no {show_path(path)}",
            next_step="Snapshot.walk() lists what there is; paths have no slash at their start",
        )


class SnapshotFile(io.RawIOBase):
    """A file of a snapshot, open for reading: seekable, unbuffered, checked before it is given.

    `read_at`, `read_into` and `ranges` are safe from several threads at once; reading from the
    position, as `read` does, is one thread's at a time. For many small reads put an
    `io.BufferedReader` around it.
    """

    def __init__(self, files: SnapshotFiles, entry: SnapshotEntry) -> None:
        super().__init__()
        self._files = files
        self._position = 0
        self.entry = entry

    def content(self) -> FileContent:
        """What the node's cache needs to know of it (`NodeCache.file`).

        Raises:
            IntegrityError: The tables of the rank are damaged or gone.
        """
        self._require_open()
        return FileContent(self._files, self.entry)

    @lazy
    def _cached(self) -> CachedFile | None:
        return self._files.cached(self)

    @override
    def close(self) -> None:
        """Close it. Idempotent."""
        cached = vars(self).pop("_cached", None)
        if cached is not None:
            cached.close()
        super().close()

    @property
    def name(self) -> str:
        """The path in the snapshot."""
        return self.entry.name

    @property
    def mode(self) -> str:
        """Always for reading bytes."""
        return "rb"

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self.entry.size_bytes

    @property
    def integrity(self) -> Integrity:
        """What is checked of all bytes that are read, as the store was opened."""
        return self._files.integrity

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Read a range; fewer bytes than asked only at the end of the file. Thread-safe.

        Raises:
            IntegrityError: Bytes are damaged or gone.
        """
        self._require_open()
        if offset < 0 or size_bytes < 0:
            raise ValueError(f"not a range: {size_bytes} bytes at {offset}")
        data = bytearray(max(0, min(size_bytes, self.size_bytes - offset)))
        if data:
            self.read_into(offset, data)
        return bytes(data)

    def read_exactly(self, offset: int, size_bytes: int) -> bytes:
        """Read a range past the node's cache, which takes in what is beside it. Thread-safe.

        For who was told of damage, which may be beside the range as well.

        Raises:
            UsageError: The range does not lie within the file.
            IntegrityError: Bytes are damaged or gone.
        """
        self._require_open()
        self._require_within(offset, size_bytes)
        data = bytearray(size_bytes)
        self._files.read_into(self.entry, offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: Buffer, *, streaming: bool = False) -> None:
        """Fill all of a buffer with the file's bytes from `offset` on. Thread-safe.

        The range must lie within the file. Every byte was checked when this returns, as a pull
        checks it; after an error the buffer's content is undefined, and nothing else has changed.
        An empty buffer is filled anywhere within the file.

        Without `streaming` the frames that hold the range come from the cache of the store and
        stay there, within its budget: right for small reads anywhere, such as page faults.

        With `streaming` frames that no other part of the file's rank needs are read and decoded
        straight into the buffer and not kept: right for reading everything once, in the `ranges`
        of the file. Other frames come from the cache. Each thread that reads so keeps about
        16 MiB of scratch memory until it ends, whatever the number of files, snapshots and stores;
        nothing large is allocated in a call but frames for the cache. A buffer that is aligned to
        pages is filled past the page cache where the storage is read so.

        Args:
            offset: Where in the file to begin.
            buffer: Writable and contiguous; it stays the caller's.
            streaming: Read a long range once.

        Raises:
            UsageError: The range does not lie within the file.
            TypeError: The buffer cannot be written.
            IntegrityError: Bytes are damaged or gone.
        """
        self._require_open()
        with memoryview(buffer) as view:
            if view.readonly:
                raise TypeError("cannot read into a buffer that is read-only")
            with view.cast("B") as into:
                self._require_within(offset, into.nbytes)
                if self._cached is not None:
                    self._cached.read_into(offset, into)
                elif streaming:
                    self._files.stream_into(self.entry, offset, into)
                else:
                    self._files.read_into(self.entry, offset, into)

    def ranges(
        self, *, about_bytes: int = RANGE_BYTES, zeros_bytes_min: int = ZEROS_BYTES_MIN
    ) -> list[FileRange]:
        """Divide the whole file into ranges for `read_into(..., streaming=True)`.

        They cover the file in order. Data are cut where as few frames as possible are on both
        sides, so that threads that read different ranges rarely need the same frame; no range of
        data is longer than one and a half times `about_bytes`. Zeros that are known without
        reading are ranges of their own, of any length. All ranges begin at multiples of 4096.

        Args:
            about_bytes: How long ranges of data should be; at least 64 KiB. Each of two
                neighbouring ranges may need to decode a frame of up to 4 MiB that both have.
            zeros_bytes_min: Shorter runs of zeros stay within ranges of data; at least 4096.

        Raises:
            UsageError: A length is too small.
            IntegrityError: The tables of the rank are damaged or gone.
        """
        self._require_open()
        if about_bytes < RANGE_BYTES_MIN or zeros_bytes_min < PAGE_BYTES:
            raise UsageError(
                f"cannot divide {self.name} into ranges of {about_bytes} bytes and zeros of "
                f"{zeros_bytes_min}",
                next_step=f"give at least {RANGE_BYTES_MIN} and {PAGE_BYTES}",
            )
        return self._files.ranges(
            self.entry, about_bytes=about_bytes, zeros_bytes_min=zeros_bytes_min
        )

    def pieces(self) -> FilePieces:
        """Divide the whole file into pieces for `read_piece`, for whoever reads all of it at once.

        They cover the file in order. A raw frame that nothing else of the rank needs is a piece,
        of which nothing has to be looked up when it is read; other data are joined to pieces of up
        to 4 MiB, and zeros, of any length, are pieces of their own. Unlike ranges, pieces begin at
        any byte. Dividing 64 GiB takes some milliseconds; each piece is made when it is taken out.

        Raises:
            IntegrityError: The tables of the rank are damaged or gone.
        """
        self._require_open()
        return self._files.pieces(self.entry)

    def read_piece(
        self, piece: FilePiece, buffer: Buffer, *, check: ReadCheck = ReadCheck.ALL
    ) -> None:
        """Fill the beginning of a buffer with a piece of this file. Thread-safe.

        As `read_into` with `streaming` does it. With another `check` the bytes are *not* what the
        store's integrity promises when this returns: the caller has to hash every chunk of the
        file, as `chunks` lists them, before anybody may use a byte of it (I6).

        Args:
            piece: One of `pieces`.
            buffer: Writable and contiguous, at least as long as the piece.
            check: What to check.

        Raises:
            UsageError: The piece is of another file, or the buffer is too short.
            IntegrityError: Bytes are damaged or gone; the buffer's content is undefined.
        """
        self._require_open()
        with memoryview(buffer).cast("B")[: piece.length] as into:
            if into.nbytes < piece.length:
                raise UsageError(f"{into.nbytes} bytes are too few for {piece.length}")
            self._require_within(piece.offset, piece.length)
            if piece.is_zeros:
                np.frombuffer(into, np.uint8)[:] = 0
            else:
                self._files.read_piece(self.entry, piece, into, check)

    def open_pack(self, pack: PackId) -> int | None:
        """Return a descriptor of a pack that has raw pieces of this file, the caller's to close.

        For whoever reads very many pieces: the bytes of a group are `at` its place there, and those
        of a piece at `piece.stored.frame.offset`, unchecked, and what was said of `check` in
        `read_piece` holds. The descriptor may bypass the page cache. None if packs are no files:
        then there is `read_piece`.

        Raises:
            MissingPack: The pack is gone.
        """
        self._require_open()
        return self._files.open_pack(self.entry, pack)

    def chunks(self) -> FileChunks:
        """List the chunks of the file, out of the manifest that the snapshot's id covers.

        They cover the file in order. The table takes about 60 bytes a chunk, 16 MB for 64 GiB of
        device memory.

        Raises:
            IntegrityError: The manifest is damaged or gone.
        """
        self._require_open()
        return self._files.chunks(self.entry)

    def _require_within(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > self.size_bytes:
            raise UsageError(
                f"{show_path(self.entry.path)} has {self.size_bytes} bytes, so it has no "
                f"{length} bytes at {offset}",
                next_step="read within the file; `size_bytes` says where it ends",
            )

    @override
    def readable(self) -> bool:
        """Yes."""
        self._require_open()
        return True

    @override
    def seekable(self) -> bool:
        """Yes."""
        self._require_open()
        return True

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        """Fill a buffer from the position on, fewer bytes only at the end of the file."""
        self._require_open()
        with memoryview(buffer) as view, view.cast("B") as into:
            count = max(0, min(into.nbytes, self.size_bytes - self._position))
            if count:
                self.read_into(self._position, into[:count])
        self._position += count
        return count

    @override
    def readall(self) -> bytes:
        """Read all from the position on."""
        data = self.read_at(self._position, max(0, self.size_bytes - self._position))
        self._position += len(data)
        return data

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position, also beyond the end, where there is nothing to read."""
        self._require_open()
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size_bytes}
        if whence not in base:
            raise ValueError(f"not a place to seek from: {whence}")
        position = base[whence] + offset
        if position < 0:
            raise ValueError(f"cannot seek to {position}")
        self._position = position
        return position

    @override
    def tell(self) -> int:
        """The position."""
        self._require_open()
        return self._position

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
