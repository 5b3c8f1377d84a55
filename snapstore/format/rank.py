"""Rank manifests: the content of one rank (`format_spec/04-manifests.md`, section 2)."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from snapstore.errors import Malformed
from snapstore.format import limits
from snapstore.format.canonical import Word, decode_document, encode
from snapstore.format.envelope import (
    RANK_MAGIC,
    Built,
    Section,
    build,
    parse_whole,
    read_section,
)
from snapstore.format.tables import (
    STREAM_DTYPE,
    Rows,
    as_rows,
    check_runs,
    column,
    refuse,
    refuse_over,
)
from snapstore.format.tree import EntryType, TreeEntry, decode_tree, encode_tree
from snapstore.ids import Digest
from snapstore.units import BytesLike

__all__ = [
    "EXTENT_DTYPE",
    "HOST",
    "STREAM_DTYPE",
    "RankMeta",
    "RankNumber",
    "RankTables",
    "StreamInfo",
    "build_rank",
    "check_tree_against_streams",
    "encode_meta",
    "parse_extents",
    "parse_meta",
    "parse_rank",
    "parse_streams",
    "parse_tree",
]

HOST: Literal["host"] = "host"
"""The rank of what belongs to no process of the job."""

RankNumber = Literal["host"] | Annotated[int, msgspec.Meta(ge=0, le=limits.RANK_NUMBER_MAX)]

EXTENT_DTYPE = np.dtype(
    [("length", "<u8"), ("chunk_offset", "<u4"), ("chunk_length", "<u4"), ("id", "V32")]
)
"""An extent whose `chunk_length` is 0 is zeros."""
FORMAT: Final = "snapstore/rank"

_ID_BYTES = 32

assert EXTENT_DTYPE.itemsize == limits.EXTENT_ROW_BYTES


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a stream comes from; for people and for the next push, never needed to read it.

    Attributes:
        data_class: What kind of data it holds (stored as `class`).
        origin: The path or the region it was read from.
    """

    data_class: Word = msgspec.field(name="class")
    origin: Annotated[str, msgspec.Meta(max_length=limits.ORIGIN_CHARS_MAX)]


class RankMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank manifest says besides its tables.

    Attributes:
        rank: A number, or `HOST`.
        streams: One entry for each row of the stream table.
        placement: GPU ordinal and UUID, addresses, allocation order; empty when unknown.
    """

    rank: RankNumber
    streams: tuple[StreamInfo, ...] = ()
    placement: dict[str, object] = {}
    format: Literal["snapstore/rank"] = FORMAT
    version: Literal[1] = 1


@dataclasses.dataclass(frozen=True, slots=True)
class RankTables:
    """A whole rank manifest, all rules checked."""

    root: Digest
    meta: RankMeta
    tree: list[TreeEntry]
    streams: Rows
    extents: Rows


def build_rank(meta: RankMeta, tree: Sequence[TreeEntry], streams: Rows, extents: Rows) -> Built:
    """Encode a rank manifest.

    Raises:
        Malformed: The tree or the metadata hold what the format cannot say.
        LimitExceeded: They exceed a limit.
    """
    assert len(meta.streams) == len(streams), (len(meta.streams), len(streams))
    _check_extents(extents, streams)
    check_tree_against_streams(tree, streams)
    return build(
        RANK_MAGIC,
        [
            Section(b"META", encode_meta(meta)),
            Section(b"TREE", encode_tree(tree)),
            Section(b"STRM", streams),
            Section(b"XTNT", extents),
        ],
    )


def parse_rank(data: BytesLike, *, root: Digest | None = None) -> RankTables:
    """Check and decode a whole rank manifest; the tables refer to `data`.

    Raises:
        FormatError: No writer of this format produces it.
        DigestMismatch: It is damaged, or `root` is given and another.
    """
    envelope = parse_whole(data, magic=RANK_MAGIC, root=root)
    meta = parse_meta(read_section(envelope, data, b"META", limit_bytes=limits.RANK_META_BYTES_MAX))
    tree = parse_tree(read_section(envelope, data, b"TREE", limit_bytes=limits.RANK_TREE_BYTES_MAX))
    streams = parse_streams(
        read_section(envelope, data, b"STRM", limit_bytes=limits.RANK_BYTES_MAX)
    )
    if len(streams) != len(meta.streams):
        raise Malformed(
            f"rank manifest META: {len(meta.streams)} streams, but STRM has {len(streams)}"
        )
    extents = parse_extents(
        read_section(envelope, data, b"XTNT", limit_bytes=limits.RANK_BYTES_MAX), streams
    )
    check_tree_against_streams(tree, streams)
    return RankTables(envelope.root, meta, tree, streams, extents)


def encode_meta(meta: RankMeta) -> bytes:
    """Encode the section `META`.

    Raises:
        Malformed: It holds what canonical JSON cannot say.
    """
    data = encode(meta, what="rank manifest META")
    parse_meta(data)
    return data


def parse_meta(data: BytesLike) -> RankMeta:
    """Check and decode the section `META`.

    Raises:
        FormatError: It is not what the format says.
    """
    return decode_document(
        data,
        RankMeta,
        format_word=FORMAT,
        what="rank manifest META",
        limit_bytes=limits.RANK_META_BYTES_MAX,
    )


def parse_tree(data: BytesLike) -> list[TreeEntry]:
    """Check and decode the section `TREE`.

    Raises:
        FormatError: It is not what the format says.
    """
    return decode_tree(data)


def parse_streams(data: BytesLike) -> Rows:
    """See the section `STRM` as rows; `parse_extents` checks what they say.

    Raises:
        FormatError: It is not what the format says.
    """
    what = "rank manifest STRM"
    streams = as_rows(data, STREAM_DTYPE, what=what, rows_max=limits.RANK_STREAMS_MAX)
    refuse_over(
        column(streams, "length"), limits.STREAM_BYTES_MAX, what=what, reason="stream length"
    )
    return streams


def parse_extents(data: BytesLike, streams: Rows) -> Rows:
    """Check the section `XTNT` against the streams and see it as rows.

    Raises:
        FormatError: It is not what the format says.
    """
    extents = as_rows(
        data, EXTENT_DTYPE, what="rank manifest XTNT", rows_max=limits.RANK_EXTENTS_MAX
    )
    _check_extents(extents, streams)
    return extents


def check_tree_against_streams(tree: Sequence[TreeEntry], streams: Rows) -> None:
    """Check that each file lies within its stream, and no two files in the same part of one.

    Raises:
        Malformed: One does not, or names a stream that does not exist.
    """
    lengths: list[int] = streams["length"].tolist()
    count = len(lengths)
    spans: list[tuple[int, int, int]] = []
    for entry in tree:
        if entry.type is EntryType.FILE and entry.size_bytes:
            if entry.stream >= count:
                raise Malformed(
                    f"tree: {entry.path[:80]!r} is in stream {entry.stream}, of {count}"
                )
            if entry.offset + entry.size_bytes > lengths[entry.stream]:
                raise Malformed(f"tree: {entry.path[:80]!r} ends beyond stream {entry.stream}")
            spans.append((entry.stream, entry.offset, entry.offset + entry.size_bytes))
    spans.sort()
    for (stream, _, end), (next_stream, begin, _) in itertools.pairwise(spans):
        # Else a few stored bytes could be made to fill a disk.
        if stream == next_stream and begin < end:
            raise Malformed(f"tree: two files share bytes of stream {stream} at offset {begin}")


def _check_extents(extents: Rows, streams: Rows) -> None:
    what = "rank manifest XTNT"
    lengths, chunk_lengths = column(extents, "length"), column(extents, "chunk_length")
    offsets = column(extents, "chunk_offset")
    refuse(lengths == 0, what=what, reason="an empty extent")
    refuse_over(lengths, limits.STREAM_BYTES_MAX, what=what, reason="length")
    refuse_over(chunk_lengths, limits.CHUNK_BYTES_MAX, what=what, reason="chunk length")
    zeros = chunk_lengths == 0
    outside = ~zeros & (offsets + lengths > chunk_lengths)
    refuse(outside, what=what, reason="does not end within its chunk")
    words = np.ascontiguousarray(extents["id"]).view("<u8").reshape(len(extents), _ID_BYTES // 8)
    has_chunk = (offsets != 0) | words.any(axis=1)
    refuse(zeros & has_chunk, what=what, reason="zeros with a chunk")
    check_runs(streams, lengths, what="rank manifest")
