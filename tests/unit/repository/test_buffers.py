"""A pool never makes more buffers than it may, and nobody waits for ever."""

import threading

import numpy as np
import pytest

from snapstore.errors import Interrupted
from snapstore.repository.buffers import BufferPool


def test_buffers_are_aligned_and_of_one_size() -> None:
    pool = BufferPool(count=3, size_bytes=10_000)
    for buffer in [pool.acquire() for _ in range(3)]:
        assert len(buffer) == 10_000
        assert buffer.ctypes.data % 4096 == 0


def test_buffers_are_used_again() -> None:
    pool = BufferPool(count=2, size_bytes=100)
    with pool.borrowed() as first:
        first[:] = 7
    with pool.borrowed() as second:
        assert np.shares_memory(first, second)


def test_who_finds_none_waits_until_one_comes_back() -> None:
    """Goal: at most `count` buffers are out at any time, with many threads asking.

    Method: sixteen threads borrow and give back; each counts those that are out.
    """
    pool = BufferPool(count=3, size_bytes=100)
    lock = threading.Lock()
    out, most = 0, 0
    seen: set[int] = set()

    def work() -> None:
        nonlocal out, most
        for _ in range(50):
            with pool.borrowed() as buffer:
                with lock:
                    out += 1
                    most = max(most, out)
                    seen.add(buffer.ctypes.data)
                with lock:
                    out -= 1

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 3
    assert len(seen) <= 3


def test_closing_wakes_those_who_wait() -> None:
    pool = BufferPool(count=1, size_bytes=100)
    buffer = pool.acquire()
    stopped: list[Interrupted] = []
    waiting = threading.Event()

    def work() -> None:
        waiting.set()
        try:
            pool.acquire()
        except Interrupted as error:
            stopped.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    waiting.wait()
    pool.close()
    thread.join()
    assert len(stopped) == 1
    pool.release(buffer)
    with pytest.raises(Interrupted):
        pool.acquire()
    pool.close()


def test_a_pool_grows_and_shrinks() -> None:
    """What is lent when a pool shrinks is dropped when it comes back."""
    pool = BufferPool(count=1, size_bytes=100)
    pool.widen()
    lent = [pool.acquire(), pool.acquire()]
    assert pool.try_acquire() is None
    pool.narrow()
    pool.release(lent.pop())
    assert pool.try_acquire() is None
    pool.release(lent.pop())
    lent.append(pool.acquire())
    assert pool.try_acquire() is None
    pool.release(lent.pop())
    pool.trim()
    pool.widen()
    pool.narrow()
    pool.narrow()
    assert pool.try_acquire() is None
    pool.close()
    with pytest.raises(Interrupted):
        pool.try_acquire()


def test_an_error_gives_the_buffer_back() -> None:
    pool = BufferPool(count=1, size_bytes=100)
    with pytest.raises(ZeroDivisionError), pool.borrowed():
        raise ZeroDivisionError
    pool.release(pool.acquire())


def test_a_buffer_of_somebody_else_is_refused() -> None:
    with pytest.raises(AssertionError):
        BufferPool(count=1, size_bytes=100).release(np.zeros(99, np.uint8))
