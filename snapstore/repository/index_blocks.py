"""Checked random access to an index that stays where it is.

An index is verified once as a whole, against the digests that its name commits to; at the same
time a checksum is taken of every block. From then on blocks are read alone and compared with these,
so that nothing is used that was not verified, wherever and whenever it is read.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import xxhash
from blake3 import blake3

from snapstore.backend.base import ObjectKind
from snapstore.errors import DigestMismatch, Malformed, SnapError
from snapstore.format import limits
from snapstore.format.envelope import INDEX_MAGIC, parse_header
from snapstore.repository.objects import about
from snapstore.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    from snapstore.backend.base import Backend
    from snapstore.format.tables import U64
    from snapstore.ids import Digest
    from snapstore.repository.frames import Numbers

__all__ = ["BLOCK_BYTES", "BlockReader", "Source", "StoredSource", "block_count", "survey"]

BLOCK_BYTES = 4 * KIB
"""A page, which is what a disk reads anyway: the checksums are 0.2 % of the index."""

_GAP_BLOCKS = 8
"""Reading this much in vain takes no longer than another request, on a disk or from memory."""

_RUN_BLOCKS = 1 * MIB // BLOCK_BYTES
_RUNS_PER_TASK_MIN = 8

_PIECE_BYTES = 4 * MIB
_PIECES_AHEAD = 4


class Source(Protocol):
    """A place that has the bytes of one index, or should have. Thread-safe."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset` on; raises `SnapError`."""
        ...

    def distrust(self) -> None:
        """Take note that it has other bytes than it should. Idempotent."""
        ...


class StoredSource:
    """An index in the store (`Source`)."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._name = name

    def read(self, offset: int, into: memoryview) -> None:
        """See `Source.read`."""
        self._backend.get_range(ObjectKind.INDEX, self._name, offset, into)

    def distrust(self) -> None:
        """See `Source.distrust`. Readers change nothing in a store."""


def block_count(length: int) -> int:
    """How many blocks an object of this length has."""
    return -(-length // BLOCK_BYTES)


def survey(
    source: Source,
    root: Digest,
    length: int,
    executor: Executor,
    keep: Callable[[memoryview], None] | None = None,
) -> U64:
    """Read an index once from end to end, verify it, and return the checksums of its blocks.

    Args:
        source: Where it is.
        root: Its name.
        length: How long it is.
        executor: Reads ahead.
        keep: Given all bytes in order, before they are verified.

    Raises:
        FormatError: It is no index.
        DigestMismatch: It is damaged, or another.
    """
    sums = np.empty(block_count(length), np.uint64)
    checker: _Checker | None = None
    for offset, piece in _pieces(source, length, executor):
        if checker is None:
            checker = _Checker(piece, root, length)
        checker.update(offset, piece)
        if keep is not None:
            keep(piece)
        first = offset // BLOCK_BYTES
        sums[first : first + block_count(len(piece))] = _sums(piece)
    if checker is None:
        raise Malformed(f"index {root.short}: it is empty")
    checker.finish()
    return sums


class _Checker:
    """Compares an object that comes by in order with the digests in its directory."""

    def __init__(self, head: memoryview, root: Digest, length: int) -> None:
        self._name = f"index {root.short}"
        with about(self._name):
            envelope = parse_header(head, magic=INDEX_MAGIC, object_length=length)
            envelope.check_root(root)
        self._sections = envelope.sections
        self._hashers = [blake3() for _ in self._sections]

    def update(self, offset: int, piece: memoryview) -> None:
        stop = offset + len(piece)
        end = limits.ENVELOPE_HEADER_BYTES + limits.DIRECTORY_ENTRY_BYTES * len(self._sections)
        for info, hasher in zip(self._sections, self._hashers, strict=True):
            if end < stop and any(piece[max(end - offset, 0) : max(info.offset - offset, 0)]):
                raise Malformed(f"{self._name}: bytes before offset {info.offset} are not zero")
            if info.offset < stop and offset < info.end:
                hasher.update(piece[max(info.offset - offset, 0) : info.end - offset])
            end = info.end

    def finish(self) -> None:
        for info, hasher in zip(self._sections, self._hashers, strict=True):
            if hasher.digest() != info.digest:
                what = f"{self._name} section {info.tag.decode()}"
                raise DigestMismatch(f"{what} at offset {info.offset}: damaged")


def _pieces(source: Source, length: int, executor: Executor) -> Iterator[tuple[int, memoryview]]:
    """Give an object in order, read a little ahead, in buffers that are used again."""
    size = min(_PIECE_BYTES, length)
    spare = [memoryview(bytearray(size)) for _ in range(_PIECES_AHEAD)]
    pending: collections.deque[tuple[int, memoryview, memoryview, Future[None]]]
    pending = collections.deque()
    asked = 0
    while pending or asked < length:
        while spare and asked < length:
            buffer = spare.pop()
            piece = buffer[: min(size, length - asked)]
            pending.append((asked, piece, buffer, executor.submit(source.read, asked, piece)))
            asked += len(piece)
        offset, piece, buffer, reading = pending.popleft()
        reading.result()
        yield offset, piece
        spare.append(buffer)


def _sums(view: memoryview) -> list[int]:
    digest = xxhash.xxh3_64_intdigest
    return [digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Runs:
    """Ranges in bytes and in blocks; those from `starts[n]` to `starts[n + 1]` are read at once."""

    begins: list[int]
    ends: list[int]
    firsts: list[int]
    lasts: list[int]
    starts: list[int]

    @classmethod
    def of(cls, begins: Numbers, ends: Numbers) -> Self:
        firsts = begins // BLOCK_BYTES
        lasts = -(-ends // BLOCK_BYTES)
        is_far = firsts[1:] > lasts[:-1] + _GAP_BLOCKS
        is_long = firsts[1:] // _RUN_BLOCKS != firsts[:-1] // _RUN_BLOCKS
        starts = [0, *(np.flatnonzero(is_far | is_long) + 1).tolist(), len(begins)]
        return cls(begins.tolist(), ends.tolist(), firsts.tolist(), lasts.tolist(), starts)


class BlockReader:
    """Reads ranges of one index, each block of them compared with its checksum. Thread-safe."""

    def __init__(
        self,
        sources: Sequence[Source],
        length: int,
        sums: U64,
        executor: Executor,
        *,
        readers: int,
    ) -> None:
        """Prepare to read.

        Args:
            sources: Where the index is, the best place first.
            length: Of the index.
            sums: The checksum of each block.
            executor: Reads in parallel.
            readers: Reads that are worth having in flight.
        """
        assert len(sums) == block_count(length), (len(sums), length)
        self.length = length
        self._sources = tuple(sources)
        self._sums = sums
        self._executor = executor
        self._readers = readers

    @property
    def held_bytes(self) -> int:
        """What this takes of memory."""
        return self._sums.nbytes

    def gather(self, begins: Numbers, ends: Numbers) -> bytes:
        """Read ranges and join them. Both arrays ascend; ranges may overlap.

        Neighbouring ranges are read at once, distant ones in parallel.

        Raises:
            DigestMismatch: No source has the bytes that were verified.
            BackendError: The storage failed.
        """
        if not len(begins):
            return b""
        runs = _Runs.of(begins, ends)
        count = len(runs.starts) - 1
        tasks = max(min(self._readers, count // _RUNS_PER_TASK_MIN), 1)
        if tasks == 1:
            return b"".join(self._read_runs(runs, 0, count))
        cuts = [count * task // tasks for task in range(tasks + 1)]
        futures = [
            self._executor.submit(self._read_runs, runs, low, high)
            for low, high in itertools.pairwise(cuts)
        ]
        return b"".join(itertools.chain.from_iterable([future.result() for future in futures]))

    def _read_runs(self, runs: _Runs, low: int, high: int) -> list[bytes]:
        """Read some runs one after the other, through one buffer; may be on another thread."""
        found = []
        buffer = memoryview(bytearray())
        for start, stop in itertools.pairwise(runs.starts[low : high + 1]):
            first, last = runs.firsts[start], max(runs.lasts[stop - 1], runs.lasts[start])
            offset = first * BLOCK_BYTES
            size = min(last * BLOCK_BYTES, self.length) - offset
            if size > len(buffer):
                buffer = memoryview(bytearray(2 * size))
            view = buffer[:size]
            self._fill(view, first, runs.firsts[start:stop], runs.lasts[start:stop])
            found += [
                bytes(view[begin - offset : end - offset])
                for begin, end in zip(runs.begins[start:stop], runs.ends[start:stop], strict=True)
            ]
        return found

    def _fill(self, view: memoryview, first: int, firsts: list[int], lasts: list[int]) -> None:
        """Read a run from the first source that has the right bytes for it."""
        sources = self._sources
        damaged = 0
        for source in sources:
            is_last = source is sources[-1]
            try:
                source.read(first * BLOCK_BYTES, view)
            except SnapError:
                if is_last:
                    raise
            else:
                wrong = self._first_wrong(view, first, firsts, lasts)
                if wrong is None:
                    return
                damaged = wrong
            source.distrust()
            if not is_last:
                self._sources = tuple(other for other in self._sources if other is not source)
        offset = damaged * BLOCK_BYTES
        raise DigestMismatch(f"the block at offset {offset} is damaged")

    def _first_wrong(
        self, view: memoryview, first: int, firsts: list[int], lasts: list[int]
    ) -> int | None:
        """The first block of the ranges that is not what it was; what lies between is not used."""
        sums = self._sums[first : first + block_count(len(view))].tolist()
        digest = xxhash.xxh3_64_intdigest
        done = first
        for begin, end in zip(firsts, lasts, strict=True):
            for block in range(max(begin, done), end):
                at = (block - first) * BLOCK_BYTES
                if digest(view[at : at + BLOCK_BYTES]) != sums[block - first]:
                    return block
            done = max(done, end)
        return None
