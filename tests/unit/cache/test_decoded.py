"""Decoded files in memory: filled once, checked before they are marked, kept while open."""

import contextlib
import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from snapstore.cache.decoded import Cells, FileKey
from snapstore.cache.node_cache import CachedFile, NodeCache
from snapstore.errors import DigestMismatch, UsageError
from snapstore.units import GIB, KIB, MIB, PAGE_BYTES, align_up
from tests.support.caches import SHARED_MEMORY, ByteContent, tmpfs
from tests.support.samples import random_bytes

PAGES = 37
SIZE = PAGES * PAGE_BYTES - 1000


@pytest.fixture
def cache(tmp_path: Path, memory_directory: Path) -> Iterator[NodeCache]:
    with make_cache(tmp_path / "disk", memory_directory) as cache:
        yield cache


def make_cache(disk: Path, memory: Path, budget_bytes: int = GIB) -> NodeCache:
    return NodeCache.init(disk, budget_bytes=0, memory=memory, memory_budget_bytes=budget_bytes)


def content_of(size_bytes: int = SIZE, **options: object) -> ByteContent:
    return ByteContent(random_bytes(size_bytes, 1).tobytes(), **options)  # type: ignore[arg-type]


def read(file: CachedFile, offset: int, length: int) -> bytes:
    data = bytearray(length)
    file.read_into(offset, data)
    return bytes(data)


def test_what_is_filled_can_be_read_and_mapped(cache: NodeCache) -> None:
    """Proves: N1."""
    content = content_of()
    with cache.open_content(content) as file:
        assert file.is_kept
        assert not file.filled(0, 1)
        assert file.ensure(5, 10 * PAGE_BYTES)
        assert file.filled(0, 10 * PAGE_BYTES)
        assert not file.filled(0, SIZE)
        assert os.pread(file.fd, 100, 5) == content.data[5:105]
        assert file.ensure(0, SIZE)
        # A range is cut at the end of the file.
        assert file.filled(0, SIZE + 10 * MIB)
        with mmap.mmap(file.fd, SIZE, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == content.data
        assert content.fetched == [1] * PAGES
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.pwrite(file.fd, b"x", 0)


def test_every_page_is_fetched_once_by_many_threads(cache: NodeCache) -> None:
    """Proves: N4.

    Method: sixteen threads with handles of their own begin together and read all of it in steps of
    different lengths.
    """
    content = content_of(4 * MIB)
    together = threading.Barrier(16)

    def work(number: int) -> None:
        step = (number % 5 + 1) * 70 * KIB
        with cache.open_content(content) as file:
            together.wait()
            for offset in range(0, len(content.data), step):
                length = min(step, len(content.data) - offset)
                assert read(file, offset, length) == content.data[offset : offset + length]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert content.fetched == [1] * 1024


@pytest.mark.parametrize("huge", ["always", "within_size"])
def test_large_pages_count_as_what_they_take(tmp_path: Path, huge: str) -> None:
    """Goal: a file that is filled here and there takes no more memory than the cache may have.

    Proves: N5.
    """
    budget = 16 * MIB
    with (
        tmpfs(tmp_path / "memory", f"size=128m,huge={huge}") as memory,
        make_cache(tmp_path / "disk", memory / "decoded", budget) as cache,
    ):
        content = content_of(64 * MIB)
        with cache.open_content(content) as file:
            kept = [file.ensure(at, 1) for at in range(MIB, 64 * MIB, 2 * MIB)]
            assert kept[0]
            assert not all(kept)
            assert kept.count(True) >= 5
            # What is there already costs nothing more.
            assert file.ensure(MIB + 100 * KIB, 1)
            taken = file.path.stat().st_blocks * 512
        assert 5 * 2 * MIB <= taken <= budget
        whole = content_of(8 * MIB, label="another")
        with cache.open_content(whole) as file:
            assert file.ensure(0, 8 * MIB)
            assert read(file, 0, 8 * MIB) == whole.data


def test_what_cannot_be_fetched_is_not_marked(cache: NodeCache) -> None:
    """Proves: N1, N2."""
    content = content_of()
    with cache.open_content(content) as file:
        content.broken = True
        with pytest.raises(DigestMismatch):
            file.ensure(0, SIZE)
        with pytest.raises(DigestMismatch):
            read(file, 0, SIZE)
        assert not any(file.filled(page * PAGE_BYTES, 1) for page in range(PAGES))
        content.broken = False
        assert read(file, 0, SIZE) == content.data


def test_a_readers_memory_is_not_what_others_get(cache: NodeCache) -> None:
    """Proves: N1.

    Method: the content has its bytes checked in a buffer; nobody but the cache ever has that one.
    """
    content = content_of()
    given: list[memoryview] = []
    original = content.fetch

    def fetch(offset: int, into: memoryview) -> None:
        given.append(into)
        original(offset, into)

    content.fetch = fetch  # type: ignore[method-assign]
    data = bytearray(SIZE)
    with cache.open_content(content) as file:
        file.read_into(0, data)
    assert data == content.data
    ours = np.frombuffer(data, np.uint8)
    assert not any(np.shares_memory(ours, np.frombuffer(view, np.uint8)) for view in given)


def test_zeros_take_no_room(cache: NodeCache) -> None:
    content = content_of(64 * PAGE_BYTES, pages_per_cell=16, zeros=frozenset({1, 2}))
    data = bytearray(content.data)
    data[16 * PAGE_BYTES : 48 * PAGE_BYTES] = bytes(32 * PAGE_BYTES)
    content.data = bytes(data)
    with cache.open_content(content) as file:
        assert (
            read(file, 10 * PAGE_BYTES, 30 * PAGE_BYTES)
            == data[10 * PAGE_BYTES :][: 30 * PAGE_BYTES]
        )
        assert file.ensure(0, len(data))
        assert os.pread(file.fd, len(data), 0) == data
        # Of the content half, a header, and a page of marks.
        assert os.fstat(file.fd).st_blocks * 512 == 34 * PAGE_BYTES
    assert content.fetched == [1] * 16 + [0] * 32 + [1] * 16


def test_zeros_where_something_failed_before_are_written(cache: NodeCache) -> None:
    """Another layout of the same content may have had data there. Proves: N1."""
    content = content_of(16 * PAGE_BYTES, pages_per_cell=16, zeros=frozenset({0}))
    content.data = bytes(16 * PAGE_BYTES)
    with cache.open_content(content) as file:
        assert file.path is not None
        fd = os.open(file.path, os.O_RDWR)
        os.pwrite(fd, b"left by somebody who was killed", 3 * PAGE_BYTES)
        os.close(fd)
        assert file.ensure(0, 16 * PAGE_BYTES)
        assert os.pread(file.fd, 16 * PAGE_BYTES, 0) == content.data


def test_other_cells_of_the_same_content(cache: NodeCache) -> None:
    """Two layouts may divide the same content differently."""
    content = content_of()
    other = ByteContent(content.data, pages_per_cell=3)
    with cache.open_content(content) as file, cache.open_content(other) as again:
        assert file.ensure(4 * PAGE_BYTES, 1)
        assert read(again, 0, SIZE) == content.data
        assert read(file, 0, SIZE) == content.data
        assert again.filled(0, SIZE)
        assert file.path == again.path


def test_open_files_stay_others_go(tmp_path: Path, memory_directory: Path) -> None:
    """Proves: N5."""
    with make_cache(tmp_path / "disk", memory_directory, 400 * KIB) as cache:
        first, second, third = (content_of(label=name) for name in ("one", "two", "three"))
        with cache.open_content(first) as file:
            assert file.ensure(0, SIZE)
        with cache.open_content(second) as open_file:
            assert open_file.ensure(0, SIZE)
            with cache.open_content(third) as file:
                assert file.ensure(0, SIZE)
                names = {entry.label for entry in cache.entries()}
                assert names == {"two", "three"}
                with cache.open_content(first) as file_without_room:
                    # Everything else is open, so it is read past the cache.
                    assert not file_without_room.ensure(0, SIZE)
                    assert read(file_without_room, 0, SIZE) == first.data
                    assert not file_without_room.filled(0, SIZE)
            assert os.pread(open_file.fd, SIZE, 0) == second.data
        assert cache.stats().decoded.used_bytes <= 400 * KIB


def test_a_mapping_survives_removal(cache: NodeCache) -> None:
    """Proves: N5."""
    content = content_of()
    with cache.open_content(content) as file:
        assert file.ensure(0, SIZE)
        mapped = mmap.mmap(file.fd, SIZE, prot=mmap.PROT_READ)
    assert cache.evict() > SIZE
    assert cache.entries() == []
    assert mapped[:] == content.data
    mapped.close()
    # And the next one begins with nothing.
    with cache.open_content(content) as file:
        assert not file.filled(0, 1)
        assert read(file, 0, SIZE) == content.data


@pytest.mark.parametrize("damage", ["short", "long", "header", "empty", "other"])
def test_files_that_are_not_what_they_are_called(cache: NodeCache, damage: str) -> None:
    """Proves: N1, N6."""
    content = content_of()
    with cache.open_content(content) as file:
        assert file.ensure(0, SIZE)
        path = file.path
        assert path is not None
    length = path.stat().st_size
    if damage == "other":
        path.unlink()
        path.write_bytes(b"x" * length)
    elif damage == "header":
        with path.open("r+b") as raw:
            raw.seek(PAGES * PAGE_BYTES)
            raw.write(b"SNAPDEC0")
    else:
        os.truncate(path, {"short": length - PAGE_BYTES, "long": length + 1, "empty": 0}[damage])
    with cache.open_content(content) as file:
        assert not file.filled(0, 1)
        assert read(file, 0, SIZE) == content.data


def test_a_directory_that_vanished(cache: NodeCache, memory_directory: Path) -> None:
    """Proves: N6."""
    content = content_of()
    with cache.open_content(content) as file:
        assert file.ensure(0, 3 * PAGE_BYTES)
        assert file.path is not None
        file.path.unlink()
        assert read(file, 0, SIZE) == content.data
        memory_directory.rmdir()
        assert read(file, 0, SIZE) == content.data
    with cache.open_content(content) as file:
        assert read(file, 0, SIZE) == content.data
        assert not file.is_kept
        assert file.fd == -1


@pytest.mark.parametrize("size", [0, 10**14, (1 << 50) - 3, (1 << 63) - 9, 10**32])
def test_names_that_promise_much_are_listed_without_reading_it(
    cache: NodeCache, memory_directory: Path, size: int
) -> None:
    path = memory_directory / f"{'ab' * 32}-{size}"
    path.touch()
    # As long as such a file is, with nothing in it.
    meta = align_up(size, PAGE_BYTES)
    with contextlib.suppress(OSError, OverflowError):
        os.truncate(path, align_up(meta + PAGE_BYTES + -(-size // PAGE_BYTES), PAGE_BYTES))
    assert [entry.held_bytes for entry in cache.entries()] in ([], [0])


def test_ranges_outside_the_file(cache: NodeCache) -> None:
    with cache.open_content(content_of()) as file:
        for offset, length in ((-1, 5), (0, SIZE + 1), (SIZE, 1)):
            with pytest.raises(UsageError, match="read within"):
                raise_with_step(file, offset, length)
        file.read_into(SIZE, bytearray())
        with pytest.raises(TypeError):
            file.read_into(0, b"read-only")


def raise_with_step(file: CachedFile, offset: int, length: int) -> None:
    try:
        file.ensure(offset, length)
    except UsageError as error:
        raise UsageError(error.next_step) from error


def test_empty_content_is_not_kept(cache: NodeCache) -> None:
    with cache.open_content(ByteContent(b"")) as file:
        assert not file.is_kept
        assert file.parts() == []
        file.read_into(0, bytearray())


@given(st.binary(min_size=32, max_size=32), st.integers(0, 1 << 50))
def test_names_of_files(digest: bytes, size: int) -> None:
    key = FileKey(digest, size)
    assert FileKey.of_name(key.name) == key
    for wrong in (key.name + "x", key.name.upper() + "G", "x", "", f"{digest.hex()}-0{size}"):
        assert FileKey.of_name(wrong) is None


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 8),
)
def test_parts_cover_the_cells(cells: list[tuple[int, bool]], pages_max: int) -> None:
    starts = [0]
    for pages, _ in cells:
        starts.append(starts[-1] + pages * PAGE_BYTES)
    parts = Cells(starts, [zeros for _, zeros in cells]).parts(pages_max * PAGE_BYTES)
    assert parts[0][0] == 0
    for (offset, length), after in zip(parts, [*parts[1:], (starts[-1], 0)], strict=True):
        assert offset + length == after[0]
        assert length <= pages_max * PAGE_BYTES or length <= 5 * PAGE_BYTES


class Machine(RuleBasedStateMachine):
    """Handles of one file are opened and closed, used and evicted, beside a model of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        temporary = self.stack.enter_context(temporary_directories())
        self.cache = self.stack.enter_context(make_cache(*temporary))
        self.content = content_of(pages_per_cell=3, zeros=frozenset({2, 5}))
        data = bytearray(self.content.data)
        for cell in (2, 5):
            at = cell * 3 * PAGE_BYTES
            data[at : at + 3 * PAGE_BYTES] = bytes(3 * PAGE_BYTES)
        self.content.data = bytes(data)
        self.files: list[CachedFile] = []
        self.there: set[int] = set()

    def teardown(self) -> None:
        for file in self.files:
            file.close()
        self.stack.close()

    @rule()
    def open_one(self) -> None:
        if len(self.files) < 3:
            self.files.append(self.cache.open_content(self.content))

    @precondition(lambda self: self.files)
    @rule()
    def close_one(self) -> None:
        self.files.pop(0).close()

    @precondition(lambda self: self.files)
    @rule(offset=st.integers(0, SIZE - 1), length=st.integers(1, SIZE), reads=st.booleans())
    def use(self, offset: int, length: int, *, reads: bool) -> None:
        length = min(length, SIZE - offset)
        file = self.files[-1]
        if reads:
            assert read(file, offset, length) == self.content.data[offset : offset + length]
        else:
            assert file.ensure(offset, length)
        cell = 3 * PAGE_BYTES
        first, last = offset // cell * 3, -(-(offset + length) // cell) * 3
        self.there.update(range(first, min(last, PAGES)))

    @rule()
    def evict(self) -> None:
        freed = self.cache.evict()
        if self.files:
            assert freed == 0
        else:
            self.there.clear()
            self.content.fetched = [0] * PAGES

    @invariant()
    def marks_are_those_of_the_model(self) -> None:
        for file in self.files:
            for page in range(PAGES):
                assert file.filled(page * PAGE_BYTES, 1) == (page in self.there)
        stored = {page for page in range(PAGES) if page // 3 not in {2, 5}}
        expected = [int(page in self.there & stored) for page in range(PAGES)]
        assert self.content.fetched == expected


@contextlib.contextmanager
def temporary_directories() -> Iterator[tuple[Path, Path]]:
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory,
    ):
        yield Path(disk) / "cache", Path(memory) / "cache"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no tmpfs at /dev/shm")
def test_any_use_of_one_file() -> None:
    """Proves: N2, N5."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine, settings=settings(max_examples=40, stateful_step_count=20)
    )
