"""Layouts: where the bytes of a rank are (`format_spec/04-manifests.md`, section 4).

Derived from a rank manifest and indexes. Reading a snapshot needs this and no chunk tables.
"""

import dataclasses
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from snapstore.errors import DigestMismatch, LimitExceeded, Malformed
from snapstore.format import limits
from snapstore.format.canonical import Hex32, Hex64, Time, check_time, decode_document, encode
from snapstore.format.envelope import (
    LAYOUT_MAGIC,
    Built,
    Envelope,
    Section,
    build,
    parse_whole,
    read_section,
)
from snapstore.format.index import (
    FRAME_DTYPE,
    PACK_DTYPE,
    check_frames_in_packs,
    check_packs,
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
from snapstore.ids import RankId
from snapstore.units import BytesLike

__all__ = [
    "FRAME_DTYPE",
    "PACK_DTYPE",
    "SEGMENT_DTYPE",
    "STREAM_DTYPE",
    "ZEROS",
    "LayoutMeta",
    "LayoutTables",
    "build_layout",
    "parse_layout",
]

SEGMENT_DTYPE = np.dtype([("length", "<u8"), ("frame", "<u4"), ("offset", "<u4")])
ZEROS = 0xFFFFFFFF
"""The frame row of a segment of zeros."""
FORMAT: Final = "snapstore/layout"

assert SEGMENT_DTYPE.itemsize == limits.SEGMENT_ROW_BYTES


class LayoutMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rank a layout is of, and who wrote it when.

    Attributes:
        rank: The rank id, as hexadecimal digits.
        nonce: Random, of the writer; tells it after a lost reply that it has won.
        created: When.
    """

    rank: Hex64
    nonce: Hex32
    created: Time
    format: Literal["snapstore/layout"] = FORMAT
    version: Literal[1] = 1


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutTables:
    """A whole layout, all rules checked; rows of the types of this module."""

    meta: LayoutMeta
    packs: Rows
    frames: Rows
    streams: Rows
    segments: Rows


def build_layout(
    meta: LayoutMeta, packs: Rows, frames: Rows, streams: Rows, segments: Rows
) -> Built:
    """Encode a layout.

    Frames and packs may be given in any order; they are brought into the order of their first use,
    and those that nothing uses are left out.

    Raises:
        Malformed: A segment lies outside its frame or a frame outside its pack.
        LimitExceeded: There are too many rows, or a length is too large.
    """
    frames, segments = _frames_in_order_of_use(frames, segments)
    packs, frames = _packs_in_order_of_use(packs, frames)
    _check_tables(packs, frames, streams, segments)
    plain_bytes = sum(table.nbytes for table in (packs, frames, streams, segments))
    if plain_bytes > limits.LAYOUT_PLAIN_BYTES_MAX:
        raise LimitExceeded(f"layout: {plain_bytes} bytes decoded")
    return build(
        LAYOUT_MAGIC,
        [
            Section(b"META", encode_meta(meta)),
            Section(b"PACK", packs),
            Section(b"FRAM", frames, compress=True),
            Section(b"STRM", streams, compress=True),
            Section(b"SEGM", segments, compress=True),
        ],
    )


def parse_layout(data: BytesLike, *, rank: RankId | None = None) -> LayoutTables:
    """Check and decode a layout.

    Args:
        data: The whole object.
        rank: The rank that it must be of; with None any.

    Raises:
        FormatError: No writer of this format produces it.
        DigestMismatch: It is damaged, or of another rank.
    """
    envelope = parse_whole(data, magic=LAYOUT_MAGIC)
    plain_bytes = sum(info.plain_length for info in envelope.sections)
    if plain_bytes > limits.LAYOUT_PLAIN_BYTES_MAX:
        raise LimitExceeded(f"layout: {plain_bytes} bytes decoded")
    meta = parse_meta(
        read_section(envelope, data, b"META", limit_bytes=limits.LAYOUT_META_BYTES_MAX)
    )
    if rank is not None and meta.rank != rank.hex:
        raise DigestMismatch(f"layout: of rank {meta.rank[:12]} instead of {rank.short}")
    packs = _rows(envelope, data, b"PACK", PACK_DTYPE, limits.LAYOUT_PACKS_MAX)
    frames = _rows(envelope, data, b"FRAM", FRAME_DTYPE, limits.LAYOUT_FRAMES_MAX)
    streams = _rows(envelope, data, b"STRM", STREAM_DTYPE, limits.RANK_STREAMS_MAX)
    segments = _rows(envelope, data, b"SEGM", SEGMENT_DTYPE, limits.LAYOUT_SEGMENTS_MAX)
    _check_tables(packs, frames, streams, segments)
    return LayoutTables(meta, packs, frames, streams, segments)


def encode_meta(meta: LayoutMeta) -> bytes:
    """Encode the section `META`.

    Raises:
        Malformed: A value is not what the format says.
    """
    data = encode(meta, what="layout META")
    parse_meta(data)
    return data


def parse_meta(data: BytesLike) -> LayoutMeta:
    """Check and decode the section `META`.

    Raises:
        FormatError: It is not what the format says.
    """
    meta = decode_document(
        data,
        LayoutMeta,
        format_word=FORMAT,
        what="layout META",
        limit_bytes=limits.LAYOUT_META_BYTES_MAX,
    )
    check_time(meta.created, what="layout META")
    return meta


def _rows(
    envelope: Envelope, data: BytesLike, tag: bytes, dtype: np.dtype[np.void], rows_max: int
) -> Rows:
    section = read_section(envelope, data, tag, limit_bytes=rows_max * dtype.itemsize)
    return as_rows(section, dtype, what=f"layout {tag.decode()}", rows_max=rows_max)


def _check_tables(packs: Rows, frames: Rows, streams: Rows, segments: Rows) -> None:
    check_packs(packs, what="layout PACK")
    check_frames_in_packs(frames, packs, what="layout FRAM")
    _check_order_of_use(frames["pack"], len(packs), what="layout PACK")
    lengths, frame = column(segments, "length"), column(segments, "frame")
    offsets = column(segments, "offset")
    what = "layout SEGM"
    refuse(lengths == 0, what=what, reason="an empty segment")
    refuse_over(lengths, limits.STREAM_BYTES_MAX, what=what, reason="length")
    zeros = frame == ZEROS
    refuse(zeros & (offsets != 0), what=what, reason="zeros with an offset")
    refuse(~zeros & (frame >= len(frames)), what=what, reason="no such frame")
    data = ~zeros
    plain_lengths = column(frames, "plain_length")[segments["frame"][data]]
    outside = np.zeros(len(segments), np.bool_)
    outside[data] = offsets[data] + lengths[data] > plain_lengths
    refuse(outside, what=what, reason="does not end within its frame")
    _check_order_of_use(segments["frame"][data], len(frames), what="layout FRAM")
    check_runs(streams, lengths, what="layout")


def _check_order_of_use(used: npt.NDArray[np.uint32], count: int, *, what: str) -> None:
    # In order of first use every number is at most one more than the greatest before it.
    newest = np.maximum.accumulate(used.astype(np.int64))
    before = np.full(len(used), -1, np.int64)
    before[1:] = newest[:-1]
    if bool((newest > before + 1).any()) or (int(newest[-1]) if len(used) else -1) != count - 1:
        raise Malformed(f"{what}: not in order of first use, or not used")


def _order_of_use(used: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
    numbers, first_use = np.unique(used, return_index=True)
    return numbers[np.argsort(first_use)].astype(np.intp)


def _frames_in_order_of_use(frames: Rows, segments: Rows) -> tuple[Rows, Rows]:
    data = segments["frame"] != ZEROS
    used = segments["frame"][data]
    refuse(used >= len(frames), what="layout SEGM", reason="no such frame")
    order = _order_of_use(used)
    rows = np.zeros(len(frames), np.uint32)
    rows[order] = np.arange(len(order))
    segments = segments.copy()
    segments["frame"][data] = rows[used]
    return frames[order], segments


def _packs_in_order_of_use(packs: Rows, frames: Rows) -> tuple[Rows, Rows]:
    refuse(frames["pack"] >= len(packs), what="layout FRAM", reason="no such pack")
    order = _order_of_use(frames["pack"])
    rows = np.zeros(len(packs), np.uint32)
    rows[order] = np.arange(len(order))
    frames = frames.copy()
    frames["pack"] = rows[frames["pack"]]
    return packs[order], frames
