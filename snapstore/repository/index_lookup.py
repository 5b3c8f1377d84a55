"""Looking chunks up in an index of any size, without loading it (`format_spec/03-indexes.md`).

Ids are sorted, so that a batch goes through the index once from front to back: entries of `FANO`,
then the buckets of `CHNK`, then rows of `FRAM` and `PACK` of what was found. What is held is the
checksums of the index's blocks, `FANO` if there is room for it, a number for each frame that was
found, and one part of a batch.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format import limits
from snapstore.format.envelope import HEADER_BYTES_MAX, INDEX_MAGIC, parse_header
from snapstore.format.index import (
    CHUNK_DTYPE,
    FRAME_DTYPE,
    PACK_DTYPE,
    TablePlace,
    buckets_of,
    check_buckets,
    check_ends,
    check_frame_rows,
    check_frames_in_packs,
    check_packs,
    parse_shape,
)
from snapstore.format.tables import U64, Mask, Rows, column, id_words
from snapstore.ids import Digest
from snapstore.repository.chunk_runs import MISSING, Places, find_ids
from snapstore.repository.index_blocks import BlockReader, Source, StoredSource, survey
from snapstore.repository.objects import about

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from snapstore.backend.base import Backend, ObjectInfo
    from snapstore.repository.frames import FrameTable, Numbers
    from snapstore.repository.index_cache import IndexCache

__all__ = ["INDEX_READERS", "IndexLookup", "open_blocks"]

INDEX_READERS = 8
"""Reads in flight. More are slower from memory, where they wait for the interpreter."""

_IDS_AT_ONCE = 4096
_ROWS_AT_ONCE = 1 << 18
"""Rows of `CHNK` in memory: 11 MB, and about three times that while they are searched."""

_FRAMES_AT_ONCE = 1 << 14
_FANOUT_AT_ONCE = 1 << 17

_BUCKET_ROWS_MAX = 1 << 14
"""No bucket of real digests has this many: 64 are meant, and twice that is one in 10^12."""

_SUPERSEDES_BYTES_MAX = 1 << 20
_UNUSABLE = -1


def open_blocks(
    backend: Backend, info: ObjectInfo, executor: Executor, cache: IndexCache | None
) -> BlockReader:
    """Make an index of the store ready to be read in blocks.

    The first time on this machine all of it is read and verified. Checksums of its blocks are kept
    in the cache, and for a store that is not a directory a copy of the index as well. Without a
    cache, or where it is full, every caller verifies anew.

    Raises:
        ObjectNotFound: The index is gone.
        FormatError: It is no index.
        DigestMismatch: It is damaged.
    """
    if info.size_bytes > limits.INDEX_BYTES_MAX:
        raise LimitExceeded(f"index {info.name[:12]}: {info.size_bytes} bytes")
    stored = StoredSource(backend, info.name)
    sources: list[Source] = [stored]
    readers = min(backend.capabilities.readers_in_parallel, INDEX_READERS)
    root = Digest.parse(info.name)
    if cache is None:
        sums = survey(stored, root, info.size_bytes, executor)
    else:
        is_local = backend.capabilities.url.startswith("file:")
        found = cache.require(
            info.name,
            info.size_bytes,
            lambda keep: survey(stored, root, info.size_bytes, executor, keep),
            copy=not is_local,
        )
        sums = found.sums
        if found.copy is not None:
            sources.insert(0, found.copy)
    return BlockReader(sources, info.size_bytes, sums, executor, readers=readers)


class IndexLookup:
    """Finds chunks in one index. Used by one thread."""

    def __init__(
        self,
        name: str,
        blocks: BlockReader,
        frames: FrameTable,
        usable: Callable[[Rows], Mask],
        *,
        fanout_bytes_max: int = 0,
    ) -> None:
        """Read the header, and `FANO` if it is small enough.

        Args:
            name: Of the index.
            blocks: Reads it.
            frames: Gets the frames that hold chunks which were found.
            usable: Tells which packs may be relied on, given rows of `PACK`.
            fanout_bytes_max: How much of memory `FANO` may take; it saves half of all reads.

        Raises:
            FormatError: It is no index.
        """
        self.name = name
        self._blocks = blocks
        self._frames = frames
        self._usable = usable
        with self._about():
            head = self._read(0, min(blocks.length, HEADER_BYTES_MAX))
            self._envelope = parse_header(head, magic=INDEX_MAGIC, object_length=blocks.length)
            self._envelope.check_root(Digest.parse(name))
            self._shape = parse_shape(self._envelope)
        # One number a frame, 0 where nobody has asked: pages that are never written take no room.
        self._numbers = np.zeros(self._shape.frames.count, np.int32)
        self._fanout = np.empty(0, np.uint32)
        if self._shape.fanout.count * self._fanout.itemsize <= fanout_bytes_max:
            with self._about():
                self._fanout = self._load_fanout()

    @property
    def held_bytes(self) -> int:
        """What this may take of memory in the end."""
        return self._blocks.held_bytes + self._numbers.nbytes + self._fanout.nbytes

    def supersedes(self) -> tuple[str, ...]:
        """Names of indexes that this one contains; none if they are too many to be worth it."""
        info = self._envelope.find(b"SUPR")
        if info is None or info.stored_length > _SUPERSEDES_BYTES_MAX:
            return ()
        with self._about():
            data = self._read(info.offset, info.end)
        return tuple(data[at : at + 32].hex() for at in range(0, len(data) - 31, 32))

    def lookup(self, words: U64) -> Places:
        """Find the places of chunks in this index alone.

        Raises:
            FormatError: The index contradicts itself.
            DigestMismatch: It was damaged after it was verified.
            BackendError: The storage failed.
        """
        places = Places.unknown(len(words))
        order = np.argsort(words[:, 0], kind="stable")
        with self._about():
            for at in range(0, len(order), _IDS_AT_ONCE):
                rows = order[at : at + _IDS_AT_ONCE]
                self._find_sorted(words[rows], rows, places)
            # All frames of the batch at once: they are dense where the chunks were far apart.
            self._number_places(places)
        return places

    def _find_sorted(self, wanted: U64, rows: Numbers, places: Places) -> None:
        """Find chunks, given in order of their ids; `places` gets rows of `FRAM` as frames."""
        in_bucket = buckets_of(wanted[:, 0], self._shape.bits)
        buckets = np.unique(in_bucket)
        begins, ends = self._bucket_rows(buckets)
        for some in _parts(ends - begins):
            low = int(np.searchsorted(in_bucket, buckets[some][0]))
            high = int(np.searchsorted(in_bucket, buckets[some][-1], side="right"))
            chunks = _as_rows(
                self._gather(self._shape.chunks, begins[some], ends[some]), CHUNK_DTYPE
            )
            check_buckets(
                chunks,
                buckets=np.repeat(buckets[some], ends[some] - begins[some]),
                bits=self._shape.bits,
                frame_count=self._shape.frames.count,
            )
            words = id_words(chunks["id"])
            found = find_ids(np.ascontiguousarray(words[:, 0]), words, wanted[low:high])
            hit = found != MISSING
            chunks, at = chunks[found[hit]], rows[low:high][hit]
            places.frames[at] = chunks["frame"]
            places.offsets[at], places.lengths[at] = chunks["offset"], chunks["length"]

    def _bucket_rows(self, buckets: U64) -> tuple[Numbers, Numbers]:
        """Where each of these buckets begins and ends in `CHNK`."""
        first = buckets.astype(np.int64)
        if len(self._fanout):
            bounds = np.stack((self._fanout[first], self._fanout[first + 1]), axis=1)
        else:
            data = self._gather(self._shape.fanout, first, first + 2)
            entries = np.frombuffer(data, "<u8")
            self._check_fanout(entries)
            bounds = entries.reshape(len(buckets), 2).astype(np.uint32)
        begins: Numbers = bounds[:, 0].astype(np.int64)
        ends: Numbers = bounds[:, 1].astype(np.int64)
        if (ends - begins > _BUCKET_ROWS_MAX).any():
            raise LimitExceeded(f"a bucket has more than {_BUCKET_ROWS_MAX} chunks")
        return begins, ends

    def _load_fanout(self) -> npt.NDArray[np.uint32]:
        table = self._shape.fanout
        fanout = np.empty(table.count, np.uint32)
        for at in range(0, table.count, _FANOUT_AT_ONCE):
            # Together with the last entry before, which must not be greater either.
            begin, end = max(at - 1, 0), min(at + _FANOUT_AT_ONCE, table.count)
            some = np.frombuffer(self._gather_one(table, begin, end), "<u8")
            self._check_fanout(some)
            fanout[begin:end] = some
        return fanout

    def _check_fanout(self, some: U64) -> None:
        if (some[1:] < some[:-1]).any() or (some > self._shape.chunks.count).any():
            raise Malformed("FANO does not ascend to the number of chunks")

    def _number_places(self, places: Places) -> None:
        """Turn rows of `FRAM` into frame numbers, and forget chunks in packs that are not there."""
        hit = np.flatnonzero(places.frames != MISSING)
        in_frames = places.frames[hit]
        wanted = np.unique(in_frames)
        for at in range(0, len(wanted), _FRAMES_AT_ONCE):
            self._number_frames(wanted[at : at + _FRAMES_AT_ONCE])
        numbers = self._numbers[in_frames].astype(np.int64)
        is_usable = numbers != _UNUSABLE
        lost, hit, numbers = hit[~is_usable], hit[is_usable], numbers[is_usable] - 1
        ends = (places.offsets[hit] + places.lengths[hit]).astype(np.uint64)
        check_ends(ends, column(self._frames.rows[numbers], "plain_length"))
        places.frames[hit] = numbers
        places.frames[lost] = MISSING
        places.offsets[lost] = places.lengths[lost] = 0

    def _number_frames(self, wanted: Numbers) -> None:
        """Add those of these frames to the frame table that are not there yet."""
        fresh = wanted[self._numbers[wanted] == 0]
        if not len(fresh):
            return
        frames = _as_rows(self._gather(self._shape.frames, fresh, fresh + 1), FRAME_DTYPE).copy()
        check_frame_rows(frames, pack_count=self._shape.packs.count)
        pack_rows, frames["pack"] = np.unique(frames["pack"], return_inverse=True)
        at = pack_rows.astype(np.int64)
        packs = _as_rows(self._gather(self._shape.packs, at, at + 1), PACK_DTYPE)
        check_packs(packs, what="PACK")
        check_frames_in_packs(frames, packs, what="FRAM")
        usable = self._usable(packs)
        is_usable = usable[frames["pack"]]
        self._numbers[fresh[~is_usable]] = _UNUSABLE
        frames = frames[is_usable]
        frames["pack"] = (np.cumsum(usable) - 1)[frames["pack"]]
        first = self._frames.add_frames(frames, self._frames.add_packs(packs[usable]))
        self._numbers[fresh[is_usable]] = np.arange(first + 1, first + 1 + len(frames))

    def _gather(self, table: TablePlace, begins: Numbers, ends: Numbers) -> bytes:
        base, size = table.offset, table.row_bytes
        return self._blocks.gather(base + begins * size, base + ends * size)

    def _gather_one(self, table: TablePlace, begin: int, end: int) -> bytes:
        return self._read(
            table.offset + begin * table.row_bytes, table.offset + end * table.row_bytes
        )

    def _read(self, begin: int, end: int) -> bytes:
        return self._blocks.gather(np.array([begin], np.int64), np.array([end], np.int64))

    def _about(self) -> contextlib.AbstractContextManager[None]:
        return about(f"index {self.name[:12]}")


def _parts(counts: Numbers) -> Iterator[slice]:
    """Divide buckets, given their numbers of rows, into parts that may be in memory at once."""
    part = np.cumsum(counts) // _ROWS_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(counts)]
    yield from (slice(low, high) for low, high in itertools.pairwise(cuts) if low < high)


def _as_rows(data: bytes, dtype: np.dtype[np.void]) -> Rows:
    return np.frombuffer(data, dtype) if data else np.zeros(0, dtype)
