"""What the kernel asks, answered: the only module that speaks FUSE, apart from `session`."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from typing import TYPE_CHECKING, TypeVar

import pyfuse3
import trio
from typing_extensions import override

from snapstore.errors import LookupFailed, SnapError
from snapstore.mount.blocks import BLOCK_BYTES
from snapstore.mount.fetching import Reader, StoreSilent
from snapstore.mount.open_files import OpenFiles
from snapstore.mount.waiting import WaitingReaders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from snapstore.mount.cached import Opener
    from snapstore.mount.fetching import Fetcher
    from snapstore.mount.nodes import Attributes, Forest
    from snapstore.repository.file_reader import SnapshotFile

__all__ = ["ReadOnlyTree"]

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
Runs = list[tuple[int, int]]
"""The first of some blocks, and how many there are."""

_SETTLED_S = 86_400.0
"""How long the kernel may believe what never changes."""

_NAME_S = 1.0
"""How long it may believe in names that come and go."""

_BLOCK_BYTES = 512
_NAME_BYTES_MAX = 255
_TREE_THREADS = 8


class ReadOnlyTree(pyfuse3.Operations):
    """The operations of a mount, on a forest of nodes. Used by the event loop alone."""

    enable_writeback_cache = False
    supports_dot_lookup = False

    def __init__(
        self,
        forest: Forest,
        opener: Opener,
        *,
        timeout_s: float,
        size_bytes: int,
    ) -> None:
        super().__init__()
        self._forest = forest
        self._timeout_s = timeout_s
        self._size_bytes = size_bytes
        self._threads = trio.CapacityLimiter(_TREE_THREADS)
        self._opener = opener
        self._files = OpenFiles()
        self._readers: dict[int, Reader] = {}
        self._waiting = WaitingReaders()
        self._documents: dict[int, bytes] = {}
        self._listings: dict[int, list[tuple[bytes, Attributes]]] = {}
        self._last_handle = 0
        self.fetcher: Fetcher | None = None

    # -- nodes

    @override
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        found = await self._ask(parent_inode, lambda: self._forest.look_up(parent_inode, name))
        if found is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        self._forest.know(found.inode)
        return _entry(found)

    @override
    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for inode, times in inode_list:
            if self._forest.forget(inode, times):
                self._files.drop_idle(inode)

    @override
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return _entry(await self._ask(inode, lambda: self._forest.attributes(inode)))

    @override
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        tree, local = self._forest.at(inode)
        return await self._ask(inode, lambda: tree.target(local))

    @override
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        return [name for name, _ in await self._xattrs(inode)]

    @override
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        for there, value in await self._xattrs(inode):
            if there == name:
                return value
        raise pyfuse3.FUSEError(pyfuse3.ENOATTR)

    @override
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = 4096
        found.f_blocks = -(-self._size_bytes // 4096)
        found.f_bfree = found.f_bavail = 0
        found.f_files = found.f_ffree = found.f_favail = 0
        found.f_namemax = _NAME_BYTES_MAX
        return found

    async def _xattrs(self, inode: int) -> tuple[tuple[bytes, bytes], ...]:
        tree, local = self._forest.at(inode)
        return await self._ask(inode, lambda: tree.xattrs(local))

    # -- directories

    @override
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        listing = await self._ask(inode, lambda: self._forest.list(inode))
        handle = self._next_handle()
        self._listings[handle] = listing
        return handle

    @override
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        listing = self._listings[fh]
        for index in range(start_id, len(listing)):
            name, attributes = listing[index]
            if not pyfuse3.readdir_reply(token, name, _entry(attributes), index + 1):
                return
            self._forest.know(attributes.inode)

    @override
    async def releasedir(self, fh: int) -> None:
        del self._listings[fh]

    # -- files

    @override
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise pyfuse3.FUSEError(errno.EROFS)
        tree, local = self._forest.at(inode)
        document = await self._ask(inode, lambda: tree.document(local))
        if document is None and inode not in self._files:
            file = await self._ask(inode, lambda: tree.open(local))
            content = await self._ask(
                inode,
                lambda: self._opener.open(file),
                may_block=self._opener.may_block(file.size_bytes),
            )
            self._files.add(inode, content, tree.path(local))
        handle = self._next_handle()
        if document is not None:
            self._documents[handle] = document
        else:
            self._readers[handle] = Reader(self._files.use(inode), inode, ctx.pid)
        return pyfuse3.FileInfo(fh=handle, keep_cache=True)

    @override
    async def read(self, fh: int, off: int, size: int) -> bytes:
        reader = self._readers.get(fh)
        if reader is None:
            return self._documents[fh][off : off + size]
        content = reader.file.content
        size = min(size, content.size_bytes - off)
        if size <= 0:
            return b""
        fetcher = self.fetcher
        assert fetcher is not None
        # First: it may make room, which may take away what was just seen.
        fetcher.note(reader, off, size)
        data = content.peek(off, size)
        if data is None:
            with _answered(reader.file.name, off), self._waiting.interruptible(reader.pid):
                data = await fetcher.read(reader, off, size)
        # A view is as good as bytes here, and the answer is sent before anything else happens.
        return data  # type: ignore[return-value]

    @override
    async def flush(self, fh: int) -> None:
        """Nothing waits to be written."""

    @override
    async def release(self, fh: int) -> None:
        if self._documents.pop(fh, None) is not None:
            return
        self._files.done_with(self._readers.pop(fh).inode)

    # -- in the background

    async def watch(self) -> None:
        """Let readers go that have a signal to take; runs for as long as the mount does."""
        await self._waiting.watch()

    async def warm(
        self, order: Iterable[tuple[int, Callable[[SnapshotFile], Runs]]], *, room_bytes: int
    ) -> bool:
        """Fetch files, given by their inodes and what of them, one after the other.

        Args:
            order: Which, and how to divide each, which may block.
            room_bytes: When to stop with files that are kept in memory of this mount.

        Returns:
            Whether all was fetched.

        Raises:
            SnapError: Something cannot be had.
        """
        assert self.fetcher is not None
        left_blocks = room_bytes // BLOCK_BYTES
        for inode, divide in order:
            tree, local = self._forest.at(inode)
            opened = tree.open(local)
            if inode not in self._files:
                content = await trio.to_thread.run_sync(self._opener.open, opened)
                self._files.add(inode, content, tree.path(local))
            file = self._files.use(inode)
            try:
                runs = await trio.to_thread.run_sync(divide, opened)
                for first, count in runs:
                    if file.content.is_bounded and left_blocks < count:
                        return False
                    left_blocks -= count
                    await self.fetcher.warm(file, [(first, count)])
            finally:
                self._files.done_with(inode)
        return True

    # -- asking the trees

    async def _ask(
        self, inode: int, question: Callable[[], _Result], *, may_block: bool = False
    ) -> _Result:
        """Ask right here what is known, and on another thread what may take long."""
        tree, local = self._forest.at(inode)
        with _answered(f"inode {inode:x}", None):
            if not may_block and not tree.may_block(local):
                return question()
            with trio.move_on_after(self._timeout_s):
                return await trio.to_thread.run_sync(
                    question, limiter=self._threads, abandon_on_cancel=True
                )
            raise StoreSilent(f"the store has not answered for {self._timeout_s:g} s")

    def _next_handle(self) -> int:
        self._last_handle += 1
        return self._last_handle


@contextlib.contextmanager
def _answered(what: str, offset: int | None) -> Iterator[None]:
    """Turn errors into what the kernel understands, and say in the log what they were."""
    try:
        yield
    except LookupFailed as error:
        log.info("%s: %s", what, error)
        raise pyfuse3.FUSEError(errno.ENOENT) from error
    except (SnapError, OSError, MemoryError) as error:
        where = what if offset is None else f"{what}: offset {offset}"
        log.error("%s: answered with EIO: %s", where, error)  # noqa: TRY400 - no bug of ours
        raise pyfuse3.FUSEError(errno.EIO) from error


def _entry(attributes: Attributes) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = attributes.inode
    entry.st_mode = attributes.mode
    entry.st_nlink = attributes.links
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_size = attributes.size_bytes
    entry.st_blksize = 4096
    entry.st_blocks = -(-attributes.data_bytes // _BLOCK_BYTES)
    entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = attributes.mtime_ns
    entry.entry_timeout = _SETTLED_S if attributes.keeps_name else _NAME_S
    entry.attr_timeout = _SETTLED_S if attributes.settled else 0
    return entry
