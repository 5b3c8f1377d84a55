"""Cases of envelopes and packs."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from blake3 import blake3

from tools.vectors.encode import (
    INDEX,
    LAYOUT,
    PACK,
    Case,
    Draft,
    Json,
    bad,
    binary,
    digest,
    draft,
    envelope,
    good,
    pack_chunks,
    pack_frames,
    repeat,
    zstd,
    zstd_blocks,
    zstd_header,
    zstd_zeros,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Row = tuple[int | bytes, ...]

SUM = b"0123456789abcdef"
FRAMES: list[Row] = [
    (0, 5000, 5000, 0, 2, 0, b"", SUM),
    (8192, 10, 3000, 2, 1, 1, b"", SUM),
    (12288, 700, 700, 3, 1, 0, b"", SUM),
]
CHUNKS: list[Row] = [
    (digest("chunk 0"), 4096),
    (digest("chunk 1"), 904),
    (digest("chunk 2"), 3000),
    (digest("chunk 3"), 700),
]
FOOTER_OFFSET = 16384


# -- envelopes ------------------------------------------------------------------------------------


def _sections() -> dict[bytes, bytes]:
    return {b"AAAA": b"first", b"BBBB": bytes(range(100)), b"CCCC": b""}


def valid_envelopes() -> list[Case]:
    """Envelopes that must be accepted; `expect` lists the sections' plain bytes."""
    many = {b"S%03d" % number: b"x" * number for number in range(16)}
    packed = draft(LAYOUT, {b"AAAA": bytes(1000)}, packed=frozenset({b"AAAA"}))
    zeros = draft(LAYOUT, {b"AAAA": bytes(300_000)}, packed=frozenset())
    _restore(zeros, zstd_header(300_000) + zstd_zeros(300_000), plain=300_000)
    return [
        _envelope("three sections", INDEX, envelope(INDEX, _sections()), _sections()),
        _envelope("sixteen sections", INDEX, envelope(INDEX, many), many),
        _envelope("one empty section", INDEX, envelope(INDEX, {b"AAAA": b""}), {b"AAAA": b""}),
        _envelope("zstd", LAYOUT, packed.seal(), {b"AAAA": bytes(1000)}),
        good(
            "zstd of zeros",
            zeros.seal(),
            [["AAAA", {"blake3": blake3(bytes(300_000)).hexdigest()}]],
            magic=LAYOUT.decode(),
        ),
    ]


def _envelope(name: str, magic: bytes, data: bytes, sections: dict[bytes, bytes]) -> Case:
    expect: Json = [
        [tag.decode(), {"blake3": blake3(plain).hexdigest()}] for tag, plain in sections.items()
    ]
    return good(name, data, expect, magic=magic.decode())


def _restore(made: Draft, stored: bytes, *, plain: int) -> None:
    """Give the last section these stored bytes, encoded and sealed correctly."""
    last = made.entries[-1]
    last.data, last.encoding = stored, 1
    last.stored, last.plain, last.digest = len(stored), plain, blake3(stored).digest()
    made.length = last.offset + len(stored)


def _spoilt(spoil: Callable[[Draft], None], magic: bytes = INDEX) -> bytes:
    made = draft(magic, _sections(), packed=frozenset())
    spoil(made)
    return made.seal()


def _set(number: int, field: str, value: int | bytes) -> bytes:
    return _spoilt(lambda made: setattr(made.entries[number], field, value))


def _head(field: str, value: int | bytes) -> bytes:
    return _spoilt(lambda made: setattr(made, field, value))


def flip(data: bytes, offset: int, bit: int = 0) -> bytes:
    """Change one bit."""
    flipped = data[offset] ^ (1 << bit)
    return data[:offset] + bytes([flipped]) + data[offset + 1 :]


def hostile_envelopes() -> list[Case]:
    """Envelopes that must be refused."""
    whole = envelope(INDEX, _sections())
    cases = [
        bad("empty", b""),
        bad("shorter than a header", whole[:63]),
        bad("header only", whole[:64]),
        bad("half a directory", whole[:100]),
        bad("directory only", whole[: 64 + 3 * 64]),
        bad("last byte missing", envelope(INDEX, {b"AAAA": b"first"})[:-1]),
        bad("one byte more", whole + b"\0"),
        bad("twice", whole + whole),
        bad("magic of a pack", _head("magic", PACK)),
        bad("magic of nothing", _head("magic", b"SNAPXXXX")),
        bad("zeros", bytes(256)),
        bad("ones", b"\xff" * 256),
        bad("version 0", _head("version", 0)),
        bad("version 2", _head("version", 2), "UnsupportedVersion"),
        bad("version 65535", _head("version", 65535), "UnsupportedVersion"),
        bad(
            "version 2 and nothing else known", INDEX + b"\2\0" + b"\xff" * 60, "UnsupportedVersion"
        ),
        bad("no sections", _head("count", 0)),
        bad("17 sections", _head("count", 17)),
        bad("65535 sections", _head("count", 65535)),
        bad("one section less", _head("count", 2), "DigestMismatch"),
        bad("one section more", _head("count", 4), "DigestMismatch"),
        bad("feature 0", _head("features", 1), "UnsupportedFeature"),
        bad("feature 31", _head("features", 1 << 31), "UnsupportedFeature"),
        bad("all features", _head("features", (1 << 32) - 1), "UnsupportedFeature"),
        bad("reserved bytes", _head("zero", 1)),
        bad("length 0", _head("length", 0)),
        bad("length one less", _head("length", len(whole) - 1)),
        bad("length one more", _head("length", len(whole) + 1)),
        bad("length 2^64-1", _head("length", (1 << 64) - 1)),
        bad("damaged version", flip(whole, 9), "UnsupportedVersion"),
        bad("damaged feature", flip(whole, 12), "DigestMismatch"),
        bad("damaged length", flip(whole, 16), "DigestMismatch"),
        bad("damaged root digest", flip(whole, 40), "DigestMismatch"),
        bad("damaged directory", flip(whole, 64 + 8), "DigestMismatch"),
        bad("damaged last digest", flip(whole, 64 + 3 * 64 - 1, 7), "DigestMismatch"),
        bad("damaged section", flip(whole, 64 + 3 * 64 + 1), "DigestMismatch"),
        bad("padding", _head("padding", b"\1")),
        bad("bytes behind the last section", _longer()),
        bad("tag in small letters", _set(0, "tag", b"aaaa")),
        bad("tag not ASCII", _set(0, "tag", b"AA\xc3\x84")),
        bad("tag of zeros", _set(0, "tag", bytes(4))),
        bad("tag twice", _set(1, "tag", b"AAAA")),
        bad("unknown encoding", _set(0, "encoding", 2)),
        bad("encoding 2^32-1", _set(0, "encoding", (1 << 32) - 1)),
        bad("offset 0", _set(0, "offset", 0)),
        bad("offset within the directory", _set(0, "offset", 64)),
        bad("offset not aligned", _set(1, "offset", 321)),
        bad("offset with a gap", _set(1, "offset", 384)),
        bad("offset 2^64-64", _set(1, "offset", (1 << 64) - 64)),
        bad("lengths differ", _set(0, "plain", 6)),
        bad("stored length 2^64-1", _spoilt(lambda made: _lengths(made, 2, (1 << 64) - 1))),
        bad("stored length 2^63", _spoilt(lambda made: _lengths(made, 0, 1 << 63))),
        bad("lengths that wrap", _spoilt(_wrap)),
        bad("overlap", _spoilt(lambda made: setattr(made.entries[1], "offset", 256))),
        bad("entries swapped", _spoilt(lambda made: made.entries.reverse())),
        bad(
            "compressed, named by digest", envelope(INDEX, _sections(), packed=frozenset({b"BBBB"}))
        ),
    ]
    for case in cases:
        case["args"] = {"magic": INDEX.decode()}
    return cases + _hostile_zstd()


def _lengths(made: Draft, number: int, value: int) -> None:
    made.entries[number].stored = made.entries[number].plain = value


def _wrap(made: Draft) -> None:
    # 320 + (2^64 - 128) wraps to 192: behind the directory, before itself.
    _lengths(made, 1, (1 << 64) - 128)
    made.entries[2].offset = 192


def _longer() -> bytes:
    made = draft(INDEX, {b"AAAA": b"first"}, packed=frozenset())
    made.length += 1
    return made.seal() + b"\0"


def _zstd_case(stored: bytes, *, plain: int) -> bytes:
    made = draft(LAYOUT, {b"AAAA": b""}, packed=frozenset())
    _restore(made, stored, plain=plain)
    return made.seal()


def _hostile_zstd() -> list[Case]:
    """Sections with encoding 1 that decode to something else than announced."""
    data = bytes(range(200))
    frame = zstd(data)
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"skip"
    bombs = {
        "decodes to nothing": (zstd(b""), 0),
        "announces nothing": (frame, 0),
        "announces more": (frame, 201),
        "announces less": (frame, 199),
        "announces more than it can": (frame, len(frame) * 32768 + 1),
        "announces 2^64-1": (frame, (1 << 64) - 1),
        "frame declares more": (zstd_header(300) + zstd_blocks(data), 200),
        "frame declares less": (zstd_header(100) + zstd_blocks(data), 200),
        "frame holds less": (zstd_header(200) + zstd_blocks(data[:100]), 200),
        "frame holds more": (zstd_header(200) + zstd_blocks(data + data), 200),
        "frame declares nothing": (zstd_header(None) + zstd_blocks(data), 200),
        "frame declares 1 TiB": (zstd_header(1 << 40) + zstd_zeros(1 << 20), 1 << 20),
        "frame declares 2^64-1": (zstd_header((1 << 64) - 1) + zstd_zeros(1 << 20), 1 << 20),
        "frame decodes to 16 MiB": (zstd_header(200) + zstd_zeros(1 << 24), 200),
        "frame is cut": (frame[:-1], 200),
        "header is cut": (frame[:7], 200),
        "not zstd": (bytes(210), 200),
        "empty": (b"", 200),
        "something behind it": (frame + b"x", 200),
        "two frames": (zstd(data[:100]) + zstd(data[100:]), 200),
        "skippable frame first": (skippable + frame, 200),
        "skippable frame behind": (frame + skippable, 200),
        "skippable frame only": (skippable, 200),
        "dictionary": (zstd_header(200, dictionary=7) + zstd_blocks(data), 200),
        "reserved block type": (zstd_header(200) + b"\x47\x06\x00" + data, 200),
    }
    cases = [
        bad(f"zstd: {name}", _zstd_case(stored, plain=plain))
        for name, (stored, plain) in bombs.items()
    ]
    cases.append(
        bad("zstd: damaged", flip(_zstd_case(frame, plain=200), 128 + 50), "DigestMismatch")
    )
    for case in cases:
        case["args"] = {"magic": LAYOUT.decode()}
    return cases


# -- packs ----------------------------------------------------------------------------------------


def _footer(
    frames: list[Row] | None = None, chunks: list[Row] | None = None, **more: bytes
) -> bytes:
    sections = {
        b"FRAM": pack_frames(FRAMES if frames is None else frames),
        b"CHNK": pack_chunks(CHUNKS if chunks is None else chunks),
    }
    return envelope(PACK, sections | {tag.encode(): data for tag, data in more.items()})


def table_json(table: list[Row], *, drop: int | None = None) -> Json:
    """Rows as `expect` has them: bytes in hexadecimal, without the reserved column."""
    return [
        [
            value.hex() if isinstance(value, bytes) else value
            for at, value in enumerate(row)
            if at != drop
        ]
        for row in table
    ]


def valid_footers() -> list[Case]:
    """Footers that must decode."""
    expect: dict[str, Json] = {
        "frames": table_json(FRAMES, drop=6),
        "chunks": table_json(CHUNKS),
        "salt": None,
    }
    limit_frame: list[Row] = [(0, 4_194_304 + 65_536, 4_194_304, 0, 4, 1, b"", SUM)]
    limit_chunks: list[Row] = [(digest(f"big {number}"), 1 << 20) for number in range(4)]
    one: list[Row] = [(0, 1, 1, 0, 1, 0, b"", SUM)]
    one_chunk: list[Row] = [(digest("one"), 1)]
    salt = bytes(range(16))
    packed = draft(
        PACK,
        {b"FRAM": pack_frames(FRAMES), b"CHNK": pack_chunks(CHUNKS)},
        packed=frozenset({b"FRAM"}),
    )
    cases = [
        good("three frames", _footer(), expect),
        good("salt", _footer(SALT=salt), {**expect, "salt": salt.hex()}),
        good("unknown section", _footer(XTRA=b"of a later writer"), expect),
        good("compressed section", packed.seal(), expect),
        good(
            "gaps between frames",
            _footer([(4096, *FRAMES[0][1:]), (16384, *FRAMES[1][1:]), (40960, *FRAMES[2][1:])]),
            {
                **expect,
                "frames": table_json(
                    [(4096, *FRAMES[0][1:]), (16384, *FRAMES[1][1:]), (40960, *FRAMES[2][1:])],
                    drop=6,
                ),
            },
        ),
        good(
            "largest frame and chunks",
            _footer(limit_frame, limit_chunks),
            {
                "frames": table_json(limit_frame, drop=6),
                "chunks": table_json(limit_chunks),
                "salt": None,
            },
        ),
        good(
            "smallest",
            _footer(one, one_chunk),
            {"frames": table_json(one, drop=6), "chunks": table_json(one_chunk), "salt": None},
        ),
        good(
            "a chunk twice",
            _footer([(0, 2, 2, 0, 2, 0, b"", SUM)], one_chunk * 2),
            {
                "frames": table_json([(0, 2, 2, 0, 2, 0, b"", SUM)], drop=6),
                "chunks": table_json(one_chunk * 2),
                "salt": None,
            },
        ),
    ]
    offsets = {
        "gaps between frames": 45056,
        "largest frame and chunks": 4_194_304 + 65_536,
        "smallest": 4096,
        "a chunk twice": 4096,
    }
    for case in cases:
        case["args"] = {"footer_offset": offsets.get(str(case["name"]), FOOTER_OFFSET)}
    return cases


def _frame(number: int, **changes: int | bytes) -> bytes:
    names = ("offset", "stored", "plain", "first", "count", "codec", "zero", "checksum")
    table = [dict(zip(names, row, strict=True)) for row in FRAMES]
    table[number] |= changes
    return _footer([tuple(row.values()) for row in table])


def _chunk_lengths(*lengths: int) -> bytes:
    return _footer(None, [(row[0], length) for row, length in zip(CHUNKS, lengths, strict=True)])


def hostile_footers() -> list[Case]:
    """Footers that must be refused."""
    u32, u64 = (1 << 32) - 1, (1 << 64) - 1
    limit = "LimitExceeded"
    whole = _footer()
    frames, chunks = pack_frames(FRAMES), pack_chunks(CHUNKS)
    cases = [
        bad("no frame", _footer([], [])),
        bad("no frame but chunks", _footer([])),
        bad("no FRAM", envelope(PACK, {b"CHNK": chunks})),
        bad("no CHNK", envelope(PACK, {b"FRAM": frames})),
        bad("half a frame row", envelope(PACK, {b"FRAM": frames[:-1], b"CHNK": chunks})),
        bad("half a chunk row", envelope(PACK, {b"FRAM": frames, b"CHNK": chunks + b"\0"})),
        bad("tables swapped", envelope(PACK, {b"FRAM": chunks, b"CHNK": frames}), limit),
        bad("salt too short", _footer(SALT=bytes(15))),
        bad("salt empty", _footer(SALT=b"")),
        bad("salt too long", _footer(SALT=bytes(17)), limit),
        bad("offset not aligned", _frame(1, offset=8193)),
        bad("frames overlap", _frame(1, offset=4096)),
        bad("two frames at one offset", _frame(1, offset=0)),
        bad("frames unsorted", _frame(2, offset=4096)),
        bad("frame in the footer", _frame(2, offset=16384)),
        bad("frame reaches into the footer", _frame(2, stored=5000, plain=5000)),
        bad("frames end before the footer", _footer(FRAMES[:2], CHUNKS[:3])),
        bad("offset beyond any pack", _frame(2, offset=1 << 40), limit),
        bad("offset 2^64-4096", _frame(2, offset=u64 - 4095), limit),
        bad("stored length 0", _frame(1, stored=0)),
        bad("decoded length 0", _frame(1, plain=0)),
        bad("stored length too large", _frame(1, stored=4_194_304 + 65_537), limit),
        bad("stored length 2^32-1", _frame(1, stored=u32), limit),
        bad("decoded length too large", _frame(1, plain=4_194_305), limit),
        bad("decoded length 2^32-1", _frame(1, plain=u32), limit),
        bad("raw, other decoded length", _frame(0, stored=4999)),
        bad("codec 3", _frame(1, codec=3)),
        bad("codec 65535", _frame(1, codec=65535)),
        bad("reserved bytes", _frame(1, zero=b"\0\0\0\0\0\1")),
        bad("no chunk in a frame", _frame(1, count=0)),
        bad("one chunk too many", _frame(1, count=2)),
        bad("chunks shared", _frame(1, first=1)),
        bad("chunks skipped", _frame(1, first=3)),
        bad("chunk count 2^32-1", _frame(1, count=u32)),
        bad("first chunk 2^32-1", _frame(1, first=u32)),
        bad(
            "counts that wrap 32 bits",
            _footer(
                [(*FRAMES[0][:3], 0, u32, *FRAMES[0][5:]), (*FRAMES[1][:3], u32, 5, *FRAMES[1][5:])]
            ),
        ),
        bad("chunk left over", _footer(None, [*CHUNKS, (digest("more"), 1)])),
        bad("chunk missing", _footer(None, CHUNKS[:-1])),
        bad("chunk of 0 bytes", _chunk_lengths(5000, 0, 3000, 700)),
        bad("chunks do not add up", _chunk_lengths(4096, 905, 3000, 700)),
        bad("chunk too large", _chunk_lengths(4096, 904, (1 << 20) + 1, 700), limit),
        bad("chunk of 2^32-1 bytes", _chunk_lengths(4096, 904, 3000, u32), limit),
        bad("chunk lengths that wrap 32 bits", _chunk_lengths(u32, 5001, 3000, 700), limit),
        bad("damaged FRAM", flip(whole, 64 + 2 * 64 + 3), "DigestMismatch"),
        bad("damaged CHNK", flip(whole, len(whole) - 1), "DigestMismatch"),
        bad("truncated", whole[:-1]),
        bad("trailer included", whole + _trailer(FOOTER_OFFSET, len(whole))),
        bad("version 2", _version_2(), "UnsupportedVersion"),
        bad("too large", _too_large(), limit),
    ]
    for case in cases:
        case["args"] = {"footer_offset": FOOTER_OFFSET}
    for name, offset in (("footer further on", FOOTER_OFFSET + 4096), ("footer before", 12288)):
        cases.append(bad(name, whole, footer_offset=offset))
    return cases


def _version_2() -> bytes:
    made = draft(PACK, {b"FRAM": b"", b"CHNK": b""}, packed=frozenset())
    made.version = 2
    return made.seal()


def _too_large() -> Json:
    # The digest of what is only described: 64 MiB of zeros in one unknown section.
    size = 64 << 20
    made = draft(PACK, {b"XTRA": bytes(size)}, packed=frozenset())
    return [binary(made.head()), repeat(bytes(1024), size // 1024)]


def _trailer(offset: int, length: int, zero: int = 0, magic: bytes = b"SNAPTAIL") -> bytes:
    return struct.pack("<QQQ8s", offset, length, zero, magic)


def trailers() -> tuple[list[Case], list[Case]]:
    """Trailers that must decode, and those that must be refused."""
    length = FOOTER_OFFSET + 500 + 32
    valid = [
        good("plain", _trailer(FOOTER_OFFSET, 500), [FOOTER_OFFSET, 500], pack_length=length),
        good("at once", _trailer(4096, 192), [4096, 192], pack_length=4096 + 192 + 32),
    ]
    right = _trailer(FOOTER_OFFSET, 500)
    hostile = [
        bad("empty", b"", pack_length=length),
        bad("too short", right[1:], pack_length=length),
        bad("too long", b"\0" + right, pack_length=length),
        bad("zeros", bytes(32), pack_length=length),
        bad(
            "magic of a footer", _trailer(FOOTER_OFFSET, 500, magic=b"SNAPPACK"), pack_length=length
        ),
        bad("reserved bytes", _trailer(FOOTER_OFFSET, 500, 1), pack_length=length),
        bad("offset 0", _trailer(0, length - 32), pack_length=length),
        bad("offset not aligned", _trailer(FOOTER_OFFSET + 1, 499), pack_length=length),
        bad("footer ends early", _trailer(FOOTER_OFFSET, 499), pack_length=length),
        bad("footer ends in the trailer", _trailer(FOOTER_OFFSET, 501), pack_length=length),
        bad("footer behind the pack", _trailer(FOOTER_OFFSET * 2, 500), pack_length=length),
        bad("offset 2^64-4096", _trailer((1 << 64) - 4096, 500), pack_length=length),
        bad(
            "sum wraps 64 bits",
            _trailer(1 << 63, (1 << 63) + length - 32),
            "LimitExceeded",
            pack_length=length,
        ),
        bad(
            "length 2^64-1",
            _trailer(FOOTER_OFFSET, (1 << 64) - 1),
            "LimitExceeded",
            pack_length=length,
        ),
        bad(
            "footer too large",
            _trailer(4096, 50_331_649),
            "LimitExceeded",
            pack_length=4096 + 50_331_649 + 32,
        ),
        bad("pack too large", right, "LimitExceeded", pack_length=(128 << 20) + 1),
        bad("pack shorter than a trailer", right, pack_length=31),
        bad("pack empty", right, pack_length=0),
    ]
    return valid, hostile
