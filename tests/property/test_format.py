"""Round trips of every object against simple models, and mutations of valid objects.

Mutated objects are sealed again with right digests, so that the damage reaches the checks behind
them. Whatever a decoder is given, it returns or raises a `SnapError`, and allocates little.
"""

import json
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstore.errors import LimitExceeded, Malformed, SnapError
from snapstore.format import canonical, limits
from snapstore.format import index as index_format
from snapstore.format import layout as layout_format
from snapstore.format import pack as pack_format
from snapstore.format import rank as rank_format
from snapstore.format import snapshot as snapshot_format
from snapstore.format.envelope import (
    INDEX_MAGIC,
    LAYOUT_MAGIC,
    PACK_MAGIC,
    RANK_MAGIC,
    Section,
    build,
    decode_section,
    parse_header,
    parse_whole,
)
from snapstore.format.tables import order_of_ids
from snapstore.format.tree import EntryType, TreeEntry, decode_tree, encode_tree
from snapstore.ids import Digest
from snapstore.units import MIB, align_up
from tools.vectors import binaries, tables, trees
from tools.vectors.encode import envelope, zstd

ALLOCATED_BYTES_MAX = 16 * MIB

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | INT64 | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
# Few letters, so that ids share prefixes and come twice.
IDS = st.lists(st.sampled_from(b"\x00\x01\xff"), min_size=2, max_size=2).map(
    lambda ends: bytes(ends[:1]) + b"\x07" * 30 + bytes(ends[1:])
) | st.binary(min_size=32, max_size=32)


def id_array(ids: list[bytes]) -> np.ndarray:
    return np.array(ids, "V32") if ids else np.zeros(0, "V32")


# -- canonical JSON -------------------------------------------------------------------------------


@given(VALUES)
def test_canonical_json_is_that_of_the_standard_library(value: object) -> None:
    data = canonical.encode(value)
    model = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert data == model.encode()
    assert canonical.decode(data, object) == value


@given(VALUES, st.data())
def test_other_spellings_are_refused(value: object, data: st.DataObject) -> None:
    """Any change that leaves valid JSON of the same value makes it non-canonical."""
    good = canonical.encode(value).decode()
    place = data.draw(st.integers(0, len(good)))
    letter = data.draw(st.sampled_from([" ", "\n", "\t", ".0", "e0", "0", "-", "\\", "\ufeff"]))
    spelled = good[:place] + letter + good[place:]
    try:
        decoded = canonical.decode(spelled.encode(), object)
    except (Malformed, LimitExceeded):
        return
    assert canonical.encode(decoded) == spelled.encode()


@given(VALUES, st.floats() | st.integers(2**63) | st.integers(max_value=-(2**63) - 1))
def test_numbers_that_are_no_integers_of_64_bits_are_refused(value: object, odd: float) -> None:
    with pytest.raises(Malformed):
        canonical.encode([value, {"key": odd}])


@given(st.binary(max_size=64) | TEXT.map(str.encode))
def test_canonical_decoder_survives_anything(data: bytes) -> None:
    try:
        value = canonical.decode(data, object)
    except (Malformed, LimitExceeded):
        return
    assert canonical.encode(value) == data


# -- trees ----------------------------------------------------------------------------------------

COMPONENTS = st.sampled_from([b"a", b"a.", b"a-b", b"b", b"\xff", "é".encode(), b"..."])
NUMBERS = st.builds(
    dict,
    mode=st.integers(0, 4095),
    uid=st.integers(0, 2**32 - 1),
    gid=st.integers(0, 2**32 - 1),
    mtime_ns=INT64,
    xattrs=st.dictionaries(
        st.text("ab.é", min_size=1, max_size=4).map(str.encode), st.binary(max_size=9), max_size=3
    ).map(lambda found: tuple(sorted(found.items()))),
)


@st.composite
def tree_entries(draw: st.DrawFn) -> list[TreeEntry]:
    """Grow a tree from random paths: what has something below it is a directory."""
    paths = draw(st.lists(st.lists(COMPONENTS, min_size=1, max_size=4), max_size=12))
    inner = {b"/".join(path[:depth]) for path in paths for depth in range(len(path))} | {b""}
    leaves = {b"/".join(path) for path in paths} - inner
    entries: list[TreeEntry] = []
    files: list[bytes] = []
    for path in sorted(inner | leaves):
        more: dict[str, object] = {}
        kind = EntryType.DIRECTORY if path in inner else draw(st.sampled_from(EntryType))
        if kind is EntryType.HARDLINK and not files:
            kind = EntryType.SYMLINK
        if kind is EntryType.FILE:
            files.append(path)
            if draw(st.booleans()):
                more = {
                    "size_bytes": draw(st.integers(1, 2**50)),
                    "stream": draw(st.integers(0, 2**20 - 1)),
                    "offset": draw(st.integers(0, 2**50)),
                }
        elif kind is EntryType.SYMLINK:
            target = draw(st.binary(min_size=1, max_size=9)).replace(b"\0", b"/")
            more = {"target": target}
        elif kind is EntryType.HARDLINK:
            more = {"target": draw(st.sampled_from(files))}
        entries.append(TreeEntry(path=path, type=kind, **draw(NUMBERS), **more))
    return entries


@given(tree_entries())
def test_trees_come_back(entries: list[TreeEntry]) -> None:
    data = encode_tree(entries)
    assert decode_tree(data) == entries
    value = json.loads(data)
    model = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert model.encode() == data


@given(tree_entries(), st.randoms(use_true_random=False))
def test_trees_in_another_order_are_refused(entries: list[TreeEntry], random: object) -> None:
    shuffled = list(entries)
    random.shuffle(shuffled)
    if shuffled != entries:
        with pytest.raises(Malformed):
            encode_tree(shuffled)


# -- binary objects -------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.text("ABC123", min_size=4, max_size=4), st.binary(max_size=300), min_size=1, max_size=16
    )
)
def test_envelopes_come_back(content: dict[str, bytes]) -> None:
    """Whatever is in it, reading the header alone says the same as reading all."""
    sections = [
        Section(tag.encode(), data, compress=len(data) % 2 == 1) for tag, data in content.items()
    ]
    built = build(LAYOUT_MAGIC, sections)
    data = built.to_bytes()
    assert built.length == len(data)
    whole = parse_whole(data, magic=LAYOUT_MAGIC, root=built.root)
    head = parse_header(
        data[: limits.HEADER_BYTES_MAX], magic=LAYOUT_MAGIC, object_length=len(data)
    )
    assert head == whole
    for info in whole.sections:
        plain = decode_section(info, data[info.offset : info.end], limit_bytes=300)
        assert bytes(plain) == content[info.tag.decode()]


@given(st.lists(IDS, max_size=40))
def test_ids_sort_as_bytes(ids: list[bytes]) -> None:
    order = order_of_ids(id_array(ids))
    assert order.tolist() == sorted(range(len(ids)), key=lambda row: (ids[row], row))


@st.composite
def pack_tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Frames with their chunks, laid out like a writer does, sometimes with gaps."""
    frames: list[tuple[object, ...]] = []
    chunks: list[tuple[bytes, int]] = []
    end = 0
    for _ in range(draw(st.integers(1, 6))):
        lengths = draw(st.lists(st.integers(1, MIB), min_size=1, max_size=4))
        codec = draw(st.sampled_from(pack_format.CODECS))
        plain = sum(lengths)
        stored = plain if codec == pack_format.CODEC_RAW else draw(st.integers(1, 5000))
        offset = align_up(end, 4096) + 4096 * draw(st.integers(0, 1))
        checksum = draw(st.binary(min_size=16, max_size=16))
        frames.append((offset, stored, plain, len(chunks), len(lengths), codec, b"", checksum))
        chunks += [(draw(IDS), length) for length in lengths]
        end = offset + stored
    made = np.array(frames, pack_format.FRAME_DTYPE), np.array(chunks, pack_format.CHUNK_DTYPE)
    return *made, align_up(end, 4096)


@given(pack_tables(), st.none() | st.binary(min_size=16, max_size=16))
def test_footers_come_back(made: tuple[np.ndarray, np.ndarray, int], salt: bytes | None) -> None:
    frames, chunks, offset = made
    data = pack_format.encode_footer(frames, chunks, offset=offset, salt=salt)
    found = pack_format.parse_trailer(data[-32:], pack_length=offset + len(data))
    assert found == (offset, len(data) - 32)
    footer = pack_format.parse_footer(data[:-32], footer_offset=offset)
    assert footer.frames.tobytes() == frames.tobytes()
    assert footer.chunks.tobytes() == chunks.tobytes()
    assert footer.salt == salt


@st.composite
def index_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows as merged indexes give them: unsorted, with packs, frames and ids twice."""
    names = draw(st.lists(IDS, min_size=1, max_size=4))
    packs = [(name, 100 * MIB) for name in names]
    frames = [
        (
            4 * MIB * place,
            1 + place,
            4 * MIB,
            draw(st.integers(0, len(packs) - 1)),
            1,
            b"",
            b"\x01" * 16,
        )
        for place in draw(st.lists(st.integers(0, 8), min_size=1, max_size=8))
    ]
    chunks = [
        (
            one,
            draw(st.integers(0, len(frames) - 1)),
            draw(st.integers(0, 3 * MIB)),
            draw(st.integers(1, MIB)),
        )
        for one in draw(st.lists(IDS, max_size=80))
    ]
    return (
        np.array(packs, index_format.PACK_DTYPE),
        np.array(frames, index_format.FRAME_DTYPE),
        np.array(chunks, index_format.CHUNK_DTYPE),
    )


@given(index_rows(), st.lists(IDS.map(Digest), max_size=3))
def test_indexes_say_the_same_as_a_dictionary(
    rows: tuple[np.ndarray, np.ndarray, np.ndarray], supersedes: list[Digest]
) -> None:
    packs, frames, chunks = rows
    model: dict[bytes, tuple[object, ...]] = {}
    for chunk in chunks:
        frame = frames[chunk["frame"]]
        pack = packs[frame["pack"]]["id"].tobytes()
        place = (pack, int(frame["offset"]), int(chunk["offset"]), int(chunk["length"]))
        model.setdefault(chunk["id"].tobytes(), place)
    built = index_format.build_index(packs, frames, chunks, supersedes=supersedes)
    read = index_format.parse_index(built.to_bytes(), root=built.root)
    assert [one.tobytes() for one in read.chunks["id"]] == sorted(model)
    bits = index_format.fanout_bits(len(model))
    for chunk_id, place in model.items():
        bucket = index_format.bucket_of(chunk_id, bits)
        run = read.chunks[int(read.fanout[bucket]) : int(read.fanout[bucket + 1])]
        index_format.check_bucket(run, bucket=bucket, bits=bits, frame_count=len(read.frames))
        (chunk,) = run[run["id"] == np.void(chunk_id)]
        frame = read.frames[chunk["frame"]]
        pack = read.packs[frame["pack"]]["id"].tobytes()
        assert place == (pack, int(frame["offset"]), int(chunk["offset"]), int(chunk["length"]))
    assert set(read.supersedes) == set(supersedes)


@st.composite
def runs_of_streams(draw: st.DrawFn, lengths: st.SearchStrategy[int]) -> list[list[int]]:
    return draw(st.lists(st.lists(lengths, max_size=5), max_size=5))


def stream_rows(runs: list[list[int]]) -> np.ndarray:
    streams = np.zeros(len(runs), rank_format.STREAM_DTYPE)
    first = 0
    for row, run in zip(streams, runs, strict=True):
        row["first"], row["count"], row["length"] = first, len(run), sum(run)
        first += len(run)
    return streams


@given(runs_of_streams(st.integers(1, MIB)), st.randoms(use_true_random=False))
def test_rank_manifests_come_back(runs: list[list[int]], random: object) -> None:
    streams = stream_rows(runs)
    lengths = [length for run in runs for length in run]
    extents = np.zeros(len(lengths), rank_format.EXTENT_DTYPE)
    for row, length in zip(extents, lengths, strict=True):
        row["length"] = length
        if random.random() < 0.7:
            row["chunk_length"] = random.randint(length, MIB)
            row["chunk_offset"] = random.randint(0, int(row["chunk_length"]) - length)
            row["id"] = random.randbytes(32)
    infos = tuple(rank_format.StreamInfo(data_class="generic", origin="x") for _ in runs)
    meta = rank_format.RankMeta(rank=random.randint(0, 7), streams=infos)
    root = TreeEntry(path=b"", type=EntryType.DIRECTORY, mode=0, uid=0, gid=0, mtime_ns=0)
    built = rank_format.build_rank(meta, [root], streams, extents)
    read = rank_format.parse_rank(built.to_bytes(), root=built.root)
    assert read.meta == meta
    assert read.tree == [root]
    assert read.streams.tobytes() == streams.tobytes()
    assert read.extents.tobytes() == extents.tobytes()


@given(runs_of_streams(st.integers(1, 4 * MIB)), st.randoms(use_true_random=False))
def test_layouts_come_back(runs: list[list[int]], random: object) -> None:
    """Frames and packs are renumbered in order of use, but every segment keeps its place."""
    streams = stream_rows(runs)
    lengths = [length for run in runs for length in run]
    packs = np.array(
        [(random.randbytes(32), 128 * MIB) for _ in range(4)], layout_format.PACK_DTYPE
    )
    frames = np.array(
        [
            (4096 * place, 9, 4 * MIB, random.randint(0, 3), 1, b"", b"\2" * 16)
            for place in range(9)
        ],
        layout_format.FRAME_DTYPE,
    )
    segments = np.zeros(len(lengths), layout_format.SEGMENT_DTYPE)
    for row, length in zip(segments, lengths, strict=True):
        zeros = random.random() < 0.3
        row["length"] = length
        row["frame"] = layout_format.ZEROS if zeros else random.randint(0, 8)
        row["offset"] = 0 if zeros else random.randint(0, 4 * MIB - length)
    meta = layout_format.LayoutMeta(rank="0" * 64, nonce="0" * 32, created="2026-11-30T05:00:00Z")
    built = layout_format.build_layout(meta, packs, frames, streams, segments)
    read = layout_format.parse_layout(built.to_bytes())
    assert read.meta == meta
    assert read.streams.tobytes() == streams.tobytes()
    assert places(read.packs, read.frames, read.segments) == places(packs, frames, segments)
    again = layout_format.build_layout(meta, read.packs, read.frames, read.streams, read.segments)
    assert again.to_bytes() == built.to_bytes()


def places(packs: np.ndarray, frames: np.ndarray, segments: np.ndarray) -> list[object]:
    found: list[object] = []
    for segment in segments:
        where: object = None
        if segment["frame"] != layout_format.ZEROS:
            frame = frames[segment["frame"]]
            where = packs[frame["pack"]]["id"].tobytes(), int(frame["offset"])
        found.append((int(segment["length"]), int(segment["offset"]), where))
    return found


LABELS = st.dictionaries(st.text(min_size=1, max_size=9), TEXT, max_size=3)
OPEN = st.dictionaries(TEXT, VALUES, max_size=3)


@given(LABELS, OPEN, OPEN, st.sets(st.integers(-1, 9), min_size=1))
def test_root_manifests_come_back(
    labels: dict[str, str], needs: dict[str, object], writer: dict[str, object], ranks: set[int]
) -> None:
    manifest = snapshot_format.RootManifest(
        created="2026-11-30T05:00:00Z",
        kind="criu",
        labels=labels,
        requirements=needs,
        writer=writer,
        ranks=tuple(
            snapshot_format.RankEntry(
                rank=rank_format.HOST if number < 0 else number,
                manifest=f"{number % 16:x}" * 64,
                logical_bytes=2,
                data_bytes=1,
                files=0,
            )
            for number in sorted(ranks)
        ),
    )
    data, snapshot_id = snapshot_format.encode_snapshot(manifest)
    assert snapshot_id.raw == Digest.of(data).raw
    assert snapshot_format.decode_snapshot(data) == manifest


# -- mutations ------------------------------------------------------------------------------------

INTERESTING = [0, 1, 0x7F, 0x80, 0xFF]


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[str, float, int, int]]:
    """Edits of bytes: where (as a part of the length), what and how much."""
    kinds = st.sampled_from(["set", "word", "cut", "insert", "copy"])
    values = st.sampled_from(INTERESTING) | st.integers(0, 255)
    one = st.tuples(kinds, st.floats(0, 1, exclude_max=True), values, st.integers(1, 48))
    return draw(st.lists(one, min_size=1, max_size=4))


def mutate(data: bytes, edits: list[tuple[str, float, int, int]]) -> bytes:
    made = bytearray(data)
    for kind, part, value, size in edits:
        at = int(part * len(made))
        if kind == "set" and made:
            made[at] = value
        elif kind == "word":
            made[at : at + 8] = bytes([value]) * min(8, len(made) - at)
        elif kind == "cut":
            del made[at : at + size]
        elif kind == "insert":
            made[at:at] = bytes([value]) * size
        elif kind == "copy":
            made[at:at] = made[:size]
    return bytes(made)


def survives(decode: Callable[[bytes], object], data: bytes) -> None:
    tracemalloc.start()
    try:
        decode(data)
    except SnapError as error:
        assert len(str(error)) < 1000  # noqa: PT017 - both outcomes are right
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < ALLOCATED_BYTES_MAX


OBJECTS: dict[str, tuple[bytes, dict[bytes, bytes], Callable[[bytes], object]]] = {
    "footer": (
        PACK_MAGIC,
        {
            b"FRAM": binaries.pack_frames(binaries.FRAMES),
            b"CHNK": binaries.pack_chunks(binaries.CHUNKS),
            b"SALT": bytes(16),
        },
        lambda data: pack_format.parse_footer(data, footer_offset=binaries.FOOTER_OFFSET),
    ),
    "index": (INDEX_MAGIC, tables.index_sections(), index_format.parse_index),
    "rank": (RANK_MAGIC, tables.rank_sections(), rank_format.parse_rank),
    "layout": (LAYOUT_MAGIC, tables.layout_sections(), layout_format.parse_layout),
}


@pytest.mark.parametrize("kind", sorted(OBJECTS))
@given(data=st.data(), edits=mutations())
def test_mutated_sections(kind: str, data: st.DataObject, edits: list) -> None:
    """One section is changed and everything sealed again: only the content can give it away."""
    magic, sections, decode = OBJECTS[kind]
    tag = data.draw(st.sampled_from(sorted(sections)))
    survives(decode, envelope(magic, {**sections, tag: mutate(sections[tag], edits)}))


@pytest.mark.parametrize("kind", sorted(OBJECTS))
@given(edits=mutations())
def test_mutated_objects(kind: str, edits: list) -> None:
    magic, sections, decode = OBJECTS[kind]
    whole = envelope(magic, sections)
    changed = mutate(whole, edits)
    survives(decode, changed)
    if changed != whole:
        with pytest.raises(SnapError):
            decode(changed)


@given(edits=mutations(), plain_length=st.integers(0, 2**64 - 1) | st.integers(0, 3000))
def test_mutated_zstd_sections(edits: list, plain_length: int) -> None:
    """A frame of zstd is changed and the directory claims any length for it."""
    stored = mutate(zstd(bytes(range(256)) * 8), edits)
    made = tables.draft(LAYOUT_MAGIC, {b"AAAA": stored}, packed=frozenset())
    made.entries[0].encoding, made.entries[0].plain = 1, plain_length

    def decode(data: bytes) -> None:
        (info,) = parse_whole(data, magic=LAYOUT_MAGIC).sections
        decode_section(info, data[info.offset : info.end], limit_bytes=MIB)

    survives(decode, made.seal())


@given(edits=mutations(), number=st.integers(0, len(trees.valid_trees()) - 1))
def test_mutated_trees(edits: list, number: int) -> None:
    """What still decodes is canonical and sound, so it can be encoded again."""
    pieces = trees.valid_trees()[number]["input"]
    changed = mutate("".join(piece["text"] for piece in pieces).encode(), edits)
    try:
        entries = decode_tree(changed)
    except SnapError:
        return
    assert encode_tree(entries) == changed


@settings(max_examples=300)
@given(
    data=st.binary(max_size=200),
    magic=st.sampled_from([PACK_MAGIC, INDEX_MAGIC, RANK_MAGIC, LAYOUT_MAGIC]),
)
def test_random_bytes(data: bytes, magic: bytes) -> None:
    for kind_magic, _, decode in OBJECTS.values():
        if kind_magic == magic:
            survives(decode, magic + data)
