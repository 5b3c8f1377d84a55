"""Cases of indexes, rank manifests and layouts."""

from __future__ import annotations

from tools.vectors.binaries import SUM, Row, flip, table_json
from tools.vectors.documents import LAYOUT_META, RANK_META
from tools.vectors.encode import (
    INDEX,
    LAYOUT,
    RANK,
    Case,
    Json,
    bad,
    binary,
    canonical,
    digest,
    draft,
    envelope,
    extents,
    good,
    index_chunks,
    index_frames,
    index_packs,
    numbers,
    repeat,
    segments,
    streams,
)
from tools.vectors.trees import ROOT, file

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
LIMIT = "LimitExceeded"
MIB = 1 << 20


def replaced(table: list[Row], row: int, column: int, value: int | bytes) -> list[Row]:
    """The table with one value changed."""
    changed = list(table)
    old = table[row]
    changed[row] = (*old[:column], value, *old[column + 1 :])
    return changed


def _id(first: int, last: int = 0) -> bytes:
    """An id with this first and last byte."""
    return bytes([first]) + bytes(30) + bytes([last])


# -- indexes --------------------------------------------------------------------------------------

PACKS: list[Row] = [(_id(0x11), 3 * MIB), (_id(0x22), 128 * MIB)]
FRAMES: list[Row] = [
    (0, MIB, MIB, 0, 0, 0, SUM),
    (MIB, 4096, 2 * MIB, 0, 1, 0, SUM),
    (4096, 5, 9, 1, 2, 0, SUM),
]
CHUNKS: list[Row] = [
    (_id(0x01), 0, 0, MIB),
    (_id(0x80), 1, 0, 1000),
    (_id(0x80, 1), 1, 1000, 4096),
    (_id(0xFF), 2, 0, 9),
]


def _fanout(chunks: list[Row]) -> list[int]:
    bits = 0
    while (1 << bits) * 64 < len(chunks):
        bits += 1
    firsts = [int.from_bytes(bytes(row[0])[:8], "big") >> (64 - bits) for row in chunks]
    return [sum(first < bucket for first in firsts) for bucket in range((1 << bits) + 1)]


def index_sections(
    packs: list[Row] = PACKS,
    frames: list[Row] = FRAMES,
    chunks: list[Row] = CHUNKS,
    fanout: list[int] | None = None,
) -> dict[bytes, bytes]:
    """The sections of an index, right unless tables are given that are not."""
    return {
        b"PACK": index_packs(packs),
        b"FRAM": index_frames(frames),
        b"FANO": numbers(_fanout(chunks) if fanout is None else fanout),
        b"CHNK": index_chunks(chunks),
    }


def _index(
    packs: list[Row] = PACKS, frames: list[Row] = FRAMES, chunks: list[Row] = CHUNKS
) -> bytes:
    return envelope(INDEX, index_sections(packs, frames, chunks))


def _supersedes(*ids: bytes) -> bytes:
    return envelope(INDEX, index_sections() | {b"SUPR": b"".join(ids)})


def _index_json(packs: list[Row], frames: list[Row], chunks: list[Row]) -> dict[str, Json]:
    return {
        "packs": table_json(packs),
        "frames": table_json(frames, drop=5),
        "chunks": table_json(chunks),
        "fanout": list(_fanout(chunks)),
        "supersedes": [],
    }


def _many(count: int) -> list[Row]:
    ids = sorted(digest(f"chunk {number}") for number in range(count))
    return [(one, 1, 100 * number, 100) for number, one in enumerate(ids)]


def valid_indexes() -> list[Case]:
    """Indexes that must decode."""
    plain = _index_json(PACKS, FRAMES, CHUNKS)
    cases = [
        good("small", _index(), plain),
        good("empty", _index(packs=[], frames=[], chunks=[]), _index_json([], [], [])),
        good(
            "supersedes",
            _supersedes(_id(1), _id(1, 1), _id(2)),
            {**plain, "supersedes": [_id(1).hex(), _id(1, 1).hex(), _id(2).hex()]},
        ),
        good("unknown section", envelope(INDEX, index_sections() | {b"XTRA": b"later"}), plain),
    ]
    for count in (64, 65, 129):
        chunks = _many(count)
        cases.append(
            good(f"{count} chunks", _index(chunks=chunks), _index_json(PACKS, FRAMES, chunks))
        )
    return cases


def hostile_indexes() -> list[Case]:
    """Indexes that must be refused."""
    return [*_bad_packs_and_frames(), *_bad_chunks(), *_bad_fanouts(), *_badindex_sections()]


def _bad_packs_and_frames() -> list[Case]:
    def pack(row: int, column: int, value: int | bytes) -> bytes:
        return _index(packs=replaced(PACKS, row, column, value))

    def frame(row: int, column: int, value: int | bytes) -> bytes:
        return _index(frames=replaced(FRAMES, row, column, value))

    return [
        bad("packs unsorted", _index(packs=PACKS[::-1])),
        bad("pack twice", pack(1, 0, _id(0x11))),
        bad(
            "packs unsorted in the last byte",
            _index(packs=[(_id(5, 2), MIB * 9), (_id(5, 1), MIB)]),
        ),
        bad("pack of 0 bytes", pack(1, 1, 0)),
        bad("unused pack of 0 bytes", _index(packs=[*PACKS, (_id(0x33), 0)])),
        bad("pack too long", pack(1, 1, 128 * MIB + 1), LIMIT),
        bad("pack of 2^64-1 bytes", pack(1, 1, U64), LIMIT),
        bad("no such pack", frame(2, 3, 2)),
        bad("pack 2^32-1", frame(2, 3, U32)),
        bad("frames unsorted by pack", frame(0, 3, 1)),
        bad("frames unsorted by offset", frame(0, 0, 2 * MIB)),
        bad("frames overlap", frame(1, 0, MIB - 4096)),
        bad("frame twice", frame(1, 0, 0)),
        bad("frame beyond its pack", frame(1, 0, 3 * MIB)),
        bad("frame reaches beyond its pack", frame(0, 1, 4 * MIB)),
        bad("frame offset not aligned", frame(1, 0, MIB + 1)),
        bad("frame offset 2^64-4096", frame(2, 0, U64 - 4095), LIMIT),
        bad("frame of 0 bytes", frame(1, 1, 0)),
        bad("frame decodes to nothing", frame(1, 2, 0)),
        bad("frame decodes to too much", frame(1, 2, 4 * MIB + 1), LIMIT),
        bad("frame stored too long", frame(2, 1, 4 * MIB + 65_537), LIMIT),
        bad("unknown codec", frame(1, 4, 3)),
        bad("raw of two lengths", frame(0, 1, MIB - 1)),
        bad("reserved bytes", frame(1, 5, 1)),
    ]


def _bad_chunks() -> list[Case]:
    def chunk(row: int, column: int, value: int | bytes) -> bytes:
        return _index(chunks=replaced(CHUNKS, row, column, value))

    return [
        bad("ids unsorted", _index(chunks=CHUNKS[::-1])),
        bad("ids unsorted in the last byte", chunk(1, 0, _id(0x80, 2))),
        bad("id twice", chunk(2, 0, _id(0x80))),
        bad("no such frame", chunk(3, 1, 3)),
        bad("frame 2^32-1", chunk(3, 1, U32)),
        bad("chunk of 0 bytes", chunk(1, 3, 0)),
        bad("chunk too long", chunk(1, 3, MIB + 1), LIMIT),
        bad("chunk of 2^32-1 bytes", chunk(1, 3, U32), LIMIT),
        bad("chunk beyond its frame", chunk(3, 2, 9)),
        bad("chunk reaches beyond its frame", chunk(3, 2, 1)),
        bad("offset 2^32-1", chunk(3, 2, U32)),
        bad("end wraps 32 bits", chunk(3, 2, U32 - 8)),
        bad("chunks without frames", _index(packs=[], frames=[])),
    ]


def _bad_fanouts() -> list[Case]:
    chunks = _many(129)
    right = _fanout(chunks)
    assert len(right) == 5

    def fan(name: str, fanout: list[int]) -> Case:
        return bad(f"fanout: {name}", envelope(INDEX, index_sections(chunks=chunks, fanout=fanout)))

    return [
        fan("first not 0", [1, *right[1:]]),
        fan("last one less", [*right[:-1], right[-1] - 1]),
        fan("last one more", [*right[:-1], right[-1] + 1]),
        fan("one row less in a bucket", [right[0], right[1] - 1, *right[2:]]),
        fan("all in one bucket", [0, 129, 129, 129, 129]),
        fan("falling", [0, right[2], right[1], *right[3:]]),
        fan("2^64-1", [0, U64, *right[2:]]),
        fan("too short", [0, right[2], 129]),
        fan("too long", sorted(right + right[1:-1] + [129])),
        fan("one entry", [129]),
        fan("empty", []),
        bad("fanout: for more bits than rows", _spread_fanout()),
    ]


def _spread_fanout() -> bytes:
    fanout = [sum(bytes(row[0])[0] < bucket for row in CHUNKS) for bucket in range(257)]
    return envelope(INDEX, index_sections(fanout=fanout))


def _badindex_sections() -> list[Case]:
    sections = index_sections()
    whole = envelope(INDEX, sections)
    cases = [
        bad(f"no {tag.decode()}", envelope(INDEX, {k: v for k, v in sections.items() if k != tag}))
        for tag in sections
    ]
    cases += [
        bad(f"half a row of {tag.decode()}", envelope(INDEX, sections | {tag: sections[tag][:-1]}))
        for tag in sections
    ]
    return [
        *cases,
        bad(
            "PACK and CHNK swapped",
            envelope(INDEX, sections | {b"PACK": sections[b"CHNK"], b"CHNK": sections[b"PACK"]}),
        ),
        bad("SUPR unsorted", _supersedes(_id(2), _id(1))),
        bad("SUPR twice", _supersedes(_id(1), _id(1))),
        bad("SUPR half an id", _supersedes(_id(1)[:31])),
        bad("compressed", envelope(INDEX, sections, packed=frozenset({b"CHNK"}))),
        bad("damaged CHNK", flip(whole, len(whole) - 1), "DigestMismatch"),
        bad("truncated", whole[:-1]),
        bad("a rank manifest", envelope(RANK, sections)),
    ]


def buckets() -> list[Case]:
    """How many bits choose a bucket, and which bucket an id is in."""
    counts = {0: 0, 1: 0, 64: 0, 65: 1, 128: 1, 129: 2, 256: 2, 257: 3, 4096: 6, 4097: 7}
    counts |= {1_000_000: 14, 1 << 20: 14, (1 << 20) + 1: 15, 1 << 28: 22, 1 << 30: 24, 1 << 40: 24}
    sizes: list[Case] = [
        {"name": f"{count} chunks", "input": {"count": count}, "expect": bits}
        for count, bits in counts.items()
    ]
    one = "8f" + "01" * 31
    of_bits = {0: 0, 1: 1, 3: 4, 8: 0x8F, 12: 0x8F0, 24: 0x8F0101}
    ids: list[Case] = [
        {"name": f"{bits} bits", "input": {"id": one, "bits": bits}, "expect": bucket}
        for bits, bucket in of_bits.items()
    ]
    return sizes + ids


# -- rank manifests -------------------------------------------------------------------------------

TREE: Json = [ROOT, file("a", 5000), file("b", 10, stream=1, offset=90)]
RANK_STREAMS: list[Row] = [(0, 3, 5000), (3, 1, 100), (4, 0, 0)]
EXTENTS: list[Row] = [
    (1000, 0, 1000, _id(1)),
    (3000, 0, 0, bytes(32)),
    (1000, 96, 4096, _id(2)),
    (100, MIB - 100, MIB, _id(3)),
]


def _rank_meta(count: int) -> dict[str, Json]:
    infos: Json = [{"class": "generic", "origin": f"stream {number}"} for number in range(count)]
    return {**RANK_META, "streams": infos}


def rank_sections(
    table: list[Row] = RANK_STREAMS, runs: list[Row] = EXTENTS, tree: Json = TREE
) -> dict[bytes, bytes]:
    """The sections of a rank manifest, right unless tables are given that are not."""
    return {
        b"META": canonical(_rank_meta(len(table))).encode(),
        b"TREE": canonical(tree).encode(),
        b"STRM": streams(table),
        b"XTNT": extents(runs),
    }


def _rank(table: list[Row] = RANK_STREAMS, runs: list[Row] = EXTENTS, tree: Json = TREE) -> bytes:
    return envelope(RANK, rank_sections(table, runs, tree))


def _rank_json(table: list[Row], runs: list[Row], tree: Json) -> dict[str, Json]:
    return {
        "meta": _rank_meta(len(table)),
        "tree": tree,
        "streams": table_json(table),
        "extents": table_json(runs),
    }


def valid_ranks() -> list[Case]:
    """Rank manifests that must decode."""
    plain = _rank_json(RANK_STREAMS, EXTENTS, TREE)
    longest: list[Row] = [(0, 1, 1 << 50)]
    zeros: list[Row] = [(1 << 50, 0, 0, bytes(32))]
    root_only: Json = [ROOT]
    return [
        good("three streams", _rank(), plain),
        good("nothing but a root", _rank([], [], root_only), _rank_json([], [], root_only)),
        good("2^50 zeros", _rank(longest, zeros, root_only), _rank_json(longest, zeros, root_only)),
        good("unknown section", envelope(RANK, {b"XTRA": b""} | rank_sections()), plain),
    ]


def hostile_ranks() -> list[Case]:
    """Rank manifests that must be refused."""
    sections = rank_sections()
    whole = envelope(RANK, sections)
    cases = [
        bad(f"no {tag.decode()}", envelope(RANK, {k: v for k, v in sections.items() if k != tag}))
        for tag in sections
    ]
    cases += [
        bad(f"half of {tag.decode()}", envelope(RANK, sections | {tag: sections[tag][:-1]}))
        for tag in sections
    ]
    return [
        *cases,
        *_bad_streams(),
        *_bad_extents(),
        bad(
            "fewer streams in META",
            envelope(RANK, sections | {b"META": canonical(_rank_meta(2)).encode()}),
        ),
        bad("file beyond its stream", _rank(tree=[ROOT, file("a", 101, stream=1)])),
        bad(
            "file reaches beyond its stream", _rank(tree=[ROOT, file("a", 100, stream=1, offset=1)])
        ),
        bad("file in no stream", _rank(tree=[ROOT, file("a", 1, stream=3)])),
        bad("file in an empty stream", _rank(tree=[ROOT, file("a", 1, stream=2)])),
        bad("file at 2^50", _rank(tree=[ROOT, file("a", 1, offset=1 << 50)])),
        bad("tree leads outside", _rank(tree=[ROOT, file("../a")])),
        bad("compressed", envelope(RANK, sections, packed=frozenset({b"TREE"}))),
        bad("damaged XTNT", flip(whole, len(whole) - 1), "DigestMismatch"),
        bad("truncated", whole[:-1]),
        bad(
            "META of version 2",
            envelope(RANK, sections | {b"META": canonical({**RANK_META, "version": 2}).encode()}),
            "UnsupportedVersion",
        ),
    ]


def _bad_streams() -> list[Case]:
    def stream(row: int, column: int, value: int) -> bytes:
        return _rank(replaced(RANK_STREAMS, row, column, value))

    wrapping: list[Row] = [(0, 3, 5000), (3, U64, 100), (2, 2, 1100)]
    return [
        bad("stream does not start at 0", stream(0, 0, 1)),
        bad("stream takes from the one before", stream(1, 0, 2)),
        bad("stream leaves one out", stream(1, 0, 4)),
        bad("first 2^64-1", stream(1, 0, U64)),
        bad("one extent too many", stream(1, 1, 2)),
        bad("one extent too few", stream(1, 1, 0)),
        bad("count 2^62", stream(1, 1, 1 << 62)),
        bad("count 2^64-1", stream(2, 1, U64)),
        bad("counts that wrap", _rank(wrapping)),
        bad("stream longer than its extents", stream(1, 2, 101)),
        bad("stream shorter than its extents", stream(1, 2, 99)),
        bad("stream too long", stream(1, 2, (1 << 50) + 1), LIMIT),
        bad("stream of 2^64-1 bytes", stream(1, 2, U64), LIMIT),
        bad("extents without stream", _rank([], EXTENTS, [ROOT])),
        bad("streams without extents", _rank(RANK_STREAMS, [])),
    ]


def _bad_extents() -> list[Case]:
    def extent(row: int, column: int, value: int | bytes) -> bytes:
        return _rank(runs=replaced(EXTENTS, row, column, value))

    long_zeros: Row = (U64, 0, 0, bytes(32))
    return [
        bad("extent of 0 bytes", extent(1, 0, 0)),
        bad("stream of an extent of 0 bytes", _rank([(0, 1, 0)], [(0, 0, 0, bytes(32))], [ROOT])),
        bad("0 bytes of a chunk", _rank([(0, 1, 0)], [(0, 0, 9, _id(1))], [ROOT])),
        bad("extent beyond its chunk", extent(2, 1, 4096)),
        bad("extent reaches beyond its chunk", extent(2, 1, 3097)),
        bad("extent longer than its chunk", extent(0, 2, 999)),
        bad("chunk offset 2^32-1", extent(2, 1, U32)),
        bad("chunk too long", extent(0, 2, MIB + 1), LIMIT),
        bad("chunk of 2^32-1 bytes", extent(0, 2, U32), LIMIT),
        bad("zeros with an id", extent(1, 3, _id(1))),
        bad("zeros with an id in the last byte", extent(1, 3, _id(0, 1))),
        bad("zeros with an offset", extent(1, 1, 1)),
        bad("extent too long", extent(1, 0, (1 << 50) + 1), LIMIT),
        bad("extent of 2^64-1 bytes", extent(1, 0, U64), LIMIT),
        # 2^64-1 and 101 more make 100 if sums wrap.
        bad(
            "two lengths that wrap",
            _rank([(0, 2, 100)], [long_zeros, (101, 0, 0, bytes(32))], [ROOT]),
            LIMIT,
        ),
        bad("lengths that wrap to 0", _wrapping_extents(), LIMIT),
    ]


def _wrapping_extents() -> Json:
    """One stream of 0 bytes whose 2^14 extents of 2^50 zeros add up to 2^64."""
    row = extents([(1 << 50, 0, 0, bytes(32))])
    count = 1 << 14
    sections = rank_sections([(0, count, 0)], [], [ROOT]) | {b"XTNT": row * count}
    whole = draft(RANK, sections, packed=frozenset()).seal()
    head = whole[: -len(row) * count]
    return [binary(head), repeat(row, count)]


# -- layouts --------------------------------------------------------------------------------------

LAYOUT_STREAMS: list[Row] = [(0, 3, MIB + 3009), (3, 1, 100), (4, 0, 0)]
SEGMENTS: list[Row] = [
    (MIB, 0, 0),
    (3000, U32, 0),
    (9, 1, 0),
    (100, 2, 2 * MIB - 100),
]
LAYOUT_PACKS: list[Row] = [(_id(0x22), 3 * MIB), (_id(0x11), 128 * MIB)]
LAYOUT_FRAMES: list[Row] = [
    (0, MIB, MIB, 0, 0, 0, SUM),
    (4096, 5, 9, 1, 2, 0, SUM),
    (MIB, 4096, 2 * MIB, 0, 1, 0, SUM),
]


def layout_sections(
    packs: list[Row] = LAYOUT_PACKS,
    frames: list[Row] = LAYOUT_FRAMES,
    table: list[Row] = LAYOUT_STREAMS,
    runs: list[Row] = SEGMENTS,
) -> dict[bytes, bytes]:
    """The sections of a layout, right unless tables are given that are not."""
    return {
        b"META": canonical(LAYOUT_META).encode(),
        b"PACK": index_packs(packs),
        b"FRAM": index_frames(frames),
        b"STRM": streams(table),
        b"SEGM": segments(runs),
    }


def _layout(**tables: list[Row]) -> bytes:
    return envelope(LAYOUT, layout_sections(**tables))


def valid_layouts() -> list[Case]:
    """Layouts that must decode."""
    plain: dict[str, Json] = {
        "meta": LAYOUT_META,
        "packs": table_json(LAYOUT_PACKS),
        "frames": table_json(LAYOUT_FRAMES, drop=5),
        "streams": table_json(LAYOUT_STREAMS),
        "segments": table_json(SEGMENTS),
    }
    nothing: dict[str, Json] = {name: [] for name in ("packs", "frames", "streams", "segments")}
    packed = frozenset({b"FRAM", b"SEGM"})
    return [
        good("as is", _layout(), plain),
        good("compressed", envelope(LAYOUT, layout_sections(), packed=packed), plain),
        good(
            "all compressed",
            envelope(LAYOUT, layout_sections(), packed=frozenset(layout_sections())),
            plain,
        ),
        good("unknown section", envelope(LAYOUT, layout_sections() | {b"XTRA": b"x"}), plain),
        good(
            "nothing",
            _layout(packs=[], frames=[], table=[], runs=[]),
            {"meta": LAYOUT_META, **nothing},
        ),
    ]


def hostile_layouts() -> list[Case]:
    """Layouts that must be refused."""
    sections = layout_sections()
    cases = [
        bad(f"no {tag.decode()}", envelope(LAYOUT, {k: v for k, v in sections.items() if k != tag}))
        for tag in sections
    ]
    cases += [
        bad(f"half of {tag.decode()}", envelope(LAYOUT, sections | {tag: sections[tag][:-1]}))
        for tag in sections
    ]
    whole = envelope(LAYOUT, sections)
    return [
        *cases,
        *_bad_segments(),
        *_bad_places(),
        bad("of another rank", whole, "DigestMismatch", rank=digest("another").hex()),
        bad("damaged SEGM", flip(whole, len(whole) - 1), "DigestMismatch"),
        bad("truncated", whole[:-1]),
        bad(
            "META larger than allowed", envelope(LAYOUT, sections | {b"META": b" " * 65537}), LIMIT
        ),
        bad("6 GiB decoded", _huge_layout(), LIMIT),
    ]


def _bad_segments() -> list[Case]:
    def segment(row: int, column: int, value: int) -> bytes:
        return _layout(runs=replaced(SEGMENTS, row, column, value))

    def stream(row: int, column: int, value: int) -> bytes:
        return _layout(table=replaced(LAYOUT_STREAMS, row, column, value))

    return [
        bad("segment of 0 bytes", segment(1, 0, 0)),
        bad(
            "stream of a segment of 0 bytes",
            _layout(packs=[], frames=[], table=[(0, 1, 0)], runs=[(0, U32, 0)]),
        ),
        bad("no such frame", segment(3, 1, 3)),
        bad("frame 2^32-2", segment(3, 1, U32 - 1)),
        bad("segment beyond its frame", segment(3, 2, 2 * MIB)),
        bad("segment reaches beyond its frame", segment(3, 2, 2 * MIB - 99)),
        bad("segment end wraps 32 bits", segment(3, 2, U32 - 99)),
        bad("segment of 2^64-1 bytes", segment(3, 0, U64), LIMIT),
        bad(
            "segment end wraps 64 bits",
            _layout(runs=replaced(replaced(SEGMENTS, 3, 0, U64), 3, 2, 1)),
            LIMIT,
        ),
        bad("zeros with an offset", segment(1, 2, 1)),
        bad("stream longer than its segments", stream(1, 2, 101)),
        bad("segment left out", stream(1, 0, 4)),
        bad("count 2^62", stream(1, 1, 1 << 62)),
        bad("stream too long", stream(1, 2, 1 << 51), LIMIT),
    ]


def _bad_places() -> list[Case]:
    def frame(row: int, column: int, value: int) -> bytes:
        return _layout(frames=replaced(LAYOUT_FRAMES, row, column, value))

    other_order = [LAYOUT_FRAMES[0], LAYOUT_FRAMES[2], LAYOUT_FRAMES[1]]
    other_use = replaced(replaced(SEGMENTS, 2, 1, 2), 3, 1, 1)
    other_packs = [(*row[:3], 1 - int(row[3]), *row[4:]) for row in LAYOUT_FRAMES]
    return [
        bad("frames not in order of use", _layout(frames=other_order, runs=other_use)),
        bad("packs not in order of use", _layout(packs=LAYOUT_PACKS[::-1], frames=other_packs)),
        bad("frame not used", _layout(frames=[*LAYOUT_FRAMES, LAYOUT_FRAMES[0]])),
        bad("pack not used", _layout(packs=[*LAYOUT_PACKS, (_id(0x33), MIB)])),
        bad("no such pack", frame(1, 3, 2)),
        bad("pack 2^32-1", frame(1, 3, U32)),
        bad("frame beyond its pack", frame(2, 0, 3 * MIB)),
        bad("frame offset 2^64-4096", frame(2, 0, U64 - 4095), LIMIT),
        bad("unknown codec", frame(2, 4, 9)),
        bad("pack too long", _layout(packs=replaced(LAYOUT_PACKS, 0, 1, U64)), LIMIT),
    ]


def _huge_layout() -> Json:
    """Sections that would decode to 3 GiB each from what zstd could make of their length."""
    size = 96 * 1024
    made = draft(LAYOUT, {b"AAAA": bytes(size), b"BBBB": bytes(size)}, packed=frozenset())
    for one in made.entries:
        one.encoding, one.plain = 1, 3 << 30
    return [binary(made.head()), repeat(bytes(1024), 2 * size // 1024)]
