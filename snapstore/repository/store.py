"""The façade: one open store, and everything that can be done with it.

Wiring only; the work is in the modules beside this one, which are imported when first used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote

from snapstore.backend import open_backend
from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.retry import RetryingBackend, RetryPolicy
from snapstore.clock import Clock, SystemClock, format_utc
from snapstore.errors import (
    FormatError,
    ObjectExists,
    ObjectNotFound,
    RefNotFound,
    SnapError,
    StoreNotFound,
    UsageError,
)
from snapstore.format import limits
from snapstore.format.config import StoreConfig, decode_config, encode_config
from snapstore.ids import RefName, SnapshotId, SnapshotRef, parse_snapshot_ref
from snapstore.options import StoreOptions
from snapstore.progress import ProgressCallback, ProgressMeter
from snapstore.repository.frame_cache import FrameCache
from snapstore.repository.objects import read_object
from snapstore.repository.refs import ResolvedRef, list_refs, resolve_ref
from snapstore.repository.snapshot import Snapshot, load_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from snapstore.cache.contents import CacheTier
    from snapstore.cache.node_cache import NodeCache
    from snapstore.format.rank import RankNumber
    from snapstore.options import Compression
    from snapstore.repository.diff import SnapshotDiff
    from snapstore.repository.pull import PullResult
    from snapstore.repository.refs import NameGeneration
    from snapstore.repository.removal import RemoveResult
    from snapstore.repository.snapshot_writer import SnapshotWriter
    from snapstore.repository.stats import StoreStats
    from snapstore.repository.summary import SnapshotSummary
    from snapstore.repository.warming import WarmResult
    from snapstore.repository.write_session import PushResult
    from snapstore.units import BytesLike

__all__ = ["Store", "init_store", "open_store"]

_log = logging.getLogger(__name__)


class Store:
    """An open store. Thread-safe; a context manager that closes its connections.

    Every operation blocks. Operations that take a `progress` callback call it from worker threads,
    one call at a time; an exception from it ends the operation like any other error.
    """

    def __init__(
        self,
        backend: Backend,
        config: StoreConfig,
        options: StoreOptions,
        clock: Clock,
        cache: NodeCache | None = None,
    ) -> None:
        self._cache = cache
        self._reading = backend if cache is None else cache.backend(backend, config.store_id)
        self._backend = backend
        self._options = options
        self._clock = clock
        self._frame_cache = FrameCache(budget_bytes=options.cache_bytes)
        self.config = config

    @property
    def url(self) -> str:
        """The store's URL, without credentials."""
        return self._backend.capabilities.url

    @property
    def is_service(self) -> bool:
        """Whether each read waits for a service, so that it pays to have several under way."""
        return self._backend.capabilities.is_service

    @property
    def options(self) -> StoreOptions:
        """How the store is worked with."""
        return self._options

    @property
    def cache(self) -> NodeCache | None:
        """The cache of the node that it is read through, if the options name one."""
        return self._cache

    def push(
        self,
        directory: Path | str,
        name: RefName | str,
        *,
        labels: Mapping[str, str] | None = None,
        rank_glob: str | None = None,
        class_overrides: Sequence[str] = (),
        skip_special: bool = False,
        progress: ProgressCallback | None = None,
    ) -> PushResult:
        """Store a directory as a snapshot and let `name` point to it.

        Returns once the snapshot is durable. Safe to repeat: what is stored already is not sent
        again, and a push that failed or was killed left nothing under the name.

        Args:
            directory: The tree; any directory.
            name: `team/model/engine:tag`.
            labels: Kept with the snapshot.
            rank_glob: Which paths belong to which rank, with `{N}` for its number.
            class_overrides: `GLOB=CLASS`, how files are to be cut.
            skip_special: Leave out sockets, fifos and devices.
            progress: Told how far it is.

        Raises:
            UsageError: `name` cannot be a name, or means one exact snapshot.
            SourceError: The tree cannot be stored as it stands, or changed meanwhile.
            BackendError: The storage failed.
            ConcurrencyError: Somebody else decided first; push again.
        """
        from snapstore.repository.push import PushRequest, push_directory

        self._refuse_overlap(Path(directory))
        request = PushRequest(
            directory=Path(directory),
            name=_ref_name(name, doing="push to"),
            labels=labels or {},
            rank_glob=rank_glob,
            class_overrides=class_overrides,
            skip_special=skip_special,
        )
        meter = ProgressMeter(progress)
        return push_directory(self._backend, self._options, self._clock, request, meter)

    def begin(
        self,
        name: RefName | str,
        *,
        labels: Mapping[str, str] | None = None,
        root_mode: int = 0o700,
        compression: Compression | None = None,
        progress: ProgressCallback | None = None,
    ) -> contextlib.AbstractContextManager[SnapshotWriter]:
        """Write a snapshot from bytes that arrive, with no directory in between.

        The `with` block gives a `SnapshotWriter`, whose `commit` makes the snapshot durable and
        lets `name` point to it. Without a commit, nothing has the name when the block ends.

        Args:
            name: `team/model/engine:tag`.
            labels: Kept with the snapshot.
            root_mode: Permissions of the root of the tree, and of the directories in it.
            compression: Effort spent on frames, instead of what the store's options say.
            progress: Told how far it is, of a total that is not known.

        Raises:
            UsageError: `name` cannot be a name, or means one exact snapshot.
            BackendError: The storage failed.
        """
        from snapstore.repository.snapshot_writer import WriteRequest, writing

        request = WriteRequest(
            name=_ref_name(name, doing="write"), labels=labels or {}, root_mode=root_mode
        )
        options = self._options
        if compression is not None:
            options = dataclasses.replace(options, compression=compression)
        return writing(self._backend, options, self._clock, request, ProgressMeter(progress))

    def pull(
        self,
        name: SnapshotRef | RefName | str,
        directory: Path | str,
        *,
        ranks: Sequence[RankNumber] = (),
        resume: bool = False,
        in_place: bool = False,
        sync: bool = False,
        progress: ProgressCallback | None = None,
    ) -> PullResult:
        """Recreate a snapshot's tree.

        The directory has its name only when everything in it was checked and written (I8), except
        with `in_place`.

        Args:
            name: `name`, `name:tag` or `name@b3:<id>`.
            directory: Must not exist or be empty.
            ranks: Only these, and what is above them; default all.
            resume: Go on with what an earlier pull to the same directory left.
            in_place: Write straight into an existing directory, such as a mount point.
            sync: Return only when the files are durable.
            progress: Told how far it is.

        Raises:
            LookupFailed: There is no such snapshot.
            IntegrityError: Bytes are damaged or gone; nothing has the final name.
            TargetError: The directory cannot be used.
        """
        from snapstore.repository.pull import PullRequest, pull_snapshot

        self._refuse_overlap(Path(directory))
        request = PullRequest(
            directory=Path(directory),
            ranks=tuple(ranks),
            resume=resume,
            in_place=in_place,
            sync=sync,
        )
        snapshot = self.snapshot(name)
        return pull_snapshot(snapshot, self._options, request, ProgressMeter(progress))

    def snapshot(self, name: SnapshotRef | RefName | str) -> Snapshot:
        """Find a snapshot and read its root manifest.

        Raises:
            LookupFailed: There is no such snapshot.
            IntegrityError: It is damaged.
        """
        wanted = _snapshot_ref(name)
        named = ""
        snapshot = wanted.snapshot
        if snapshot is None:
            named = str(wanted)
            snapshot = resolve_ref(self._backend, wanted.ref).snapshot
        return load_snapshot(
            self._reading,
            snapshot,
            named=named,
            options=self._options,
            cache=self._frame_cache,
            node_cache=self._cache,
        )

    def list(
        self, prefix: str = "", *, damaged: Callable[[RefName, SnapError], None] | None = None
    ) -> Iterator[ResolvedRef]:
        """Give the names that start with `prefix` and what they point to, sorted.

        Args:
            prefix: Of the name, as text.
            damaged: Told of each name that cannot be read; else the first one ends the listing.

        Raises:
            FormatError: A name is damaged, and nobody wants to be told.
        """
        for name in list_refs(self._backend, prefix):
            try:
                found = resolve_ref(self._backend, name)
            except RefNotFound:
                continue  # Deleted.
            except FormatError as error:
                if damaged is None:
                    raise
                damaged(name, error)
                continue
            yield found

    def require_present(self) -> None:
        """Make sure that the store is there: a directory of which nothing is left lists as empty.

        Raises:
            StoreNotFound: It is gone, or what it lies on is not mounted any more.
            BackendError: The storage failed.
        """
        _read_config(self._backend)

    def show(self, name: SnapshotRef | RefName | str) -> SnapshotSummary:
        """Tell what a snapshot holds and what it takes."""
        from snapstore.repository.summary import summarise

        return summarise(self.snapshot(name))

    def diff(self, a: SnapshotRef | RefName | str, b: SnapshotRef | RefName | str) -> SnapshotDiff:
        """Tell what two snapshots share, what `b` costs on top of `a`, and what it alone holds.

        Raises:
            LookupFailed: There is no such snapshot.
            IntegrityError: One of them is damaged.
        """
        from snapstore.repository.diff import compare

        return compare(
            self.snapshot(a), self.snapshot(b), self._clock, memory_bytes=self._options.memory_bytes
        )

    def stats(self, prefix: str = "", *, depth: int = 1) -> StoreStats:
        """Count what the store holds, all together and by namespace.

        What is damaged is passed over and told in the result.

        Args:
            prefix: Count only names that start so.
            depth: How many components of a name make its namespace.

        Raises:
            UsageError: `depth` is not positive.
        """
        from snapstore.repository.stats import measure_store

        return measure_store(
            self._backend,
            self._clock,
            prefix=prefix,
            depth=depth,
            memory_bytes=self._options.memory_bytes,
        )

    def tag(self, source: SnapshotRef | RefName | str, name: RefName | str) -> ResolvedRef:
        """Let `name` point to the snapshot `source`. Writes nothing if it does so already.

        Raises:
            LookupFailed: There is no such snapshot.
            IntegrityError: Something that it needs is damaged or gone.
            ConcurrencyError: It is being removed, or others moved the name again and again.
            AccessDenied: The store cannot be written.
        """
        from snapstore.repository.tags import tag_snapshot

        wanted = _ref_name(name, doing="move")
        return tag_snapshot(self._backend, self._clock, self.snapshot(source), wanted)

    def history(self, name: RefName | str) -> tuple[NameGeneration, ...]:
        """Tell what a name has pointed to, the newest first, deletions included.

        Raises:
            RefNotFound: Nothing ever had this name.
        """
        from snapstore.repository.tags import name_history

        return name_history(self._backend, _ref_name(name, doing="tell the history of"))

    def rollback(self, name: RefName | str, *, to: int | None = None) -> ResolvedRef:
        """Let a name, deleted or not, point again to what an earlier generation pointed to.

        Args:
            name: Which name.
            to: The generation; by default the newest before the current with another snapshot.

        Raises:
            RefNotFound: There is no such name or generation.
            UsageError: The generation has no snapshot.
            IntegrityError: Something that its snapshot needs is damaged or gone.
            ConcurrencyError: It is being removed, or somebody moved the name meanwhile.
            AccessDenied: The store cannot be written.
        """
        from snapstore.repository.tags import roll_back

        return roll_back(self._backend, self._clock, _ref_name(name, doing="roll back"), to=to)

    def remove(self, *names: RefName | str, dry_run: bool = False) -> RemoveResult:
        """Delete names: all of them or, if one is missing, none.

        A name's history stays, and `rollback` brings it back while its data are there. The result
        says what nothing else needs; those bytes come back when packs are removed.

        Args:
            names: Which names.
            dry_run: Only tell.

        Raises:
            RefNotFound: A name points to nothing.
            RefConflict: Somebody moved a name meanwhile; it was left as it is.
            AccessDenied: The store cannot be written.
        """
        from snapstore.repository.removal import remove_names

        return remove_names(
            self._backend,
            self._clock,
            [_ref_name(name, doing="remove") for name in names],
            dry_run=dry_run,
            memory_bytes=self._options.memory_bytes,
        )

    def put_hint(self, topic: str, name: str, data: BytesLike) -> None:
        """Leave advice for whoever works with this store, in the place of what was there.

        Nothing may depend on a hint: it can vanish, and anybody who may write can replace it. Of
        several who write at once any one wins, and who reads meanwhile may find nothing.

        Args:
            topic: What it is about, such as `page-order`: lower-case letters, digits and `-`.
            name: For what, such as the id of a snapshot: letters, digits, `.`, `_` and `-`.
            data: At most 16 MiB, of the form that the topic has.

        Raises:
            UsageError: No hint can have that topic and name.
            LimitExceeded: It is too long.
            AccessDenied: The store cannot be written.
        """
        from snapstore.repository.hints import put_hint

        put_hint(self._backend, topic, name, data)

    def get_hint(
        self, topic: str, name: str, limit_bytes: int = limits.HINT_BYTES_MAX
    ) -> bytes | None:
        """Read advice; None if there is none, it is too long, or it cannot be read.

        Check it like anything that a stranger wrote: nobody has signed it, and if it is replaced
        meanwhile it may be cut short.

        Raises:
            UsageError: No hint can have that topic and name.
        """
        from snapstore.repository.hints import get_hint

        return get_hint(self._backend, topic, name, limit_bytes=limit_bytes)

    def warm(
        self,
        name: SnapshotRef | RefName | str,
        *,
        tier: CacheTier | None = None,
        ranks: Sequence[RankNumber] = (),
        bytes_per_s: float | None = None,
        progress: ProgressCallback | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> WarmResult:
        """Fetch into the node's cache what it lacks of a snapshot.

        What is there already is not fetched again. Of what cannot be there at once only as much is
        fetched as can. Safe to interrupt and to repeat.

        Args:
            name: Which snapshot.
            tier: Which part of the cache; by default decoded files, if it has that part.
            ranks: Only these; default all.
            bytes_per_s: How fast to read from the store at most.
            progress: Told how far it is.
            warn: Told beforehand if there is no room for all of it.

        Raises:
            UsageError: No cache was opened with the store, or it has no such part.
            LookupFailed: There is no such snapshot.
            IntegrityError: Bytes are damaged or gone.
        """
        from snapstore.backend.paced import PacedBackend
        from snapstore.repository.warming import warm_snapshot, warmed_tier

        tier = warmed_tier(self._cache, tier)
        snapshot = self.snapshot(name)
        paced = None
        if bytes_per_s is not None and self._cache is not None:
            paced = PacedBackend(self._backend, self._clock, bytes_per_s=bytes_per_s)
            reading = self._cache.backend(paced, self.config.store_id)
            snapshot = dataclasses.replace(snapshot, backend=reading)
        meter = ProgressMeter(progress)
        try:
            return warm_snapshot(snapshot, self._options, meter, tier=tier, ranks=ranks, warn=warn)
        except BaseException:
            if paced is not None:
                paced.stop()
            raise

    def pin(self, name: SnapshotRef | RefName | str) -> SnapshotId:
        """Keep in the node's cache what it has, and will have, of a snapshot.

        `NodeCache.unpin` takes that back.

        Raises:
            UsageError: No cache was opened with the store.
            LookupFailed: There is no such snapshot.
        """
        from snapstore.repository.warming import pin_snapshot

        return pin_snapshot(self.snapshot(name), str(name))

    def evict(self, name: SnapshotRef | RefName | str) -> int:
        """Remove from the node's cache what it has of a snapshot, unless it is pinned or open.

        Returns:
            How many bytes were freed.

        Raises:
            UsageError: No cache was opened with the store.
            LookupFailed: There is no such snapshot.
        """
        from snapstore.repository.warming import evict_snapshot

        return evict_snapshot(self.snapshot(name))

    def _refuse_overlap(self, directory: Path) -> None:
        """Refuse a tree that contains the store, or that the store contains."""
        if not self.url.startswith("file:"):
            return
        root = Path(unquote(self.url.removeprefix("file://"))).resolve()
        tree = directory.resolve()
        if tree == root or root in tree.parents or tree in root.parents:
            raise UsageError(
                f"{str(directory)!r} and the store at {str(root)!r} are one inside the other",
                next_step="keep the store apart from the trees that go into it",
            )

    def close(self) -> None:
        """Release connections and descriptors. Idempotent."""
        self._backend.close()
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def init_store(
    url: str, options: StoreOptions | None = None, *, clock: Clock | None = None
) -> Store:
    """Make a store, or open the one that is there already.

    Raises:
        UsageError: The URL cannot be meant.
        BackendError: The storage cannot be written.
    """
    clock = clock or SystemClock()
    options = options or StoreOptions()
    backend = _patient(open_backend(url, create=True, clock=clock), clock, options)
    try:
        try:
            config = _read_config(backend)
        except StoreNotFound:
            new = StoreConfig(created=format_utc(clock.now_ns()), store_id=secrets.token_hex(16))
            # Whoever was first has made the store: theirs counts.
            with contextlib.suppress(ObjectExists):
                backend.put_new(ObjectKind.CONFIG, "", [encode_config(new)])
            config = _read_config(backend)
        return _opened(backend, config, options, clock)
    except BaseException:
        backend.close()
        raise


def open_store(
    url: str,
    options: StoreOptions | None = None,
    *,
    readonly: bool = False,
    clock: Clock | None = None,
) -> Store:
    """Open an existing store.

    Args:
        url: `file:///mnt/snapshots`, or a path.
        options: Budget, threads, compression, integrity.
        readonly: Never write, not even leases.
        clock: For tests.

    Raises:
        StoreNotFound: There is none.
        UnsupportedVersion: It is of a newer format.
    """
    clock = clock or SystemClock()
    options = options or StoreOptions()
    backend = _patient(open_backend(url, readonly=readonly, clock=clock), clock, options)
    try:
        config = _read_config(backend)
        return _opened(backend, config, options, clock)
    except BaseException:
        backend.close()
        raise


def _opened(backend: Backend, config: StoreConfig, options: StoreOptions, clock: Clock) -> Store:
    cache = None
    if options.node_cache is not None:
        from snapstore.cache.directory import CacheUnusable
        from snapstore.cache.node_cache import NodeCache

        try:
            cache = NodeCache(options.node_cache, clock=clock)
        except CacheUnusable as error:
            # A disk that is full or read-only now is none of its readers' (N6 of the cache).
            _log.warning("reading past the cache: %s", error)
    return Store(backend, config, options, clock, cache)


def _patient(backend: Backend, clock: Clock, options: StoreOptions) -> Backend:
    """Try again what the storage says may succeed later; a busy service for two minutes."""
    policy = RetryPolicy()
    if backend.capabilities.is_service:
        policy = RetryPolicy(attempts_max=15, total_s_max=120.0)
    if options.patience_s is not None:
        total_s = min(options.patience_s, policy.total_s_max)
        policy = dataclasses.replace(policy, total_s_max=total_s)
    rng = random.Random()  # noqa: S311 - only jitter
    return RetryingBackend(backend, rng=rng, clock=clock, policy=policy)


def _read_config(backend: Backend) -> StoreConfig:
    try:
        data = read_object(backend, ObjectKind.CONFIG, "", limit_bytes=limits.CONFIG_BYTES_MAX)
    except ObjectNotFound as error:
        raise StoreNotFound(
            f"there is no store at {backend.capabilities.url}",
            next_step="make one with `snapstore init`",
        ) from error
    return decode_config(data)


def _ref_name(name: RefName | str, *, doing: str) -> RefName:
    if isinstance(name, RefName):
        return name
    parsed = parse_snapshot_ref(name)
    if parsed.snapshot is not None:
        raise UsageError(
            f"cannot {doing} one exact snapshot: {name[:120]!r}",
            next_step="give a name, or a name and a tag",
        )
    return parsed.ref


def _snapshot_ref(name: SnapshotRef | RefName | str) -> SnapshotRef:
    if isinstance(name, str):
        return parse_snapshot_ref(name)
    return SnapshotRef(name) if isinstance(name, RefName) else name
