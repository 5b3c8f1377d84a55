"""Encoders for test vectors, written from the specification alone.

They import nothing of `snapstore`, so that the vectors are a second reading of the specification
and not an echo of the first; and they can write what no correct encoder would.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from typing import TypeAlias

from blake3 import blake3

Json: TypeAlias = "bool | int | str | list[Json] | dict[str, Json] | None"
Case: TypeAlias = "dict[str, Json]"

PACK, INDEX, RANK, LAYOUT = b"SNAPPACK", b"SNAPINDX", b"SNAPRANK", b"SNAPLAYT"
BLOCK_BYTES_MAX = 128 * 1024
_RAW, _RLE = 0, 1


# -- cases ----------------------------------------------------------------------------------------


def text(data: str | bytes) -> Json:
    """A piece of input that people can read."""
    return {"text": data if isinstance(data, str) else data.decode()}


def binary(data: bytes) -> Json:
    """A piece of input in base64."""
    return {"base64": base64.b64encode(data).decode()}


def repeat(data: bytes, count: int) -> Json:
    """A piece of input that says a few bytes many times."""
    return {"base64": base64.b64encode(data).decode(), "times": count}


def good(name: str, data: Json | bytes | str, expect: Json, **args: Json) -> Case:
    """A case that must decode to `expect`."""
    return {"name": name, "input": _pieces(data), "expect": expect, **_args(args)}


def bad(name: str, data: Json | bytes | str, error: str = "Malformed", **args: Json) -> Case:
    """A case that must be refused with this error."""
    return {"name": name, "input": _pieces(data), "error": error, **_args(args)}


def _pieces(data: Json | bytes | str) -> Json:
    if isinstance(data, str):
        return [text(data)]
    if isinstance(data, bytes):
        return [binary(data)]
    return data if isinstance(data, list) else [data]


def _args(args: dict[str, Json]) -> dict[str, Json]:
    return {"args": args} if args else {}


def canonical(value: Json) -> str:
    """Canonical JSON, by the standard library."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def digest(word: str) -> bytes:
    """A digest to stand for something."""
    return blake3(word.encode()).digest()


# -- rows -----------------------------------------------------------------------------------------


def rows(form: str, table: list[tuple[int | bytes, ...]]) -> bytes:
    """Pack rows little-endian."""
    return b"".join(struct.pack("<" + form, *row) for row in table)


def pack_frames(table: list[tuple[int | bytes, ...]]) -> bytes:
    """Offset, stored, decoded, first chunk, chunks, codec, zero, checksum."""
    return rows("QIIIIH6s16s", table)


def pack_chunks(table: list[tuple[int | bytes, ...]]) -> bytes:
    """Id, length."""
    return rows("32sI", table)


def index_packs(table: list[tuple[int | bytes, ...]]) -> bytes:
    """Id, length."""
    return rows("32sQ", table)


def index_frames(table: list[tuple[int | bytes, ...]]) -> bytes:
    """Offset, stored, decoded, pack, codec, zero, checksum."""
    return rows("QIIIHH16s", table)


def index_chunks(table: list[tuple[int | bytes, ...]]) -> bytes:
    """Id, frame, offset, length."""
    return rows("32sIII", table)


def streams(table: list[tuple[int | bytes, ...]]) -> bytes:
    """First, count, length."""
    return rows("QQQ", table)


def extents(table: list[tuple[int | bytes, ...]]) -> bytes:
    """Length, offset in the chunk, length of the chunk, id."""
    return rows("QII32s", table)


def segments(table: list[tuple[int | bytes, ...]]) -> bytes:
    """Length, frame, offset."""
    return rows("QII", table)


def numbers(values: list[int]) -> bytes:
    """Numbers of 8 bytes."""
    return struct.pack(f"<{len(values)}Q", *values)


# -- zstd -----------------------------------------------------------------------------------------


def zstd_header(content_size: int | None, *, dictionary: int = 0) -> bytes:
    """A frame header with the content size in 8 bytes, or with a window and no size."""
    if content_size is None:
        return b"\x28\xb5\x2f\xfd" + b"\x00" + b"\x58"
    if dictionary:
        return b"\x28\xb5\x2f\xfd" + struct.pack("<BBQ", 0b11100001, dictionary, content_size)
    return b"\x28\xb5\x2f\xfd" + struct.pack("<BQ", 0b11100000, content_size)


def zstd_blocks(data: bytes) -> bytes:
    """Raw blocks, which any decoder accepts and any version of this code writes alike."""
    parts = [data[at : at + BLOCK_BYTES_MAX] for at in range(0, len(data), BLOCK_BYTES_MAX)]
    last = len(parts) - 1
    return b"".join(_block(_RAW, len(one), one, n == last) for n, one in enumerate(parts))


def zstd_zeros(length: int) -> bytes:
    """Blocks that decode to zeros, 4 bytes for each 128 KiB."""
    sizes = [BLOCK_BYTES_MAX] * (length // BLOCK_BYTES_MAX)
    if length % BLOCK_BYTES_MAX:
        sizes.append(length % BLOCK_BYTES_MAX)
    last = len(sizes) - 1
    return b"".join(_block(_RLE, size, b"\0", n == last) for n, size in enumerate(sizes))


def zstd(data: bytes) -> bytes:
    """One whole frame."""
    return zstd_header(len(data)) + zstd_blocks(data)


def _block(kind: int, size: int, content: bytes, last: bool) -> bytes:  # noqa: FBT001
    return (size << 3 | kind << 1 | int(last)).to_bytes(3, "little") + content


# -- envelopes ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Entry:
    """One directory entry and the bytes of its section."""

    tag: bytes
    data: bytes
    encoding: int = 0
    offset: int = 0
    stored: int = 0
    plain: int = 0
    digest: bytes = b""


@dataclasses.dataclass
class Draft:
    """An envelope that can be spoilt before it is sealed with its root digest."""

    magic: bytes
    entries: list[Entry]
    version: int = 1
    features: int = 0
    zero: int = 0
    count: int = 0
    length: int = 0
    padding: bytes = b"\0"

    def head(self) -> bytes:
        """Header and directory."""
        first = struct.pack(
            "<8sHHIQQ",
            self.magic,
            self.version,
            self.count,
            self.features,
            self.length,
            self.zero,
        )
        directory = b"".join(
            struct.pack(
                "<4sIQQQ32s",
                one.tag,
                one.encoding,
                one.offset & (1 << 64) - 1,
                one.stored,
                one.plain,
                one.digest,
            )
            for one in self.entries
        )
        return first + blake3(first + directory).digest() + directory

    def seal(self) -> bytes:
        """The whole object; sections follow each other whatever their entries say."""
        out = self.head()
        for one in self.entries:
            out += self.padding * (-len(out) % 64) + one.data
        return out


def draft(magic: bytes, sections: dict[bytes, bytes], *, packed: frozenset[bytes]) -> Draft:
    """Lay out the sections; those whose tag is in `packed` as a zstd frame."""
    entries: list[Entry] = []
    end = 64 + 64 * len(sections)
    for tag, plain in sections.items():
        data = zstd(plain) if tag in packed else plain
        offset = end + -end % 64
        entries.append(
            Entry(
                tag=tag,
                data=data,
                encoding=int(tag in packed),
                offset=offset,
                stored=len(data),
                plain=len(plain),
                digest=blake3(data).digest(),
            )
        )
        end = offset + len(data)
    return Draft(magic, entries, count=len(entries), length=end)


def envelope(
    magic: bytes, sections: dict[bytes, bytes], *, packed: frozenset[bytes] = frozenset()
) -> bytes:
    """A correct object of these sections."""
    return draft(magic, sections, packed=packed).seal()
