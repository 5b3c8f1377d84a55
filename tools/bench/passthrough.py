"""The least that a FUSE file system in Python can do: give out one file as it is.

`python -m tools.bench.passthrough FILE DIR` shows it as `DIR/file` until it is unmounted. The mount
is measured beside it: the same library and event loop, and an `os.pread` for every request.
"""

import errno
import os
import stat
import sys

import pyfuse3
import trio
from typing_extensions import override

_FILE = pyfuse3.InodeT(2)
_FOREVER_S = 86_400


class PassThrough(pyfuse3.Operations):
    """One directory with one file."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self._source = source

    @override
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if name != b"file":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(_FILE)

    @override
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    @override
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(1), keep_cache=True)

    @override
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return os.pread(self._source, size, off)

    @override
    async def flush(self, fh: int) -> None:
        """Nothing waits to be written."""

    @override
    async def release(self, fh: int) -> None:
        """Nothing was opened."""

    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        found = pyfuse3.EntryAttributes()
        found.st_ino = pyfuse3.InodeT(inode)
        is_file = inode == _FILE
        found.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o444 if is_file else stat.S_IFDIR | 0o555)
        found.st_size = os.fstat(self._source).st_size if is_file else 0
        found.st_nlink = 1
        found.entry_timeout = found.attr_timeout = _FOREVER_S
        return found


def main() -> None:
    """Serve until it is unmounted."""
    source, directory = sys.argv[1:]
    options = {*pyfuse3.default_options, "ro", "fsname=passthrough", "subtype=passthrough"}
    pyfuse3.init(PassThrough(os.open(source, os.O_RDONLY)), directory, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    main()
