"""Small real stores in memory for the tests of this folder."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from typing_extensions import override

from snapstore.backend.base import Backend, ObjectInfo, ObjectKind
from snapstore.backend.memory import MemoryBackend, MemoryObjects
from snapstore.clock import format_utc
from snapstore.format import index as index_format
from snapstore.format.config import StoreConfig
from snapstore.format.mark import Mark, MarkState, encode_mark
from snapstore.format.tables import U64, id_words
from snapstore.ids import Digest
from snapstore.options import StoreOptions
from snapstore.repository.chains import append_generation, head_number
from snapstore.repository.store import Store
from snapstore.testing.clock import ManualClock

__all__ = [
    "ForgetfulBackend",
    "add_index",
    "chunk_id",
    "memory_stores",
    "names_of",
    "open_on",
    "pack_name",
    "words_of",
    "write_files",
    "write_mark",
]

CONFIG = StoreConfig(created="2026-11-30T05:00:00Z", store_id="0" * 32)

_numbers = itertools.count()


def memory_stores() -> Iterator[str]:
    """URLs of stores in memory that nobody else uses."""
    for number in _numbers:
        yield f"memory://unit-{number}"


def open_on(backend: Backend, clock: ManualClock) -> Store:
    """Open a store on a backend that the test holds."""
    return Store(backend, CONFIG, StoreOptions(threads=2), clock)


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Make a tree that has just these files; what it had before is gone."""
    for path in sorted(folder.rglob("*"), reverse=True) if folder.exists() else []:
        path.rmdir() if path.is_dir() else path.unlink()
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def names_of(backend: Backend, kind: ObjectKind) -> set[str]:
    """Names of all objects of a kind."""
    return {info.name for info in backend.list(kind)}


def write_mark(
    backend: Backend, clock: ManualClock, kind: ObjectKind, name: str, state: MarkState
) -> None:
    """Write the next generation of a mark, as a pruner does."""
    chain = f"{kind.value}/{name}"
    mark = Mark(created=format_utc(clock.now_ns()), nonce="f" * 32, state=state)
    newest = head_number(backend, ObjectKind.MARK, chain)
    append_generation(backend, ObjectKind.MARK, chain, encode_mark(mark), after=newest)


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
