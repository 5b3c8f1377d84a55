"""A backend that counts what passes through it, and lets a test look or interfere."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapstore.backend.base import Backend, Capabilities, ObjectInfo, ObjectKind
    from snapstore.clock import Clock
    from snapstore.units import BytesLike

__all__ = ["Operation", "TraceHook", "TracingBackend", "Verb", "VerbCounts"]

Verb = Literal["get_range", "put_new", "stat", "list", "delete"]


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One call of the port.

    Attributes:
        number: Counts all calls of one traced backend from 0, in the order in which they began.
        verb: The method.
        kind: Kind of object.
        name: Name of the object, or the prefix of a listing.
        offset: Start of the range that was asked for; 0 for other verbs.
        size_bytes: Length of the range, or of the object to write; 0 for other verbs.
    """

    number: int
    verb: Verb
    kind: ObjectKind
    name: str
    offset: int = 0
    size_bytes: int = 0


@dataclasses.dataclass(slots=True)
class VerbCounts:
    """What one verb has cost so far; `seconds` adds up over threads."""

    operations: int = 0
    errors: int = 0
    bytes: int = 0
    seconds: float = 0.0


class TraceHook(Protocol):
    """Is told of every operation, in the thread that runs it."""

    def before(self, operation: Operation) -> None:
        """Called before the operation; what it raises is raised instead of running it."""
        ...

    def after(self, operation: Operation, error: BaseException | None) -> None:
        """Called after the operation, even if it failed; what it raises replaces the outcome."""
        ...


class TracingBackend:
    """Counts operations, errors, bytes and seconds per verb (`Backend`). Thread-safe.

    A listing is one operation, from its first item to its end or to its reader's loss of interest.
    """

    def __init__(self, inner: Backend, *, clock: Clock, hook: TraceHook | None = None) -> None:
        self._inner = inner
        self._clock = clock
        self._hook = hook
        self._lock = threading.Lock()
        self._counts: dict[Verb, VerbCounts] = {}
        self._started = 0

    @property
    def counts(self) -> dict[Verb, VerbCounts]:
        """A copy of the counters of all verbs used so far."""
        with self._lock:
            return {verb: dataclasses.replace(count) for verb, count in self._counts.items()}

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return self._inner.capabilities

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        with self._traced("get_range", kind, name, offset, into.nbytes):
            self._inner.get_range(kind, name, offset, into)

    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""
        size_bytes = sum(memoryview(piece).nbytes for piece in pieces)
        with self._traced("put_new", kind, name, 0, size_bytes):
            self._inner.put_new(kind, name, pieces)

    def stat(self, kind: ObjectKind, name: str) -> ObjectInfo:
        """See `Backend.stat`."""
        with self._traced("stat", kind, name):
            return self._inner.stat(kind, name)

    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`."""
        with self._traced("list", kind, prefix):
            yield from self._inner.list(kind, prefix)

    def delete(self, kind: ObjectKind, name: str) -> None:
        """See `Backend.delete`."""
        with self._traced("delete", kind, name):
            self._inner.delete(kind, name)

    def close(self) -> None:
        """See `Backend.close`. Not counted."""
        self._inner.close()

    @contextlib.contextmanager
    def _traced(
        self, verb: Verb, kind: ObjectKind, name: str, offset: int = 0, size_bytes: int = 0
    ) -> Iterator[None]:
        with self._lock:
            operation = Operation(self._started, verb, kind, name, offset, size_bytes)
            self._started += 1
        start_s = self._clock.monotonic_s()
        try:
            if self._hook is not None:
                self._hook.before(operation)
            yield
        except GeneratorExit:
            # The reader of a listing has seen enough.
            self._finish(operation, start_s, None)
            raise
        except BaseException as error:
            self._finish(operation, start_s, error)
            raise
        else:
            self._finish(operation, start_s, None)

    def _finish(self, operation: Operation, start_s: float, error: BaseException | None) -> None:
        seconds = self._clock.monotonic_s() - start_s
        with self._lock:
            count = self._counts.setdefault(operation.verb, VerbCounts())
            count.operations += 1
            count.errors += error is not None
            count.bytes += operation.size_bytes if error is None else 0
            count.seconds += seconds
        if self._hook is not None:
            self._hook.after(operation, error)
