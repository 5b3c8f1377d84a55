"""Attributes computed when first asked for: once in the end, and nobody waits for a stranger."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from snapstore.errors import TransientBackendError
from snapstore.repository.lazy import lazy

PATIENCE_S = 30


class Slow:
    """Computes its value as slowly as it is told to."""

    def __init__(self, go: threading.Event) -> None:
        self.go = go
        self.computed = 0

    @lazy
    def value(self) -> list[int]:
        """What is asked for."""
        self.computed += 1
        assert self.go.wait(PATIENCE_S)
        return [self.computed]


def test_it_is_computed_once() -> None:
    go = threading.Event()
    go.set()
    slow = Slow(go)
    assert slow.computed == 0
    assert slow.value is slow.value
    assert slow.computed == 1
    assert Slow.value.__doc__ == "What is asked for."


def test_one_object_does_not_wait_for_another() -> None:
    """Goal: a slow storage of one snapshot stops no reader of another."""
    never, now = threading.Event(), threading.Event()
    now.set()
    stuck, other = Slow(never), Slow(now)
    with ThreadPoolExecutor(2) as executor:
        waiting = executor.submit(lambda: stuck.value)
        assert executor.submit(lambda: other.value).result(PATIENCE_S) == [1]
        assert not waiting.done()
        never.set()
        assert waiting.result(PATIENCE_S) == [1]


def test_two_threads_get_the_same_value() -> None:
    go = threading.Event()
    slow = Slow(go)
    with ThreadPoolExecutor(2) as executor:
        both = [executor.submit(lambda: slow.value) for _ in range(2)]
        go.set()
        first, second = (one.result(PATIENCE_S) for one in both)
    assert first is second


def test_an_error_is_not_kept() -> None:
    class Failing:
        failures = 1

        @lazy
        def value(self) -> int:
            if self.failures:
                self.failures -= 1
                raise TransientBackendError("not now")
            return 7

    failing = Failing()
    with pytest.raises(TransientBackendError):
        _ = failing.value
    assert failing.value == 7
