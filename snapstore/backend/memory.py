"""Objects in this process's memory: the oracle that other backends are compared with.

The simplest program that keeps every promise of the port; also what tests of the layers above
run on. Several handles may share the objects, as several clients share a server.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

from snapstore.backend import layout
from snapstore.backend.base import CONTENT_NAMED, Capabilities, ObjectInfo, ObjectKind
from snapstore.clock import Clock, SystemClock
from snapstore.errors import (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    RangeNotSatisfiable,
    StoreNotFound,
)
from snapstore.units import MIB, BytesLike

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MemoryBackend", "MemoryObjects"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Stored:
    data: bytes
    modified_ns: int


class MemoryObjects:
    """The stored objects, shared by any number of backends. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[str, _Stored] = {}

    def get(self, key: str) -> _Stored | None:
        """Look an object up."""
        with self._lock:
            return self._by_key.get(key)

    def add(self, key: str, stored: _Stored) -> _Stored:
        """Store an object unless the key is taken; return the one that is there now."""
        with self._lock:
            return self._by_key.setdefault(key, stored)

    def remove(self, key: str) -> None:
        """Remove an object if it is there."""
        with self._lock:
            self._by_key.pop(key, None)

    def below(self, prefix: str) -> list[tuple[str, _Stored]]:
        """List the objects whose keys start with `prefix`."""
        with self._lock:
            return [item for item in self._by_key.items() if item[0].startswith(prefix)]


_named: dict[str, MemoryObjects] = {}
_named_lock = threading.Lock()


class MemoryBackend:
    """A store in memory (`Backend`)."""

    def __init__(
        self,
        objects: MemoryObjects | None = None,
        *,
        readonly: bool = False,
        clock: Clock | None = None,
        url: str = "memory://",
    ) -> None:
        self._objects = objects or MemoryObjects()
        self._clock = clock or SystemClock()
        self._capabilities = Capabilities(
            url=url, writable=not readonly, readers_in_parallel=4, read_bytes_best=MIB
        )

    @classmethod
    def named(cls, name: str, *, create: bool = False, readonly: bool = False) -> MemoryBackend:
        """Open the store that every caller in this process gets for `name`.

        Raises:
            StoreNotFound: Nobody has created it yet.
        """
        url = f"memory://{name}"
        with _named_lock:
            if name not in _named and not create:
                raise StoreNotFound(f"no store {url} in this process")
            objects = _named.setdefault(name, MemoryObjects())
        return cls(objects, readonly=readonly, url=url)

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return self._capabilities

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        data = self._find(kind, name).data
        end = offset + into.nbytes
        if offset < 0 or end > len(data):
            raise RangeNotSatisfiable(
                f"{kind.name} {name} has {len(data)} bytes, not {offset} + {into.nbytes}"
            )
        into.cast("B")[:] = memoryview(data)[offset:end]

    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""
        key = layout.key_of(kind, name)
        self._require_writable(key)
        data = b"".join(pieces)
        present = self._objects.add(key, _Stored(data, self._clock.now_ns())).data
        same = len(present) == len(data) if kind in CONTENT_NAMED else present == data
        if not same:
            raise ObjectExists(f"{key} exists with other content")

    def stat(self, kind: ObjectKind, name: str) -> ObjectInfo:
        """See `Backend.stat`."""
        stored = self._find(kind, name)
        return ObjectInfo(name, len(stored.data), stored.modified_ns)

    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`."""
        start = layout.listing_prefix(kind, prefix)
        found = [] if start is None else self._objects.below(start)
        for key, stored in found:
            name = layout.name_of(kind, key)
            if name is not None:
                yield ObjectInfo(name, len(stored.data), stored.modified_ns)

    def delete(self, kind: ObjectKind, name: str) -> None:
        """See `Backend.delete`."""
        key = layout.key_of(kind, name)
        self._require_writable(key)
        self._objects.remove(key)

    def close(self) -> None:
        """See `Backend.close`. The objects stay for other handles."""

    def _find(self, kind: ObjectKind, name: str) -> _Stored:
        key = layout.key_of(kind, name)
        stored = self._objects.get(key)
        if stored is None:
            raise ObjectNotFound(f"no {key}")
        return stored

    def _require_writable(self, key: str) -> None:
        if not self._capabilities.writable:
            raise AccessDenied(f"{key}: {self._capabilities.url} is open for reading only")
