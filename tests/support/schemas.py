"""Executes the specification on what tests write.

`check_document` runs the JSON schema of a document and decodes it. `check_store` walks a store on
a file system and checks every object in it and everything that points from one to another, with
its own notion of where objects lie, so that it shares no mistake with the code that wrote them.
"""

import collections
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import xxhash
from blake3 import blake3

from snapstore.compression import decode_frame
from snapstore.format import config as config_format
from snapstore.format import envelope, limits
from snapstore.format import index as index_format
from snapstore.format import layout as layout_format
from snapstore.format import lease as lease_format
from snapstore.format import mark as mark_format
from snapstore.format import pack as pack_format
from snapstore.format import page_order as page_order_format
from snapstore.format import rank as rank_format
from snapstore.format import ref as ref_format
from snapstore.format import snapshot as snapshot_format
from snapstore.format import tree as tree_format
from snapstore.ids import Digest, RankId

SCHEMAS = Path(__file__).parents[2] / "format_spec" / "schemas"

DECODERS: dict[str, Callable[[bytes], object]] = {
    "config": config_format.decode_config,
    "snapshot": snapshot_format.decode_snapshot,
    "rank-meta": rank_format.parse_meta,
    "tree": rank_format.parse_tree,
    "layout-meta": layout_format.parse_meta,
    "ref": ref_format.decode_ref,
    "lease": lease_format.decode_lease,
    "mark": mark_format.decode_mark,
    "page-order": page_order_format.decode_page_order,
}

_HEX64 = "[0-9a-f]{64}"
_NUMBER = "(?!0{8})[0-9]{8}"
_COMPONENT = "[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_SHARDED = re.compile(r"(packs|indexes|ranks|snapshots)/([0-9a-f]{2})/(\2[0-9a-f]{62})")
_CHAINS = {
    "layouts": re.compile(rf"layouts/({_HEX64})/({_NUMBER})"),
    "refs": re.compile(rf"refs/({_COMPONENT}(?:/{_COMPONENT})*/@{_COMPONENT})/({_NUMBER})"),
    "leases": re.compile(rf"leases/([0-9a-f]{{32}})/({_NUMBER})"),
    "marks": re.compile(rf"marks/([a-z]+/{_HEX64})/({_NUMBER})"),
}
KEPT_BYTES_MAX = 1 << 20
"""Of a pack that is not read again if it comes again."""
_HINT = re.compile(rf"hints/[a-z][a-z0-9-]*/{_COMPONENT}")


@functools.cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """The compiled schema of a kind of document."""
    schema = json.loads((SCHEMAS / f"{kind}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def check_document(kind: str, data: bytes | memoryview) -> object:
    """Check a document against its schema, its canonical form and all other rules; decode it."""
    raw = bytes(data)
    _check_text(kind, raw)
    return DECODERS[kind](raw)


# Tests that stop a store at each of its operations look at the same few objects hundreds of times.
@functools.lru_cache(1000)
def _check_text(kind: str, raw: bytes) -> None:
    """Check what the text of a document alone tells."""
    value = json.loads(raw)
    error = jsonschema.exceptions.best_match(validator(kind).iter_errors(value))
    assert error is None, f"{kind}: {error.message} at {error.json_path}"
    again = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert again.encode() == raw, f"{kind}: not canonical"


def check_store(path: Path | str, *, strays: bool = False) -> dict[str, int]:
    """Check everything that a store on a file system holds; tell how many objects of each kind.

    Args:
        path: The directory of the store (not a URL).
        strays: Whether files that are no objects may lie outside `tmp/`.
    """
    check = _StoreCheck(Path(path))
    check.read_names(strays=strays)
    check.check_config()
    check.check_chains()
    check.check_packs()
    check.check_indexes()
    check.check_ranks()
    check.check_snapshots()
    check.check_layouts()
    check.check_roots()
    return check.counts()


@dataclasses.dataclass(slots=True)
class _Pack:
    data: bytes
    footer: pack_format.PackFooter
    frame_of_offset: dict[int, int]
    chunks: dict[bytes, tuple[int, int, int]]
    """Row of the frame, where in it, and the length, by id."""

    def stored(self, row: int) -> memoryview:
        frame = self.footer.frames[row]
        start = int(frame["offset"])
        return memoryview(self.data)[start : start + int(frame["stored_length"])]

    def plain(self, row: int) -> bytearray:
        frame = self.footer.frames[row]
        out = bytearray(int(frame["plain_length"]))
        decode_frame(int(frame["codec"]), self.stored(row), memoryview(out))
        return out


@functools.lru_cache(50)
def _read_pack(data: bytes) -> _Pack:
    """Read a pack, and check all that is in it."""
    tail = data[-limits.PACK_TRAILER_BYTES :]
    offset, length = pack_format.parse_trailer(tail, pack_length=len(data))
    footer = pack_format.parse_footer(data[offset : offset + length], footer_offset=offset)
    rows = {int(at): row for row, at in enumerate(footer.frames["offset"])}
    pack = _Pack(data, footer, rows, {})
    end = 0
    for row, frame in enumerate(footer.frames):
        start = int(frame["offset"])
        assert not any(data[end:start]), f"gap before {start} of a pack is not zero"
        end = start + int(frame["stored_length"])
        checksum = xxhash.xxh3_128_digest(pack.stored(row))
        assert checksum == frame["checksum"].tobytes(), f"frame {row} of a pack is damaged"
        plain = pack.plain(row)
        at = 0
        first = int(frame["first_chunk"])
        for chunk in footer.chunks[first : first + int(frame["chunk_count"])]:
            length = int(chunk["length"])
            chunk_id = chunk["id"].tobytes()
            assert blake3(plain[at : at + length]).digest() == chunk_id, f"chunk of frame {row}"
            pack.chunks[chunk_id] = (row, at, length)
            at += length
    assert not any(data[end:offset]), "gap before the footer of a pack"
    return pack


class _StoreCheck:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.named: dict[str, set[str]] = {
            kind: set() for kind in ("packs", "indexes", "ranks", "snapshots")
        }
        self.chains: dict[str, dict[str, list[int]]] = {kind: {} for kind in _CHAINS}
        self.hints = 0
        self.packs: dict[str, _Pack] = {}
        self.chunks: dict[bytes, tuple[str, int, int, int]] = {}
        self.ranks: dict[str, rank_format.RankTables] = {}
        self.plain = functools.lru_cache(64)(lambda pack, row: self.packs[pack].plain(row))

    def counts(self) -> dict[str, int]:
        found = {kind: len(names) for kind, names in self.named.items()}
        found |= {kind: len(chains) for kind, chains in self.chains.items()}
        return found | {"hints": self.hints}

    # -- names ------------------------------------------------------------------------------------

    def read_names(self, *, strays: bool) -> None:
        for file in sorted(self.root.rglob("*")):
            key = file.relative_to(self.root).as_posix()
            if file.is_dir() or key.startswith("tmp/") or key == "snapstore.json":
                continue
            assert self._take(key) or strays, f"no object of a store has the key {key}"

    def _take(self, key: str) -> bool:
        if match := _SHARDED.fullmatch(key):
            self.named[match[1]].add(match[3])
        elif _HINT.fullmatch(key):
            self.hints += 1
        else:
            for kind, pattern in _CHAINS.items():
                if match := pattern.fullmatch(key):
                    self.chains[kind].setdefault(match[1], []).append(int(match[2]))
                    return True
            return False
        return True

    def _read(self, kind: str, name: str) -> bytes:
        return (self.root / kind / name[:2] / name).read_bytes()

    def _read_chain(self, kind: str, name: str) -> list[bytes]:
        numbers = self.chains[kind][name]
        first = numbers[0]
        assert numbers == list(range(first, first + len(numbers))), f"{kind}/{name}: gap {numbers}"
        return [(self.root / kind / name / f"{number:08}").read_bytes() for number in numbers]

    def _exists(self, kind: str, name: str) -> bool:
        """Whether an object is there; one that is marked *deleting* may be gone."""
        if name in self.named[kind]:
            return True
        states = self.chains["marks"].get(f"{kind}/{name}")
        if not states:
            return False
        last = mark_format.decode_mark(self._read_chain("marks", f"{kind}/{name}")[-1])
        return last.state is mark_format.MarkState.DELETING

    # -- documents --------------------------------------------------------------------------------

    def check_config(self) -> None:
        check_document("config", (self.root / "snapstore.json").read_bytes())

    def check_chains(self) -> None:
        for name in self.chains["refs"]:
            for data in self._read_chain("refs", name):
                check_document("ref", data)
        for name in self.chains["leases"]:
            self._check_lease(name)
        for name in self.chains["marks"]:
            previous = None
            for data in self._read_chain("marks", name):
                mark = check_document("mark", data)
                assert isinstance(mark, mark_format.Mark)
                if previous is not None or self.chains["marks"][name][0] == 1:
                    assert mark_format.may_follow(mark.state, previous), f"marks/{name}"
                previous = mark.state

    def _check_lease(self, name: str) -> None:
        previous: lease_format.Lease | None = None
        for data in self._read_chain("leases", name):
            lease = check_document("lease", data)
            assert isinstance(lease, lease_format.Lease)
            state = None if previous is None else previous.state
            if previous is not None or self.chains["leases"][name][0] == 1:
                assert lease_format.may_follow(lease.state, state), f"leases/{name}"
            if previous is not None and lease.state is not lease_format.LeaseState.REVOKED:
                assert lease.nonce == previous.nonce, f"leases/{name}: another holder"
            previous = lease

    def check_roots(self) -> None:
        """What the newest generation of refs and leases names is there."""
        for name in self.chains["refs"]:
            ref = ref_format.decode_ref(self._read_chain("refs", name)[-1])
            if ref.snapshot is not None:
                assert ref.snapshot in self.named["snapshots"], f"refs/{name} dangles"
        for name in self.chains["leases"]:
            lease = lease_format.decode_lease(self._read_chain("leases", name)[-1])
            if lease.snapshot is not None:
                assert self._exists("snapshots", lease.snapshot), f"leases/{name} dangles"

    def check_snapshots(self) -> None:
        for name in self.named["snapshots"]:
            data = self._read("snapshots", name)
            assert blake3(data).hexdigest() == name, f"snapshots/{name}: another digest"
            manifest = check_document("snapshot", data)
            assert isinstance(manifest, snapshot_format.RootManifest)
            for entry in manifest.ranks:
                assert self._exists("ranks", entry.manifest), f"snapshots/{name}: no rank"
                tables = self.ranks.get(entry.manifest)
                if tables is not None:
                    _check_rank_entry(entry, tables)

    # -- packs and indexes ------------------------------------------------------------------------

    def check_packs(self) -> None:
        for name in self.named["packs"]:
            data = self._read("packs", name)
            assert blake3(data).hexdigest() == name, f"packs/{name}: another digest"
            pack = (_read_pack if len(data) <= KEPT_BYTES_MAX else _read_pack.__wrapped__)(data)
            self.packs[name] = pack
            for chunk_id, (row, at, length) in pack.chunks.items():
                self.chunks[chunk_id] = (name, row, at, length)

    def check_indexes(self) -> None:
        for name in self.named["indexes"]:
            tables = index_format.parse_index(self._read("indexes", name), root=Digest.parse(name))
            where = f"indexes/{name}"
            packs = self._check_places(tables.packs, tables.frames, where)
            for chunk in tables.chunks:
                pack, row = packs[int(chunk["frame"])]
                if pack is None:
                    continue
                at, length = int(chunk["offset"]), int(chunk["length"])
                plain = self.plain(pack, row)[at : at + length]
                assert blake3(plain).digest() == chunk["id"].tobytes(), f"{where}: chunk"

    def _check_places(
        self, packs: np.ndarray, frames: np.ndarray, where: str
    ) -> list[tuple[str | None, int]]:
        """Check packs and frames of an index or layout; tell pack and row there of each frame."""
        names = [row["id"].tobytes().hex() for row in packs]
        for name, length in zip(names, packs["length"], strict=True):
            assert self._exists("packs", name), f"{where}: pack {name} is missing"
            if name in self.packs:
                assert len(self.packs[name].data) == length, f"{where}: length of pack {name}"
        places: list[tuple[str | None, int]] = []
        for frame in frames:
            name = names[int(frame["pack"])]
            pack = self.packs.get(name)
            if pack is None:
                places.append((None, 0))
                continue
            row = pack.frame_of_offset[int(frame["offset"])]
            for field in ("stored_length", "plain_length", "codec", "checksum"):
                same = pack.footer.frames[row][field] == frame[field]
                assert same, f"{where}: {field} of a frame of pack {name}"
            places.append((name, row))
        return places

    # -- ranks and layouts ------------------------------------------------------------------------

    def check_ranks(self) -> None:
        for name in self.named["ranks"]:
            data = self._read("ranks", name)
            tables = rank_format.parse_rank(data, root=Digest.parse(name))
            header = envelope.parse_whole(data, magic=envelope.RANK_MAGIC)
            for tag, kind in ((b"META", "rank-meta"), (b"TREE", "tree")):
                info = header.require(tag)
                check_document(kind, data[info.offset : info.end])
            for extent in tables.extents:
                length = int(extent["chunk_length"])
                if length and extent["id"].tobytes() in self.chunks:
                    assert self.chunks[extent["id"].tobytes()][3] == length, f"ranks/{name}: chunk"
            self.ranks[name] = tables

    def check_layouts(self) -> None:
        for name in self.chains["layouts"]:
            if name not in self.ranks:
                continue  # Left behind by a removal of the rank manifest.
            generations = self._read_chain("layouts", name)
            for data in generations:
                header = envelope.parse_whole(data, magic=envelope.LAYOUT_MAGIC)
                info = header.require(b"META")
                check_document("layout-meta", data[info.offset : info.end])
                layout_format.parse_layout(data, rank=RankId.parse(name))
            # Only the newest generation has to be readable; packs of older ones may be gone.
            newest = layout_format.parse_layout(generations[-1], rank=RankId.parse(name))
            self._check_layout(name, newest)

    def _check_layout(self, name: str, layout: layout_format.LayoutTables) -> None:
        where = f"layouts/{name}"
        rank = self.ranks[name]
        places = self._check_places(layout.packs, layout.frames, where)
        assert all(pack is not None for pack, _ in places), f"{where}: a pack is being deleted"
        assert np.array_equal(layout.streams["length"], rank.streams["length"]), where
        for number in range(len(rank.streams)):
            by_layout = b"".join(self._by_layout(layout, places, number))
            position = 0
            for extent in _owned(rank.extents, rank.streams[number]):
                length = int(extent["length"])
                run = by_layout[position : position + length]
                self._check_extent(run, extent, where=f"{where}, stream {number} at {position}")
                position += length

    def _by_layout(
        self,
        layout: layout_format.LayoutTables,
        places: list[tuple[str | None, int]],
        number: int,
    ) -> Iterator[bytes]:
        for segment in _owned(layout.segments, layout.streams[number]):
            length, offset = int(segment["length"]), int(segment["offset"])
            if int(segment["frame"]) == layout_format.ZEROS:
                yield bytes(length)
            else:
                pack, row = places[int(segment["frame"])]
                yield bytes(self.plain(pack, row)[offset : offset + length])

    def _check_extent(self, run: bytes, extent: np.void, *, where: str) -> None:
        if int(extent["chunk_length"]) == 0:
            assert not any(run), f"{where}: not zeros"
            return
        chunk_id = extent["id"].tobytes()
        offset = int(extent["chunk_offset"])
        if offset == 0 and len(run) == int(extent["chunk_length"]):
            assert blake3(run).digest() == chunk_id, f"{where}: another chunk"
            return
        assert chunk_id in self.chunks, f"{where}: no pack has the chunk"
        pack, row, at, _ = self.chunks[chunk_id]
        start = at + offset
        assert self.plain(pack, row)[start : start + len(run)] == run, f"{where}: other bytes"


def _owned(rows: np.ndarray, stream: np.void) -> np.ndarray:
    first = int(stream["first"])
    return rows[first : first + int(stream["count"])]


def _check_rank_entry(entry: snapshot_format.RankEntry, tables: rank_format.RankTables) -> None:
    types = collections.Counter(one.type for one in tables.tree)
    data = tables.extents["chunk_length"] != 0
    assert entry.rank == tables.meta.rank
    assert entry.files == types[tree_format.EntryType.FILE]
    assert entry.logical_bytes == int(tables.streams["length"].sum())
    assert entry.data_bytes == int(tables.extents["length"][data].sum())


def to_jsonable(value: object) -> object:
    """A decoded document as plain values, for comparison with a vector."""
    return msgspec.to_builtins(value)
