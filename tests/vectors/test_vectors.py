"""Runs every vector of `format_spec/vectors`, and the generator that writes them.

A vector says what bytes must decode to, or with which error they must be refused. The generator
encodes by itself; so this also compares two readings of the specification.
"""

import base64
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from snapstore import errors
from snapstore.format import config as config_format
from snapstore.format import envelope
from snapstore.format import index as index_format
from snapstore.format import layout as layout_format
from snapstore.format import lease as lease_format
from snapstore.format import mark as mark_format
from snapstore.format import pack as pack_format
from snapstore.format import page_order as page_order_format
from snapstore.format import rank as rank_format
from snapstore.format import ref as ref_format
from snapstore.format import snapshot as snapshot_format
from snapstore.format.tree import TreeEntry, decode_tree
from snapstore.ids import Digest, RankId
from snapstore.units import MIB
from tests.support.schemas import check_document, validator
from tools.make_vectors import VECTORS, vectors

# Far below what a hostile number could ask for, above what the largest input of a case needs.
ALLOCATED_BYTES_MAX = 16 * MIB


def table(rows: np.ndarray) -> list[list[object]]:
    """Rows as the vectors write them: ids and checksums in hexadecimal, no reserved bytes."""
    names = [name for name in rows.dtype.names or () if name != "zero"]
    listed = rows[names].tolist()
    return [[one.hex() if isinstance(one, bytes) else one for one in row] for row in listed]


def plain(value: object) -> object:
    return json.loads(msgspec.json.encode(value))


def tree_json(tree: list[TreeEntry]) -> object:
    """Not by the encoder, since that checks once more what the decoder should have refused."""
    return [entry_json(entry) for entry in tree]


def entry_json(entry: TreeEntry) -> dict[str, object]:
    value: dict[str, object] = {"type": entry.type.value}
    for name in ("mode", "uid", "gid", "mtime_ns"):
        value[name] = getattr(entry, name)
    for name in ("path", "target"):
        raw: bytes = getattr(entry, name)
        try:
            value[name] = raw.decode()
        except UnicodeDecodeError:
            value[f"{name}_b64"] = base64.b64encode(raw).decode()
    if not entry.target:
        del value["target"]
    if entry.size_bytes:
        value |= {"size": entry.size_bytes, "stream": entry.stream, "offset": entry.offset}
    if entry.xattrs:
        value["xattrs"] = [
            [one.decode(), base64.b64encode(two).decode()] for one, two in entry.xattrs
        ]
    return value


def run_envelope(data: bytes, args: dict[str, str]) -> object:
    made = envelope.parse_whole(data, magic=args["magic"].encode())
    return [
        [
            info.tag.decode(),
            {"blake3": blake3(section(made, data, info)).hexdigest()},
        ]
        for info in made.sections
    ]


def section(made: envelope.Envelope, data: bytes, info: envelope.SectionInfo) -> memoryview:
    stored = memoryview(data)[info.offset : info.end]
    return envelope.decode_section(info, stored, limit_bytes=MIB, what=made.what)


def run_footer(data: bytes, args: dict[str, int]) -> object:
    footer = pack_format.parse_footer(data, footer_offset=args["footer_offset"])
    return {
        "frames": table(footer.frames),
        "chunks": table(footer.chunks),
        "salt": None if footer.salt is None else footer.salt.hex(),
    }


def run_index(data: bytes, _: dict[str, str]) -> object:
    tables = index_format.parse_index(data)
    return {
        "packs": table(tables.packs),
        "frames": table(tables.frames),
        "chunks": table(tables.chunks),
        "fanout": tables.fanout.tolist(),
        "supersedes": [one.hex for one in tables.supersedes],
    }


def run_rank(data: bytes, _: dict[str, str]) -> object:
    tables = rank_format.parse_rank(data)
    return {
        "meta": plain(tables.meta),
        "tree": tree_json(tables.tree),
        "streams": table(tables.streams),
        "extents": table(tables.extents),
    }


def run_layout(data: bytes, args: dict[str, str]) -> object:
    rank = RankId.parse(args["rank"]) if "rank" in args else None
    tables = layout_format.parse_layout(data, rank=rank)
    return {
        "meta": plain(tables.meta),
        "packs": table(tables.packs),
        "frames": table(tables.frames),
        "streams": table(tables.streams),
        "segments": table(tables.segments),
    }


def run_bucket(given: dict[str, object], _: dict[str, str]) -> object:
    if "count" in given:
        return index_format.fanout_bits(int(str(given["count"])))
    return index_format.bucket_of(bytes.fromhex(str(given["id"])), int(str(given["bits"])))


def run_lease_transition(given: dict[str, str | None], _: dict[str, str]) -> object:
    previous = given["previous"] and lease_format.LeaseState(given["previous"])
    return lease_format.may_follow(lease_format.LeaseState(given["new"]), previous)


def run_mark_transition(given: dict[str, str | None], _: dict[str, str]) -> object:
    previous = given["previous"] and mark_format.MarkState(given["previous"])
    return mark_format.may_follow(mark_format.MarkState(given["new"]), previous)


def document(decode: Callable[[bytes], object]) -> Callable[[bytes, dict[str, str]], object]:
    return lambda data, _: plain(decode(data))


RUN: dict[str, Callable[..., object]] = {
    "config": document(config_format.decode_config),
    "snapshot": document(snapshot_format.decode_snapshot),
    "rank-meta": document(rank_format.parse_meta),
    "layout-meta": document(layout_format.parse_meta),
    "ref": document(ref_format.decode_ref),
    "lease": document(lease_format.decode_lease),
    "mark": document(mark_format.decode_mark),
    "page-order": document(page_order_format.decode_page_order),
    "tree": lambda data, _: tree_json(decode_tree(data)),
    "envelope": run_envelope,
    "pack-footer": run_footer,
    "pack-trailer": lambda data, args: list(pack_format.parse_trailer(data, **args)),
    "index": run_index,
    "index-bucket": run_bucket,
    "rank": run_rank,
    "layout": run_layout,
    "lease-transition": run_lease_transition,
    "mark-transition": run_mark_transition,
}
DOCUMENTS = {
    "config",
    "snapshot",
    "rank-meta",
    "layout-meta",
    "ref",
    "lease",
    "mark",
    "page-order",
    "tree",
}


def given(case: dict) -> object:
    """The input of a case: bytes from its pieces, or a plain value."""
    if not isinstance(case["input"], list):
        return case["input"]
    parts = []
    for piece in case["input"]:
        raw = piece["text"].encode() if "text" in piece else base64.b64decode(piece["base64"])
        parts.append(raw * piece.get("times", 1))
    return b"".join(parts)


def cases(*, hostile: bool) -> Iterator[object]:
    files = VECTORS.glob("hostile/*.json") if hostile else VECTORS.glob("*/valid.json")
    for file in sorted(files):
        content = json.loads(file.read_text())
        for case in content["cases"]:
            yield pytest.param(content["object"], case, id=f"{content['object']}: {case['name']}")


@pytest.mark.parametrize(("kind", "case"), list(cases(hostile=False)))
def test_valid(kind: str, case: dict) -> None:
    assert RUN[kind](given(case), case.get("args", {})) == case["expect"]


@pytest.mark.parametrize(("kind", "case"), list(cases(hostile=True)))
def test_hostile(kind: str, case: dict) -> None:
    """H1 and H2: the error is the one written down, and little was allocated on the way to it."""
    data = given(case)
    tracemalloc.start()
    try:
        with pytest.raises(errors.SnapError) as caught:
            RUN[kind](data, case.get("args", {}))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == case["error"], caught.value
    assert peak < ALLOCATED_BYTES_MAX
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("kind", sorted(DOCUMENTS))
def test_schemas_accept_valid_documents(kind: str) -> None:
    for case in json.loads((VECTORS / kind / "valid.json").read_text())["cases"]:
        check_document(kind, given(case))


# A schema sees values: 1.0 is 1, `$` also matches before a line feed, and order is beyond it.
BEYOND_SCHEMAS = {
    "version as float",
    "whole float",
    "page as float",
    "33 levels",
    "host last",
    "ranks descending",
    "store id with line feed",
    "time: line feed",
    "time: no such day",
    "time: year 0",
    "no such file",
    "ends beyond any file",
    "file not used",
    "files in another order",
}


@pytest.mark.parametrize("kind", sorted(DOCUMENTS - {"tree"}))
def test_schemas_refuse_canonical_hostile_documents(kind: str) -> None:
    """Of a tree the schema knows too little for this; of other documents nearly everything."""
    for case in json.loads((VECTORS / "hostile" / f"{kind}.json").read_text())["cases"]:
        if case["name"] in BEYOND_SCHEMAS:
            continue
        data = given(case)
        try:
            value = json.loads(data)
            form = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
            is_canonical = form.encode() == data
        except (ValueError, RecursionError):
            continue
        assert not (is_canonical and validator(kind).is_valid(value)), case["name"]


def records(dtype: np.dtype, rows: list[list[object]]) -> np.ndarray:
    """The inverse of `table`."""
    made = np.zeros(len(rows), dtype)
    names = [name for name in dtype.names or () if name != "zero"]
    for number, row in enumerate(rows):
        for name, value in zip(names, row, strict=True):
            made[name][number] = bytes.fromhex(value) if isinstance(value, str) else value
    return made


def encode_footer(want: dict, args: dict[str, int]) -> bytes:
    return pack_format.encode_footer(
        records(pack_format.FRAME_DTYPE, want["frames"]),
        records(pack_format.CHUNK_DTYPE, want["chunks"]),
        offset=args["footer_offset"],
        salt=None if want["salt"] is None else bytes.fromhex(want["salt"]),
    )[:-32]


def encode_index(want: dict, _: dict[str, str]) -> bytes:
    return index_format.build_index(
        records(index_format.PACK_DTYPE, want["packs"]),
        records(index_format.FRAME_DTYPE, want["frames"]),
        records(index_format.CHUNK_DTYPE, want["chunks"]),
        supersedes=[Digest.parse(one) for one in want["supersedes"]],
    ).to_bytes()


def encode_rank(want: dict, _: dict[str, str]) -> bytes:
    return rank_format.build_rank(
        msgspec.convert(want["meta"], rank_format.RankMeta),
        decode_tree(json.dumps(want["tree"], sort_keys=True, separators=(",", ":")).encode()),
        records(rank_format.STREAM_DTYPE, want["streams"]),
        records(rank_format.EXTENT_DTYPE, want["extents"]),
    ).to_bytes()


# Unknown and compressed sections are not written by the encoders, so these cannot come back.
NOT_WRITTEN = {"unknown section", "compressed section"}


@pytest.mark.parametrize(
    ("kind", "encode"),
    [("pack-footer", encode_footer), ("index", encode_index), ("rank", encode_rank)],
)
def test_encoders_write_the_vectors(kind: str, encode: Callable[..., bytes]) -> None:
    for case in json.loads((VECTORS / kind / "valid.json").read_text())["cases"]:
        if case["name"] not in NOT_WRITTEN:
            assert encode(case["expect"], case.get("args", {})) == given(case), case["name"]


def test_the_generator_writes_what_is_checked_in() -> None:
    made = vectors()
    found = {path.relative_to(VECTORS).as_posix() for path in VECTORS.rglob("*.json")}
    assert found == set(made), "run python -m tools.make_vectors"
    for path, content in made.items():
        assert Path(VECTORS / path).read_text() == content, f"{path}: run the generator"


def test_every_kind_has_valid_and_hostile_vectors() -> None:
    valid = {path.parent.name for path in VECTORS.glob("*/valid.json")}
    hostile = {path.stem for path in VECTORS.glob("hostile/*.json")}
    assert valid == set(RUN)
    assert hostile == set(RUN) - {"index-bucket", "lease-transition", "mark-transition"}
