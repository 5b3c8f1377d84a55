"""A backend that tries again when the one below it says that trying again may help."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, TypeVar

from snapstore.errors import TransientBackendError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from snapstore.backend.base import Backend, Capabilities, ObjectInfo, ObjectKind
    from snapstore.clock import Clock
    from snapstore.units import BytesLike

__all__ = ["RetryPolicy", "RetryingBackend", "unwrapped"]

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently to try.

    Attributes:
        attempts_max: Tries in all, the first included.
        delay_s_first: Pause before the second try; it doubles from try to try.
        delay_s_max: Longest pause.
        total_s_max: No pause begins that would end later than this after the first try.
    """

    attempts_max: int = 6
    delay_s_first: float = 0.1
    delay_s_max: float = 10.0
    total_s_max: float = 60.0

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """How long to wait after that many failures.

        Between half and all of the doubled pause, so that clients that failed together do not
        come back together.
        """
        longest = min(self.delay_s_max, self.delay_s_first * 2.0 ** (failures - 1))
        return longest * rng.uniform(0.5, 1.0)


class RetryingBackend:
    """Repeats what failed with `TransientBackendError` (`Backend`). Thread-safe.

    Every operation of the port may be repeated from its start. When the tries are used up the
    last error is raised as it came, with the number of tries as a note.
    """

    def __init__(
        self, inner: Backend, *, rng: random.Random, clock: Clock, policy: RetryPolicy | None = None
    ) -> None:
        self._inner = inner
        self._rng = rng
        self._clock = clock
        self._policy = policy or RetryPolicy()
        self._in_a_hurry = 0

    @contextlib.contextmanager
    def in_a_hurry(self) -> Iterator[None]:
        """Try everything once only while the block runs: somebody wants to stop."""
        self._in_a_hurry += 1
        try:
            yield
        finally:
            self._in_a_hurry -= 1

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return self._inner.capabilities

    @property
    def inner(self) -> Backend:
        """What is tried again and again."""
        return self._inner

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        self.attempt(lambda: self._inner.get_range(kind, name, offset, into))

    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""
        self.attempt(lambda: self._inner.put_new(kind, name, pieces))

    def stat(self, kind: ObjectKind, name: str) -> ObjectInfo:
        """See `Backend.stat`."""
        return self.attempt(lambda: self._inner.stat(kind, name))

    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`. Complete before the first item, so that no name comes twice."""
        yield from self.attempt(lambda: [*self._inner.list(kind, prefix)])

    def delete(self, kind: ObjectKind, name: str) -> None:
        """See `Backend.delete`."""
        self.attempt(lambda: self._inner.delete(kind, name))

    def close(self) -> None:
        """See `Backend.close`. Tried once."""
        self._inner.close()

    def attempt(self, operation: Callable[[], _Result]) -> _Result:
        """Run an operation that may be repeated from its start, and repeat it if need be."""
        start_s = self._clock.monotonic_s()
        failures = 0
        while True:
            try:
                return operation()
            except TransientBackendError as error:
                failures += 1
                delay_s = self._policy.delay_s(failures, self._rng)
                spent_s = self._clock.monotonic_s() - start_s
                if (
                    self._in_a_hurry
                    or failures >= self._policy.attempts_max
                    or spent_s + delay_s > self._policy.total_s_max
                ):
                    error.add_note(f"tried {failures} times in {spent_s:.1f} s")
                    raise
            self._clock.sleep_s(delay_s)


def unwrapped(backend: Backend) -> Backend:
    """Return what asks the storage itself, for what only some kinds of it can do."""
    return backend.inner if isinstance(backend, RetryingBackend) else backend
