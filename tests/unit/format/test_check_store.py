"""The checker that other tests rely on: it accepts a right store and finds what is wrong.

A store is written here by hand with two streams: data in raw and zstd frames, zeros, part of a
chunk, and a chunk used twice. Then one thing at a time is spoilt.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from blake3 import blake3

from snapstore.errors import SnapError
from snapstore.format import config, lease, mark, ref, snapshot
from snapstore.format import index as index_format
from snapstore.format import layout as layout_format
from snapstore.format import pack as pack_format
from snapstore.format import rank as rank_format
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.ids import Digest
from tests.support.schemas import check_document, check_store

TIME = "2026-11-30T05:00:00Z"
NONCE = "0" * 32
CHUNKS = [b"a" * 5000, bytes(range(256)) * 12, b"c" * 100]


class Store:
    """Writes objects, and knows what it wrote."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ids = [blake3(chunk).digest() for chunk in CHUNKS]
        good = config.StoreConfig(created=TIME, store_id=NONCE)
        self.put("snapstore.json", config.encode_config(good))
        self.pack = self.named("packs", self.pack_bytes())
        self.index = self.named("indexes", *self.index_bytes())
        self.rank = self.named("ranks", *self.rank_bytes())
        self.put(f"layouts/{self.rank}/00000001", self.layout_bytes())
        self.snapshot = self.named("snapshots", self.snapshot_bytes())
        for number, state in ((1, "acquired"), (2, "renewed"), (3, "committed")):
            self.lease(number, state)
        self.ref(1, self.snapshot)

    def put(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def named(self, kind: str, data: bytes, name: Digest | None = None) -> str:
        text = blake3(data).hexdigest() if name is None else name.hex
        self.put(f"{kind}/{text[:2]}/{text}", data)
        return text

    def path(self, kind: str, name: str) -> Path:
        return self.root / kind / name[:2] / name

    def pack_bytes(self) -> bytes:
        raw = CHUNKS[0] + CHUNKS[1]
        packed = zstandard.compress(CHUNKS[2])
        self.frames = np.array(
            [
                (0, len(raw), len(raw), 0, 2, 0, b"", xxhash.xxh3_128_digest(raw)),
                (8192, len(packed), 100, 2, 1, 1, b"", xxhash.xxh3_128_digest(packed)),
            ],
            pack_format.FRAME_DTYPE,
        )
        sizes = [len(chunk) for chunk in CHUNKS]
        chunks = np.array(list(zip(self.ids, sizes, strict=True)), pack_format.CHUNK_DTYPE)
        data = raw.ljust(8192, b"\0") + packed.ljust(4096, b"\0")
        data += pack_format.encode_footer(self.frames, chunks, offset=12288)
        self.pack_length = len(data)
        return data

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        packs = np.zeros(1, index_format.PACK_DTYPE)
        packs["id"], packs["length"] = np.void(bytes.fromhex(self.pack)), self.pack_length
        frames = np.zeros(2, index_format.FRAME_DTYPE)
        for field in ("offset", "stored_length", "plain_length", "codec", "checksum"):
            frames[field] = self.frames[field]
        return packs, frames

    def index_bytes(self) -> tuple[bytes, Digest]:
        rows = [(self.ids[0], 0, 0, 5000), (self.ids[1], 0, 5000, 3072), (self.ids[2], 1, 0, 100)]
        built = index_format.build_index(*self.places(), np.array(rows, index_format.CHUNK_DTYPE))
        return built.to_bytes(), built.root

    def rank_bytes(self) -> tuple[bytes, Digest]:
        zero = bytes(32)
        extents = np.array(
            [
                (5000, 0, 5000, self.ids[0]),
                (70_000, 0, 0, zero),
                (72, 3000, 3072, self.ids[1]),
                (100, 0, 100, self.ids[2]),
                (3072, 0, 3072, self.ids[1]),
            ],
            rank_format.EXTENT_DTYPE,
        )
        streams = np.array([(0, 3, 75_072), (3, 2, 3172)], rank_format.STREAM_DTYPE)
        plain = {"mode": 0o644, "uid": 0, "gid": 0, "mtime_ns": 0}
        tree = [
            TreeEntry(path=b"", type=EntryType.DIRECTORY, **plain),
            TreeEntry(path=b"a", type=EntryType.FILE, size_bytes=75_072, **plain),
            TreeEntry(path=b"\xff", type=EntryType.FILE, size_bytes=3172, stream=1, **plain),
        ]
        info = rank_format.StreamInfo(data_class="generic", origin="test")
        meta = rank_format.RankMeta(rank=rank_format.HOST, streams=(info, info))
        built = rank_format.build_rank(meta, tree, streams, extents)
        return built.to_bytes(), built.root

    def layout_bytes(self, **changes: int) -> bytes:
        segments = np.array(
            [
                (5000, 0, 0),
                (70_000, layout_format.ZEROS, 0),
                (72, 0, 8000),
                (100, 1, 0),
                (3072, 0, 5000),
            ],
            layout_format.SEGMENT_DTYPE,
        )
        for field, value in changes.items():
            segments[field][4] = value
        streams = np.array([(0, 3, 75_072), (3, 2, 3172)], layout_format.STREAM_DTYPE)
        meta = layout_format.LayoutMeta(rank=self.rank, nonce=NONCE, created=TIME)
        return layout_format.build_layout(meta, *self.places(), streams, segments).to_bytes()

    def snapshot_bytes(self, **changes: object) -> bytes:
        entry = {"logical_bytes": 78_244, "data_bytes": 8244, "files": 2, **changes}
        one = snapshot.RankEntry(**{"rank": "host", "manifest": self.rank, **entry})
        manifest = snapshot.RootManifest(created=TIME, kind="directory", ranks=(one,))
        return snapshot.encode_snapshot(manifest)[0]

    def lease(self, number: int, state: str, nonce: str = NONCE) -> None:
        named = self.snapshot if state == "committed" else None
        one = lease.Lease(
            created=TIME,
            holder="test",
            nonce=nonce,
            snapshot=named,
            state=lease.LeaseState(state),
            ttl_s=9,
        )
        self.put(f"leases/{NONCE}/{number:08}", lease.encode_lease(one))

    def ref(self, number: int, name: str | None) -> None:
        data = ref.encode_ref(ref.Ref(created=TIME, nonce=NONCE, snapshot=name))
        self.put(f"refs/team/model/@v1.0/{number:08}", data)

    def mark(self, kind: str, name: str, *states: str) -> None:
        for number, state in enumerate(states, 1):
            one = mark.Mark(created=TIME, nonce=NONCE, state=mark.MarkState(state))
            self.put(f"marks/{kind}/{name}/{number:08}", mark.encode_mark(one))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_a_right_store(store: Store) -> None:
    store.put("tmp/unfinished", b"anything")
    store.put("hints/pages/order-1", b"anything")
    store.ref(2, None)
    store.mark("packs", store.pack, "condemned", "revived")
    assert check_store(store.root) == {
        "packs": 1,
        "indexes": 1,
        "ranks": 1,
        "snapshots": 1,
        "layouts": 1,
        "refs": 1,
        "leases": 1,
        "marks": 1,
        "hints": 1,
    }


def test_an_index_may_outlive_a_pack_that_was_removed(store: Store) -> None:
    store.ref(2, None)
    for path in (store.path("packs", store.pack), store.path("ranks", store.rank)):
        path.unlink()
    with pytest.raises(AssertionError, match="missing"):
        check_store(store.root)
    store.mark("packs", store.pack, "condemned", "deleting")
    store.mark("ranks", store.rank, "condemned", "deleting")
    check_store(store.root)


def test_strays(store: Store) -> None:
    store.put("packs/ab/lost+found", b"")
    with pytest.raises(AssertionError, match="no object of a store"):
        check_store(store.root)
    check_store(store.root, strays=True)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


SPOILS: dict[str, Callable[[Store], object]] = {
    "no config": lambda store: (store.root / "snapstore.json").unlink(),
    "pack damaged": lambda store: flip(store.path("packs", store.pack), 100),
    "pack gone": lambda store: store.path("packs", store.pack).unlink(),
    "index damaged": lambda store: flip(store.path("indexes", store.index), -1),
    "index misnamed": lambda store: store.named("indexes", *(store.index_bytes()[0],)),
    "rank gone": lambda store: store.path("ranks", store.rank).unlink(),
    "rank damaged": lambda store: flip(store.path("ranks", store.rank), -1),
    "snapshot gone": lambda store: store.path("snapshots", store.snapshot).unlink(),
    "snapshot damaged": lambda store: flip(store.path("snapshots", store.snapshot), 40),
    "wrong count of files": lambda store: store.named("snapshots", store.snapshot_bytes(files=1)),
    "wrong count of bytes": lambda store: store.named(
        "snapshots", store.snapshot_bytes(data_bytes=8243)
    ),
    "ref dangles": lambda store: store.ref(2, "1" * 64),
    "gap in a chain": lambda store: store.ref(3, None),
    "ref not canonical": lambda store: store.put("refs/a/@b/00000001", b'{"version": 1}'),
    "lease after its end": lambda store: store.lease(4, "renewed"),
    "lease of another holder": lambda store: store.lease(2, "renewed", nonce="1" * 32),
    "lease starts in the middle": lambda store: store.lease(1, "renewed"),
    "mark after its end": lambda store: store.mark(
        "packs", store.pack, "condemned", "deleting", "condemned"
    ),
    "layout shows other bytes": lambda store: store.put(
        f"layouts/{store.rank}/00000002", store.layout_bytes(offset=4999)
    ),
}


@pytest.mark.parametrize("name", SPOILS)
def test_what_is_wrong_is_found(store: Store, name: str) -> None:
    SPOILS[name](store)
    with pytest.raises((AssertionError, SnapError, OSError)):
        check_store(store.root)


def test_documents_that_only_the_schema_or_only_the_decoder_refuses() -> None:
    good = mark.encode_mark(mark.Mark(created=TIME, nonce=NONCE, state=mark.MarkState.CONDEMNED))
    check_document("mark", good)
    with pytest.raises(AssertionError, match="not canonical"):
        check_document("mark", json.dumps(json.loads(good)).encode())
    with pytest.raises(AssertionError, match="mark: "):
        check_document("mark", good.replace(b"condemned", b"forgotten"))
    with pytest.raises(SnapError):
        check_document("mark", good.replace(b"11-30", b"02-30"))
