"""Filling a node's cache by several threads, and locking pages beside that."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapagent.memory.warming import CacheFill, WarmedExternal, warm_threads
from snapagent.precedence import Precedence
from snapstore import CachedFile, NodeCache, StoreOptions
from snapstore.errors import DigestMismatch
from snapstore.testing.clock import ManualClock
from snapstore.units import MIB, PAGE_BYTES
from tests.support.caches import ByteContent

CELLS = 24
"""Every second one is zeros, so that each is a part of its own."""
SIZE_BYTES = CELLS * 2 * PAGE_BYTES
WAIT_S = 30.0


@pytest.fixture
def cache(tmp_path: Path, memory_directory: Path) -> Iterator[NodeCache]:
    with NodeCache.init(
        tmp_path / "cache", budget_bytes=0, memory=memory_directory, memory_budget_bytes=8 * MIB
    ) as made:
        yield made


class Watched(ByteContent):
    """Content that tells when it is fetched."""

    on_fetch: Callable[[], None] = staticmethod(lambda: None)

    def fetch(self, offset: int, into: memoryview) -> None:
        """See `Content.fetch`."""
        self.on_fetch()
        super().fetch(offset, into)


def make_contents(count: int) -> list[Watched]:
    zeros = frozenset(range(1, CELLS, 2))
    data = b"".join(bytes([1 - cell % 2]) * 2 * PAGE_BYTES for cell in range(CELLS))
    return [Watched(data, zeros=zeros, label=f"file {number}") for number in range(count)]


class Fill:
    """One filling, with what became of it."""

    def __init__(self, cache: NodeCache, contents: list[Watched]) -> None:
        self.cache = cache
        self.contents = contents
        self.opened: list[CachedFile] = []
        self.registered: list[int] = []
        self.stop = threading.Event()
        self.precedence = Precedence(clock=ManualClock())
        self.on_register: Callable[[int], None] = lambda _: None

    def run(self, threads: int) -> WarmedExternal:
        return CacheFill(self._files(), self._register, self.precedence, self.stop).run(threads)

    def _files(self) -> Iterator[CachedFile]:
        for content in self.contents:
            self.opened.append(self.cache.open_content(content))
            yield self.opened[-1]

    def _register(self, kept: CachedFile) -> bool:
        assert kept.filled(0, kept.size_bytes)
        number = self.opened.index(kept)
        self.on_register(number)
        self.registered.append(number)
        return number != 0

    @property
    def fetched(self) -> list[int]:
        """How often pages that have data were fetched, of each file the least and the most."""
        pages = [page for page in range(CELLS * 2) if page // 2 % 2 == 0]
        counts = [{one.fetched[page] for page in pages} for one in self.contents]
        return [min(each) if len(each) == 1 else -1 for each in counts]

    @property
    def are_closed(self) -> bool:
        return all(kept.fd < 0 for kept in self.opened)


@pytest.mark.parametrize("threads", [1, 4])
def test_each_part_is_fetched_once(cache: NodeCache, threads: int) -> None:
    fill = Fill(cache, make_contents(5))
    assert fill.run(threads) == WarmedExternal(5 * SIZE_BYTES, 4 * SIZE_BYTES)
    assert fill.fetched == [1] * 5
    assert sorted(fill.registered) == [*range(5)]
    assert fill.are_closed
    again = Fill(cache, fill.contents)
    assert again.run(threads) == WarmedExternal(5 * SIZE_BYTES, 4 * SIZE_BYTES)
    assert again.fetched == [1] * 5
    assert cache.evict() > 0, "nothing is kept open"


def test_two_at_once_fetch_it_once(cache: NodeCache) -> None:
    contents = make_contents(4)
    fills = [Fill(cache, contents) for _ in range(2)]
    threads = [threading.Thread(target=fill.run, args=(2,)) for fill in fills]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fills[0].fetched == [1] * 4
    assert [sorted(fill.registered) for fill in fills] == [[*range(4)]] * 2


def test_others_fetch_while_one_locks_pages(cache: NodeCache) -> None:
    """Goal: locking pages holds up nobody, and two threads do not lock pages at a time.

    Method: the first file to be locked waits for the last page of all files to be fetched.
    """
    fill = Fill(cache, make_contents(6))
    left = threading.Semaphore(0)
    for content in fill.contents:
        content.on_fetch = left.release
    locking = threading.Lock()

    def on_register(_: int) -> None:
        assert locking.acquire(blocking=False)
        if not fill.registered:
            for _ in range(len(fill.contents) * CELLS // 2):
                assert left.acquire(timeout=WAIT_S)
        locking.release()

    fill.on_register = on_register
    assert fill.run(2) == WarmedExternal(6 * SIZE_BYTES, 5 * SIZE_BYTES)
    assert fill.are_closed


@pytest.mark.parametrize("threads", [1, 3])
def test_damage_ends_it(cache: NodeCache, threads: int) -> None:
    fill = Fill(cache, make_contents(3))
    fill.contents[1].broken = True
    with pytest.raises(DigestMismatch):
        fill.run(threads)
    assert fill.are_closed
    fill.contents[1].broken = False
    assert Fill(cache, fill.contents).run(threads).cached_bytes == 3 * SIZE_BYTES


def test_what_has_no_room_is_left_out(cache: NodeCache) -> None:
    contents = make_contents(3)
    contents[1] = Watched(b"x" * 9 * MIB, label="too large")
    fill = Fill(cache, contents)
    assert fill.run(2) == WarmedExternal(2 * SIZE_BYTES, SIZE_BYTES)
    assert sorted(fill.registered) == [0, 2]
    assert fill.are_closed


@pytest.mark.parametrize("threads", [1, 3])
def test_it_can_be_stopped(cache: NodeCache, threads: int) -> None:
    fill = Fill(cache, make_contents(40))
    fill.on_register = lambda _: fill.stop.set()
    assert fill.run(threads).cached_bytes < 40 * SIZE_BYTES
    assert fill.are_closed


def test_it_gives_way(cache: NodeCache) -> None:
    """Goal: nothing is begun, neither fetching nor locking, while something else goes first."""
    fill = Fill(cache, make_contents(2))
    held = fill.precedence.taken()
    running = threading.Event()

    def on_register(number: int) -> None:
        if not number:
            held.__enter__()
            running.set()

    fill.on_register = on_register
    thread = threading.Thread(target=fill.run, args=(1,))
    thread.start()
    assert running.wait(WAIT_S)
    assert fill.fetched == [1, 0]
    fill.stop.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert fill.fetched == [1, 0]
    held.__exit__(None, None, None)


def test_threads_are_half_the_cores_and_what_memory_has_room_for() -> None:
    cores = len(os.sched_getaffinity(0))
    assert warm_threads(StoreOptions(memory_bytes=1024 * MIB)) == max(1, min(cores // 2, 12))
    assert warm_threads(StoreOptions(memory_bytes=192 * MIB)) <= 3
