"""Objects that are written part by part, where the storage can do that.

The seven verbs of the port want all bytes of an object at once, and its name with them. A directory
can do more: see `Draft`. Whoever uses it needs another way for storage that cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from snapstore.backend.posix import PosixBackend
from snapstore.backend.retry import RetryingBackend, unwrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapstore.backend.base import Backend, ObjectKind

__all__ = ["Draft", "begin_draft", "has_drafts"]


class Draft(Protocol):
    """An object that nobody sees until it is published. Used by one thread at a time."""

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """Write pieces, one after the other, from a place of the object on. Gaps are zeros.

        The pieces are not kept. Those that are long and begin and end at pages cost the least.

        May be repeated, also after `publish` said that a name is taken.

        Raises:
            OutOfSpace: No room.
            BackendError: The storage failed; what this wrote is undefined.
        """
        ...

    def publish(self, kind: ObjectKind, name: str) -> None:
        """Make all that was written durable, and then give it the name of its content.

        Promises what `Backend.put_new` does. May be repeated; where bytes could not be made
        durable, it fails again, since only who wrote them has them.

        Raises:
            ObjectExists: The name is taken by an object of another length.
            BackendError: The storage failed.
        """
        ...

    def discard(self) -> None:
        """Let go of everything that has no name; the end of every draft. Idempotent."""
        ...


def has_drafts(backend: Backend) -> bool:
    """Whether `begin_draft` works."""
    return isinstance(unwrapped(backend), PosixBackend)


def begin_draft(backend: Backend) -> Draft:
    """Begin an object, if `has_drafts`.

    Raises:
        AccessDenied: The store is open for reading only.
    """
    inner = unwrapped(backend)
    assert isinstance(inner, PosixBackend), inner
    draft = inner.begin_draft()
    return _RetryingDraft(draft, backend) if isinstance(backend, RetryingBackend) else draft


class _RetryingDraft:
    """Repeats what may be repeated of a `Draft`."""

    def __init__(self, inner: Draft, patience: RetryingBackend) -> None:
        self._inner = inner
        self._patience = patience

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """See `Draft.write`."""
        self._patience.attempt(lambda: self._inner.write(offset, pieces))

    def publish(self, kind: ObjectKind, name: str) -> None:
        """See `Draft.publish`."""
        self._patience.attempt(lambda: self._inner.publish(kind, name))

    def discard(self) -> None:
        """See `Draft.discard`."""
        self._inner.discard()
