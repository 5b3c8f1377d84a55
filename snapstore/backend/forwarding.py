"""A backend that hands everything on, for those that do one verb in their own way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapstore.backend.base import Backend, Capabilities, ObjectInfo, ObjectKind
    from snapstore.units import BytesLike

__all__ = ["ForwardingBackend"]


class ForwardingBackend:
    """Every verb is that of the backend below (`Backend`). Closing it leaves that one open."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return self._inner.capabilities

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        self._inner.get_range(kind, name, offset, into)

    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""
        self._inner.put_new(kind, name, pieces)

    def stat(self, kind: ObjectKind, name: str) -> ObjectInfo:
        """See `Backend.stat`."""
        return self._inner.stat(kind, name)

    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`."""
        return self._inner.list(kind, prefix)

    def delete(self, kind: ObjectKind, name: str) -> None:
        """See `Backend.delete`."""
        self._inner.delete(kind, name)

    def close(self) -> None:
        """See `Backend.close`."""
