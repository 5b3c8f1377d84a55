"""Stored ranges on disk: right whatever the disk does, fetched once, within their budget."""

import logging
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.paced import PacedBackend
from snapstore.cache.cached_backend import CachedBackend
from snapstore.cache.locks import claim
from snapstore.cache.node_cache import NodeCache
from snapstore.cache.stored import BLOCK_BYTES
from snapstore.errors import Interrupted, ObjectNotFound, RangeNotSatisfiable, TransientBackendError
from snapstore.testing.clock import ManualClock
from snapstore.units import GIB, KIB, MIB
from tests.support.samples import random_bytes

NAME = "ab" * 32
SIZE = 10 * BLOCK_BYTES + 12_345


class CountingBackend(MemoryBackend):
    """Counts how often each byte of packs is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = bytearray(SIZE)
        self.trouble: Exception | None = None
        self._counting = threading.Lock()

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        if self.trouble is not None:
            raise self.trouble
        super().get_range(kind, name, offset, into)
        with self._counting:
            for at in range(offset, offset + into.nbytes):
                self.read[at] += 1


class Shelf:
    """A pack in a store and the cache before it."""

    def __init__(self, directory: Path, budget_bytes: int = GIB) -> None:
        self.data = random_bytes(SIZE, 1).tobytes()
        self.store = CountingBackend()
        self.store.put_new(ObjectKind.PACK, NAME, [self.data])
        self.cache = NodeCache.init(directory, budget_bytes=budget_bytes)
        self.backend = self.open()

    def open(self, store_id: str = "0" * 32) -> CachedBackend:
        backend = self.cache.backend(self.store, store_id)
        assert isinstance(backend, CachedBackend)
        return backend

    @property
    def path(self) -> Path:
        name = self.backend.file_name(ObjectKind.PACK, NAME)
        assert name is not None
        return self.cache.directory / "packs" / name

    def get(self, offset: int, length: int, backend: CachedBackend | None = None) -> bytes:
        data = bytearray(length)
        (backend or self.backend).get_range(ObjectKind.PACK, NAME, offset, memoryview(data))
        return bytes(data)

    def is_right(self, offset: int = 0, length: int = SIZE) -> bool:
        return self.get(offset, length) == self.data[offset : offset + length]

    def block_at(self, block: int) -> int:
        """Where a block lies in the cache file, whose table takes less than a block."""
        return (block + 1) * BLOCK_BYTES


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path / "cache")
    with shelf.cache:
        yield shelf


RANGES = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.one_of(st.integers(1, 9000), st.integers(1, SIZE))),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@given(RANGES, st.lists(st.integers(0, 10)))
def test_any_ranges(ranges: list[tuple[int, int]], damaged: list[int]) -> None:
    """What comes is the object's, and each block is fetched once, and again if it was damaged.

    Proves: N1, N3.
    """
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(Path(folder) / "cache")
        with shelf.cache:
            for offset, length in ranges:
                assert shelf.is_right(offset, min(length, SIZE - offset))
            touched = {
                block
                for offset, length in ranges
                for block in range(
                    offset // BLOCK_BYTES, (min(offset + length, SIZE) - 1) // BLOCK_BYTES + 1
                )
            }
            expected = bytearray(SIZE)
            for block in touched:
                for at in range(block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, SIZE)):
                    expected[at] = 1
            assert shelf.store.read == expected
            for block in damaged:
                with shelf.path.open("r+b") as file:
                    file.seek(shelf.block_at(block) + 77)
                    file.write(b"rotten")
            for offset, length in ranges:
                assert shelf.is_right(offset, min(length, SIZE - offset))
            for block in touched & set(damaged):
                assert shelf.store.read[block * BLOCK_BYTES] == 2


def test_damage_is_named_in_the_log(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    """Proves: N3."""
    assert shelf.is_right()
    with shelf.path.open("r+b") as file:
        file.seek(shelf.block_at(3))
        file.write(b"x")
    with caplog.at_level(logging.WARNING, "snapstore.cache"):
        assert shelf.is_right()
    assert len(caplog.messages) == 1
    assert NAME in caplog.text
    assert f"offset {3 * BLOCK_BYTES}" in caplog.text
    assert str(shelf.path) in caplog.text
    caplog.clear()
    assert shelf.is_right()
    assert not caplog.messages


@pytest.mark.parametrize("where", ["header", "table", "all", "swap", "cut", "empty"])
def test_a_disk_that_lies(shelf: Shelf, where: str, rng: random.Random) -> None:
    """Torn, lost and misplaced writes, also of the cache's own tables. Proves: N1, N3."""
    assert shelf.is_right()
    size = shelf.path.stat().st_size
    with shelf.path.open("r+b") as file:
        if where == "header":
            file.write(b"SNAPBLK1" + rng.randbytes(10))
        elif where == "table":
            file.seek(4096)
            file.write(rng.randbytes(80))
        elif where == "all":
            file.write(rng.randbytes(size))
        elif where == "swap":
            file.seek(shelf.block_at(1))
            both = file.read(2 * BLOCK_BYTES)
            file.seek(shelf.block_at(1))
            file.write(both[BLOCK_BYTES:] + both[:BLOCK_BYTES])
        else:
            file.truncate(shelf.block_at(2) if where == "cut" else 0)
    assert shelf.is_right()
    assert shelf.is_right(1000, SIZE - 5000)
    before = bytes(shelf.store.read)
    assert shelf.is_right()
    assert shelf.store.read == before


def test_many_readers_fetch_once(shelf: Shelf) -> None:
    """Proves: N4.

    Method: sixteen threads with descriptors of their own read all of it in different steps.
    """
    together = threading.Barrier(16)

    def work(number: int) -> None:
        backend = shelf.open()
        step = (number % 4 + 1) * 50_000
        together.wait()
        for offset in range(0, SIZE, step):
            length = min(step, SIZE - offset)
            assert shelf.get(offset, length, backend) == shelf.data[offset : offset + length]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert shelf.store.read == b"\1" * SIZE


def test_errors_of_the_store_are_the_readers(shelf: Shelf) -> None:
    shelf.store.trouble = TransientBackendError("busy")
    with pytest.raises(TransientBackendError):
        shelf.get(0, 10)
    shelf.store.trouble = None
    assert shelf.is_right()
    with pytest.raises(RangeNotSatisfiable):
        shelf.get(SIZE - 1, 2)
    with pytest.raises(ObjectNotFound):
        shelf.backend.get_range(ObjectKind.PACK, "cd" * 32, 0, memoryview(bytearray(1)))
    assert [path.name for path in shelf.path.parent.iterdir()] == [shelf.path.name]


def test_what_is_forgotten_is_fetched_again(shelf: Shelf) -> None:
    """Proves: N3."""
    assert shelf.is_right()
    shelf.backend.forget(ObjectKind.PACK, NAME, BLOCK_BYTES + 5, 10)
    assert shelf.is_right()
    assert shelf.store.read[BLOCK_BYTES] == 2
    assert shelf.store.read.count(2) == BLOCK_BYTES


def test_stores_are_kept_apart(shelf: Shelf) -> None:
    """Proves: N8."""
    assert shelf.is_right()
    other = shelf.open("1" * 32)
    assert shelf.get(0, SIZE, other) == shelf.data
    assert shelf.store.read == b"\2" * SIZE


def test_other_kinds_are_not_cached(shelf: Shelf) -> None:
    shelf.store.put_new(ObjectKind.HINT, "topic/name", [b"1"])
    data = bytearray(1)
    shelf.backend.get_range(ObjectKind.HINT, "topic/name", 0, memoryview(data))
    shelf.store.delete(ObjectKind.HINT, "topic/name")
    with pytest.raises(ObjectNotFound):
        shelf.backend.get_range(ObjectKind.HINT, "topic/name", 0, memoryview(data))


def test_a_layout_that_was_replaced(shelf: Shelf) -> None:
    name = f"{'ab' * 32}/00000001"
    for body in (b"first", b"second"):
        shelf.store.put_new(ObjectKind.LAYOUT, name, [body])
        for _ in range(2):
            data = bytearray(len(body))
            shelf.backend.get_range(ObjectKind.LAYOUT, name, 0, memoryview(data))
            assert data == body
        shelf.store.delete(ObjectKind.LAYOUT, name)


def test_no_room(tmp_path: Path) -> None:
    """Proves: N5, N6."""
    shelf = Shelf(tmp_path / "cache", budget_bytes=BLOCK_BYTES)
    with shelf.cache:
        for _ in range(3):
            assert shelf.is_right()
            assert shelf.is_right(5, 10)
        assert shelf.cache.stats().packs.used_bytes <= BLOCK_BYTES + 8 * KIB


@pytest.mark.slow
def test_removed_while_it_is_read(shelf: Shelf) -> None:
    """Readers that have a file open whose room was freed read on. Proves: N5, N6.

    Method: one thread evicts all the time while another reads.
    """
    done = threading.Event()

    def evict() -> int:
        freed = 0
        while not done.is_set():
            # A file that is removed before anything is in it shows nothing.
            if shelf.cache.stats().packs.used_bytes:
                freed += shelf.cache.evict()
        return freed

    with ThreadPoolExecutor(1) as pool:
        evicting = pool.submit(evict)
        try:
            for number in range(200):
                offset = number * 3001 % (SIZE - 100_000)
                assert shelf.is_right(offset, 100_000)
        finally:
            done.set()
        assert evicting.result() > SIZE
    shelf.cache.evict()
    assert shelf.cache.stats().packs.used_bytes == 0


def test_the_directory_vanishes(shelf: Shelf) -> None:
    """Proves: N6."""
    assert shelf.is_right(0, 100)
    shelf.path.parent.rename(shelf.path.parent.with_name("elsewhere"))
    assert shelf.is_right()
    for path in shelf.cache.directory.rglob("*"):
        if path.is_file():
            path.unlink()
    assert shelf.is_right()


@pytest.mark.slow
def test_a_frozen_holder_is_not_waited_for(tmp_path: Path) -> None:
    """Who waits too long for another's claim fetches for itself. Proves: N4."""
    shelf = Shelf(tmp_path / "cache")
    shelf.cache.close()
    clock = ManualClock()
    with NodeCache(tmp_path / "cache", clock=clock) as cache:
        backend = cache.backend(shelf.store, "0" * 32)
        data = bytearray(10)
        backend.get_range(ObjectKind.PACK, NAME, 0, memoryview(data))
        with claim(lambda: os.open(shelf.path, os.O_RDWR), shelf.block_at(3), shelf.block_at(9)):
            before_s = clock.monotonic_s()
            data = bytearray(SIZE)
            backend.get_range(ObjectKind.PACK, NAME, 0, memoryview(data))
            assert data == shelf.data
            assert 60 <= clock.monotonic_s() - before_s < 70


def test_paced_reading() -> None:
    """The bytes of a second are not exceeded, and who is stopped does not wait."""
    store = MemoryBackend()
    store.put_new(ObjectKind.PACK, NAME, [bytes(MIB)])
    clock = ManualClock()
    paced = PacedBackend(store, clock, bytes_per_s=MIB)
    begin_s = clock.monotonic_s()
    for _ in range(5):
        paced.get_range(ObjectKind.PACK, NAME, 0, memoryview(bytearray(MIB)))
    assert clock.monotonic_s() - begin_s == pytest.approx(4.0, abs=0.2)
    paced.stop()
    with pytest.raises(Interrupted):
        paced.get_range(ObjectKind.PACK, NAME, 0, memoryview(bytearray(MIB)))
