"""Filling the node's cache with a snapshot before somebody needs it, and what it has of one."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from snapstore.backend.base import ObjectKind
from snapstore.backend.direct import page_aligned
from snapstore.cache.cached_backend import CachedBackend
from snapstore.cache.contents import CacheTier
from snapstore.cache.decoded import FILL_BYTES_MAX
from snapstore.cache.pins import Pin
from snapstore.errors import UsageError
from snapstore.format import limits
from snapstore.format.tree import EntryType
from snapstore.ids import PackId
from snapstore.joining import wait_for_all
from snapstore.repository.file_content import CACHED_BYTES_MIN
from snapstore.repository.memory import MemoryPlan
from snapstore.repository.read_plan import plan_reads
from snapstore.repository.stored_frames import FrameErrors, check_stored, read_unit
from snapstore.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from snapstore.cache.decoded import Content, FileKey
    from snapstore.cache.node_cache import CachedFile, NodeCache
    from snapstore.format.rank import RankNumber
    from snapstore.ids import SnapshotId
    from snapstore.options import StoreOptions
    from snapstore.progress import ProgressMeter
    from snapstore.repository.read_plan import ReadUnit
    from snapstore.repository.snapshot import Snapshot

__all__ = [
    "WarmResult",
    "cache_files_of",
    "evict_snapshot",
    "pin_snapshot",
    "warm_snapshot",
    "warmed_tier",
]

_Item = TypeVar("_Item")

_FILES_AT_ONCE = 64
"""Each takes two descriptors, and is kept from being removed meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """What warming a cache did.

    Attributes:
        tier: Which part of the cache.
        wanted_bytes: What the snapshot has: stored bytes of packs, or bytes of files without those
            zeros of which nothing is stored.
        missed_bytes: What of that the cache did not keep, for want of room.
        files: Files that are decoded, or 0.
    """

    tier: CacheTier
    wanted_bytes: int
    missed_bytes: int
    files: int


class _Work(NamedTuple):
    cache: NodeCache
    meter: ProgressMeter
    ranks: Sequence[RankNumber]
    threads: int
    warn: Callable[[str], None]

    def begin(self, tier: CacheTier, wanted_bytes: int, names: Collection[str]) -> int:
        """Say what there is no room for; gives how many bytes to fetch."""
        fitting = self.cache.fitting(tier, wanted_bytes, names)
        if fitting < wanted_bytes:
            self.warn(
                f"{format_bytes(wanted_bytes)} are wanted and {format_bytes(fitting)} fit into the "
                f"cache ({tier.value}): the rest is not fetched"
            )
        self.meter.enter("warm", fitting)
        return fitting


def warm_snapshot(
    snapshot: Snapshot,
    options: StoreOptions,
    meter: ProgressMeter,
    *,
    tier: CacheTier,
    ranks: Sequence[RankNumber] = (),
    warn: Callable[[str], None],
) -> WarmResult:
    """Fetch what the cache lacks of a snapshot, or of some of its ranks.

    Only as much as the cache can keep at once: the rest would take its room, and that of others.
    `warn` is told beforehand.

    Raises:
        UsageError: There is no such part of the cache, or no such rank.
        IntegrityError: Bytes are damaged or gone.
    """
    cache = _cache_of(snapshot)
    for number in ranks:
        snapshot.rank(number)
    if not cache.has(tier):
        raise UsageError(
            f"the cache at {cache.directory} keeps no {tier.value}",
            next_step=f"give it room for them: snapstore cache init {cache.directory} …",
        )
    memory = MemoryPlan.of(options)
    wanted = snapshot.backend.capabilities.readers_in_parallel
    threads = min(max(memory.readers, wanted), memory.readers_max)
    work = _Work(cache, meter, ranks, threads, warn)
    if tier is CacheTier.PACKS:
        return _warm_packs(snapshot, memory.read_bytes, work)
    return _warm_decoded(snapshot, work)


def cache_files_of(snapshot: Snapshot) -> tuple[str, ...]:
    """The names of all cache files that a snapshot may have.

    With strong integrity also those of what is checked fast, such as by mounts.

    Raises:
        IntegrityError: Its tables are damaged or gone.
    """
    names = []
    backend = snapshot.backend
    if isinstance(backend, CachedBackend):
        for rank in snapshot.ranks():
            objects = [(ObjectKind.RANK, rank.id.hex)]
            objects += [
                (ObjectKind.PACK, PackId(bytes(raw)).hex)
                for raw in rank.layout.packs["id"].tolist()
            ]
            objects += [
                (ObjectKind.LAYOUT, info.name)
                for info in backend.list(ObjectKind.LAYOUT, f"{rank.id.hex}/")
            ]
            names += [backend.file_name(kind, name) for kind, name in objects]
    if snapshot.node_cache is not None and snapshot.node_cache.has(CacheTier.DECODED):
        for path in _paths(snapshot, ()):
            with snapshot.open(path) as file:
                names += file.content().cache_names()
    return tuple(sorted({name for name in names if name is not None}))


def warmed_tier(cache: NodeCache | None, tier: CacheTier | None) -> CacheTier:
    """Which part of a cache to warm: the one that saves most, unless somebody says."""
    if tier is not None:
        return tier
    is_decoded = cache is not None and cache.has(CacheTier.DECODED)
    return CacheTier.DECODED if is_decoded else CacheTier.PACKS


def pin_snapshot(snapshot: Snapshot, label: str) -> SnapshotId:
    """Pin all cache files that a snapshot may have; see `Store.pin`."""
    cache = _cache_of(snapshot)
    cache.pin(Pin(snapshot.id.hex, label, cache_files_of(snapshot)))
    return snapshot.id


def evict_snapshot(snapshot: Snapshot) -> int:
    """Remove all cache files of a snapshot that may go; see `Store.evict`."""
    return _cache_of(snapshot).evict(names=cache_files_of(snapshot))


def _cache_of(snapshot: Snapshot) -> NodeCache:
    if snapshot.node_cache is None:
        raise UsageError(
            "there is no cache on this node", next_step="name one with --cache or $SNAPSTORE_CACHE"
        )
    return snapshot.node_cache


def _warm_packs(snapshot: Snapshot, read_bytes: int, work: _Work) -> WarmResult:
    backend = snapshot.backend
    assert isinstance(backend, CachedBackend), backend
    work.meter.enter("plan")
    layouts = [rank.layout for rank in snapshot.ranks(work.ranks)]
    plan = plan_reads(layouts, read_bytes_max=read_bytes)
    packs = {unit.pack for unit in plan.units}
    names = {backend.file_name(ObjectKind.PACK, pack.hex) or "" for pack in packs}
    fitting = work.begin(CacheTier.PACKS, plan.stored_bytes, names)
    buffers = threading.local()
    size_bytes = max(read_bytes, limits.FRAME_STORED_BYTES_MAX) + limits.ALIGNMENT_FRAME_BYTES

    def fetch(unit: ReadUnit) -> int:
        if not hasattr(buffers, "data"):
            buffers.data = page_aligned(size_bytes).data
        stored = buffers.data[: unit.length]
        read_unit(backend, unit, stored)
        errors = FrameErrors(unit.pack)
        for frame in plan.frames_of(unit):
            with errors.about(frame):
                begin = frame.offset - unit.offset
                data = stored[begin : begin + frame.stored_length]
                check_stored(backend, unit.pack, frame, data)
        work.meter.add(unit.length)
        return unit.length

    _fetch_all(fetch, _first(plan.units, lambda unit: unit.length, fitting), work.threads)
    work.cache.trim(CacheTier.PACKS)
    # Not before: what came last may have taken the room of what came first.
    missed = sum(
        unit.length
        for unit in plan.units
        if not backend.holds(ObjectKind.PACK, unit.pack.hex, unit.offset, unit.length)
    )
    return WarmResult(
        tier=CacheTier.PACKS, wanted_bytes=plan.stored_bytes, missed_bytes=missed, files=0
    )


def _warm_decoded(snapshot: Snapshot, work: _Work) -> WarmResult:
    work.meter.enter("plan")
    paths = _paths(snapshot, work.ranks)
    # Files with the same content are one.
    contents: dict[FileKey, Content] = {}
    for path in paths:
        with snapshot.open(path) as file:
            content = file.content()
        contents.setdefault(content.key, content)
    total = sum(length for content in contents.values() for _, length in _data(content))
    names = {key.name for key in contents}
    fitting = work.begin(CacheTier.DECODED, total, names)

    def fill(part: tuple[CachedFile, int, int]) -> int:
        file, offset, length = part
        file.ensure(offset, length)
        if not file.has_data(offset):
            return 0
        work.meter.add(length)
        return length

    left = fitting
    every = list(contents.values())
    for first in range(0, len(every), _FILES_AT_ONCE):
        with contextlib.ExitStack() as opened:
            files = [
                opened.enter_context(work.cache.open_content(content))
                for content in every[first : first + _FILES_AT_ONCE]
            ]
            parts = ((file, *part) for file in files for part in file.parts())
            some = _first(parts, lambda one: one[2] if one[0].has_data(one[1]) else 0, left)
            left -= _fetch_all(fill, some, work.threads)
    work.cache.trim(CacheTier.DECODED)
    missed = sum(_missing(work.cache, content) for content in every)
    return WarmResult(
        tier=CacheTier.DECODED, wanted_bytes=total, missed_bytes=missed, files=len(paths)
    )


def _data(content: Content) -> list[tuple[int, int]]:
    """The parts of a file of which something is stored."""
    parts = content.cells.parts(FILL_BYTES_MAX)
    return [part for part in parts if content.cells.has_data(part[0])]


def _missing(cache: NodeCache, content: Content) -> int:
    """How many bytes of a file's data are not in the cache."""
    found = cache.find(content.key)
    if found is None:
        return sum(length for _, length in _data(content))
    with contextlib.closing(found):
        return sum(part[1] for part in _data(content) if not found.filled(*part))


def _first(
    items: Iterable[_Item], size_of: Callable[[_Item], int], limit_bytes: int
) -> Iterator[_Item]:
    """Give items up to the first one that there is no room for."""
    for item in items:
        limit_bytes -= size_of(item)
        if limit_bytes < 0:
            return
        yield item


def _paths(snapshot: Snapshot, ranks: Sequence[RankNumber]) -> list[bytes]:
    """The files that are worth decoding, each once."""
    return [
        entry.path
        for entry in snapshot.walk()
        if entry.type is EntryType.FILE
        and entry.size_bytes >= CACHED_BYTES_MIN
        and (not ranks or entry.rank in ranks)
    ]


def _fetch_all(fetch: Callable[[_Item], int], items: Iterable[_Item], threads: int) -> int:
    """Do something with all items, some at a time, and add up what that gives."""
    left = iter(items)
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> int:
        total = 0
        try:
            while not stop.is_set():
                with lock:
                    item = next(left, None)
                if item is None:
                    break
                total += fetch(item)
        except BaseException:
            stop.set()
            raise
        return total

    futures: list[Future[int]] = []
    with ThreadPoolExecutor(threads, thread_name_prefix="snapstore-warm") as executor:
        try:
            futures.extend(executor.submit(work) for _ in range(threads))
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            wait_for_all(futures)
    return sum(future.result() for future in futures)
