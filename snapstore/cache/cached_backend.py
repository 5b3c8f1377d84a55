"""A backend whose packs, rank manifests and layouts are read through the node's cache.

It is for reading: everything else, and every listing, is asked of the storage. What is cached can
be read for as long as the cache has it, also after somebody deleted it from the store.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from blake3 import blake3
from typing_extensions import override

from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.forwarding import ForwardingBackend
from snapstore.backend.layout import object_text
from snapstore.cache.stored import StoredObject

if TYPE_CHECKING:
    from snapstore.cache.stored import StoredTier

__all__ = ["CachedBackend"]

_NAMED_BY_CONTENT = frozenset({ObjectKind.PACK, ObjectKind.RANK})
_PREFIX_BYTES = 8


class CachedBackend(ForwardingBackend):
    """See the module (`Backend`). Thread-safe. Closing it leaves both others open."""

    def __init__(self, inner: Backend, tier: StoredTier, store_id: str) -> None:
        """Keep what is read from `inner`, the storage of one store, apart from that of others."""
        super().__init__(inner)
        self._tier = tier
        store = f"{inner.capabilities.url} {store_id}"
        self._prefix = blake3(os.fsencode(store)).hexdigest(_PREFIX_BYTES)

    @override
    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        view = into if into.format == "B" else into.cast("B")
        file = self.file_name(kind, name) if view.nbytes else None
        if file is None:
            self._inner.get_range(kind, name, offset, into)
            return
        wanted = StoredObject(
            name=file,
            title=object_text(kind, name),
            length=lambda: self._inner.stat(kind, name).size_bytes,
            fetch=lambda at, part: self._inner.get_range(kind, name, at, part),
        )
        self._tier.read(wanted, offset, view)

    def forget(self, kind: ObjectKind, name: str, offset: int, length: int) -> None:
        """Fetch a range anew when it is wanted next: what the cache has of it is wrong."""
        file = self.file_name(kind, name)
        if file is not None:
            self._tier.forget(file, offset, length)

    def holds(self, kind: ObjectKind, name: str, offset: int, length: int) -> bool:
        """Whether the cache has a range."""
        file = self.file_name(kind, name)
        return file is not None and self._tier.holds(file, offset, length)

    def file_name(self, kind: ObjectKind, name: str) -> str | None:
        """The name of the cache file of an object; None of what is not cached."""
        if kind in _NAMED_BY_CONTENT:
            return f"{self._prefix}-{kind.value}-{name}"
        if kind is ObjectKind.LAYOUT:
            # Somebody may put another one in its place, after they moved a wrong one away.
            found = self._inner.stat(kind, name)
            version = f"{found.size_bytes}-{found.modified_ns}"
            return f"{self._prefix}-{kind.value}-{name.replace('/', '.')}-{version}"
        return None
