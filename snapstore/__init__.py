"""Content-addressed, deduplicating, verified storage for snapshots of running GPU workloads.

Everything public is here::

    with snapstore.open_store("file:///mnt/nfs/snapshots") as store:
        store.push("/checkpoints/job", "team/model/engine:v1")
        store.pull("team/model/engine:v1", "/restore/job")
"""

from snapstore.errors import SnapError
from snapstore.ids import RankId, RefName, SnapshotId, SnapshotRef, parse_snapshot_ref
from snapstore.options import Compression, Integrity, StoreOptions
from snapstore.progress import Progress, ProgressCallback
from snapstore.repository.pull import PullResult
from snapstore.repository.push import PushResult
from snapstore.repository.refs import ResolvedRef
from snapstore.repository.snapshot import Snapshot
from snapstore.repository.store import Store, init_store, open_store
from snapstore.repository.summary import SnapshotSummary
from snapstore.version import VERSION

__all__ = [
    "VERSION",
    "Compression",
    "Integrity",
    "Progress",
    "ProgressCallback",
    "PullResult",
    "PushResult",
    "RankId",
    "RefName",
    "ResolvedRef",
    "SnapError",
    "Snapshot",
    "SnapshotId",
    "SnapshotRef",
    "SnapshotSummary",
    "Store",
    "StoreOptions",
    "init_store",
    "open_store",
    "parse_snapshot_ref",
]
