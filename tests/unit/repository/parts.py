"""Small real stores in memory for the tests of this folder."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from typing_extensions import override

from snapstore.backend.base import ObjectInfo, ObjectKind
from snapstore.backend.memory import MemoryBackend, MemoryObjects
from snapstore.format import index as index_format
from snapstore.format.tables import U64, id_words
from snapstore.ids import Digest
from snapstore.testing.clock import ManualClock

__all__ = [
    "ForgetfulBackend",
    "add_index",
    "chunk_id",
    "memory_stores",
    "pack_name",
    "words_of",
]

_numbers = itertools.count()


def memory_stores() -> Iterator[str]:
    """URLs of stores in memory that nobody else uses."""
    for number in _numbers:
        yield f"memory://unit-{number}"


class ForgetfulBackend(MemoryBackend):
    """Its listings are stale: without what is new, with what is gone (`Backend`, S6)."""

    def __init__(self, objects: MemoryObjects | None = None) -> None:
        super().__init__(objects)
        self.unnoticed: set[str] = set()
        self.ghosts: dict[ObjectKind, list[ObjectInfo]] = {}

    @override
    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`."""
        for info in super().list(kind, prefix):
            if info.name not in self.unnoticed:
                yield info
        yield from self.ghosts.get(kind, [])


def chunk_id(number: int, *, first_word: int | None = None) -> bytes:
    """An id for a chunk; with `first_word` one that begins with these eight bytes."""
    raw = Digest.of(number.to_bytes(8, "little", signed=True)).raw
    return raw if first_word is None else first_word.to_bytes(8, "big") + raw[8:]


def words_of(ids: Sequence[bytes]) -> U64:
    """Ids as the catalog takes them."""
    return id_words(np.array(ids, "V32"))


def pack_name(number: int) -> str:
    """The name of a pack that `add_index` makes."""
    return Digest.of(b"pack %d" % number).hex


def add_index(
    backend: MemoryBackend,
    pack: int,
    chunks: Iterable[tuple[bytes, int]],
    *,
    clock: ManualClock | None = None,
    supersedes: Sequence[Digest] = (),
) -> Digest:
    """Store an index of one pack with one frame that holds these chunks, and a pack of its length.

    The places tell the pack: chunk number *n* lies at offset *n* times 1000 + `pack`.
    """
    if clock is not None:
        clock.advance_s(1)
    rows = [(raw, 0, number * 1000 + pack, length) for number, (raw, length) in enumerate(chunks)]
    table = np.array(rows, index_format.CHUNK_DTYPE)
    length = 8192
    packs = np.array([(bytes.fromhex(pack_name(pack)), length)], index_format.PACK_DTYPE)
    frames = np.zeros(1, index_format.FRAME_DTYPE)
    frames["stored_length"], frames["plain_length"], frames["codec"] = 4096, 4 << 20, 1
    built = index_format.build_index(packs, frames, table, supersedes=supersedes)
    backend.put_new(ObjectKind.PACK, pack_name(pack), [bytes(length)])
    backend.put_new(ObjectKind.INDEX, built.root.hex, built.pieces)
    return built.root
