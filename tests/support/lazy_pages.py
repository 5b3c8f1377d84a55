"""Processes with missing memory to fill, and pages images to fill it from."""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from numpy.typing import NDArray

from snapagent.lazy.daemon import LazyPages
from snapagent.lazy.memory import TaskMemory

PAGE = 4096
ADDRESS = 0x5000_0000_0000
WAIT_S = 30
PROGRAM = Path(__file__).with_name("lazy_task.py")
ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Range:
    """A part of an image."""

    offset: int
    length: int
    is_zeros: bool
    order: int


class MemoryImage:
    """A pages image in memory, that can be told what to do before each read."""

    def __init__(self, data: bytes, *, ranges: Sequence[Range] | None = None) -> None:
        self.data = data
        self._ranges = ranges
        self.before_read: Callable[[int, int, bool], None] = lambda *_: None
        self.reads: list[tuple[int, int, bool]] = []

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def ranges(self, *, about_bytes: int) -> Sequence[Range]:
        if self._ranges is not None:
            return self._ranges
        return [
            Range(offset, min(about_bytes, self.size_bytes - offset), is_zeros=False, order=offset)
            for offset in range(0, self.size_bytes, about_bytes)
        ]

    def read_into(self, offset: int, buffer: memoryview, *, streaming: bool = False) -> None:
        assert 0 <= offset <= offset + buffer.nbytes <= self.size_bytes
        self.reads.append((offset, buffer.nbytes, streaming))
        self.before_read(offset, buffer.nbytes, streaming)
        buffer[:] = self.data[offset : offset + buffer.nbytes]


class DumpedImage:
    """A pages image that `criu dump` wrote."""

    def __init__(self, path: Path, range_bytes: int = 8 << 20) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._range_bytes = range_bytes
        self.before_read: Callable[[int, int, bool], None] = lambda *_: None
        self.size_bytes = os.fstat(self._fd).st_size

    def ranges(self, *, about_bytes: int) -> Sequence[Range]:
        del about_bytes
        return [
            Range(at, min(self._range_bytes, self.size_bytes - at), is_zeros=False, order=at)
            for at in range(0, self.size_bytes, self._range_bytes)
        ]

    def read_into(self, offset: int, buffer: memoryview, *, streaming: bool = False) -> None:
        self.before_read(offset, buffer.nbytes, streaming)
        assert os.preadv(self._fd, [buffer], offset) == buffer.nbytes

    def close(self) -> None:
        os.close(self._fd)


@dataclasses.dataclass(frozen=True)
class Columns:
    """A pagemap."""

    vaddrs: NDArray[np.uint64]
    counts: NDArray[np.uint64]
    flags: NDArray[np.uint64]
    offsets: NDArray[np.uint64]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int]]) -> Self:
        table = np.array(rows, dtype=np.uint64).reshape(-1, 4)
        return cls(*(table[:, number].copy() for number in range(4)))


class Gate:
    """Holds reads of the background up."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, offset: int, length: int, streaming: bool) -> None:  # noqa: FBT001
        if streaming:
            self.reached.release()
            assert self._open.wait(WAIT_S)

    def wait(self, readers: int = 2) -> None:
        """Wait until so many threads want to read."""
        for _ in range(readers):
            assert self.reached.acquire(timeout=WAIT_S)

    def open(self) -> None:
        """Let all pass."""
        self._open.set()


class Peer:
    """One process with missing memory: what it is asked, and what it should say."""

    def __init__(
        self,
        connection: socket.socket,
        expected: list[bytes],
        folder: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        self._stack = stack
        stack.callback(self.close)
        self._connection = connection
        connection.settimeout(WAIT_S)
        self._stream = connection.makefile("rw")
        self._folder = folder
        self.pages = expected
        self._lock = threading.Lock()

    def send(self, name: str, *arguments: object) -> None:
        self._stream.write(json.dumps([name, *arguments]) + "\n")
        self._stream.flush()

    def answer(self) -> object:
        return json.loads(self._stream.readline())

    def ask(self, name: str, *arguments: object) -> object:
        self.send(name, *arguments)
        return self.answer()

    def is_silent(self, seconds: float) -> bool:
        """Tell whether there is no answer for that long."""
        self._connection.settimeout(seconds)
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self._connection.settimeout(WAIT_S)

    def check(self, page: int = 0, count: int | None = None, how: str = "read") -> None:
        count = len(self.pages) - page if count is None else count
        wanted = hashlib.sha256(b"".join(self.pages[page : page + count])).hexdigest()
        assert self.ask(how, page, count) == wanted, (page, count)

    def fork(self) -> "Peer":
        with listening(self._folder) as (listener, path):
            self.send("fork", str(path))
            child, _ = listener.accept()
        self.answer()
        return Peer(child, list(self.pages), self._folder, self._stack)

    def close(self) -> None:
        self._stream.close()
        self._connection.close()


@contextlib.contextmanager
def listening(folder: Path) -> Iterator[tuple[socket.socket, Path]]:
    path = folder / f"peer-{len(list(folder.iterdir()))}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(WAIT_S)
        yield listener, path


class Stage:
    """A folder for sockets, a process, and a daemon that fills it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lazy-"))
        self.held: list[int] = []
        self.errors: list[BaseException] = []
        self.failed = threading.Event()
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self.folder)
        self._stack.callback(self.release)

    def hold(self, fd: int) -> None:
        self.held.append(os.dup(fd))

    def on_error(self, error: BaseException) -> None:
        self.errors.append(error)
        self.failed.set()

    def release(self) -> None:
        while self.held:
            os.close(self.held.pop())

    def start(
        self,
        image: MemoryImage,
        rows: Sequence[tuple[int, int, int, int]],
        pages: int,
        **settings: object,
    ) -> tuple[LazyPages, Peer]:
        """Start a process of so many pages, some of them missing, with a daemon that fills them.

        Rows are those of a pagemap, with numbers of pages in place of addresses and offsets.
        """
        expected = [bytes(PAGE)] * pages
        columns = []
        for page, count, flags, first in rows:
            columns.append((ADDRESS + page * PAGE, count, flags, first * PAGE))
            for number in range(count):
                at = (first + number) * PAGE
                expected[page + number] = image.data[at : at + PAGE]
        with listening(self.folder) as (listener, path):
            command = [sys.executable, str(PROGRAM), str(path)]
            lazy = self.folder / "lazy-pages.socket"
            # The process id has to be known before the daemon starts, so it starts as a shell.
            command += [str(lazy), str(pages), str(ADDRESS)]
            process = subprocess.Popen(  # noqa: S603 - of this project
                ["/bin/sh", "-c", 'read -r go && exec "$@"', "sh", *command],
                stdin=subprocess.PIPE,
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT)},
            )
            self._stack.callback(end, process)
            memory = TaskMemory(
                process.pid,
                Columns.of(columns),
                [(ADDRESS, ADDRESS + pages * PAGE)],
                "pages-1.img",
                image,
            )
            options: dict = {"threads": 2, "buffer_bytes": 64 * PAGE, **settings}
            daemon = LazyPages(
                self.folder,
                {process.pid: memory},
                hold=self.hold,
                on_error=self.on_error,
                **options,
            )
            self._stack.callback(daemon.close)
            daemon.start()
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.close()
            connection, _ = listener.accept()
        return daemon, Peer(connection, expected, self.folder, self._stack)

    def close(self) -> None:
        self._stack.close()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def stage() -> Iterator[Stage]:
    one = Stage()
    yield one
    one.close()


def random_image(pages: int, seed: int = 1, ranges: Sequence[Range] | None = None) -> MemoryImage:
    return MemoryImage(random.Random(seed).randbytes(pages * PAGE), ranges=ranges)


def whole_map(pages: int) -> list[tuple[int, int, int, int]]:
    """All pages of a mapping are in the image, in order, and lazy."""
    return [(0, pages, 6, 0)]
