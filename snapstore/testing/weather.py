"""Storage with weather: hours of faults in simulated time, all drawn from one seed.

What happens to an operation depends on the seed, the client, and the how-manyth of its kind and
verb it is, not on how threads were scheduled before it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import threading
from typing import TYPE_CHECKING, NoReturn, TypeVar

from snapstore.errors import SnapError, TransientBackendError
from snapstore.testing.faults import Killed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from snapstore.backend.base import Backend, Capabilities, ObjectInfo, ObjectKind
    from snapstore.testing.clock import ManualClock
    from snapstore.units import BytesLike

__all__ = ["Climate", "Forecast", "StormyBackend"]

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Climate:
    """How often what goes wrong; shares are of all operations.

    Attributes:
        fail: Fails without being carried out.
        lose_reply: Is carried out and fails.
        kill: The client dies, before or after it.
        stall: The client stands still for up to `stall_s_max`, while others go on.
        stall_s_max: Longer than a lease lives.
        latency_s_max: How long one operation takes at most.
        stale_share: Share of listings that are old.
        stale_s_max: How old a listing can be.
        calm_s: Mean time between outages.
        outage_s_max: How long one lasts at most.
    """

    fail: float = 0.02
    lose_reply: float = 0.02
    kill: float = 0.005
    stall: float = 0.002
    stall_s_max: float = 4000.0
    latency_s_max: float = 0.2
    stale_share: float = 0.5
    stale_s_max: float = 90.0
    calm_s: float = 900.0
    outage_s_max: float = 400.0


class Forecast:
    """When there are outages, and what goes wrong with which operation: a function of the seed."""

    def __init__(self, seed: int | str, climate: Climate, *, start_s: float, hours: float) -> None:
        self.seed = seed
        self.climate = climate
        rng = random.Random(f"{seed}/outages")
        self.outages: list[tuple[float, float]] = []
        time_s, end_s = start_s, start_s + hours * 3600
        while (time_s := time_s + rng.expovariate(1 / climate.calm_s)) < end_s:
            begin_s = time_s
            time_s += rng.uniform(1, climate.outage_s_max)
            self.outages.append((begin_s, time_s))

    def is_out(self, time_s: float) -> bool:
        """Whether the storage answers nobody."""
        return any(begin_s <= time_s < end_s for begin_s, end_s in self.outages)

    def rng(self, *what: object) -> random.Random:
        """Give the generator that decides about one operation."""
        return random.Random("/".join(map(str, (self.seed, *what))))


class StormyBackend:
    """One life of one client, in the weather (`Backend`). Thread-safe.

    After a death every further operation raises `Killed`: not even clean-up code runs.

    Args:
        inner: The storage; its objects must have times of `clock`.
        client: Which client and life; part of what the forecast is a function of.
        forecast: What goes wrong when.
        clock: Operations take time of it.
        meanwhile: Called before operations now and then, in whichever thread is running, with a
            generator: lets others do something while this client is in the middle of it.
    """

    def __init__(
        self,
        inner: Backend,
        client: str,
        forecast: Forecast,
        clock: ManualClock,
        *,
        meanwhile: Callable[[random.Random], None] = lambda _: None,
    ) -> None:
        self._inner = inner
        self._client = client
        self._forecast = forecast
        self._clock = clock
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        self._ordinals: collections.Counter[tuple[ObjectKind, str]] = collections.Counter()
        self._dead = False
        self.events: collections.Counter[str] = collections.Counter()
        self.put_bytes: collections.Counter[ObjectKind] = collections.Counter()

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return self._inner.capabilities

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        self._run(kind, "get_range", lambda _: self._inner.get_range(kind, name, offset, into))

    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""

        def put(_: random.Random) -> None:
            with self._lock:
                self.put_bytes[kind] += sum(map(len, pieces))
            self._inner.put_new(kind, name, pieces)

        self._run(kind, "put_new", put)

    def stat(self, kind: ObjectKind, name: str) -> ObjectInfo:
        """See `Backend.stat`."""
        return self._run(kind, "stat", lambda _: self._inner.stat(kind, name))

    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`. An old listing lacks what is new, each client's own included."""
        yield from self._run(kind, "list", lambda rng: self._listed(rng, kind, prefix))

    def delete(self, kind: ObjectKind, name: str) -> None:
        """See `Backend.delete`."""
        self._run(kind, "delete", lambda _: self._inner.delete(kind, name))

    def close(self) -> None:
        """See `Backend.close`."""

    def _listed(self, rng: random.Random, kind: ObjectKind, prefix: str) -> Sequence[ObjectInfo]:
        climate = self._forecast.climate
        age_s = 0.0
        if rng.random() < climate.stale_share:
            age_s = rng.uniform(0, climate.stale_s_max)
            self.events["old listing"] += 1
        horizon_ns = self._clock.now_ns() - int(age_s * 1e9)
        found = self._inner.list(kind, prefix)
        return [info for info in found if info.modified_ns <= horizon_ns]

    def _run(
        self, kind: ObjectKind, verb: str, operation: Callable[[random.Random], _Result]
    ) -> _Result:
        with self._lock:
            self._require_alive()
            number = self._ordinals[kind, verb]
            self._ordinals[kind, verb] += 1
        rng = self._forecast.rng(self._client, kind.name, verb, number)
        self._pass_time(rng)
        self._meanwhile(rng)
        what = f"{verb} of {kind.name} {number}"
        draw = rng.random()
        climate = self._forecast.climate
        if draw < climate.kill:
            self._die(rng, what, operation)
        if self._forecast.is_out(self._clock.monotonic_s()):
            self.events["outage"] += 1
            self._clock.advance_s(rng.uniform(0.1, 5))
            raise TransientBackendError(f"{what}: no answer (injected)")
        draw -= climate.kill
        if draw < climate.fail:
            self.events["failure"] += 1
            raise TransientBackendError(f"{what} failed (injected)")
        result = operation(rng)
        if draw < climate.fail + climate.lose_reply:
            self.events["lost reply"] += 1
            raise TransientBackendError(f"no reply to {what} (injected)")
        with self._lock:
            self._require_alive()
        return result

    def _pass_time(self, rng: random.Random) -> None:
        climate = self._forecast.climate
        self._clock.advance_s(rng.uniform(0, climate.latency_s_max))
        if rng.random() < climate.stall:
            self.events["stall"] += 1
            # Short ones are common, long ones are not.
            self._clock.advance_s(climate.stall_s_max * rng.random() ** 4)

    def _die(
        self, rng: random.Random, what: str, operation: Callable[[random.Random], object]
    ) -> NoReturn:
        with self._lock:
            self._require_alive()
            self._dead = True
        self.events["death"] += 1
        if rng.random() < 0.5:
            with contextlib.suppress(SnapError):
                operation(rng)
        raise Killed(f"at {what}")

    def _require_alive(self) -> None:
        if self._dead:
            raise Killed("dead already")
