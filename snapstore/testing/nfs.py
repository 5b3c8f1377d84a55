"""NFS as its users meet it: one server, several clients, each believing its own cache.

`NfsClient` is a `FileCalls`, so a `PosixBackend` runs on it unchanged. The double is harsher than
Linux where Linux leaves room, and models what stores have tripped over:

* attributes, names and *absent* names are believed until they expire, or until a directory or
  file is opened (close-to-open);
* a directory listing may be old even then;
* written bytes reach the server at `fsync` or `close`, which is where their errors come up. After
  an error the bytes are gone and the next `fsync` of the same descriptor succeeds;
* a file that another client removed gives ESTALE;
* a file that is unlinked while open lives on as `.nfs…` until it is closed;
* a request may be carried out and its reply be lost: the retransmission then finds its own work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import threading
from typing import TYPE_CHECKING, Literal

from snapstore.backend.files import FileStat

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Sequence

    from snapstore.clock import Clock

__all__ = ["STORM", "NfsCall", "NfsClient", "NfsFault", "NfsFaults", "NfsServer"]

NfsCall = Literal[
    "open", "close", "pread", "writev", "pwritev", "fsync", "fstat", "lstat", "link", "unlink",
    "mkdir", "listdir",
]  # fmt: skip

_ROOT = 1
_DEVICE = 0x5F5
_FIRST_FD = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class NfsFault:
    """One thing that goes wrong with a call.

    Attributes:
        call: Which call.
        error: The `errno` that the caller sees; 0 for a short transfer instead of an error.
        done: Whether the server carried the request out all the same (its reply was lost). A
            failed `fsync` or `close` that was not done has lost the written bytes.
    """

    call: NfsCall
    error: int
    done: bool = False


STORM: tuple[NfsFault, ...] = (
    NfsFault("open", errno.ESTALE),
    NfsFault("pread", errno.ESTALE),
    NfsFault("pread", errno.EIO),
    NfsFault("pread", 0),
    NfsFault("writev", 0),
    NfsFault("writev", errno.EIO),
    NfsFault("pwritev", 0),
    NfsFault("pwritev", errno.EIO),
    NfsFault("fsync", errno.EIO),
    NfsFault("fsync", errno.EDQUOT),
    NfsFault("close", errno.EIO),
    NfsFault("close", errno.ENOSPC),
    NfsFault("link", errno.EEXIST, done=True),
    NfsFault("link", errno.EIO, done=True),
    NfsFault("link", errno.EIO),
    NfsFault("link", errno.ETIMEDOUT, done=True),
    NfsFault("link", errno.ENOSPC),
    NfsFault("unlink", errno.ENOENT, done=True),
    NfsFault("unlink", errno.EIO),
    NfsFault("mkdir", errno.EEXIST, done=True),
    NfsFault("mkdir", errno.EIO, done=True),
    NfsFault("lstat", errno.ESTALE),
    NfsFault("listdir", errno.EIO),
)
"""Everything that a soft mount of a troubled server may answer."""


class NfsFaults:
    """Decides which calls go wrong: planned ones by number, others by chance. Thread-safe."""

    def __init__(
        self,
        planned: Iterable[tuple[int, NfsFault]] = (),
        *,
        rng: random.Random | None = None,
        chance: float = 0.0,
        menu: Sequence[NfsFault] = STORM,
    ) -> None:
        """Plan the faults.

        Args:
            planned: Faults, each with the number of the call (of its own sort, from 0) it hits.
            rng: Source of chance.
            chance: Probability that a call goes wrong which has an entry in the menu.
            menu: What may go wrong by chance.
        """
        self._planned = {(fault.call, number): fault for number, fault in planned}
        self._rng = rng
        self._chance = chance
        self._menu = menu
        self._seen: dict[NfsCall, int] = {}
        self._lock = threading.Lock()

    def draw(self, call: NfsCall) -> NfsFault | None:
        """Count a call and say what goes wrong with it, if anything."""
        with self._lock:
            number = self._seen.get(call, 0)
            self._seen[call] = number + 1
            planned = self._planned.get((call, number))
            if planned is not None or self._rng is None:
                return planned
            if self._rng.random() >= self._chance:
                return None
            choices = [fault for fault in self._menu if fault.call == call]
            return self._rng.choice(choices) if choices else None


@dataclasses.dataclass(slots=True)
class _Inode:
    number: int
    modified_ns: int
    names: dict[str, int] | None
    data: bytearray = dataclasses.field(default_factory=bytearray)
    links: int = 1
    change: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Attributes:
    stat: FileStat
    change: int


class NfsServer:
    """The exported tree. Each method is one request, carried out at once or not at all."""

    def __init__(self, clock: Clock, *, capacity_bytes: int | None = None) -> None:
        """Export an empty tree; `capacity_bytes` counts file bytes, and may be changed."""
        self._clock = clock
        self._lock = threading.RLock()
        self._numbers = itertools.count(_ROOT)
        self._inodes: dict[int, _Inode] = {}
        self.capacity_bytes = capacity_bytes
        self._new(names={})

    def get_attributes(self, number: int) -> _Attributes:
        """GETATTR."""
        with self._lock:
            inode = self._inode(number)
            found = FileStat(
                identity=(_DEVICE, number),
                is_file=inode.names is None,
                is_directory=inode.names is not None,
                size_bytes=len(inode.data),
                modified_ns=inode.modified_ns,
            )
            return _Attributes(found, inode.change)

    def look_up(self, folder: int, name: str) -> tuple[int | None, int]:
        """LOOKUP: the file's number or `None`, and the folder's change counter."""
        with self._lock:
            return self._names(folder).get(name), self._inode(folder).change

    def read(self, number: int) -> bytes:
        """READ, of everything."""
        with self._lock:
            return bytes(self._inode(number).data)

    def write(self, number: int, offset: int, data: bytes) -> None:
        """WRITE and COMMIT."""
        with self._lock:
            inode = self._inode(number)
            grown = max(0, offset + len(data) - len(inode.data))
            if self.capacity_bytes is not None and self.used_bytes() + grown > self.capacity_bytes:
                raise _os_error(errno.ENOSPC)
            inode.data += bytes(max(0, offset - len(inode.data)))
            inode.data[offset : offset + len(data)] = data
            self._touch(inode)

    def used_bytes(self) -> int:
        """How many bytes all files have together."""
        with self._lock:
            return sum(len(inode.data) for inode in self._inodes.values())

    def make(self, folder: int, name: str, *, is_directory: bool) -> int:
        """CREATE (exclusive) or MKDIR."""
        with self._lock:
            if name in self._names(folder):
                raise _os_error(errno.EEXIST)
            inode = self._new(names={} if is_directory else None)
            self._names(folder)[name] = inode.number
            self._touch(self._inode(folder))
            return inode.number

    def link(self, number: int, folder: int, name: str) -> None:
        """LINK."""
        with self._lock:
            inode = self._inode(number)
            if name in self._names(folder):
                raise _os_error(errno.EEXIST)
            self._names(folder)[name] = number
            inode.links += 1
            self._touch(self._inode(folder))

    def remove(self, folder: int, name: str) -> None:
        """REMOVE."""
        with self._lock:
            number = self._names(folder).get(name)
            if number is None:
                raise _os_error(errno.ENOENT)
            inode = self._inode(number)
            if inode.names is not None:
                raise _os_error(errno.EISDIR)
            del self._names(folder)[name]
            self._touch(self._inode(folder))
            inode.links -= 1
            if inode.links == 0:
                del self._inodes[number]

    def rename(self, folder: int, old: str, new: str) -> None:
        """RENAME within a folder."""
        with self._lock:
            names = self._names(folder)
            if old not in names:
                raise _os_error(errno.ENOENT)
            names[new] = names.pop(old)
            self._touch(self._inode(folder))

    def list_names(self, folder: int) -> list[str]:
        """READDIR."""
        with self._lock:
            return list(self._names(folder))

    def _new(self, *, names: dict[str, int] | None) -> _Inode:
        inode = _Inode(next(self._numbers), self._clock.now_ns(), names)
        self._inodes[inode.number] = inode
        return inode

    def _inode(self, number: int) -> _Inode:
        inode = self._inodes.get(number)
        if inode is None:
            raise _os_error(errno.ESTALE)
        return inode

    def _names(self, number: int) -> dict[str, int]:
        names = self._inode(number).names
        if names is None:
            raise _os_error(errno.ENOTDIR)
        return names

    def _touch(self, inode: _Inode) -> None:
        inode.change += 1
        inode.modified_ns = self._clock.now_ns()


@dataclasses.dataclass(slots=True)
class _OpenFile:
    number: int
    writable: bool
    position: int = 0
    dirty: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class _Name:
    number: int | None
    folder_change: int


class NfsClient:
    """One machine that has mounted the server's tree at `/` (`FileCalls`). Thread-safe."""

    def __init__(
        self,
        server: NfsServer,
        clock: Clock,
        *,
        cache_s: float = 60.0,
        faults: NfsFaults | None = None,
    ) -> None:
        """Mount.

        Args:
            server: The server.
            clock: Ages the caches.
            cache_s: How long attributes and listings are believed.
            faults: What goes wrong.
        """
        self._server = server
        self._clock = clock
        self._cache_s = cache_s
        self._faults = faults or NfsFaults()
        self._lock = threading.RLock()
        self._fds = itertools.count(_FIRST_FD)
        self._open_files: dict[int, _OpenFile] = {}
        self._attributes: dict[int, tuple[float, _Attributes]] = {}
        self._names: dict[tuple[int, str], _Name] = {}
        self._listings: dict[int, tuple[float, list[str]]] = {}
        self._data: dict[int, tuple[int, bytes]] = {}
        self._silly: dict[int, tuple[int, str]] = {}

    @property
    def open_count(self) -> int:
        """Number of descriptors that are open now."""
        return len(self._open_files)

    def die(self) -> None:
        """Lose power: written bytes that were not synced never reach the server."""
        with self._lock:
            self._open_files.clear()

    # --- descriptors ---

    def open(self, path: str, flags: int) -> int:
        """See `FileCalls.open`."""
        with self._lock:
            self._fail("open")
            if flags & os.O_CREAT:
                folder, name = self._split(path)
                with self._own_change(folder, name):
                    number = self._server.make(folder, name, is_directory=False)
            else:
                number = self._open_existing(path, flags)
            fd = next(self._fds)
            self._open_files[fd] = _OpenFile(number, bool(flags & os.O_CREAT))
            return fd

    def close(self, fd: int) -> None:
        """See `FileCalls.close`."""
        with self._lock:
            opened = self._open_file(fd)
            try:
                if opened.writable:
                    self._write_back(opened, "close")
            finally:
                del self._open_files[fd]
                self._drop_silly(opened.number)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """See `FileCalls.pread`."""
        with self._lock:
            number = self._open_file(fd).number
            fault = self._fail("pread")
            attributes = self._attributes_of(number)
            if attributes.stat.is_directory:
                raise _os_error(errno.EISDIR)
            cached = self._data.get(number)
            if cached is None or cached[0] != attributes.change:
                cached = (attributes.change, self._server.read(number))
                self._data[number] = cached
            piece = cached[1][offset : offset + into.nbytes]
            if fault is not None:
                piece = piece[: max(1, len(piece) // 2)]
            into[: len(piece)] = piece
            return len(piece)

    def writev(self, fd: int, pieces: Sequence[memoryview]) -> int:
        """See `FileCalls.writev`."""
        with self._lock:
            opened = self._open_file(fd)
            data = b"".join(pieces)
            if self._fail("writev") is not None:
                data = data[: max(1, len(data) // 2)]
            opened.dirty.append((opened.position, data))
            opened.position += len(data)
            return len(data)

    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        """See `FileCalls.pwritev`."""
        with self._lock:
            opened = self._open_file(fd)
            written = b"".join(pieces)
            if self._fail("pwritev") is not None:
                written = written[: max(1, len(written) // 2)]
            opened.dirty.append((offset, written))
            return len(written)

    def set_direct(self, fd: int, *, direct: bool) -> bool:
        """See `FileCalls.set_direct`; always refused, so that every byte meets the cache."""
        with self._lock:
            self._open_file(fd)
        del direct
        return False

    def fsync(self, fd: int) -> None:
        """See `FileCalls.fsync`."""
        with self._lock:
            self._write_back(self._open_file(fd), "fsync")

    def fstat(self, fd: int) -> FileStat:
        """See `FileCalls.fstat`."""
        with self._lock:
            self._fail("fstat")
            opened = self._open_file(fd)
            found = self._attributes_of(opened.number).stat
            ends = [offset + len(data) for offset, data in opened.dirty]
            size_bytes = max([found.size_bytes, opened.position, *ends])
            return dataclasses.replace(found, size_bytes=size_bytes)

    # --- names ---

    def lstat(self, path: str) -> FileStat:
        """See `FileCalls.lstat`."""
        with self._lock:
            self._fail("lstat")
            return self._attributes_of(self._resolve(path)).stat

    def link(self, source: str, target: str) -> None:
        """See `FileCalls.link`."""
        with self._lock:
            fault = self._fail("link")
            number = self._resolve(source)
            folder, name = self._split(target)
            # The kernel does not ask the server to make a name that it believes to be there.
            if self._look_up(folder, name) is not None:
                raise _os_error(errno.EEXIST)
            if fault is not None:
                # Done, but the client never learns it: its cache still says *absent*.
                self._server.link(number, folder, name)
                raise _os_error(fault.error)
            with self._own_change(folder, name):
                self._server.link(number, folder, name)

    def unlink(self, path: str) -> None:
        """See `FileCalls.unlink`."""
        with self._lock:
            fault = self._fail("unlink")
            folder, name = self._split(path)
            number = self._look_up(folder, name)
            if number is None:
                raise _os_error(errno.ENOENT)
            with self._own_change(folder, name):
                if any(opened.number == number for opened in self._open_files.values()):
                    silly = f".nfs{number:024x}"
                    self._server.rename(folder, name, silly)
                    self._silly[number] = (folder, silly)
                else:
                    self._server.remove(folder, name)
            if fault is not None:
                raise _os_error(fault.error)

    def mkdir(self, path: str) -> None:
        """See `FileCalls.mkdir`."""
        with self._lock:
            fault = self._fail("mkdir")
            folder, name = self._split(path)
            if self._look_up(folder, name) is not None:
                raise _os_error(errno.EEXIST)
            with self._own_change(folder, name):
                self._server.make(folder, name, is_directory=True)
            if fault is not None:
                raise _os_error(fault.error)

    def listdir(self, path: str) -> list[str]:
        """See `FileCalls.listdir`."""
        with self._lock:
            self._fail("listdir")
            folder = self._resolve(path)
            read_s, names = self._listings.get(folder, (float("-inf"), []))
            if self._clock.monotonic_s() - read_s >= self._cache_s:
                names = self._server.list_names(folder)
                self._listings[folder] = (self._clock.monotonic_s(), names)
            return list(names)

    def is_readonly(self, path: str) -> bool:
        """See `FileCalls.is_readonly`."""
        self._resolve(path)
        return False

    # --- the cache ---

    def _fail(self, call: NfsCall) -> NfsFault | None:
        """Fail now, or return the fault for the caller to act on after the request is done."""
        fault = self._faults.draw(call)
        if fault is None or fault.done or fault.error == 0:
            return fault
        raise _os_error(fault.error)

    def _open_file(self, fd: int) -> _OpenFile:
        if fd not in self._open_files:
            raise _os_error(errno.EBADF)
        return self._open_files[fd]

    def _open_existing(self, path: str, flags: int) -> int:
        number = self._resolve(path)
        try:
            attributes = self._fetch_attributes(number)
        except OSError:
            self._names = {key: at for key, at in self._names.items() if at.number != number}
            raise
        if flags & os.O_DIRECTORY and not attributes.stat.is_directory:
            raise _os_error(errno.ENOTDIR)
        return number

    def _resolve(self, path: str) -> int:
        number = _ROOT
        for name in filter(None, path.split("/")):
            found = self._look_up(number, name)
            if found is None:
                raise _os_error(errno.ENOENT)
            number = found
        return number

    def _split(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        return self._resolve(folder), name

    def _look_up(self, folder: int, name: str) -> int | None:
        attributes = self._attributes_of(folder)
        if not attributes.stat.is_directory:
            raise _os_error(errno.ENOTDIR)
        cached = self._names.get((folder, name))
        if cached is None or cached.folder_change != attributes.change:
            number, change = self._server.look_up(folder, name)
            cached = _Name(number, change)
            self._names[folder, name] = cached
        return cached.number

    def _attributes_of(self, number: int) -> _Attributes:
        read_s, attributes = self._attributes.get(number, (float("-inf"), None))
        if attributes is None or self._clock.monotonic_s() - read_s >= self._cache_s:
            return self._fetch_attributes(number)
        return attributes

    def _fetch_attributes(self, number: int) -> _Attributes:
        self._attributes.pop(number, None)
        attributes = self._server.get_attributes(number)
        self._attributes[number] = (self._clock.monotonic_s(), attributes)
        return attributes

    @contextlib.contextmanager
    def _own_change(self, folder: int, name: str) -> Iterator[None]:
        """Keep what is believed of a folder when the change to it was ours alone.

        The reply tells the folder's state before and after the request; if the state before is
        the believed one, then all that is believed of other names, right or wrong, stays.
        """
        believed = self._attributes_of(folder).change
        before = self._server.get_attributes(folder).change
        self._names.pop((folder, name), None)
        self._listings.pop(folder, None)
        try:
            yield
        finally:
            after = self._fetch_attributes(folder).change
            if believed == before:
                for key, at in list(self._names.items()):
                    if key[0] == folder and at.folder_change == believed:
                        self._names[key] = _Name(at.number, after)

    # --- written bytes ---

    def _write_back(self, opened: _OpenFile, call: Literal["fsync", "close"]) -> None:
        dirty, opened.dirty = opened.dirty, []
        self._fail(call)
        for offset, data in dirty:
            self._server.write(opened.number, offset, data)
        if dirty:
            self._fetch_attributes(opened.number)

    def _drop_silly(self, number: int) -> None:
        if any(opened.number == number for opened in self._open_files.values()):
            return
        place = self._silly.pop(number, None)
        if place is not None:
            with contextlib.suppress(OSError):
                self._server.remove(*place)


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
