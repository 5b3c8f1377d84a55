"""Indexes: from chunk id to place (`format_spec/03-indexes.md`).

Small indexes are read whole; of large ones a lookup reads one bucket, which can be checked alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format import limits
from snapstore.format.envelope import (
    INDEX_MAGIC,
    Built,
    Envelope,
    Section,
    build,
    parse_whole,
    read_section,
)
from snapstore.format.pack import check_frame_sizes
from snapstore.format.tables import (
    U64,
    Rows,
    as_rows,
    column,
    first_words,
    order_of_ids,
    refuse,
    refuse_over,
    unsorted_ids,
)
from snapstore.ids import Digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from snapstore.units import BytesLike

__all__ = [
    "CHUNK_DTYPE",
    "FRAME_DTYPE",
    "PACK_DTYPE",
    "IndexShape",
    "IndexTables",
    "TablePlace",
    "bucket_of",
    "buckets_of",
    "build_index",
    "check_bucket",
    "check_buckets",
    "check_ends",
    "check_frame_rows",
    "check_frames_in_packs",
    "check_packs",
    "check_places",
    "fanout_bits",
    "parse_index",
    "parse_shape",
]

PACK_DTYPE = np.dtype([("id", "V32"), ("length", "<u8")])
FRAME_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("stored_length", "<u4"),
        ("plain_length", "<u4"),
        ("pack", "<u4"),
        ("codec", "<u2"),
        ("zero", "V2"),
        ("checksum", "V16"),
    ]
)
CHUNK_DTYPE = np.dtype([("id", "V32"), ("frame", "<u4"), ("offset", "<u4"), ("length", "<u4")])
_ID_DTYPE = np.dtype([("id", "V32")])
_FANOUT_DTYPE = np.dtype([("first", "<u8")])

BUCKET_ROWS = 64
FANOUT_ROWS_MAX = (1 << limits.INDEX_FANOUT_BITS_MAX) + 1

assert PACK_DTYPE.itemsize == limits.INDEX_PACK_ROW_BYTES
assert FRAME_DTYPE.itemsize == limits.INDEX_FRAME_ROW_BYTES
assert CHUNK_DTYPE.itemsize == limits.INDEX_CHUNK_ROW_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class IndexTables:
    """A whole index, all rules checked; rows of the types of this module."""

    root: Digest
    packs: Rows
    frames: Rows
    chunks: Rows
    fanout: U64
    supersedes: tuple[Digest, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TablePlace:
    """Where the rows of a table lie in the object."""

    offset: int
    count: int
    row_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class IndexShape:
    """What the header of an index tells about its tables, none of which was read.

    `bits` of an id choose its bucket.
    """

    packs: TablePlace
    frames: TablePlace
    fanout: TablePlace
    chunks: TablePlace
    bits: int


def fanout_bits(count: int) -> int:
    """How many bits of an id choose a bucket in an index of `count` chunks."""
    buckets = -(-count // BUCKET_ROWS)
    return min(max(buckets - 1, 0).bit_length(), limits.INDEX_FANOUT_BITS_MAX)


def bucket_of(chunk_id: bytes, bits: int) -> int:
    """The bucket of an id: its first `bits` bits."""
    return int.from_bytes(chunk_id[:8], "big") >> (64 - bits)


def buckets_of(words: U64, bits: int) -> U64:
    """The buckets of ids, given their first eight bytes as numbers."""
    if bits == 0:
        return np.zeros(len(words), np.uint64)
    return words >> np.uint64(64 - bits)


def build_index(
    packs: Rows, frames: Rows, chunks: Rows, *, supersedes: Sequence[Digest] = ()
) -> Built:
    """Encode an index from rows in any order.

    `frames["pack"]` are rows of `packs` and `chunks["frame"]` rows of `frames`, as given; both are
    renumbered. Packs, frames and chunk ids that are there twice (when indexes are merged) are
    written once, the first of each.

    Raises:
        Malformed: The rows contradict each other, which merged indexes of a damaged store may.
        LimitExceeded: They exceed a limit.
    """
    refuse(column(frames, "pack") >= len(packs), what="index FRAM", reason="no such pack")
    refuse(column(chunks, "frame") >= len(frames), what="index CHNK", reason="no such frame")
    packs, pack_rows = _unique_packs(packs)
    frames = frames.copy()
    frames["pack"] = pack_rows[frames["pack"]]
    frames, frame_rows = _unique_frames(frames)
    order = order_of_ids(chunks["id"])
    chunks = chunks[order]
    chunks = chunks[_first_of_equal_ids(chunks["id"])]
    chunks["frame"] = frame_rows[chunks["frame"]]
    _check_tables(packs, frames, chunks)
    sections = [
        Section(b"PACK", packs),
        Section(b"FRAM", frames),
        Section(b"FANO", _fanout(chunks)),
        Section(b"CHNK", chunks),
    ]
    if supersedes:
        ids = sorted({digest.raw for digest in supersedes})
        assert len(ids) <= limits.INDEX_SUPERSEDES_MAX, len(ids)
        sections.append(Section(b"SUPR", b"".join(ids)))
    return build(INDEX_MAGIC, sections)


def parse_index(data: BytesLike, *, root: Digest | None = None) -> IndexTables:
    """Check and decode a whole index; the tables refer to `data`.

    Raises:
        FormatError: No writer of this format produces it.
        DigestMismatch: It is damaged, or `root` is given and another.
    """
    envelope = parse_whole(data, magic=INDEX_MAGIC, root=root)
    packs = _rows(envelope, data, b"PACK", PACK_DTYPE, limits.INDEX_PACKS_MAX)
    frames = _rows(envelope, data, b"FRAM", FRAME_DTYPE, limits.INDEX_FRAMES_MAX)
    chunks = _rows(envelope, data, b"CHNK", CHUNK_DTYPE, limits.INDEX_CHUNKS_MAX)
    _check_tables(packs, frames, chunks)
    fanout = column(_rows(envelope, data, b"FANO", _FANOUT_DTYPE, FANOUT_ROWS_MAX), "first")
    if not np.array_equal(fanout, _fanout(chunks)):
        raise Malformed("index FANO: does not match CHNK")
    supersedes: tuple[Digest, ...] = ()
    if envelope.find(b"SUPR") is not None:
        ids = _rows(envelope, data, b"SUPR", _ID_DTYPE, limits.INDEX_SUPERSEDES_MAX)["id"]
        refuse(unsorted_ids(ids), what="index SUPR", reason="not sorted, or there twice")
        supersedes = tuple(Digest(one.tobytes()) for one in ids)
    return IndexTables(envelope.root, packs, frames, chunks, fanout, supersedes)


def parse_shape(envelope: Envelope) -> IndexShape:
    """Find the tables of an index whose header was checked.

    Raises:
        Malformed: A table is missing, is not whole rows, or has a length that cannot be.
        LimitExceeded: A table has too many rows.
    """
    packs = _place(envelope, b"PACK", PACK_DTYPE, limits.INDEX_PACKS_MAX)
    frames = _place(envelope, b"FRAM", FRAME_DTYPE, limits.INDEX_FRAMES_MAX)
    fanout = _place(envelope, b"FANO", _FANOUT_DTYPE, FANOUT_ROWS_MAX)
    chunks = _place(envelope, b"CHNK", CHUNK_DTYPE, limits.INDEX_CHUNKS_MAX)
    bits = fanout_bits(chunks.count)
    if fanout.count != (1 << bits) + 1:
        raise Malformed(f"index FANO: {fanout.count} rows for {chunks.count} chunks")
    return IndexShape(packs, frames, fanout, chunks, bits)


def check_bucket(rows: Rows, *, bucket: int, bits: int, frame_count: int) -> None:
    """Check the rows of one bucket that were read alone.

    Raises:
        Malformed: An id is out of order or belongs to another bucket, or a frame does not exist.
        LimitExceeded: A chunk is too long.
    """
    buckets = np.full(len(rows), bucket, np.uint64)
    check_buckets(rows, buckets=buckets, bits=bits, frame_count=frame_count)


def check_buckets(rows: Rows, *, buckets: U64, bits: int, frame_count: int) -> None:
    """Check the rows of several buckets, in ascending order, that were read alone.

    `buckets` has one number a row: that of the bucket it was found in.

    Raises:
        Malformed: An id is out of order or belongs to another bucket, or a frame does not exist.
        LimitExceeded: A chunk is too long.
    """
    _check_chunks(rows, frame_count=frame_count)
    wrong = buckets_of(first_words(rows["id"]), bits) != buckets
    if wrong.any():
        row = int(wrong.argmax())
        raise Malformed(f"index CHNK: id is not of bucket {int(buckets[row])}")


def check_places(chunks: Rows, plain_lengths: U64) -> None:
    """Check that chunks lie within their frames; `plain_lengths` has one number a chunk.

    Raises:
        Malformed: One does not.
    """
    check_ends(column(chunks, "offset") + column(chunks, "length"), plain_lengths)


def check_ends(ends: U64, plain_lengths: U64) -> None:
    """Check that chunks end, given the offsets where they do, within their frames.

    Raises:
        Malformed: One does not.
    """
    refuse(ends > plain_lengths, what="index CHNK", reason="does not end within its frame")


def check_packs(packs: Rows, *, what: str) -> None:
    """Check the lengths of packs, as indexes and layouts list them.

    Raises:
        LimitExceeded: A pack is too long.
        Malformed: It is empty.
    """
    lengths = column(packs, "length")
    refuse_over(lengths, limits.PACK_BYTES_MAX, what=what, reason="length")
    refuse(lengths == 0, what=what, reason="an empty pack")


def check_frame_rows(frames: Rows, *, pack_count: int) -> None:
    """Check rows of `FRAM` that were read alone, before their packs are looked at.

    Raises:
        Malformed: The pack of one does not exist, or its sizes cannot be.
        LimitExceeded: A length is above its limit.
    """
    check_frame_sizes(frames, what="index FRAM")
    refuse(column(frames, "pack") >= pack_count, what="index FRAM", reason="no such pack")


def check_frames_in_packs(frames: Rows, packs: Rows, *, what: str) -> None:
    """Check the sizes of frames and that each lies within its pack.

    Raises:
        Malformed: One does not, or its pack does not exist.
        LimitExceeded: A length is above its limit.
    """
    check_frame_sizes(frames, what=what)
    refuse(column(frames, "pack") >= len(packs), what=what, reason="no such pack")
    ends = column(frames, "offset") + column(frames, "stored_length")
    pack_lengths = column(packs, "length")[frames["pack"]]
    refuse(ends > pack_lengths, what=what, reason="does not end within its pack")


def _check_tables(packs: Rows, frames: Rows, chunks: Rows) -> None:
    check_packs(packs, what="index PACK")
    refuse(unsorted_ids(packs["id"]), what="index PACK", reason="not sorted, or there twice")
    check_frames_in_packs(frames, packs, what="index FRAM")
    pack, offset = column(frames, "pack"), column(frames, "offset")
    ends = offset + column(frames, "stored_length")
    same = pack[1:] == pack[:-1]
    bad = np.zeros(len(frames), np.bool_)
    bad[1:] = (pack[1:] < pack[:-1]) | (same & (offset[1:] < ends[:-1]))
    refuse(bad, what="index FRAM", reason="not sorted, or overlaps the frame before")
    _check_chunks(chunks, frame_count=len(frames))
    check_places(chunks, column(frames, "plain_length")[chunks["frame"]])


def _check_chunks(chunks: Rows, *, frame_count: int) -> None:
    refuse(unsorted_ids(chunks["id"]), what="index CHNK", reason="not sorted, or there twice")
    refuse(column(chunks, "frame") >= frame_count, what="index CHNK", reason="no such frame")
    lengths = column(chunks, "length")
    refuse_over(lengths, limits.CHUNK_BYTES_MAX, what="index CHNK", reason="length")
    refuse(lengths == 0, what="index CHNK", reason="an empty chunk")


def _fanout(chunks: Rows) -> U64:
    bits = fanout_bits(len(chunks))
    fanout = np.zeros((1 << bits) + 1, np.uint64)
    buckets = buckets_of(first_words(chunks["id"]), bits)
    counts = np.bincount(buckets.astype(np.intp), minlength=1 << bits)
    np.cumsum(counts, out=fanout[1:])
    return fanout


def _place(envelope: Envelope, tag: bytes, dtype: np.dtype[np.void], rows_max: int) -> TablePlace:
    info = envelope.require(tag)
    count, rest = divmod(info.plain_length, dtype.itemsize)
    what = f"index {tag.decode()}"
    if rest:
        raise Malformed(f"{what}: {info.plain_length} bytes are no rows of {dtype.itemsize}")
    if count > rows_max:
        raise LimitExceeded(f"{what}: {count} rows, more than the limit of {rows_max}")
    return TablePlace(info.offset, count, dtype.itemsize)


def _rows(
    envelope: Envelope, data: BytesLike, tag: bytes, dtype: np.dtype[np.void], rows_max: int
) -> Rows:
    section = read_section(envelope, data, tag, limit_bytes=limits.INDEX_BYTES_MAX)
    return as_rows(section, dtype, what=f"index {tag.decode()}", rows_max=rows_max)


def _first_of_equal_ids(ids: Rows) -> npt.NDArray[np.bool_]:
    # In sorted ids, what does not increase is equal to the row before.
    return ~unsorted_ids(ids)


def _unique_packs(packs: Rows) -> tuple[Rows, npt.NDArray[np.intp]]:
    """Sort packs and drop those that are there twice; also tells where each row went."""
    order = order_of_ids(packs["id"])
    ordered = packs[order]
    first = _first_of_equal_ids(ordered["id"])
    group = np.cumsum(first) - 1
    unique = ordered[first]
    differs = unique["length"][group] != ordered["length"]
    refuse(differs, what="index PACK", reason="one pack with two lengths")
    rows = np.empty(len(packs), np.intp)
    rows[order] = group
    return unique, rows


def _unique_frames(frames: Rows) -> tuple[Rows, npt.NDArray[np.intp]]:
    """Sort frames and drop those that are there twice; also tells where each row went."""
    order = np.lexsort((frames["offset"], frames["pack"]))
    ordered = frames[order]
    first = np.ones(len(frames), np.bool_)
    first[1:] = (ordered["pack"][1:] != ordered["pack"][:-1]) | (
        ordered["offset"][1:] != ordered["offset"][:-1]
    )
    group = np.cumsum(first) - 1
    unique = ordered[first]
    differs = unique[group] != ordered
    refuse(differs, what="index FRAM", reason="one frame in two versions")
    rows = np.empty(len(frames), np.intp)
    rows[order] = group
    return unique, rows
