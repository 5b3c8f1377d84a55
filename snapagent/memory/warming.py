"""External memory of GPUs into the node's cache, after a restore, for those that follow.

The first restore is as fast as the store: nothing waits for the cache. What it has then is fetched
by the next restore from there, by the GPU alone as far as its pages are locked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from snapagent.memory.filling import read_places
from snapagent.memory.placement import HOST

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from snapagent.gpu.owned import GpuMemory
    from snapstore import CachedFile, NodeCache, Snapshot

__all__ = ["WarmedExternal", "warm_external"]


class WarmedExternal(NamedTuple):
    """What there is of a snapshot's GPU memory.

    Attributes:
        cached_bytes: Of files that are whole in the cache.
        registered_bytes: Of those whose pages are locked.
    """

    cached_bytes: int
    registered_bytes: int


def warm_external(
    snapshot: Snapshot, gpus: GpuMemory, *, stop: threading.Event | None = None
) -> WarmedExternal:
    """Fetch into the node's cache what it lacks of GPU memory, and lock pages of what is whole.

    One thread's work, so that what was restored has the others. As much is kept as the cache and
    `registered_bytes` have room for; without a cache that keeps decoded files nothing is done. Safe
    to interrupt and to repeat.

    Args:
        snapshot: Its store stays open meanwhile.
        gpus: Of the broker; locked is only for GPUs that were used already.
        stop: Ends it early.

    Raises:
        IntegrityError: Bytes are damaged or gone.
        BackendError: The storage failed.
    """
    cache = snapshot.node_cache
    cached_bytes = registered_bytes = 0
    if cache is None or not cache.has_decoded:
        return WarmedExternal(0, 0)
    for kept in _files(snapshot, cache):
        with kept:
            if not _fill(kept, stop):
                continue
            if stop is not None and stop.is_set():
                break
            cached_bytes += kept.size_bytes
            engines = gpus.engines.made
            if engines and gpus.engines.registered.add(kept, engines[0].gpu):
                registered_bytes += kept.size_bytes
    return WarmedExternal(cached_bytes, registered_bytes)


def _files(snapshot: Snapshot, cache: NodeCache) -> Iterator[CachedFile]:
    """Open files in the cache, as many as it has room for: more would drive one another out."""
    left = cache.config.memory_bytes
    for _, place in read_places(snapshot):
        for region in place.regions:
            if region.device != HOST and region.length <= left:
                left -= region.length
                with snapshot.open(region.file) as file:
                    yield cache.file(file)


def _fill(kept: CachedFile, stop: threading.Event | None) -> bool:
    for offset, length in kept.parts():
        if (stop is not None and stop.is_set()) or not kept.ensure(offset, length):
            return False
    return True
