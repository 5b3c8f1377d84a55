"""Getting frames out of packs: one ranged read, and what has to be right before bytes are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.layout import key_of
from snapstore.cache.cached_backend import CachedBackend
from snapstore.compression import Codec
from snapstore.errors import DigestMismatch, MissingPack, ObjectNotFound, RangeNotSatisfiable
from snapstore.repository.objects import about
from snapstore.repository.read_plan import ReadUnit

if TYPE_CHECKING:
    import contextlib

    from snapstore.ids import PackId
    from snapstore.repository.read_plan import PlannedFrame

__all__ = [
    "FrameErrors",
    "check_stored",
    "is_stored_raw",
    "missing_pack",
    "read_unit",
]


def read_unit(backend: Backend, unit: ReadUnit, into: memoryview) -> None:
    """Fetch neighbouring frames; `into` has the length of the read.

    Raises:
        MissingPack: The pack is gone, or shorter than it should be.
    """
    try:
        backend.get_range(ObjectKind.PACK, unit.pack.hex, unit.offset, into)
    except (ObjectNotFound, RangeNotSatisfiable) as error:
        raise missing_pack(unit.pack, unit.offset) from error


def missing_pack(pack: PackId, offset: int) -> MissingPack:
    """Say that a pack is gone, or ends before that offset."""
    return MissingPack(
        f"pack {pack.short} is gone or cut short, at offset {offset}",
        next_step="if somebody removed data meanwhile, pull again; else push the same "
        "tree again, which sends what is missing",
    )


def check_stored(backend: Backend, pack: PackId, frame: PlannedFrame, data: memoryview) -> None:
    """Check the stored bytes of a frame.

    If they came through the node's cache they are fetched again before they are called damaged:
    what it has may have been wrong when it came.

    Args:
        backend: Where they were read.
        pack: Which pack.
        frame: What the layout says of the frame.
        data: Its stored bytes, which may be replaced.

    Raises:
        DigestMismatch: They are not those that were written.
    """
    if xxhash.xxh3_128_digest(data) == frame.checksum:
        return
    if isinstance(backend, CachedBackend):
        backend.forget(ObjectKind.PACK, pack.hex, frame.offset, frame.stored_length)
        again = ReadUnit(pack, frame.offset, frame.stored_length, 0, 0)
        read_unit(backend, again, data)
        if xxhash.xxh3_128_digest(data) == frame.checksum:
            return
    raise DigestMismatch("damaged, its checksum differs")


def is_stored_raw(frame: PlannedFrame) -> bool:
    """Whether the stored bytes are the decoded ones; what only claims to be so must be decoded."""
    return frame.codec == Codec.RAW and frame.stored_length == frame.plain_length


class FrameErrors:
    """Lets what is wrong with a frame of one pack say which frame it is, and what to do."""

    def __init__(self, pack: PackId) -> None:
        # Once per read: looking names up costs as much as checking a small frame.
        self._pack = pack.short
        key = key_of(ObjectKind.PACK, pack.hex)
        self._step = f"move {key} away and push the same tree again, or pull another snapshot"

    def about(self, frame: PlannedFrame) -> contextlib.AbstractContextManager[None]:
        """Say which frame errors are about meanwhile."""
        what = f"frame at offset {frame.offset} of pack {self._pack}"
        return about(what, next_step=self._step)
