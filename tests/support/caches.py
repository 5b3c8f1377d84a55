"""What tests of the node's cache share: directories in memory, and contents that count."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapstore.cache.decoded import Cells, FileKey
from snapstore.errors import DigestMismatch
from snapstore.units import PAGE_BYTES

__all__ = ["ByteContent", "memory_directory", "tmpfs"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where tmpfs is


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    """Return the path of a directory on tmpfs that is not there yet."""
    if not SHARED_MEMORY.is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="snapstore-test-", dir=SHARED_MEMORY))
    yield folder / "cache"
    shutil.rmtree(folder)


@contextlib.contextmanager
def tmpfs(path: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs with these options at a directory that is made for it."""
    if os.geteuid():
        pytest.skip("only root can mount")
    path.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", options, "tmpfs", path)
    if subprocess.run(command, check=False, capture_output=True).returncode:  # noqa: S603
        pytest.skip(f"this system mounts no tmpfs with {options}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)  # noqa: S603, S607


@dataclasses.dataclass
class ByteContent:
    """Bytes with cells of so many pages, which say how often each page was fetched."""

    data: bytes
    pages_per_cell: int = 2
    zeros: frozenset[int] = frozenset()
    """Cells of which nothing is stored."""
    label: str = "some file"
    broken: bool = False

    def __post_init__(self) -> None:
        """Count from zero."""
        self.fetched = [0] * -(-len(self.data) // PAGE_BYTES)
        self._lock = threading.Lock()

    @property
    def key(self) -> FileKey:
        """See `Content.key`; the test chooses another label for another content."""
        return FileKey(self.label.encode().ljust(32, b".")[:32], len(self.data))

    @property
    def cells(self) -> Cells:
        """See `Content.cells`."""
        starts = range(0, len(self.data), self.pages_per_cell * PAGE_BYTES)
        zeros = [number in self.zeros for number in range(len(starts))]
        return Cells([*starts, len(self.data)], zeros)

    def fetch(self, offset: int, into: memoryview) -> None:
        """See `Content.fetch`; leaves garbage where it fails."""
        if self.broken:
            into[:] = b"\xee" * into.nbytes
            raise DigestMismatch("broken on purpose")
        into[:] = self.data[offset : offset + into.nbytes]
        with self._lock:
            for page in range(offset // PAGE_BYTES, -(-(offset + into.nbytes) // PAGE_BYTES)):
                self.fetched[page] += 1
