"""Operations are counted per verb, and a hook sees and may replace each of them."""

from __future__ import annotations

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.trace import Operation, TracingBackend, VerbCounts
from snapstore.errors import ObjectNotFound, TransientBackendError
from snapstore.testing.clock import ManualClock

PACK = "5a" * 32


class Hook:
    """Lets time pass, remembers, and raises on demand."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.seen: list[tuple[Operation, str]] = []
        self.fail_before = -1
        self.fail_after = -1

    def before(self, operation: Operation) -> None:
        self.clock.advance_s(2)
        if operation.number == self.fail_before:
            raise TransientBackendError("before")

    def after(self, operation: Operation, error: BaseException | None) -> None:
        self.seen.append((operation, type(error).__name__))
        if operation.number == self.fail_after:
            raise TransientBackendError("after")


@pytest.fixture
def hook() -> Hook:
    return Hook(ManualClock())


@pytest.fixture
def backend(hook: Hook) -> TracingBackend:
    return TracingBackend(MemoryBackend(), clock=hook.clock, hook=hook)


def test_operations_bytes_errors_and_seconds_are_counted(backend: TracingBackend) -> None:
    backend.put_new(ObjectKind.PACK, PACK, [b"abc", b"", b"defg"])
    backend.get_range(ObjectKind.PACK, PACK, 1, memoryview(bytearray(2)))
    backend.get_range(ObjectKind.PACK, PACK, 2, memoryview(bytearray(3)))
    with pytest.raises(ObjectNotFound):
        backend.stat(ObjectKind.PACK, "00" * 32)
    assert len(list(backend.list(ObjectKind.PACK))) == 1
    backend.delete(ObjectKind.PACK, PACK)
    assert backend.counts == {
        "put_new": VerbCounts(1, 0, 7, 2.0),
        "get_range": VerbCounts(2, 0, 5, 4.0),
        "stat": VerbCounts(1, 1, 0, 2.0),
        "list": VerbCounts(1, 0, 0, 2.0),
        "delete": VerbCounts(1, 0, 0, 2.0),
    }


def test_the_hook_sees_every_operation(backend: TracingBackend, hook: Hook) -> None:
    backend.put_new(ObjectKind.PACK, PACK, [b"abc"])
    with pytest.raises(ObjectNotFound):
        backend.get_range(ObjectKind.PACK, "00" * 32, 5, memoryview(bytearray(2)))
    assert hook.seen == [
        (Operation(0, "put_new", ObjectKind.PACK, PACK, 0, 3), "NoneType"),
        (Operation(1, "get_range", ObjectKind.PACK, "00" * 32, 5, 2), "ObjectNotFound"),
    ]


def test_the_hook_may_stop_an_operation(backend: TracingBackend, hook: Hook) -> None:
    hook.fail_before = 0
    with pytest.raises(TransientBackendError, match="before"):
        backend.put_new(ObjectKind.PACK, PACK, [b"abc"])
    with pytest.raises(ObjectNotFound):
        backend.stat(ObjectKind.PACK, PACK)
    assert backend.counts["put_new"] == VerbCounts(1, 1, 0, 2.0)


def test_the_hook_may_lose_a_reply(backend: TracingBackend, hook: Hook) -> None:
    hook.fail_after = 0
    with pytest.raises(TransientBackendError, match="after"):
        backend.put_new(ObjectKind.PACK, PACK, [b"abc"])
    assert backend.stat(ObjectKind.PACK, PACK).size_bytes == 3


def test_a_listing_that_is_left_early_is_one_operation(backend: TracingBackend, hook: Hook) -> None:
    for number in range(3):
        backend.put_new(ObjectKind.PACK, f"{number:064x}", [b"x"])
    listing = backend.list(ObjectKind.PACK)
    next(listing)
    del listing
    assert backend.counts["list"].operations == 1
    assert hook.seen[-1][1] == "NoneType"
