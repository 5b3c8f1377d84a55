"""The outer form of every binary object (`format_spec/01-objects.md`, section 2).

A header with a directory of sections whose root digest commits to everything, so that a reader may
check the first kilobyte and then fetch and check only the sections it needs.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING

import numpy as np
import zstandard
from blake3 import blake3

from snapstore.errors import DigestMismatch, LimitExceeded, Malformed, UnsupportedFeature
from snapstore.format import limits
from snapstore.format.canonical import check_version
from snapstore.ids import Digest
from snapstore.units import BytesLike, align_up

if TYPE_CHECKING:
    from snapstore.format.tables import U64, Rows

__all__ = [
    "HEADER_BYTES_MAX",
    "INDEX_MAGIC",
    "LAYOUT_MAGIC",
    "PACK_MAGIC",
    "RANK_MAGIC",
    "Built",
    "Envelope",
    "Section",
    "SectionInfo",
    "build",
    "decode_section",
    "encode_header",
    "parse_header",
    "parse_whole",
]

HEADER_BYTES_MAX = limits.HEADER_BYTES_MAX
VERSION = 1

PACK_MAGIC = b"SNAPPACK"
INDEX_MAGIC = b"SNAPINDX"
RANK_MAGIC = b"SNAPRANK"
LAYOUT_MAGIC = b"SNAPLAYT"

ENCODING_PLAIN = 0
ENCODING_ZSTD = 1

_HEADER = struct.Struct("<8sHHIQQ32s")
_ENTRY = struct.Struct("<4sIQQQ32s")
_COMMITTED_BYTES = 32
_ZSTD_LEVEL = 3
_TAG_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")

# Objects named by their root digest hold no compressed section: the name is that of the content.
_NAMED_BY_ROOT = frozenset({INDEX_MAGIC, RANK_MAGIC})
_LENGTH_MAX = {
    PACK_MAGIC: limits.PACK_FOOTER_BYTES_MAX,
    INDEX_MAGIC: limits.INDEX_BYTES_MAX,
    RANK_MAGIC: limits.RANK_BYTES_MAX,
    LAYOUT_MAGIC: limits.LAYOUT_PLAIN_BYTES_MAX,
}
_WORDS = {
    PACK_MAGIC: "pack footer",
    INDEX_MAGIC: "index",
    RANK_MAGIC: "rank manifest",
    LAYOUT_MAGIC: "layout",
}

assert _HEADER.size == limits.ENVELOPE_HEADER_BYTES
assert _ENTRY.size == limits.DIRECTORY_ENTRY_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A section to write; with `compress` it is stored as zstd where that is smaller."""

    tag: bytes
    data: BytesLike | Rows | U64
    compress: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """An encoded object as pieces to write one after the other; big sections are not copied."""

    pieces: list[BytesLike]
    root: Digest
    length: int

    def to_bytes(self) -> bytes:
        """All pieces in one (copies)."""
        return b"".join(self.pieces)


@dataclasses.dataclass(frozen=True, slots=True)
class SectionInfo:
    """One entry of the directory, its place already checked."""

    tag: bytes
    encoding: int
    offset: int
    stored_length: int
    plain_length: int
    digest: bytes

    @property
    def end(self) -> int:
        """Where the stored bytes end, from the start of the object."""
        return self.offset + self.stored_length


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """A checked header and directory."""

    magic: bytes
    length: int
    root: Digest
    sections: tuple[SectionInfo, ...]

    @property
    def what(self) -> str:
        """The kind of object, for messages."""
        return _WORDS[self.magic]

    def find(self, tag: bytes) -> SectionInfo | None:
        """The section with this tag, if there is one."""
        return next((info for info in self.sections if info.tag == tag), None)

    def require(self, tag: bytes) -> SectionInfo:
        """The section with this tag.

        Raises:
            Malformed: There is none.
        """
        info = self.find(tag)
        if info is None:
            raise Malformed(f"{self.what}: section {tag.decode()} is missing")
        return info

    def check_root(self, expected: Digest | None) -> None:
        """Refuse an object that is stored under the name of another.

        Raises:
            DigestMismatch: The root digest is not the expected one.
        """
        if expected is not None and expected.raw != self.root.raw:
            raise DigestMismatch(
                f"{self.what} {expected.short}: its root digest is {self.root.short}"
            )


def build(magic: bytes, sections: list[Section]) -> Built:
    """Encode an object; the data of uncompressed sections is referenced, not copied."""
    assert magic in _WORDS, magic
    assert 1 <= len(sections) <= limits.SECTIONS_MAX, len(sections)
    tags = [section.tag for section in sections]
    assert len(set(tags)) == len(tags), tags
    infos: list[SectionInfo] = []
    body: list[BytesLike] = []
    end = limits.ENVELOPE_HEADER_BYTES + limits.DIRECTORY_ENTRY_BYTES * len(sections)
    for section in sections:
        assert len(section.tag) == limits.TAG_BYTES, section.tag
        assert _TAG_BYTES.issuperset(section.tag), section.tag
        assert not (section.compress and magic in _NAMED_BY_ROOT), section.tag
        plain = _as_bytes(section.data)
        encoding, stored = _encode(plain, compress=section.compress)
        offset = align_up(end, limits.ALIGNMENT_SECTION_BYTES)
        body += [bytes(offset - end), stored]
        digest = blake3(stored).digest()
        infos.append(SectionInfo(section.tag, encoding, offset, len(stored), len(plain), digest))
        end = offset + len(stored)
    head, root = encode_header(magic, infos)
    pieces = [head, *(piece for piece in body if len(piece))]
    assert sum(map(len, pieces)) == end, end
    return Built(pieces, root, end)


def encode_header(magic: bytes, sections: list[SectionInfo]) -> tuple[bytes, Digest]:
    """Encode header and directory, for whoever writes the sections; also returns the root digest.

    The sections must be in order, each at the first aligned offset after the one before.
    """
    end = sections[-1].end
    assert end <= _LENGTH_MAX[magic], end
    head = _HEADER.pack(magic, VERSION, len(sections), 0, end, 0, b"")[:_COMMITTED_BYTES]
    entries = b"".join(
        _ENTRY.pack(
            info.tag,
            info.encoding,
            info.offset,
            info.stored_length,
            info.plain_length,
            info.digest,
        )
        for info in sections
    )
    root = Digest.of(head + entries)
    return head + root.raw + entries, root


def parse_header(data: BytesLike, *, magic: bytes, object_length: int) -> Envelope:
    """Check header and directory of an object.

    Args:
        data: The first `HEADER_BYTES_MAX` bytes of the object, or all of a smaller one; may be
            longer.
        magic: What kind of object it must be.
        object_length: How long the object really is.

    Raises:
        Malformed: No writer of this format produces these bytes.
        LimitExceeded: The object is larger than its kind may be.
        UnsupportedVersion: It is of a newer version.
        UnsupportedFeature: It requires a feature that does not exist yet.
        DigestMismatch: Header or directory are damaged.
    """
    what = _WORDS[magic]
    if len(data) < limits.ENVELOPE_HEADER_BYTES:
        raise Malformed(f"{what}: {len(data)} bytes are too short for a header")
    found, version, count, features, length, zero, root = _HEADER.unpack_from(data)
    if found != magic:
        raise Malformed(f"{what}: magic at offset 0 is {found!r}, not {magic!r}")
    check_version(version, what=what)
    if not 1 <= count <= limits.SECTIONS_MAX:
        raise Malformed(f"{what}: {count} sections at offset 10")
    end = limits.ENVELOPE_HEADER_BYTES + limits.DIRECTORY_ENTRY_BYTES * count
    if len(data) < end:
        raise Malformed(f"{what}: {len(data)} bytes are too short for a directory of {count}")
    committed = blake3(data[:_COMMITTED_BYTES])
    committed.update(data[limits.ENVELOPE_HEADER_BYTES : end])
    if committed.digest() != root:
        raise DigestMismatch(f"{what}: header and directory do not match the root digest")
    # After the digest: a damaged bit must not send the user to look for an upgrade.
    if features:
        bit = (features & -features).bit_length() - 1
        raise UnsupportedFeature(
            f"this {what} requires feature {bit}, which this snapstore does not know",
            next_step="upgrade snapstore",
        )
    if zero:
        raise Malformed(f"{what}: reserved bytes at offset 24 are not zero")
    if length != object_length:
        raise Malformed(f"{what}: {object_length} bytes, but the header says {length}")
    if length > _LENGTH_MAX[magic]:
        raise LimitExceeded(f"{what}: {length} bytes, more than the limit of {_LENGTH_MAX[magic]}")
    sections = _parse_directory(data, count, length=length, magic=magic)
    return Envelope(magic, length, Digest(root), sections)


def parse_whole(data: BytesLike, *, magic: bytes, root: Digest | None = None) -> Envelope:
    """Check header, directory and padding of an object that is in memory.

    Raises:
        FormatError: As for `parse_header`; also a gap that is not zero.
        DigestMismatch: Damaged, or `root` is given and another.
    """
    envelope = parse_header(data, magic=magic, object_length=len(data))
    envelope.check_root(root)
    end = limits.ENVELOPE_HEADER_BYTES + limits.DIRECTORY_ENTRY_BYTES * len(envelope.sections)
    for info in envelope.sections:
        if any(data[end : info.offset]):
            raise Malformed(f"{envelope.what}: bytes before offset {info.offset} are not zero")
        end = info.end
    return envelope


def decode_section(
    info: SectionInfo, stored: BytesLike, *, limit_bytes: int, what: str = "object"
) -> memoryview:
    """Check a section's stored bytes and return its plain ones.

    Raises:
        Malformed: The length is wrong, or it does not decode to its plain length.
        LimitExceeded: It is longer than this section may be.
        DigestMismatch: It is damaged.
    """
    name = f"{what} section {info.tag.decode('ascii', 'replace')}"
    if info.plain_length > limit_bytes:
        raise LimitExceeded(f"{name}: {info.plain_length} bytes exceed the limit of {limit_bytes}")
    if len(stored) != info.stored_length:
        raise Malformed(f"{name}: {len(stored)} bytes instead of {info.stored_length}")
    if blake3(stored).digest() != info.digest:
        raise DigestMismatch(f"{name} at offset {info.offset}: damaged")
    if info.encoding == ENCODING_PLAIN:
        return memoryview(stored)
    return memoryview(_decompress(stored, info.plain_length, name=name))


def read_section(
    envelope: Envelope, data: BytesLike, tag: bytes, *, limit_bytes: int
) -> memoryview:
    """Check and return a section of an object that is in memory.

    Raises:
        FormatError: The section is missing, or as for `decode_section`.
        DigestMismatch: It is damaged.
    """
    info = envelope.require(tag)
    stored = memoryview(data)[info.offset : info.end]
    return decode_section(info, stored, limit_bytes=limit_bytes, what=envelope.what)


def _parse_directory(
    data: BytesLike, count: int, *, length: int, magic: bytes
) -> tuple[SectionInfo, ...]:
    what = _WORDS[magic]
    sections: list[SectionInfo] = []
    end = limits.ENVELOPE_HEADER_BYTES + limits.DIRECTORY_ENTRY_BYTES * count
    for number in range(count):
        at = limits.ENVELOPE_HEADER_BYTES + limits.DIRECTORY_ENTRY_BYTES * number
        info = SectionInfo(*_ENTRY.unpack_from(data, at))
        where = f"{what}: directory entry {number} at offset {at}"
        if not _TAG_BYTES.issuperset(info.tag):
            raise Malformed(f"{where}: tag {info.tag!r}")
        if any(other.tag == info.tag for other in sections):
            raise Malformed(f"{where}: tag {info.tag!r} is there twice")
        if info.offset != align_up(end, limits.ALIGNMENT_SECTION_BYTES):
            raise Malformed(f"{where}: offset {info.offset} does not follow the section before")
        _check_lengths(info, where=where, magic=magic)
        end = info.end
        sections.append(info)
    # Each section begins where the one before ends, so the last end bounds all of them.
    if end != length:
        raise Malformed(f"{what}: {length} bytes, but its last section ends at {end}")
    return tuple(sections)


def _check_lengths(info: SectionInfo, *, where: str, magic: bytes) -> None:
    if info.encoding == ENCODING_PLAIN:
        if info.stored_length != info.plain_length:
            raise Malformed(f"{where}: lengths differ although it is not encoded")
    elif info.encoding != ENCODING_ZSTD:
        raise Malformed(f"{where}: encoding {info.encoding}")
    elif magic in _NAMED_BY_ROOT:
        raise Malformed(f"{where}: compressed, which this kind of object must not be")
    elif not 1 <= info.plain_length <= info.stored_length * limits.ZSTD_EXPANSION_MAX:
        raise Malformed(f"{where}: {info.stored_length} bytes cannot decode to {info.plain_length}")


def _as_bytes(data: BytesLike | Rows | U64) -> BytesLike:
    if isinstance(data, np.ndarray):
        assert data.ndim == 1, data.shape
        return np.ascontiguousarray(data).view(np.uint8).data
    return data


def _encode(plain: BytesLike, *, compress: bool) -> tuple[int, BytesLike]:
    if compress and len(plain):
        stored = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(plain)
        if len(stored) < len(plain):
            return ENCODING_ZSTD, stored
    return ENCODING_PLAIN, plain


def _decompress(stored: BytesLike, plain_length: int, *, name: str) -> bytes:
    # The library allocates what the frame declares, so that is compared first; a frame that
    # declares nothing is refused, and so is anything behind the frame.
    try:
        declared = zstandard.get_frame_parameters(stored)
        if declared.content_size != plain_length or declared.dict_id != 0:
            raise Malformed(f"{name}: the zstd frame does not declare {plain_length} bytes")
        plain = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Malformed(f"{name}: {error}") from error
    if len(plain) != plain_length:
        raise Malformed(f"{name}: decodes to {len(plain)} bytes instead of {plain_length}")
    return plain
