"""Make a snapshot of a terabyte without its data: what a mount reads of it is there, and one frame.

Every rank has one file of pages. Its tables are those that a push writes: rank manifest, layout,
root manifest and name; chunks are of 1 MiB, a frame each, which is more frames than a push makes.
The first MiB of each file is real; all other packs exist in the tables alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

import snapstore
from snapstore.backend import open_backend
from snapstore.backend.base import Backend, ObjectKind
from snapstore.clock import SystemClock, format_utc
from snapstore.format import layout as layout_format
from snapstore.format import rank as rank_format
from snapstore.format.index import FRAME_DTYPE, PACK_DTYPE
from snapstore.format.snapshot import RankEntry, RootManifest, encode_snapshot
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.ids import RankId, parse_snapshot_ref
from snapstore.repository.layouts import stream_rows
from snapstore.repository.refs import write_ref
from snapstore.units import MIB

if TYPE_CHECKING:
    from snapstore.format.tables import Rows
    from snapstore.repository.snapshot import LoadedRank

__all__ = ["make_huge_snapshot"]

_FRAMES_IN_PACK = 60
_RAW = 0


def make_huge_snapshot(
    url: str, name: str, *, ranks: int = 8, mib_of_rank: int = 125 * 1024, seed: int = 1
) -> bytes:
    """Put it into a new store; returns the first MiB of each of its files, `rank-N/pages`."""
    rng = np.random.default_rng(seed)
    content = rng.integers(0, 256, MIB, np.uint8).tobytes()
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as folder, snapstore.init_store(url) as store:
        (Path(folder) / "pages").write_bytes(content)
        store.push(folder, f"{name}-real")
        (real,) = store.snapshot(f"{name}-real").ranks()
        with contextlib.closing(open_backend(url, clock=clock)) as backend:
            created = format_utc(clock.now_ns())
            entries = [
                _put_rank(backend, number, real, mib_of_rank, created, rng)
                for number in range(ranks)
            ]
            root = RootManifest(created=created, kind="generic", ranks=tuple(entries))
            data, snapshot = encode_snapshot(root)
            backend.put_new(ObjectKind.SNAPSHOT, snapshot.hex, [data])
            write_ref(backend, clock, parse_snapshot_ref(name).ref, snapshot)
    return content


def _put_rank(
    backend: Backend,
    number: int,
    real: LoadedRank,
    mib: int,
    created: str,
    rng: np.random.Generator,
) -> RankEntry:
    head = real.read_extents()
    length = mib * MIB
    extents = np.zeros(len(head) + mib - 1, rank_format.EXTENT_DTYPE)
    extents[: len(head)] = head
    rest = extents[len(head) :]
    rest["length"] = rest["chunk_length"] = MIB
    rest["id"] = np.frombuffer(rng.bytes(32 * len(rest)), "V32")
    streams = stream_rows([len(extents)], [length])
    info = rank_format.StreamInfo(data_class="pages", origin=f"rank-{number}/pages")
    meta = rank_format.RankMeta(rank=number, streams=(info,))
    built = rank_format.build_rank(meta, _tree(number, length), streams, extents)
    backend.put_new(ObjectKind.RANK, built.root.hex, built.pieces)
    packs, frames, segments = _tables(real, mib, rng)
    rows = stream_rows([len(segments)], [length])
    about = layout_format.LayoutMeta(
        rank=built.root.hex, nonce=os.urandom(16).hex(), created=created
    )
    layout = layout_format.build_layout(about, packs, frames, rows, segments)
    backend.put_new(ObjectKind.LAYOUT, f"{built.root.hex}/{1:08d}", layout.pieces)
    rank_id = RankId(built.root.raw)
    return RankEntry(
        rank=number, manifest=rank_id.hex, logical_bytes=length, data_bytes=length, files=1
    )


def _tree(number: int, length: int) -> list[TreeEntry]:
    folder = f"rank-{number}".encode()
    root = TreeEntry(path=b"", type=EntryType.DIRECTORY, mode=0o755, uid=0, gid=0, mtime_ns=0)
    below = msgspec.structs.replace(root, path=folder)
    pages = msgspec.structs.replace(
        root, path=folder + b"/pages", type=EntryType.FILE, size_bytes=length
    )
    return [root, below, pages]


def _tables(real: LoadedRank, mib: int, rng: np.random.Generator) -> tuple[Rows, Rows, Rows]:
    """Put invented packs and frames of 1 MiB after those of the real first MiB."""
    layout = real.layout
    count = mib - 1
    packs = np.zeros(len(layout.packs) + -(-count // _FRAMES_IN_PACK), PACK_DTYPE)
    packs[: len(layout.packs)] = layout.packs
    invented = packs[len(layout.packs) :]
    invented["id"] = np.frombuffer(rng.bytes(32 * len(invented)), "V32")
    invented["length"] = (_FRAMES_IN_PACK + 2) * MIB
    frames = np.zeros(len(layout.frames) + count, FRAME_DTYPE)
    frames[: len(layout.frames)] = layout.frames
    rest = frames[len(layout.frames) :]
    numbers = np.arange(count)
    rest["offset"] = (numbers % _FRAMES_IN_PACK + 1) * MIB
    rest["stored_length"] = rest["plain_length"] = MIB
    rest["pack"] = len(layout.packs) + numbers // _FRAMES_IN_PACK
    rest["codec"] = _RAW
    rest["checksum"] = np.frombuffer(rng.bytes(16 * count), "V16")
    segments = np.zeros(len(layout.segments) + count, layout_format.SEGMENT_DTYPE)
    segments[: len(layout.segments)] = layout.segments
    segments["length"][len(layout.segments) :] = MIB
    segments["frame"][len(layout.segments) :] = len(layout.frames) + numbers
    return packs, frames, segments
