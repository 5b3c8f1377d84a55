"""Objects that lie behind right digests: written by an enemy, not damaged by a disk."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from snapstore.backend.base import ObjectKind
from snapstore.errors import DigestMismatch, FormatError, LimitExceeded, SnapError
from snapstore.format import index as index_format
from snapstore.format.envelope import LAYOUT_MAGIC
from snapstore.format.layout import SEGMENT_DTYPE, ZEROS, LayoutTables, parse_layout
from snapstore.format.rank import EXTENT_DTYPE, STREAM_DTYPE
from snapstore.options import Integrity
from tests.support.damage import Lab, Sections, canonical, flip, rows, seal, tree_state, unseal

HUGE = 1 << 62


def refused(lab: Lab, to: Path, integrity: Integrity = Integrity.STRONG) -> SnapError:
    """Pull what must not be pulled: exit 4, the next step said, and nothing has the name."""
    with pytest.raises(SnapError) as caught:
        lab.pull(to, integrity=integrity)
    assert caught.value.exit_code == 4
    assert caught.value.next_step
    assert not to.exists()
    return caught.value


def check_pulled(lab: Lab, to: Path) -> None:
    lab.pull(to)
    assert tree_state(to) == tree_state(lab.tree)


# -- layouts --------------------------------------------------------------------------------------


def data_rows(tables: LayoutTables) -> np.ndarray:
    return np.flatnonzero(tables.segments["frame"] != ZEROS)


def other_frame(tables: LayoutTables) -> None:
    """Show the bytes of one frame where those of another, equally long, should be."""
    lengths = tables.segments["length"]
    for row in data_rows(tables):
        fits = tables.frames["plain_length"] >= lengths[row]
        others = np.flatnonzero(fits & (np.arange(len(fits)) != tables.segments["frame"][row]))
        if len(others):
            tables.segments["frame"][row], tables.segments["offset"][row] = others[0], 0
            return
    raise AssertionError("no frame is long enough")


def shifted(tables: LayoutTables) -> None:
    """Show bytes of the right frame from a wrong offset on."""
    sizes = tables.frames["plain_length"][tables.segments["frame"][data_rows(tables)]]
    room = tables.segments["offset"][data_rows(tables)] > 0
    row = data_rows(tables)[np.flatnonzero(room)[0]]
    assert len(sizes)
    tables.segments["offset"][row] -= 1


def data_as_zeros(tables: LayoutTables) -> None:
    row = data_rows(tables)[0]
    tables.segments["frame"][row], tables.segments["offset"][row] = ZEROS, 0


def a_byte_as_zero(tables: LayoutTables) -> LayoutTables:
    """Split a run of data and call one byte in its middle zero."""
    row = data_rows(tables)[0]
    segment = tables.segments[row]
    length, frame, offset = segment.tolist()
    parts = [(100, frame, offset), (1, ZEROS, 0), (length - 101, frame, offset + 101)]
    new = np.array(parts, SEGMENT_DTYPE)
    segments = np.concatenate((tables.segments[:row], new, tables.segments[row + 1 :]))
    return dataclasses.replace(tables, segments=segments, streams=recount(tables, row, 2))


def zeros_as_data(tables: LayoutTables) -> LayoutTables:
    """Show the beginning of a frame where zeros should be."""
    zeros = np.flatnonzero(tables.segments["frame"] == ZEROS)
    row = int(zeros[np.argmax(tables.segments["length"][zeros])])
    length = int(tables.segments["length"][row])
    new = np.array([(4096, 0, 0), (length - 4096, ZEROS, 0)], SEGMENT_DTYPE)
    segments = np.concatenate((tables.segments[:row], new, tables.segments[row + 1 :]))
    return dataclasses.replace(tables, segments=segments, streams=recount(tables, row, 1))


def recount(tables: LayoutTables, row: int, more: int) -> np.ndarray:
    streams = tables.streams.copy()
    firsts = streams["first"].astype(np.int64)
    owner = int(np.flatnonzero(firsts <= row)[-1])
    streams["count"][owner] += more
    streams["first"][owner + 1 :] += more
    return streams


LYING_LAYOUTS: dict[str, Callable[[LayoutTables], LayoutTables | None]] = {
    "another chunk's frame": other_frame,
    "another offset": shifted,
    "data as zeros": data_as_zeros,
    "a byte as zero": a_byte_as_zero,
    "zeros as data": zeros_as_data,
}


@pytest.mark.parametrize("lie", LYING_LAYOUTS)
def test_a_layout_that_lies(lab: Lab, tmp_path: Path, lie: str) -> None:
    """Strong integrity believes no layout; fast integrity does, as documented.

    Proves: I6, I8.
    """
    path = lab.lie_in_tables(LYING_LAYOUTS[lie])
    error = refused(lab, tmp_path / "out")
    assert isinstance(error, DigestMismatch)
    folder = f"layouts/{lab.rank_ids()[0].hex}"
    assert f"move {folder} away" in error.next_step
    lab.pull(tmp_path / "fast", integrity=Integrity.FAST)
    assert tree_state(tmp_path / "fast") != tree_state(lab.tree)
    path.parent.rename(tmp_path / "moved away")
    lab.pull(tmp_path / "out", resume=True)
    assert tree_state(tmp_path / "out") == tree_state(lab.tree)


def test_a_layout_of_another_rank(lab: Lab, tmp_path: Path) -> None:
    """One rank's bytes do not pass for another's, although all lengths agree.

    Proves: I6.
    """
    one, other = lab.rank_ids()[1:]
    sections = unseal(lab.layout_paths(other)[-1].read_bytes(), LAYOUT_MAGIC)
    sections[b"META"] = sections[b"META"].replace(other.hex.encode(), one.hex.encode())
    lab.put(ObjectKind.LAYOUT, f"{one.hex}/00000002", seal(LAYOUT_MAGIC, sections).to_bytes())
    assert isinstance(refused(lab, tmp_path / "out"), DigestMismatch)
    lab.pull(tmp_path / "fast", integrity=Integrity.FAST)
    assert (tmp_path / "fast/rank0.bin").read_bytes() == (lab.tree / "rank1.bin").read_bytes()


@pytest.mark.parametrize("field", ["checksum", "codec", "plain_length", "stored_length", "offset"])
@pytest.mark.parametrize("integrity", Integrity)
def test_a_layout_that_lies_about_a_frame(
    lab: Lab, tmp_path: Path, field: str, integrity: Integrity
) -> None:
    """Each thing that is said of a frame is checked before its bytes are used. Proves: I6, H1."""

    def change(tables: LayoutTables) -> None:
        if field == "checksum":
            tables.frames["checksum"][0] = bytes(16)
        elif field == "codec":
            tables.frames["codec"][0] = 1 + tables.frames["codec"][0] % 2
        elif field == "offset":
            tables.frames["offset"][0], tables.frames["offset"][1] = tables.frames["offset"][:2][
                ::-1
            ]
        elif field == "plain_length":
            tables.frames["codec"][0] = 1
            tables.frames["plain_length"][0] += 1
        else:
            tables.frames["codec"][0] = 1
            tables.frames["stored_length"][0] -= 1

    lab.lie_in_tables(change)
    refused(lab, tmp_path / "out", integrity=integrity)


def raw_segments(change: Callable[[np.ndarray], object]) -> Callable[[Sections], None]:
    def apply(sections: Sections) -> None:
        with rows(sections, b"SEGM", SEGMENT_DTYPE) as table:
            change(table)

    return apply


def raw_streams(change: Callable[[np.ndarray], object]) -> Callable[[Sections], None]:
    def apply(sections: Sections) -> None:
        with rows(sections, b"STRM", STREAM_DTYPE) as table:
            change(table)

    return apply


def setter(field: str, value: int, row: int = 0) -> Callable[[np.ndarray], None]:
    def apply(table: np.ndarray) -> None:
        table[field][row] = value % (1 << 8 * table.dtype[field].itemsize)

    return apply


MALFORMED_LAYOUTS: dict[str, Callable[[Sections], object]] = {
    "a segment of 2^62 bytes": raw_segments(setter("length", HUGE)),
    "an empty segment": raw_segments(setter("length", 0)),
    "a segment of a frame that is not there": raw_segments(setter("frame", 0xFFFFFFFE)),
    "a segment outside its frame": raw_segments(setter("offset", 0xFFFFFFFF)),
    "2^62 segments in a stream": raw_streams(setter("count", HUGE)),
    "2^64 - 1 segments in a stream": raw_streams(setter("count", -1)),
    "a stream of 2^62 bytes": raw_streams(setter("length", HUGE)),
    "a stream that begins at segment 2^62": raw_streams(setter("first", HUGE, 1)),
    "streams that share segments": raw_streams(setter("first", 0, 1)),
    "no segments": lambda sections: sections.update({b"SEGM": b""}),
    "half a segment": lambda sections: sections.update({b"SEGM": sections[b"SEGM"][:-1]}),
    "no frames": lambda sections: sections.update({b"FRAM": b""}),
    "no packs": lambda sections: sections.update({b"PACK": b""}),
    "no section of segments": lambda sections: sections.pop(b"SEGM"),
    "no META": lambda sections: sections.pop(b"META"),
    "META that is no JSON": lambda sections: sections.update({b"META": b"\0\xff"}),
    "META of version 2": lambda sections: sections.update(
        {b"META": sections[b"META"].replace(b'"version":1', b'"version":2')}
    ),
}


@pytest.mark.parametrize("lie", MALFORMED_LAYOUTS)
def test_a_layout_that_no_writer_writes(lab: Lab, tmp_path: Path, lie: str) -> None:
    """It is passed over for an older one, and for the indexes when there is none. Proves: H1."""
    path = lab.lie_in_layout(MALFORMED_LAYOUTS[lie])
    check_pulled(lab, tmp_path / "older")
    path.with_name("00000001").unlink()
    check_pulled(lab, tmp_path / "derived")


def test_a_chain_with_a_high_number(lab: Lab, tmp_path: Path) -> None:
    """One bad layout under the last number does not make a reader try all below. Proves: H3."""
    rank = lab.rank_ids()[0]
    last = lab.put(ObjectKind.LAYOUT, f"{rank.hex}/99999999", b"bad")
    check_pulled(lab, tmp_path / "out")
    with pytest.raises(LimitExceeded, match="full") as caught:
        lab.push()
    assert f"move layouts/{rank.hex}/99999999 away" in caught.value.next_step
    last.unlink()
    lab.push()


def test_a_full_chain(lab: Lab, tmp_path: Path) -> None:
    """A name whose numbers are used up can be read; a push says that it needs another name."""
    data = lab.path(ObjectKind.REF, "team/model/@v1/00000001").read_bytes()
    lab.put(ObjectKind.REF, "team/model/@v1/99999999", data)
    check_pulled(lab, tmp_path / "out")
    with pytest.raises(LimitExceeded, match="full") as caught:
        lab.push()
    assert "use another name" in caught.value.next_step
    lab.push("team/model:v2")


def test_more_segments_than_extents(lab: Lab, tmp_path: Path) -> None:
    """A layout of tiny runs, which would make each large chunk be hashed for each of its bytes.

    Proves: H1.
    """

    def shred(tables: LayoutTables) -> LayoutTables:
        row = int(data_rows(tables)[np.argmax(tables.segments["length"][data_rows(tables)])])
        length, frame, offset = tables.segments[row].tolist()
        new = np.zeros(length, SEGMENT_DTYPE)
        new["length"], new["frame"], new["offset"] = 1, frame, offset + np.arange(length)
        segments = np.concatenate((tables.segments[:row], new, tables.segments[row + 1 :]))
        streams = recount(tables, row, length - 1)
        return dataclasses.replace(tables, segments=segments, streams=streams)

    path = lab.lie_in_tables(shred)
    assert len(parse_layout(path.read_bytes()).segments) > 100_000
    with lab.open() as store:
        rank = store.snapshot(lab.name).ranks()[0]
        assert len(rank.layout.segments) < 1000, "the older generation"
    check_pulled(lab, tmp_path / "out")


# -- rank manifests -------------------------------------------------------------------------------


def extents(change: Callable[[np.ndarray], object]) -> Callable[[Sections], None]:
    def apply(sections: Sections) -> None:
        with rows(sections, b"XTNT", EXTENT_DTYPE) as table:
            change(table)

    return apply


def first_data(table: np.ndarray) -> int:
    return int(np.flatnonzero(table["chunk_length"] != 0)[0])


def longer_extent(table: np.ndarray) -> None:
    """Overlap the next extent: the stream's length no longer is the sum."""
    zeros = np.flatnonzero(table["chunk_length"] == 0)
    table["length"][zeros[0]] += 4096


def shorter_extent(table: np.ndarray) -> None:
    """Leave a hole before the next extent."""
    table["length"][first_data(table)] -= 1


def wrapping_lengths(table: np.ndarray) -> None:
    """Make the sum of all lengths wrap around 2^64 and come out right."""
    zeros = np.flatnonzero(table["chunk_length"] == 0)
    table["length"][zeros[0]] += np.uint64(1 << 63)
    table["length"][zeros[-1]] += np.uint64(1 << 63)


def document(tag: bytes, change: Callable[[Any], object]) -> Callable[[Sections], None]:
    def apply(sections: Sections) -> None:
        value = json.loads(sections[tag])
        change(value)
        sections[tag] = canonical(value)

    return apply


LYING_RANKS: dict[str, Callable[[Sections], object]] = {
    "extents that overlap": extents(longer_extent),
    "extents with a hole": extents(shorter_extent),
    "extents whose lengths wrap": extents(wrapping_lengths),
    "an extent outside its chunk": extents(
        lambda table: setter("chunk_offset", 1, first_data(table))(table)
    ),
    "an extent of 2^62 bytes": extents(setter("length", HUGE)),
    "an empty extent": extents(setter("length", 0)),
    "a chunk of 4 GiB": extents(
        lambda table: setter("chunk_length", 0xFFFFFFFF, first_data(table))(table)
    ),
    "zeros with a chunk id": extents(
        lambda table: setter("chunk_length", 0, first_data(table))(table)
    ),
    "2^62 chunks": raw_streams(setter("count", HUGE)),
    "2^64 - 1 chunks": raw_streams(setter("count", -1)),
    "a stream of 2^62 bytes": raw_streams(setter("length", HUGE)),
    "a stream of 2^50 bytes": raw_streams(setter("length", 1 << 50)),
    "a stream that begins at extent 2^62": raw_streams(setter("first", HUGE, 1)),
    "streams that share extents": raw_streams(setter("first", 0, 1)),
    "fewer streams": lambda sections: sections.update({b"STRM": sections[b"STRM"][:-24]}),
    "part of a row": lambda sections: sections.update({b"XTNT": sections[b"XTNT"][:-1]}),
    "no extents": lambda sections: sections.update({b"XTNT": b""}),
    "no section of extents": lambda sections: sections.pop(b"XTNT"),
    "no streams in META": document(b"META", lambda meta: meta.update(streams=[])),
    "another rank in META": document(b"META", lambda meta: meta.update(rank=7)),
    "an unknown key in META": document(b"META", lambda meta: meta.update(more=1)),
    "META with white space": lambda sections: sections.update({b"META": sections[b"META"] + b" "}),
    "a file outside its stream": document(b"TREE", lambda tree: tree[-1].update(offset=1 << 40)),
    "a file of 2^62 bytes": document(b"TREE", lambda tree: tree[-1].update(size=HUGE)),
    "a file in a stream that is not there": document(
        b"TREE", lambda tree: tree[-1].update(stream=99)
    ),
}


@pytest.mark.parametrize("integrity", Integrity)
@pytest.mark.parametrize("lie", LYING_RANKS)
def test_a_rank_manifest_that_lies(
    lab: Lab, tmp_path: Path, lie: str, integrity: Integrity
) -> None:
    """Counts, lengths and offsets are checked before use, whatever the digests say.

    With fast integrity the chunk table is not read, so lies in it alone are not noticed; the
    bytes are those of the layout then, and within the files. Proves: H1, I8.
    """
    rank = lab.lie_in_rank(LYING_RANKS[lie])
    if integrity is Integrity.FAST and ("exten" in lie or "chunk" in lie or "row" in lie):
        try:
            lab.pull(tmp_path / "out", integrity=integrity)
        except FormatError:
            assert not (tmp_path / "out").exists()
        else:
            assert tree_state(tmp_path / "out") == tree_state(lab.tree)
        return
    error = refused(lab, tmp_path / "out", integrity=integrity)
    assert "host" in str(error) or rank.short in str(error)
    if "file" not in lie:
        with lab.open() as store, pytest.raises(SnapError):
            store.show(lab.name)


def test_a_rank_manifest_of_other_chunks(lab: Lab, tmp_path: Path) -> None:
    """Its ids are what counts: bytes that do not hash to them are refused. Proves: I6."""

    def change(table: np.ndarray) -> None:
        table["id"][first_data(table)] = b"\1" * 32

    lab.lie_in_rank(extents(change))
    assert isinstance(refused(lab, tmp_path / "out"), DigestMismatch)
    lab.lie_in_rank(lambda _: None, layouts=False)
    refused(lab, tmp_path / "derived")


# -- root manifests, refs, indexes ----------------------------------------------------------------


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


LYING_ROOTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a rank that is not there": lambda root: root["ranks"][0].update(manifest="0" * 64),
    "a rank twice": lambda root: root["ranks"].append(root["ranks"][-1]),
    "ranks out of order": lambda root: root["ranks"].reverse(),
    "a rank under another number": lambda root: root["ranks"][-1].update(rank=2),
    "ranks that are swapped": lambda root: (
        root["ranks"][1].update(rank=1),
        root["ranks"][2].update(rank=2),
    ),
    "no ranks": lambda root: root["ranks"].clear(),
    "rank 2^62": lambda root: root["ranks"][-1].update(rank=HUGE),
    "2^63 bytes": lambda root: root["ranks"][0].update(logical_bytes=1 << 63),
    "-1 files": lambda root: root["ranks"][0].update(files=-1),
    "1.5 files": lambda root: root["ranks"][0].update(files=1.5),
    "an unknown key": lambda root: root.update(more=1),
    "a missing key": lambda root: root.pop("kind"),
    "33 levels": lambda root: root["requirements"].update(deep=deep(33)),
    "900 levels": lambda root: root["requirements"].update(deep=deep(900)),
    "a float": lambda root: root["requirements"].update(number=0.5),
    "an integer of 70 bits": lambda root: root["requirements"].update(number=1 << 70),
    "a long label": lambda root: root["labels"].update(a="x" * 5000),
    "a day that does not exist": lambda root: root.update(created="2026-02-30T00:00:00Z"),
    "a lone surrogate": lambda root: root["labels"].update(a="\ud800"),
    "another format": lambda root: root.update(format="snapstore/rank"),
}


@pytest.mark.parametrize("lie", LYING_ROOTS)
def test_a_root_manifest_that_lies(lab: Lab, tmp_path: Path, lie: str) -> None:
    """Nothing is taken from a root manifest that breaks a rule. Proves: H1, I2."""
    snapshot = lab.lie_in_root(LYING_ROOTS[lie])
    error = refused(lab, tmp_path / "out")
    assert snapshot.short in str(error) or "rank" in str(error)
    lab.pull(tmp_path / "other", "other")
    lab.push()
    check_pulled(lab, tmp_path / "out")


def test_a_root_manifest_nested_without_end(lab: Lab, tmp_path: Path) -> None:
    """Nesting deeper than any stack is an error like others. Proves: H3."""
    data = b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    digest = lab.put_named(ObjectKind.SNAPSHOT, data)
    lab.point(digest)
    refused(lab, tmp_path / "out")


def test_sizes_that_are_claimed_are_only_shown(lab: Lab) -> None:
    """Sums of claimed sizes have no limit that could be exceeded."""
    lab.lie_in_root(
        lambda root: [rank.update(logical_bytes=(1 << 63) - 1) for rank in root["ranks"]]
    )
    with lab.open() as store:
        manifest = store.snapshot(lab.name).manifest
        assert sum(rank.logical_bytes for rank in manifest.ranks) == 3 * ((1 << 63) - 1)
        assert store.show(lab.name).logical_bytes < 1 << 30


@pytest.mark.parametrize("kind", [ObjectKind.RANK, ObjectKind.PACK, ObjectKind.SNAPSHOT])
def test_a_ref_to_something_else(lab: Lab, tmp_path: Path, kind: ObjectKind) -> None:
    """A digest of another kind of object is no snapshot. Proves: I2."""
    name = lab.names(kind)[0]
    if kind is ObjectKind.SNAPSHOT:
        name = name[::-1]
    lab.point(name)
    assert "team/model:v1" in str(refused(lab, tmp_path / "out"))


INDEX_LIES: dict[str, Callable[[Sections], object]] = {
    "a chunk outside its frame": lambda sections: index_rows(sections, "offset", 0xFFFFFFF0),
    "a chunk of 4 GiB": lambda sections: index_rows(sections, "length", 0xFFFFFFFF),
    "a frame that is not there": lambda sections: index_rows(sections, "frame", 0xFFFFFFFF),
    "no fan-out": lambda sections: sections.update({b"FANO": b""}),
    "a fan-out of 2^62": lambda sections: sections.update(
        {b"FANO": HUGE.to_bytes(8, "little") * (len(sections[b"FANO"]) // 8)}
    ),
    "no packs": lambda sections: sections.update({b"PACK": b""}),
    "unsorted ids": lambda sections: sections.update(
        {b"CHNK": sections[b"CHNK"][44:] + sections[b"CHNK"][:44]}
    ),
}


def index_rows(sections: Sections, field: str, value: int) -> None:
    with rows(sections, b"CHNK", index_format.CHUNK_DTYPE) as table:
        table[field] = value


@pytest.mark.parametrize("lie", INDEX_LIES)
def test_an_index_that_no_writer_writes(lab: Lab, tmp_path: Path, lie: str) -> None:
    """It is passed over with a warning; a push is never refused because of it. Proves: H1."""
    (index,) = lab.indexes_of(lab.packs_of())
    bad = lab.lie_in_index(INDEX_LIES[lie], index)
    result = lab.push()
    assert result.ingest.new_bytes == 0
    (warning,) = result.warnings
    assert bad.name[:12] in warning
    check_pulled(lab, tmp_path / "out")


def test_an_index_that_lies_about_a_place(lab: Lab, tmp_path: Path) -> None:
    """A push believes an index, since reading all it refers to would cost as much as sending it.

    So an enemy can spoil what is pushed after; a pull with strong integrity refuses that, and
    never takes one chunk for another. Proves: I6.
    """
    (index,) = lab.indexes_of(lab.packs_of())

    def change(sections: Sections) -> None:
        with rows(sections, b"CHNK", index_format.CHUNK_DTYPE) as table:
            same = np.flatnonzero(table["length"] == table["length"][0])
            frames = np.frombuffer(sections[b"FRAM"], index_format.FRAME_DTYPE)
            room = np.flatnonzero(frames["plain_length"] >= table["length"][0])
            other = room[room != table["frame"][0]][0]
            assert len(same)
            table["frame"][0], table["offset"][0] = other, 0

    lab.lie_in_index(change, index)
    index.unlink()
    result = lab.push()
    assert result.ingest.new_bytes == 0
    assert isinstance(refused(lab, tmp_path / "out"), DigestMismatch)


def test_fast_integrity_catches_accidents(lab: Lab, tmp_path: Path) -> None:
    """A bit that is turned over in any frame is found by its checksum. Proves: I6."""
    (pack,) = lab.packs_of()
    good = pack.read_bytes()
    frames = np.concatenate(
        [parse_layout(lab.layout_paths(rank)[-1].read_bytes()).frames for rank in lab.rank_ids()]
    )
    assert len(frames) > 5
    for number, frame in enumerate(frames.tolist()):
        pack.write_bytes(good)
        flip(pack, (frame[0] + frame[1] * 0.7) / len(good))
        error = refused(lab, tmp_path / f"out-{number}", integrity=Integrity.FAST)
        assert isinstance(error, DigestMismatch)
        assert pack.name[:12] in str(error)
