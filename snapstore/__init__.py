"""Content-addressed, deduplicating, verified storage for snapshots of running GPU workloads.

Everything public is here::

    with snapstore.open_store("file:///mnt/nfs/snapshots") as store:
        store.push("/checkpoints/job", "team/model/engine:v1")
        store.pull("team/model/engine:v1", "/restore/job")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapstore.backend import check_store_url
    from snapstore.cache.contents import CacheEntry, CacheStats, CacheTier, TierStats
    from snapstore.cache.node_cache import CachedFile, NodeCache
    from snapstore.chunking.grid import DEVICE_CHUNK_BYTES
    from snapstore.errors import SnapError
    from snapstore.format.page_order import PageRun, decode_page_order, encode_page_order
    from snapstore.format.tree import EntryType
    from snapstore.ids import RankId, RefName, SnapshotId, SnapshotRef, parse_snapshot_ref
    from snapstore.options import Compression, Integrity, StoreOptions
    from snapstore.progress import Progress, ProgressCallback
    from snapstore.repository.arriving_file import FileWriter, HashedTotals
    from snapstore.repository.chunk_source import ChunkSource, PartGroups, Span
    from snapstore.repository.diff import DiffBytes, SnapshotDiff, StreamDiff
    from snapstore.repository.file_pieces import FileChunks, FilePiece, FilePieces, PieceGroup
    from snapstore.repository.file_ranges import FileRange
    from snapstore.repository.file_reader import SnapshotEntry, SnapshotFile
    from snapstore.repository.hashed_chunks import HashedChunks
    from snapstore.repository.pull import PullResult
    from snapstore.repository.range_reader import ReadCheck
    from snapstore.repository.refs import NameGeneration, ResolvedRef
    from snapstore.repository.removal import Freed, RemovedName, RemoveResult
    from snapstore.repository.snapshot import Snapshot
    from snapstore.repository.snapshot_writer import SnapshotWriter
    from snapstore.repository.stats import NamespaceStats, ObjectTotals, StoreStats
    from snapstore.repository.store import Store, init_store, open_store
    from snapstore.repository.summary import SnapshotSummary
    from snapstore.repository.warming import WarmResult
    from snapstore.repository.write_session import PushResult
    from snapstore.source.described import Described, DescribedFile, describe_images
    from snapstore.version import VERSION

__all__ = [
    "DEVICE_CHUNK_BYTES",
    "VERSION",
    "CacheEntry",
    "CacheStats",
    "CacheTier",
    "CachedFile",
    "ChunkSource",
    "Compression",
    "Described",
    "DescribedFile",
    "DiffBytes",
    "EntryType",
    "FileChunks",
    "FilePiece",
    "FilePieces",
    "FileRange",
    "FileWriter",
    "Freed",
    "HashedChunks",
    "HashedTotals",
    "Integrity",
    "NameGeneration",
    "NamespaceStats",
    "NodeCache",
    "ObjectTotals",
    "PageRun",
    "PartGroups",
    "PieceGroup",
    "Progress",
    "ProgressCallback",
    "PullResult",
    "PushResult",
    "RankId",
    "ReadCheck",
    "RefName",
    "RemoveResult",
    "RemovedName",
    "ResolvedRef",
    "SnapError",
    "Snapshot",
    "SnapshotDiff",
    "SnapshotEntry",
    "SnapshotFile",
    "SnapshotId",
    "SnapshotRef",
    "SnapshotSummary",
    "SnapshotWriter",
    "Span",
    "Store",
    "StoreOptions",
    "StoreStats",
    "StreamDiff",
    "TierStats",
    "WarmResult",
    "check_store_url",
    "decode_page_order",
    "describe_images",
    "encode_page_order",
    "init_store",
    "open_store",
    "parse_snapshot_ref",
]

# Where each name is. Loaded when first asked for: a program that pulls needs nothing of a push, and
# loading all of it would take as long as restoring a small process.
_HOMES = {
    "CacheEntry": "snapstore.cache.contents",
    "CacheStats": "snapstore.cache.contents",
    "CacheTier": "snapstore.cache.contents",
    "TierStats": "snapstore.cache.contents",
    "WarmResult": "snapstore.repository.warming",
    "CachedFile": "snapstore.cache.node_cache",
    "NodeCache": "snapstore.cache.node_cache",
    "DEVICE_CHUNK_BYTES": "snapstore.chunking.grid",
    "check_store_url": "snapstore.backend",
    "SnapError": "snapstore.errors",
    "PageRun": "snapstore.format.page_order",
    "decode_page_order": "snapstore.format.page_order",
    "encode_page_order": "snapstore.format.page_order",
    "EntryType": "snapstore.format.tree",
    "RankId": "snapstore.ids",
    "RefName": "snapstore.ids",
    "SnapshotId": "snapstore.ids",
    "SnapshotRef": "snapstore.ids",
    "parse_snapshot_ref": "snapstore.ids",
    "Compression": "snapstore.options",
    "Integrity": "snapstore.options",
    "StoreOptions": "snapstore.options",
    "Progress": "snapstore.progress",
    "ProgressCallback": "snapstore.progress",
    "FileWriter": "snapstore.repository.arriving_file",
    "HashedChunks": "snapstore.repository.hashed_chunks",
    "ChunkSource": "snapstore.repository.chunk_source",
    "PartGroups": "snapstore.repository.chunk_source",
    "Span": "snapstore.repository.chunk_source",
    "HashedTotals": "snapstore.repository.arriving_file",
    "DiffBytes": "snapstore.repository.diff",
    "SnapshotDiff": "snapstore.repository.diff",
    "StreamDiff": "snapstore.repository.diff",
    "FileChunks": "snapstore.repository.file_pieces",
    "FilePiece": "snapstore.repository.file_pieces",
    "FilePieces": "snapstore.repository.file_pieces",
    "PieceGroup": "snapstore.repository.file_pieces",
    "FileRange": "snapstore.repository.file_ranges",
    "SnapshotEntry": "snapstore.repository.file_reader",
    "SnapshotFile": "snapstore.repository.file_reader",
    "PullResult": "snapstore.repository.pull",
    "ReadCheck": "snapstore.repository.range_reader",
    "ResolvedRef": "snapstore.repository.refs",
    "NameGeneration": "snapstore.repository.refs",
    "Freed": "snapstore.repository.removal",
    "RemoveResult": "snapstore.repository.removal",
    "RemovedName": "snapstore.repository.removal",
    "Snapshot": "snapstore.repository.snapshot",
    "SnapshotWriter": "snapstore.repository.snapshot_writer",
    "NamespaceStats": "snapstore.repository.stats",
    "ObjectTotals": "snapstore.repository.stats",
    "StoreStats": "snapstore.repository.stats",
    "Store": "snapstore.repository.store",
    "init_store": "snapstore.repository.store",
    "open_store": "snapstore.repository.store",
    "SnapshotSummary": "snapstore.repository.summary",
    "PushResult": "snapstore.repository.write_session",
    "Described": "snapstore.source.described",
    "DescribedFile": "snapstore.source.described",
    "describe_images": "snapstore.source.described",
    "VERSION": "snapstore.version",
}


def __getattr__(name: str) -> object:
    """Load a public name; see PEP 562."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
