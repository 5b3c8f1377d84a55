"""What a machine keeps of indexes is bounded, shared, never needed and never believed."""

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest

from snapstore.backend.base import Capabilities, ObjectInfo, ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.posix import PosixBackend
from snapstore.clock import SystemClock
from snapstore.errors import DigestMismatch, FormatError, IntegrityError, UsageError
from snapstore.options import StoreOptions
from snapstore.repository import index_cache
from snapstore.repository.chunk_runs import MISSING
from snapstore.repository.frames import FrameTable
from snapstore.repository.index_cache import IndexCache
from snapstore.repository.index_lookup import IndexLookup, open_blocks
from snapstore.testing.clock import ManualClock
from tests.unit.repository.parts import add_index, chunk_id, words_of

IDS = [chunk_id(number) for number in range(2000)]
PLENTY = 1 << 30


class CountingBackend(MemoryBackend):
    """Counts the bytes of indexes that are read."""

    read_bytes = 0

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        super().get_range(kind, name, offset, into)
        self.read_bytes += into.nbytes


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def backend() -> CountingBackend:
    return CountingBackend()


def stored(backend: MemoryBackend, pack: int = 1) -> ObjectInfo:
    root = add_index(backend, pack, [(raw, 10) for raw in IDS])
    return backend.stat(ObjectKind.INDEX, root.hex)


def cache_in(directory: Path, budget_bytes: int = PLENTY) -> IndexCache:
    return IndexCache(directory / "cache", budget_bytes, ManualClock())


def files_in(directory: Path) -> list[str]:
    return sorted(path.suffix for path in (directory / "cache").glob("*"))


Find = Callable[[IndexCache | None], int]


@pytest.fixture
def find(backend: CountingBackend, executor: ThreadPoolExecutor) -> Find:
    """Look all ids of an index up, through a cache, and count those that are found."""
    info = stored(backend)

    def found(cache: IndexCache | None) -> int:
        blocks = open_blocks(backend, info, executor, cache)
        index = IndexLookup(info.name, blocks, FrameTable(), lambda packs: np.ones(len(packs), "?"))
        return int((index.lookup(words_of(IDS)).frames != MISSING).sum())

    return found


def test_the_second_use_reads_nothing_from_the_store(
    tmp_path: Path, backend: CountingBackend, find: Find
) -> None:
    cache = cache_in(tmp_path)
    assert find(cache) == len(IDS)
    assert files_in(tmp_path) == [".index", ".sums"]
    backend.read_bytes = 0
    assert find(cache) == len(IDS)
    assert find(cache_in(tmp_path)) == len(IDS)
    assert backend.read_bytes == 0


@pytest.mark.parametrize("suffix", [".index", ".sums"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "grow", "empty", "remove"])
def test_a_damaged_cache_is_never_believed(
    tmp_path: Path, find: Find, suffix: str, damage: str
) -> None:
    """Goal: whatever happens to a file of the cache, look-ups answer as without a cache.

    Method: damage one file; look everything up; what was damaged must be whole again or gone, so
    that the next use is as good as the first.
    """
    cache = cache_in(tmp_path)
    find(cache)
    (path,) = (tmp_path / "cache").glob(f"*{suffix}")
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle] ^= 1
    path.unlink()
    if damage != "remove":
        path.write_bytes(
            {"truncate": data[:middle], "grow": data + b"x", "empty": b""}.get(damage, data)
        )
    assert find(cache) == len(IDS)
    assert find(cache) == len(IDS)
    assert files_in(tmp_path) == [".index", ".sums"]


@pytest.mark.parametrize("position", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_a_copy_that_shrinks_while_it_is_used_is_given_up(
    tmp_path: Path, backend: CountingBackend, executor: ThreadPoolExecutor, position: float
) -> None:
    info = stored(backend)
    cache = cache_in(tmp_path)
    blocks = open_blocks(backend, info, executor, cache)
    index = IndexLookup(info.name, blocks, FrameTable(), lambda packs: np.ones(len(packs), "?"))
    (path,) = (tmp_path / "cache").glob("*.index")
    os.truncate(path, int(info.size_bytes * position))
    assert (index.lookup(words_of(IDS)).frames != MISSING).all()
    assert path.exists() == (position == 1.0)


def test_a_damaged_index_is_found_out_and_no_copy_of_it_is_kept(
    tmp_path: Path, backend: CountingBackend, executor: ThreadPoolExecutor
) -> None:
    info = stored(backend)
    data = bytearray(info.size_bytes)
    backend.get_range(ObjectKind.INDEX, info.name, 0, memoryview(data))
    for position in (5, 40, 100, 330, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 4
        backend.delete(ObjectKind.INDEX, info.name)
        backend.put_new(ObjectKind.INDEX, info.name, [damaged])
        for cache in (cache_in(tmp_path), None):
            with pytest.raises((FormatError, IntegrityError)):
                open_blocks(backend, info, executor, cache)
        assert files_in(tmp_path) == []


def test_damage_after_the_index_was_verified_is_found_out(
    tmp_path: Path, backend: CountingBackend, executor: ThreadPoolExecutor
) -> None:
    """Goal: bytes that change in the store after they were verified are not used.

    Method: verify an index, keep its checksums only, flip a bit of a chunk's place in the store.
    """
    info = stored(backend)
    cache = cache_in(tmp_path, info.size_bytes // 2)
    open_blocks(backend, info, executor, cache)
    assert files_in(tmp_path) == [".sums"]
    data = bytearray(info.size_bytes)
    backend.get_range(ObjectKind.INDEX, info.name, 0, memoryview(data))
    data[-5] ^= 1
    backend.delete(ObjectKind.INDEX, info.name)
    backend.put_new(ObjectKind.INDEX, info.name, [data])
    blocks = open_blocks(backend, info, executor, cache)
    index = IndexLookup(info.name, blocks, FrameTable(), lambda packs: np.ones(len(packs), "?"))
    with pytest.raises(DigestMismatch, match=rf"index {info.name[:12]}: the block at offset"):
        index.lookup(words_of(IDS))


def test_the_least_recently_used_goes_first(
    tmp_path: Path, backend: CountingBackend, executor: ThreadPoolExecutor
) -> None:
    infos = [stored(backend, pack) for pack in range(4)]
    cache = cache_in(tmp_path, int(infos[0].size_bytes * 2.5))
    for info in infos[:2]:
        open_blocks(backend, info, executor, cache)
    directory = tmp_path / "cache"
    for age, info in ((30, infos[1]), (20, infos[0])):
        for path in directory.glob(f"{info.name}*"):
            os.utime(path, (1_000_000_000 - age, 1_000_000_000 - age))
    open_blocks(backend, infos[2], executor, cache)
    kept = {path.name.partition(".")[0] for path in directory.glob("*.index")}
    assert kept == {infos[0].name, infos[2].name}
    assert sum(path.stat().st_size for path in directory.iterdir()) <= infos[0].size_bytes * 2.5


def test_what_a_killed_process_left_is_removed(
    tmp_path: Path, backend: CountingBackend, executor: ThreadPoolExecutor
) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    old, young, foreign = directory / "a.part", directory / "b.part", directory / "notes.txt"
    for path in (old, young, foreign):
        path.write_bytes(b"left")
    clock = ManualClock()
    now = clock.now_ns()
    os.utime(old, ns=(now - 25 * 3600 * 10**9, now - 25 * 3600 * 10**9))
    os.utime(young, ns=(now, now))
    open_blocks(backend, stored(backend), executor, IndexCache(directory, PLENTY, clock))
    assert not old.exists()
    assert young.exists()
    assert foreign.exists()


def test_a_full_disk_costs_the_cache_only(
    tmp_path: Path, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: with no room for a copy or for checksums a look-up still answers.

    Method: every write to a file of the cache fails as on a full disk.
    """

    class FullDisk:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def write(self, _fd: int, _data: object) -> int:
            raise OSError(28, "No space left on device")

    def full(*_: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_cache, "os", FullDisk())
    monkeypatch.setattr(Path, "open", full)
    assert find(cache_in(tmp_path)) == len(IDS)
    assert files_in(tmp_path) == []


def test_a_directory_that_cannot_be_made_costs_the_cache_only(tmp_path: Path, find: Find) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert find(IndexCache(tmp_path / "file" / "cache", PLENTY, ManualClock())) == len(IDS)


def test_an_index_larger_than_the_budget_is_not_copied(tmp_path: Path, find: Find) -> None:
    assert find(cache_in(tmp_path, 50_000)) == len(IDS)
    assert files_in(tmp_path) == [".sums"]
    assert find(cache_in(tmp_path / "none", 10)) == len(IDS)
    assert files_in(tmp_path / "none") == []


class RemoteDirectory(PosixBackend):
    """A directory that says of itself that it is none."""

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return dataclasses.replace(super().capabilities, url="remote:directory")


def _fill(store: Path, cache: Path, info: ObjectInfo, start: Event) -> None:
    start.wait()
    backend = RemoteDirectory(store)
    with ThreadPoolExecutor(2) as executor:
        blocks = open_blocks(backend, info, executor, IndexCache(cache, PLENTY, SystemClock()))
        index = IndexLookup(info.name, blocks, FrameTable(), lambda packs: np.ones(len(packs), "?"))
        assert (index.lookup(words_of(IDS)).frames != MISSING).all()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_processes_that_fill_one_cache_at_the_same_time(tmp_path: Path, *, killed: bool) -> None:
    """Goal: processes that want the same copy at once all get right answers and leave one copy.

    Method: eight real processes that begin together; once half of them are killed on the way, and
    what these leave must not stop another one.
    """
    memory = MemoryBackend()
    info = stored(memory)
    data = bytearray(info.size_bytes)
    memory.get_range(ObjectKind.INDEX, info.name, 0, memoryview(data))
    PosixBackend.create(tmp_path / "store").put_new(ObjectKind.INDEX, info.name, [data])
    context = multiprocessing.get_context("spawn")
    start = context.Event()
    arguments = (tmp_path / "store", tmp_path / "cache", info, start)
    processes = [context.Process(target=_fill, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    start.set()
    for process in processes[::2] if killed else []:
        process.kill()
    for process in processes:
        process.join(60)
    assert {process.exitcode for process in processes[1::2]} == {0}
    _fill(*arguments)
    suffixes = files_in(tmp_path)
    assert suffixes.count(".index") == 1
    assert suffixes.count(".sums") == 1
    if not killed:
        assert suffixes == [".index", ".sums"]


def test_options_choose_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clock = ManualClock()
    default = IndexCache.of(StoreOptions(), clock)
    assert default is not None
    assert default._directory == tmp_path / "snapstore" / "indexes"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/somebody")
    other = IndexCache.of(StoreOptions(), clock)
    assert other is not None
    assert other._directory == Path("/somebody/.cache/snapstore/indexes")
    monkeypatch.delenv("HOME")
    assert IndexCache.of(StoreOptions(), clock) is None
    assert IndexCache.of(StoreOptions(index_cache=tmp_path, index_cache_bytes=0), clock) is None


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(UsageError, match="index cache"):
        StoreOptions(index_cache_bytes=-1)
