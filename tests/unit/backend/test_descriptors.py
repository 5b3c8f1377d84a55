"""Descriptors are lent, bounded, and never closed under a reader."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from snapstore.backend.descriptors import DESCRIPTOR_AGE_S_MAX, DescriptorCache
from snapstore.testing.clock import ManualClock

if TYPE_CHECKING:
    import random


class FakeFiles:
    """Counts what is open, and refuses to close anything twice."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.open_now: set[int] = set()

    def open(self, path: str) -> int:
        if path == "missing":
            raise FileNotFoundError(path)
        self.opened.append(path)
        fd = len(self.opened)
        self.open_now.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.open_now.remove(fd)


@pytest.fixture
def files() -> FakeFiles:
    return FakeFiles()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def cache_of(files: FakeFiles, clock: ManualClock, capacity: int = 2) -> DescriptorCache:
    return DescriptorCache(files.open, files.close, clock, capacity=capacity)


def use(cache: DescriptorCache, path: str) -> int:
    with cache.lend(path) as fd:
        return fd


def test_a_path_is_opened_once(files: FakeFiles, clock: ManualClock) -> None:
    cache = cache_of(files, clock)
    assert use(cache, "a") == use(cache, "a")
    assert files.opened == ["a"]


def test_the_least_recently_used_is_closed(files: FakeFiles, clock: ManualClock) -> None:
    cache = cache_of(files, clock)
    for path in ("a", "b", "a", "c", "a"):
        use(cache, path)
    assert files.opened == ["a", "b", "c"]
    assert files.open_now == {1, 3}


def test_one_in_use_outlives_its_place(files: FakeFiles, clock: ManualClock) -> None:
    cache = cache_of(files, clock, capacity=1)
    with cache.lend("a") as fd:
        use(cache, "b")
        use(cache, "c")
        cache.forget("a")
        cache.close()
        assert files.open_now == {fd}
    assert files.open_now == set()


def test_a_forgotten_path_is_opened_anew(files: FakeFiles, clock: ManualClock) -> None:
    cache = cache_of(files, clock)
    with cache.lend("a") as old:
        cache.forget("a")
        assert use(cache, "a") != old
    assert files.open_now == {2}


def test_an_old_descriptor_is_opened_anew(files: FakeFiles, clock: ManualClock) -> None:
    cache = cache_of(files, clock)
    use(cache, "a")
    clock.advance_s(DESCRIPTOR_AGE_S_MAX)
    use(cache, "a")
    clock.advance_s(1)
    use(cache, "a")
    assert files.opened == ["a", "a"]
    assert files.open_now == {2}


def test_a_failure_to_open_leaves_nothing(files: FakeFiles, clock: ManualClock) -> None:
    cache = cache_of(files, clock)
    with pytest.raises(FileNotFoundError):
        use(cache, "missing")
    use(cache, "a")
    cache.close()
    assert files.open_now == set()


def test_a_failure_of_the_reader_gives_back(files: FakeFiles, clock: ManualClock) -> None:
    cache = cache_of(files, clock)
    with pytest.raises(ZeroDivisionError), cache.lend("a"):
        raise ZeroDivisionError
    cache.close()
    assert files.open_now == set()


def test_closing_again_does_nothing(files: FakeFiles, clock: ManualClock) -> None:
    cache = cache_of(files, clock)
    use(cache, "a")
    cache.close()
    cache.close()
    with pytest.raises(AssertionError):
        use(cache, "a")


def test_many_threads_close_each_descriptor_once(
    files: FakeFiles, clock: ManualClock, rng: random.Random
) -> None:
    cache = cache_of(files, clock, capacity=3)
    paths = [rng.choice("abcdef") for _ in range(2000)]

    def work(path: str) -> None:
        with cache.lend(path) as fd:
            assert fd in files.open_now
        if path == "f":
            cache.forget("f")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, paths))
    assert len(files.open_now) <= 3
    cache.close()
    assert files.open_now == set()
