"""Trying a storage before trusting it: the contract, its latencies and its rates, and a verdict.

What is reported was done: every property by the check that tests our own backends (`contract`),
every number with objects that were written, read back and deleted again. It touches nobody's
objects, but who lists a store at the same place meanwhile finds some that make no sense.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Literal

from snapstore.backend.base import Backend, ObjectKind
from snapstore.errors import DigestMismatch, SnapError
from snapstore.repository.buffers import BufferPool
from snapstore.testing.contract import CHECKS
from snapstore.units import KIB, MIB

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from snapstore.clock import Clock
    from snapstore.testing.contract_base import Check, Subject

__all__ = ["CheckResult", "Latency", "Rate", "Validation", "validate"]

_SMALL_BYTES = 4 * KIB
_SMALL_COUNT = 25
_PACK_BYTES = 64 * MIB
_READ_BYTES = 8 * MIB
_READERS = 8

Outcome = Literal["passed", "failed", "not tested"]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """What became of one check.

    Attributes:
        name: Stable word.
        statement: What must be true.
        outcome: Whether it is.
        reason: Why not, or why it was not tested.
        seconds: How long it took.
    """

    name: str
    statement: str
    outcome: Outcome
    reason: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Latency:
    """How long a small operation takes, in seconds."""

    operation: str
    median_s: float
    worst_s: float
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """How fast large objects move."""

    operation: str
    bytes_per_s: float
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Validation:
    """What a storage can do."""

    url: str
    checks: tuple[CheckResult, ...]
    latencies: tuple[Latency, ...]
    rates: tuple[Rate, ...]

    @property
    def usable(self) -> bool:
        """Whether a store may be kept there: nothing that must be true is false."""
        return all(result.outcome != "failed" for result in self.checks)


def validate(
    subject: Subject,
    rng: random.Random,
    clock: Clock,
    *,
    data_bytes: int = 256 * MIB,
    checked: Callable[[CheckResult], None] = lambda _: None,
) -> Validation:
    """Run all checks, then measure.

    Args:
        subject: How to open the storage.
        rng: For names and bytes.
        clock: For the time they take.
        data_bytes: How much to write and read for the rates, in packs of 64 MiB.
        checked: Told of each check.

    Raises:
        SnapError: The storage cannot be opened, or fails while it is measured.
    """
    results = []
    for check in CHECKS:
        result = _run(check, subject, rng, clock)
        results.append(result)
        checked(result)
    with contextlib.closing(subject.open()) as backend:
        latencies = tuple(_latencies(backend, rng, clock))
        rates = tuple(_rates(backend, rng, clock, max(1, data_bytes // _PACK_BYTES)))
        return Validation(backend.capabilities.url, tuple(results), latencies, rates)


def _run(check: Check, subject: Subject, rng: random.Random, clock: Clock) -> CheckResult:
    lacking = check.lacking(subject)
    if lacking:
        return CheckResult(check.name, check.statement, "not tested", lacking, 0.0)
    started_s = clock.monotonic_s()
    outcome: Outcome = "passed"
    reason = ""
    try:
        check.run(subject, rng)
    except SnapError as error:
        outcome, reason = "failed", str(error)
    return CheckResult(
        check.name, check.statement, outcome, reason, clock.monotonic_s() - started_s
    )


def _latencies(backend: Backend, rng: random.Random, clock: Clock) -> Iterator[Latency]:
    names = [f"contract/{rng.randbytes(16).hex()}" for _ in range(_SMALL_COUNT)]
    data = rng.randbytes(_SMALL_BYTES)
    into = memoryview(bytearray(_SMALL_BYTES))
    operations: dict[str, Callable[[str], object]] = {
        "put_new, 4 KiB": lambda name: backend.put_new(ObjectKind.HINT, name, [data]),
        "stat": lambda name: backend.stat(ObjectKind.HINT, name),
        "get_range, 4 KiB": lambda name: backend.get_range(ObjectKind.HINT, name, 0, into),
        "list of one": lambda name: list(backend.list(ObjectKind.HINT, name)),
        "delete": lambda name: backend.delete(ObjectKind.HINT, name),
    }
    for operation, call in operations.items():
        times_s = [_seconds(partial(call, name), clock) for name in names]
        yield Latency(operation, statistics.median(times_s), max(times_s), len(times_s))


def _rates(backend: Backend, rng: random.Random, clock: Clock, packs: int) -> Iterator[Rate]:
    names = [rng.randbytes(32).hex() for _ in range(packs)]
    # Aligned as a push and a pull have them, so that the storage may pass by the page cache.
    pool = BufferPool(count=1 + _READERS, size_bytes=_PACK_BYTES)
    data = pool.acquire().data
    data[:] = rng.randbytes(_PACK_BYTES)
    size_bytes = packs * _PACK_BYTES
    try:
        written_s = sum(
            _seconds(partial(backend.put_new, ObjectKind.PACK, name, [data]), clock)
            for name in names
        )
        yield Rate("write packs of 64 MiB, one by one", size_bytes / written_s, size_bytes)
        ranges = [*itertools.product(names, range(0, _PACK_BYTES, _READ_BYTES))]

        def read(place: tuple[str, int]) -> None:
            name, offset = place
            with pool.borrowed() as buffer:
                into = buffer[:_READ_BYTES].data
                backend.get_range(ObjectKind.PACK, name, offset, into)
                if into[:_SMALL_BYTES] != data[offset : offset + _SMALL_BYTES]:
                    raise DigestMismatch(f"pack {name[:12]} came back with other bytes")

        with ThreadPoolExecutor(_READERS) as executor:
            read_s = _seconds(lambda: [*executor.map(read, ranges)], clock)
        yield Rate(f"read ranges of 8 MiB, {_READERS} at once", size_bytes / read_s, size_bytes)
    finally:
        for name in names:
            backend.delete(ObjectKind.PACK, name)


def _seconds(operation: Callable[[], object], clock: Clock) -> float:
    started_s = clock.monotonic_s()
    operation()
    return max(clock.monotonic_s() - started_s, 1e-9)
