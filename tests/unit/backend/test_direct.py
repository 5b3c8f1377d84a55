"""Past the page cache: the same bytes whatever the alignment and however the system answers."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from snapstore.backend.direct import (
    PlacedWriter,
    page_aligned,
    read_aligned,
    takes_unaligned,
    write_direct,
)
from snapstore.backend.files import OsFileCalls
from snapstore.units import KIB, MIB, PAGE_BYTES
from tests.support.samples import random_bytes


def aligned(data: np.ndarray) -> memoryview:
    room = page_aligned(len(data))
    room[:] = data
    return room.data


class Picky(OsFileCalls):
    """A file system that looks at every transfer that is to bypass the page cache.

    It takes those aligned to `block_bytes`, the others are EINVAL, as the kernel has it; at most
    `most_bytes` at a time.
    """

    def __init__(self, *, block_bytes: int = PAGE_BYTES, most_bytes: int = 1 << 40) -> None:
        self.block_bytes = block_bytes
        self.most_bytes = most_bytes
        self.direct: set[int] = set()
        self.direct_bytes = 0
        self.refusals = 0

    @override
    def set_direct(self, fd: int, *, direct: bool) -> bool:
        (self.direct.add if direct else self.direct.discard)(fd)
        return direct

    @override
    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        self._look(fd, into, offset)
        return super().pread(fd, into[: self.most_bytes], offset)

    @override
    def writev(self, fd: int, pieces: Sequence[memoryview]) -> int:
        for piece in pieces:
            self._look(fd, piece, os.lseek(fd, 0, os.SEEK_CUR))
        return super().writev(fd, [pieces[0][: self.most_bytes]])

    @override
    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        at = offset
        for piece in pieces:
            self._look(fd, piece, at)
            at += piece.nbytes
        return super().pwritev(fd, [pieces[0][: self.most_bytes]], offset)

    def _look(self, fd: int, view: memoryview, offset: int) -> None:
        if fd not in self.direct:
            return
        address = np.frombuffer(view, np.uint8).ctypes.data
        if any(value % self.block_bytes for value in (address, view.nbytes, offset)):
            self.refusals += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.direct_bytes += min(view.nbytes, self.most_bytes)


class Refusing(OsFileCalls):
    """A file system without direct transfers."""

    @override
    def set_direct(self, fd: int, *, direct: bool) -> bool:
        return False


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


CALLS = [
    pytest.param(OsFileCalls, id="real"),
    pytest.param(Picky, id="picky"),
    pytest.param(lambda: Picky(block_bytes=64 * KIB), id="large-blocks"),
    pytest.param(lambda: Picky(most_bytes=300 * KIB), id="short"),
    pytest.param(lambda: Picky(most_bytes=PAGE_BYTES + 512), id="short-and-uneven"),
    pytest.param(Refusing, id="refusing"),
]
BODY = 2 * MIB + 5 * PAGE_BYTES


@pytest.mark.parametrize("make", CALLS)
@pytest.mark.parametrize("tail", [0, 1, 777, 5000])
def test_what_is_written_is_read(fd: int, make: type[OsFileCalls], tail: int) -> None:
    data = random_bytes(BODY + tail, 1)
    files = make()
    write_direct(files, fd, [aligned(data[:BODY]), data[BODY:].data])
    assert os.pread(fd, len(data) + 1, 0) == data.tobytes()
    # The rest of the object follows through the page cache.
    os.write(fd, b"more")
    assert os.pread(fd, 10, len(data)) == b"more"


@pytest.mark.parametrize("make", CALLS)
@pytest.mark.parametrize("tail", [0, 1, 777, 5000])
def test_parts_go_where_they_belong(fd: int, make: type[OsFileCalls], tail: int) -> None:
    """Goal: long parts, short ones between them, and an end of any length, in any order."""
    data = random_bytes(2 * BODY + tail, 4)
    files = make()
    writer = PlacedWriter(files, fd)
    first, second = aligned(data[:BODY]), aligned(data[BODY : 2 * BODY])
    writer.write(2 * BODY, [data[2 * BODY :].data])
    writer.write(BODY, [second[:MIB], second[MIB:]])
    writer.write(2 * BODY, [data[2 * BODY :].data])
    writer.write(0, [first[: MIB + 1], first[MIB + 1 :]])
    writer.write(0, [first])
    files.set_direct(fd, direct=False)
    assert os.pread(fd, len(data) + 1, 0) == data.tobytes()
    if type(files) is Picky and files.block_bytes == PAGE_BYTES:
        assert files.direct_bytes > 0


def test_memory_that_the_device_cannot_read_is_copied(fd: int) -> None:
    class Unreadable(Picky):
        @override
        def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
            if fd in self.direct:
                self.refusals += 1
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            return super().pwritev(fd, pieces, offset)

    data = random_bytes(BODY, 5)
    files = Unreadable()
    writer = PlacedWriter(files, fd)
    writer.write(0, [aligned(data)])
    writer.write(BODY, [aligned(data)])
    assert os.pread(fd, 2 * BODY, 0) == data.tobytes() * 2
    assert files.refusals == 1


@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES, MIB - 1, MIB, MIB + 1])
def test_unaligned_and_small_writes(fd: int, size: int) -> None:
    data = random_bytes(size + 1, 2)
    write_direct(OsFileCalls(), fd, [data[1:].data] if size else [])
    assert os.pread(fd, size + 1, 0) == data[1:].tobytes()


@pytest.mark.parametrize("make", CALLS)
def test_every_range_is_read(fd: int, make: type[OsFileCalls]) -> None:
    data = random_bytes(BODY + 777, 3)
    os.pwrite(fd, data.tobytes(), 0)
    files = make()
    files.set_direct(fd, direct=True)
    room = aligned(np.zeros(len(data) + 2 * PAGE_BYTES, np.uint8))
    for offset in (0, 1, PAGE_BYTES - 1, PAGE_BYTES, MIB, MIB + 1, BODY, BODY + 776, BODY + 777):
        for length in (1, PAGE_BYTES, PAGE_BYTES + 1, MIB + 3, len(data) + PAGE_BYTES):
            for skip in (0, 1, 512):
                into = room[skip : skip + length]
                expected = data[offset : offset + length].tobytes()
                assert read_aligned(files, fd, offset, into) == len(expected)
                assert bytes(into[: len(expected)]) == expected


def test_packs_really_pass_the_cache(fd: int) -> None:
    """Aligned bodies go directly in one piece; nothing is tried that the system would refuse."""
    files = Picky()
    data = random_bytes(BODY + 777, 4)
    write_direct(files, fd, [aligned(data[:BODY]), data[BODY:].data])
    assert (files.direct_bytes, files.refusals) == (BODY, 0)
    files.set_direct(fd, direct=True)
    files.direct_bytes = 0
    into = aligned(np.zeros(BODY, np.uint8))
    assert read_aligned(files, fd, 0, into) == BODY
    assert (files.direct_bytes, files.refusals) == (BODY, 0)
    assert bytes(into) == data[:BODY].tobytes()


@pytest.mark.parametrize(
    ("make", "takes"),
    [pytest.param(Picky, False, id="picky"), pytest.param(Refusing, True, id="refusing")],
)
def test_who_takes_unaligned_ranges_is_known(
    fd: int, make: type[OsFileCalls], *, takes: bool
) -> None:
    os.pwrite(fd, bytes(PAGE_BYTES), 0)
    files = make()
    files.set_direct(fd, direct=True)
    assert takes_unaligned(files, fd) is takes


def test_other_errors_are_not_hidden(fd: int) -> None:
    class Full(OsFileCalls):
        @override
        def writev(self, fd: int, pieces: Sequence[memoryview]) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        @override
        def pread(self, fd: int, into: memoryview, offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    data = aligned(random_bytes(BODY, 5))
    with pytest.raises(OSError, match="No space"):
        write_direct(Full(), fd, [data])
    with pytest.raises(OSError, match="Input/output"):
        read_aligned(Full(), fd, 0, data)
    with pytest.raises(OSError, match="Input/output"):
        takes_unaligned(Full(), fd)


def test_a_file_system_that_takes_nothing_is_an_error(fd: int) -> None:
    class Empty(OsFileCalls):
        @override
        def writev(self, fd: int, pieces: Sequence[memoryview]) -> int:
            return 0

    with pytest.raises(OSError, match="took no bytes"):
        write_direct(Empty(), fd, [aligned(random_bytes(BODY, 6))])
