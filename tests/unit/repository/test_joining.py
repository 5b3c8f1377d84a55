"""Threads have ended before what they use is closed, however often somebody interrupts."""

import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import FrameType

import pytest

from snapstore.joining import wait_for_all
from snapstore.repository.warming import _fetch_all

INTERRUPTS = 5


class _Interrupts:
    """Ctrl-C as often as it is asked for, each once the one before has been taken in."""

    def __init__(self) -> None:
        self.seen = 0
        self.raises = True
        self._taken = threading.Event()
        self._pause = threading.Event()

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        self.seen += 1
        self._taken.set()
        if self.raises:
            raise KeyboardInterrupt

    def send(self) -> None:
        self._taken.clear()
        main = threading.main_thread().ident
        assert main is not None
        while self.raises and not _waits(sys._current_frames()[main]):
            self._pause.wait(0.001)
        # One that comes right before a thread begins to wait is only seen when it is woken.
        signal.pthread_kill(main, signal.SIGINT)
        while not self._taken.wait(0.05):
            signal.pthread_kill(main, signal.SIGINT)


def _waits(frame: FrameType | None) -> bool:
    """Whether a thread waits for others."""
    shutdown = ThreadPoolExecutor.shutdown.__code__
    waiting = {wait.__code__, Future.exception.__code__, shutdown}
    while frame is not None and frame.f_code not in waiting:
        frame = frame.f_back
    return frame is not None


def test_all_have_ended_when_it_raises() -> None:
    """Goal: a second Ctrl-C does not leave threads behind.

    Method: an item of the work interrupts the main thread again and again, and ends then.
    """
    interrupts = _Interrupts()
    ended = threading.Event()

    def fetch(_item: int) -> int:
        for _ in range(INTERRUPTS):
            interrupts.send()
        ended.set()
        return 0

    before = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        _fetch_all(fetch, [1], 1)
    except KeyboardInterrupt:
        interrupts.raises = False
        had_ended = ended.is_set()
    finally:
        interrupts.raises = False
        assert ended.wait(30)
        signal.signal(signal.SIGINT, before)
    assert had_ended
    assert interrupts.seen >= INTERRUPTS


def test_errors_of_the_threads_are_not_its_own() -> None:
    with ThreadPoolExecutor(1) as executor:
        futures = [executor.submit(int, "x"), executor.submit(int, "1")]
        wait_for_all(futures)
    with pytest.raises(ValueError, match="invalid literal"):
        futures[0].result()
