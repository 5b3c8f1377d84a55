"""What may help is tried again, a bounded number of times and for a bounded time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from snapstore.backend.base import ObjectInfo, ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.retry import RetryingBackend, RetryPolicy
from snapstore.errors import ObjectNotFound, OutOfSpace, TransientBackendError
from snapstore.testing.clock import ManualClock
from snapstore.testing.faults import Fault, FaultyBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

PACK = "5a" * 32
POLICY = RetryPolicy(attempts_max=4, delay_s_first=1.0, delay_s_max=3.0, total_s_max=100.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def backend_with(
    faults: dict[int, Fault], clock: ManualClock, policy: RetryPolicy = POLICY
) -> tuple[RetryingBackend, FaultyBackend]:
    faulty = FaultyBackend(MemoryBackend(), faults)
    return RetryingBackend(faulty, rng=random.Random(7), clock=clock, policy=policy), faulty


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.LOST_REPLY])
def test_every_verb_is_tried_again(fault: Fault, clock: ManualClock) -> None:
    backend, faulty = backend_with({0: fault, 2: fault, 4: fault, 6: fault, 8: fault}, clock)
    into = bytearray(3)
    backend.put_new(ObjectKind.PACK, PACK, [b"abc"])
    backend.get_range(ObjectKind.PACK, PACK, 0, memoryview(into))
    assert into == b"abc"
    assert backend.stat(ObjectKind.PACK, PACK).size_bytes == 3
    assert [info.name for info in backend.list(ObjectKind.PACK)] == [PACK]
    backend.delete(ObjectKind.PACK, PACK)
    assert faulty.operations == 10


def test_pauses_double_up_to_a_limit_with_jitter(clock: ManualClock) -> None:
    backend, _ = backend_with(dict.fromkeys(range(3), Fault.FAIL_BEFORE), clock)
    backend.delete(ObjectKind.PACK, PACK)
    assert [
        longest / 2 <= slept <= longest
        for slept, longest in zip(clock.slept_s, (1, 2, 3), strict=True)
    ] == [True] * 3
    assert len(set(clock.slept_s)) == 3


def test_the_same_seed_waits_alike() -> None:
    slept = []
    for _ in range(2):
        clock = ManualClock()
        backend, _ = backend_with({0: Fault.FAIL_BEFORE, 1: Fault.FAIL_BEFORE}, clock)
        backend.delete(ObjectKind.PACK, PACK)
        slept.append(clock.slept_s)
    assert slept[0] == slept[1]


def test_the_last_error_is_raised_with_the_number_of_tries(clock: ManualClock) -> None:
    backend, faulty = backend_with(dict.fromkeys(range(99), Fault.FAIL_BEFORE), clock)
    with pytest.raises(TransientBackendError, match="operation 3 failed") as caught:
        backend.stat(ObjectKind.PACK, PACK)
    assert faulty.operations == POLICY.attempts_max
    assert caught.value.__notes__ == [f"tried 4 times in {sum(clock.slept_s):.1f} s"]


def test_no_pause_goes_beyond_the_total_time(clock: ManualClock) -> None:
    policy = RetryPolicy(attempts_max=1000, delay_s_first=1.0, delay_s_max=8.0, total_s_max=30.0)
    backend, _ = backend_with(dict.fromkeys(range(1000), Fault.FAIL_BEFORE), clock, policy)
    with pytest.raises(TransientBackendError):
        backend.stat(ObjectKind.PACK, PACK)
    assert 20 < clock.monotonic_s() <= 30


def test_what_no_retry_helps_is_raised_at_once(clock: ManualClock) -> None:
    backend, faulty = backend_with({1: Fault.FULL_DISK}, clock)
    with pytest.raises(ObjectNotFound):
        backend.stat(ObjectKind.PACK, PACK)
    with pytest.raises(OutOfSpace):
        backend.put_new(ObjectKind.PACK, PACK, [b"x"])
    assert faulty.operations == 2
    assert clock.slept_s == []


def test_a_listing_that_breaks_starts_over_without_repeating_a_name(clock: ManualClock) -> None:
    class Breaking(MemoryBackend):
        broken = False

        @override
        def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
            for info in super().list(kind, prefix):
                yield info
                if not self.broken:
                    self.broken = True
                    raise TransientBackendError("gone in the middle")

    inner = Breaking()
    names = {f"{number:064x}" for number in range(5)}
    for name in names:
        inner.put_new(ObjectKind.PACK, name, [b"x"])
    backend = RetryingBackend(inner, rng=random.Random(7), clock=clock, policy=POLICY)
    assert sorted(info.name for info in backend.list(ObjectKind.PACK)) == sorted(names)
    assert inner.broken


def test_somebody_in_a_hurry_is_told_at_once(clock: ManualClock) -> None:
    """Who interrupts a program does not wait for a storage that is away."""
    backend, faulty = backend_with(dict.fromkeys(range(4), Fault.FAIL_BEFORE), clock)
    with backend.in_a_hurry(), pytest.raises(TransientBackendError):
        backend.stat(ObjectKind.PACK, PACK)
    assert faulty.operations == 1
    assert clock.slept_s == []
    with pytest.raises(ObjectNotFound):
        backend.stat(ObjectKind.PACK, PACK)
    assert faulty.operations == 5
