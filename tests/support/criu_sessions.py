"""Sinks and sources over plain directories, and CRIU commands that end with the test."""

import bisect
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from snapagent.criu.image_pipe import ImagePipe
from snapagent.criu.pagemaps import build_pagemap
from snapagent.criu.protocol import PagesImage
from snapagent.errors import AgentError
from snapstore.source.criu_pagemap import PageFlag, PagemapEntry, parse_pagemap
from snapstore.units import MIB, PAGE_BYTES
from tools.live_process import Criu, CriuFailedError, explanation

CRIU_S_MAX = 120


@contextlib.contextmanager
def running(
    criu: Criu, arguments: Sequence[str], log: Path, *, pass_fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Start CRIU; if it still runs at the end of the context, it is killed."""
    command = [criu.program, *arguments, "--log-file", log, "-v2"]
    with subprocess.Popen(  # noqa: S603 - the program under test
        command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=tuple(pass_fds)
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for CRIU's success."""
    status = process.wait(timeout=CRIU_S_MAX)
    if status != 0:
        raise CriuFailedError("\n".join([f"criu ended with status {status}", *explanation(log)]))


class DirectoryPages:
    """A page sink that writes what CRIU's own page server would write."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.images: list[PagesImage] = []
        self._buffer = memoryview(bytearray(MIB))
        self._entries: list[tuple[int, int, int]] = []
        self._file: BinaryIO | None = None

    def begin(self, image: PagesImage) -> None:
        assert self._file is None
        self.images.append(image)
        self._entries = []
        self._file = (self.directory / image.pages_name).open("xb", buffering=0)

    def entry(self, vaddr: int, nr_pages: int, flags: int) -> None:
        self._entries.append((vaddr, nr_pages, flags))

    def buffer(self) -> memoryview:
        return self._buffer

    def advance(self, count: int) -> None:
        assert self._file is not None
        assert self._file.write(self._buffer[:count]) == count

    def end(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        image = self.images[-1]
        pagemap = build_pagemap(image.pages_id, self._entries)
        (self.directory / image.pagemap_name).write_bytes(pagemap)


class DirectoryImages:
    """An image sink and an image source over a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def store(self, name: str, pipe: ImagePipe) -> None:
        buffer = memoryview(bytearray(MIB))
        with (self.directory / name).open("xb") as file:
            while count := pipe.read_into(buffer):
                file.write(buffer[:count])

    def find(self, name: str) -> Callable[[ImagePipe], None] | None:
        path = self.directory / name
        if not path.exists():
            return None

        def write(pipe: ImagePipe) -> None:
            with path.open("rb") as file:
                while data := file.read(MIB):
                    pipe.write(data)

        return write


class DumpReader:
    """A page reader over dump directories, of several processes. Close it."""

    def __init__(self) -> None:
        self._tasks: dict[int, tuple[list[PagemapEntry], int]] = {}
        self.lazy_bytes = 0

    def add(self, dump: Path, pid: int) -> None:
        pagemap = parse_pagemap((dump / f"pagemap-{pid}.img").read_bytes())
        entries = [entry for entry in pagemap.entries() if entry.offset is not None]
        fd = os.open(dump / f"pages-{pagemap.pages_id}.img", os.O_RDONLY)
        self._tasks[pid] = (sorted(entries), fd)
        lazy = [entry.nr_pages for entry in entries if entry.flags & PageFlag.LAZY]
        self.lazy_bytes += sum(lazy) * PAGE_BYTES

    def read(self, pid: int, vaddr: int, nr_pages_max: int, into: memoryview) -> int:
        entries, fd = self._tasks[pid]
        row = bisect.bisect_right(entries, vaddr, key=lambda entry: entry.vaddr) - 1
        entry = entries[row]
        skip = (vaddr - entry.vaddr) // PAGE_BYTES
        if row < 0 or skip >= entry.nr_pages:
            raise AgentError(f"process {pid} has no page at {vaddr:#x}")
        count = min(nr_pages_max, entry.nr_pages - skip)
        assert entry.offset is not None
        size = os.preadv(fd, [into[: count * PAGE_BYTES]], entry.offset + skip * PAGE_BYTES)
        return size // PAGE_BYTES

    def close(self) -> None:
        for _, fd in self._tasks.values():
            os.close(fd)
