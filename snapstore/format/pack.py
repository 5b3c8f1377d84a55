"""Footers and trailers of packs (`format_spec/02-packs.md`, section 1).

Knows nothing of codecs: a frame is a range of stored bytes with two lengths and a checksum.
"""

from __future__ import annotations

import dataclasses
import struct

import numpy as np

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format import limits
from snapstore.format.envelope import (
    PACK_MAGIC,
    Envelope,
    Section,
    build,
    decode_section,
    parse_whole,
    read_section,
)
from snapstore.format.tables import Rows, as_rows, column, refuse, refuse_over
from snapstore.units import BytesLike, align_up

__all__ = [
    "CHUNK_DTYPE",
    "CODECS",
    "CODEC_PLANES",
    "CODEC_RAW",
    "CODEC_ZSTD",
    "FRAME_DTYPE",
    "PackFooter",
    "check_frame_sizes",
    "encode_footer",
    "parse_footer",
    "parse_trailer",
]

CODEC_RAW = 0
CODEC_ZSTD = 1
CODEC_PLANES = 2
CODECS = (CODEC_RAW, CODEC_ZSTD, CODEC_PLANES)

TRAILER_MAGIC = b"SNAPTAIL"
_TRAILER = struct.Struct("<QQQ8s")

FRAME_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("stored_length", "<u4"),
        ("plain_length", "<u4"),
        ("first_chunk", "<u4"),
        ("chunk_count", "<u4"),
        ("codec", "<u2"),
        ("zero", "V6"),
        ("checksum", "V16"),
    ]
)
CHUNK_DTYPE = np.dtype([("id", "V32"), ("length", "<u4")])

assert FRAME_DTYPE.itemsize == limits.PACK_FRAME_ROW_BYTES
assert CHUNK_DTYPE.itemsize == limits.PACK_CHUNK_ROW_BYTES
assert _TRAILER.size == limits.PACK_TRAILER_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class PackFooter:
    """What a pack holds: rows of `FRAME_DTYPE` and of `CHUNK_DTYPE`, all rules checked."""

    frames: Rows
    chunks: Rows
    salt: bytes | None


def encode_footer(frames: Rows, chunks: Rows, *, offset: int, salt: bytes | None = None) -> bytes:
    """Encode footer and trailer of a pack whose footer begins at `offset`."""
    sections = [Section(b"FRAM", frames), Section(b"CHNK", chunks)]
    if salt is not None:
        assert len(salt) == limits.PACK_SALT_BYTES, len(salt)
        sections.append(Section(b"SALT", salt))
    try:
        _check_tables(frames, chunks, footer_offset=offset)
    except (Malformed, LimitExceeded) as error:
        raise AssertionError(f"refusing to write a bad footer: {error}") from error
    footer = build(PACK_MAGIC, sections)
    assert offset + footer.length + limits.PACK_TRAILER_BYTES <= limits.PACK_BYTES_MAX, offset
    return footer.to_bytes() + _TRAILER.pack(offset, footer.length, 0, TRAILER_MAGIC)


def footer_bytes_max(frames: int, chunks: int) -> int:
    """How long footer and trailer of a pack can be, salt included."""
    sections = 3
    return (
        limits.ENVELOPE_HEADER_BYTES
        + sections * (limits.DIRECTORY_ENTRY_BYTES + limits.ALIGNMENT_SECTION_BYTES)
        + frames * limits.PACK_FRAME_ROW_BYTES
        + chunks * limits.PACK_CHUNK_ROW_BYTES
        + limits.PACK_SALT_BYTES
        + limits.PACK_TRAILER_BYTES
    )


def parse_trailer(tail: BytesLike, *, pack_length: int) -> tuple[int, int]:
    """Read the last 32 bytes of a pack: offset and length of its footer.

    Raises:
        Malformed: It is no trailer, or points elsewhere than at the footer right before it.
        LimitExceeded: The pack or its footer is too long.
    """
    if pack_length > limits.PACK_BYTES_MAX:
        raise LimitExceeded(f"pack: {pack_length} bytes, more than {limits.PACK_BYTES_MAX}")
    if len(tail) != limits.PACK_TRAILER_BYTES:
        raise Malformed(f"pack trailer: {len(tail)} bytes instead of {limits.PACK_TRAILER_BYTES}")
    offset, length, zero, magic = _TRAILER.unpack(tail)
    if magic != TRAILER_MAGIC or zero != 0:
        raise Malformed(f"pack trailer at offset {pack_length - len(tail)}: not a trailer")
    if offset % limits.ALIGNMENT_FRAME_BYTES or offset == 0:
        raise Malformed(f"pack trailer: footer offset {offset}")
    if length > limits.PACK_FOOTER_BYTES_MAX:
        raise LimitExceeded(f"pack trailer: a footer of {length} bytes")
    if offset + length + limits.PACK_TRAILER_BYTES != pack_length:
        raise Malformed(
            f"pack trailer: footer at {offset} of {length} bytes does not end before the trailer"
        )
    return offset, length


def parse_footer(data: BytesLike, *, footer_offset: int) -> PackFooter:
    """Check and decode a footer (without the trailer), which began at `footer_offset`.

    Raises:
        FormatError: No writer of this format produces it.
        DigestMismatch: It is damaged.
    """
    envelope = parse_whole(data, magic=PACK_MAGIC)
    frames = as_rows(
        read_section(envelope, data, b"FRAM", limit_bytes=limits.PACK_FOOTER_BYTES_MAX),
        FRAME_DTYPE,
        what="pack FRAM",
        rows_max=limits.PACK_FRAMES_MAX,
    )
    chunks = as_rows(
        read_section(envelope, data, b"CHNK", limit_bytes=limits.PACK_FOOTER_BYTES_MAX),
        CHUNK_DTYPE,
        what="pack CHNK",
        rows_max=limits.PACK_CHUNKS_MAX,
    )
    _check_tables(frames, chunks, footer_offset=footer_offset)
    return PackFooter(frames, chunks, _parse_salt(envelope, data))


def check_frame_sizes(frames: Rows, *, what: str) -> None:
    """Check what frames of packs, indexes and layouts have in common.

    Raises:
        Malformed: An offset is not aligned, a length zero, a codec unknown.
        LimitExceeded: A length is above its limit.
    """
    stored, plain = column(frames, "stored_length"), column(frames, "plain_length")
    codec = column(frames, "codec")
    refuse_over(stored, limits.FRAME_STORED_BYTES_MAX, what=what, reason="stored length")
    refuse_over(plain, limits.FRAME_PLAIN_BYTES_MAX, what=what, reason="decoded length")
    refuse_over(column(frames, "offset"), limits.PACK_BYTES_MAX, what=what, reason="offset")
    refuse((stored == 0) | (plain == 0), what=what, reason="a length is zero")
    unaligned = column(frames, "offset") % np.uint64(limits.ALIGNMENT_FRAME_BYTES) != 0
    refuse(unaligned, what=what, reason="offset is not a multiple of 4096")
    refuse(codec > max(CODECS), what=what, reason="unknown codec")
    differs = (codec == CODEC_RAW) & (stored != plain)
    refuse(differs, what=what, reason="lengths of a raw frame differ")
    padding = np.ascontiguousarray(frames["zero"])
    if padding.view(np.uint8).any():
        raise Malformed(f"{what}: reserved bytes are not zero")


def _check_tables(frames: Rows, chunks: Rows, *, footer_offset: int) -> None:
    if len(frames) == 0:
        raise Malformed("pack FRAM: no frame")
    check_frame_sizes(frames, what="pack FRAM")
    offset, stored = column(frames, "offset"), column(frames, "stored_length")
    ends = offset + stored
    overlaps = np.zeros(len(frames), np.bool_)
    overlaps[1:] = offset[1:] < ends[:-1]
    refuse(overlaps, what="pack FRAM", reason="begins before the frame before it ends")
    if align_up(int(ends[-1]), limits.ALIGNMENT_FRAME_BYTES) != footer_offset:
        raise Malformed(
            f"pack FRAM: the last frame ends at {int(ends[-1])}, the footer begins at "
            f"{footer_offset}"
        )
    lengths = column(chunks, "length")
    refuse(lengths == 0, what="pack CHNK", reason="an empty chunk")
    refuse_over(lengths, limits.CHUNK_BYTES_MAX, what="pack CHNK", reason="length")
    first, count = column(frames, "first_chunk"), column(frames, "chunk_count")
    refuse(count == 0, what="pack FRAM", reason="no chunk")
    bounds = np.zeros(len(frames) + 1, np.uint64)
    np.cumsum(count, out=bounds[1:])
    refuse(first != bounds[:-1], what="pack FRAM", reason="chunks do not follow the frame before")
    if int(bounds[-1]) != len(chunks):
        raise Malformed(f"pack FRAM: frames own {int(bounds[-1])} chunks of {len(chunks)}")
    # At most 2^20 chunks of 2^20 bytes: the sums fit easily.
    sums = np.zeros(len(chunks) + 1, np.uint64)
    np.cumsum(lengths, out=sums[1:])
    at = bounds.astype(np.intp)
    differs = sums[at[1:]] - sums[at[:-1]] != column(frames, "plain_length")
    refuse(differs, what="pack FRAM", reason="chunks do not add up to the decoded length")


def _parse_salt(envelope: Envelope, data: BytesLike) -> bytes | None:
    info = envelope.find(b"SALT")
    if info is None:
        return None
    stored = memoryview(data)[info.offset : info.end]
    salt = bytes(decode_section(info, stored, limit_bytes=limits.PACK_SALT_BYTES, what="pack"))
    if len(salt) != limits.PACK_SALT_BYTES:
        raise Malformed(f"pack SALT: {len(salt)} bytes instead of {limits.PACK_SALT_BYTES}")
    return salt
