"""Pushing a directory: the use case that puts the parts of the writing side in order.

The order is I1 of `format_spec/SEMANTICS.md`: packs, indexes, rank manifests and layouts, root
manifest, lease *committed*, ref. Whatever happens on the way, nothing has the final name before
all of it is there, and what was stored is found by the next push.
"""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from snapstore import version
from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.layout import key_of
from snapstore.backend.retry import RetryingBackend
from snapstore.clock import Clock, format_utc
from snapstore.errors import (
    DigestMismatch,
    ObjectExists,
    ObjectNotFound,
    RefConflict,
    SnapError,
    UsageError,
)
from snapstore.format import limits
from snapstore.format.envelope import LAYOUT_MAGIC, Built, Envelope, parse_header
from snapstore.format.snapshot import RankEntry, RootManifest, encode_snapshot
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.ids import RankId, RefName, SnapshotId
from snapstore.repository.catalog import Catalog
from snapstore.repository.chains import append_generation, head_number
from snapstore.repository.file_streams import plan_file_streams
from snapstore.repository.frames import FrameTable
from snapstore.repository.index_cache import IndexCache
from snapstore.repository.ingest import Ingest, IngestTotals
from snapstore.repository.leases import PushLease, deleting_names, revive
from snapstore.repository.memory import MemoryPlan
from snapstore.repository.objects import EnvelopeReader
from snapstore.repository.packer import Packer, PackerTotals
from snapstore.repository.rank_builder import RankBuilder
from snapstore.repository.refs import set_ref
from snapstore.source.classes import parse_class_override
from snapstore.source.ranks import parse_rank_glob
from snapstore.source.recognise import Recognised, recognise
from snapstore.source.scan import ScannedTree, check_tree_unchanged, scan_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from snapstore.format.rank import RankNumber
    from snapstore.options import StoreOptions
    from snapstore.progress import ProgressMeter
    from snapstore.repository.windows import StreamSource

__all__ = ["PushRequest", "PushResult", "push_directory"]

_LAYOUT_ATTEMPTS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushRequest:
    """What to push and how to look at it.

    Attributes:
        directory: The tree.
        name: Which name the snapshot gets.
        labels: Kept in the root manifest.
        rank_glob: Which paths belong to which rank, instead of what the layout suggests.
        class_overrides: `GLOB=CLASS` in order; the last that matches wins.
        skip_special: Leave out sockets, fifos and devices instead of refusing the tree.
    """

    directory: Path
    name: RefName
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rank_glob: str | None = None
    class_overrides: Sequence[str] = ()
    skip_special: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """What a push did.

    Attributes:
        snapshot: The new snapshot.
        name: Its name.
        generation: Number of the ref's generation that points to it.
        kind: What the tree was recognised as.
        ranks: The rank ids by rank.
        ingest: Bytes and chunks of the streams.
        packed: Objects and bytes that were written for them.
        metadata_bytes: Bytes of manifests and layouts.
        skipped: Paths that were left out.
        warnings: What did not parse and was stored as plain files, and what is damaged in the
            store, so that it was sent again.
    """

    snapshot: SnapshotId
    name: RefName
    generation: int
    kind: str
    ranks: Mapping[RankNumber, RankId]
    ingest: IngestTotals
    packed: PackerTotals
    metadata_bytes: int
    skipped: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def stored_bytes(self) -> int:
        """All bytes that this push added to the store."""
        return self.packed.pack_bytes + self.packed.index_bytes + self.metadata_bytes


@dataclasses.dataclass(slots=True)
class _Rank:
    builder: RankBuilder
    sources: list[StreamSource]
    tree: list[TreeEntry]
    placement: dict[str, object]


class _Writer:
    """What one push holds while it writes; `__exit__` leaves nothing running."""

    def __init__(
        self, backend: Backend, options: StoreOptions, clock: Clock, meter: ProgressMeter
    ) -> None:
        self.backend = backend
        self.clock = clock
        self.metadata_bytes = 0
        plan = MemoryPlan.of(options)
        self.lease = PushLease(backend, clock)
        # If anything below fails, the lease is given back at once.
        with contextlib.ExitStack() as stack:
            stack.callback(self._release_lease)
            self.frames = FrameTable()
            catalog = stack.enter_context(
                Catalog(
                    self.frames,
                    budget_bytes=plan.catalog_bytes,
                    cache=IndexCache.of(options, clock),
                )
            )
            deleting = deleting_names(backend, ObjectKind.PACK)
            loaded = catalog.load(backend, without=deleting)
            # What reads for the workers is closed after them.
            self._kept = stack.enter_context(contextlib.ExitStack())
            executor = ThreadPoolExecutor(plan.threads, thread_name_prefix="snapstore-push")
            stack.callback(executor.shutdown, wait=True, cancel_futures=True)
            self.packer = Packer(
                backend,
                self.frames,
                pack_bytes=plan.pack_bytes,
                in_flight=plan.packs_in_flight,
                deleting=deleting.__contains__,
                damaged_indexes=loaded.damaged,
            )
            stack.callback(self.packer.abort)
            self.ingest = Ingest(
                frames=self.frames,
                catalog=catalog,
                packer=self.packer,
                executor=executor,
                buffers=plan.window_buffers,
                compression=options.compression,
                progress=self._window_done(meter),
            )
            self._loaded = loaded
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.ExitStack() as hurry:
            # Whoever interrupts does not want to wait for a storage that does not answer.
            interrupted = kind is not None and not issubclass(kind, Exception)
            if interrupted and isinstance(self.backend, RetryingBackend):
                hurry.enter_context(self.backend.in_a_hurry())
            self._stack.close()

    @property
    def warnings(self) -> list[str]:
        """What was found to be damaged in the store so far."""
        return self._loaded.warnings

    def keep(self, callback: Callable[[], None]) -> None:
        """Have something called when the push ends, one way or the other."""
        self._kept.callback(callback)

    def put(self, kind: ObjectKind, name: str, built: Built) -> None:
        """Store a manifest, and count its bytes if it was not there before.

        Raises:
            DigestMismatch: Its name, which is its content's, is taken by damaged bytes.
        """
        with contextlib.suppress(ObjectNotFound):
            if self.backend.stat(kind, name).size_bytes == built.length:
                return
        try:
            self.backend.put_new(kind, name, built.pieces)
        except ObjectExists as error:
            raise DigestMismatch(
                f"{kind.value} {name[:12]} is in the store already, and damaged",
                next_step=f"move {key_of(kind, name)} away and push again",
            ) from error
        self.metadata_bytes += built.length

    def put_layout(self, rank_id: RankId, layout: Built) -> None:
        """Store the newest layout of a rank, unless the newest one there says the same."""
        for _ in range(_LAYOUT_ATTEMPTS):
            newest = head_number(self.backend, ObjectKind.LAYOUT, rank_id.hex)
            if newest and _same_places(self.backend, rank_id, newest, layout):
                return
            try:
                append_generation(
                    self.backend, ObjectKind.LAYOUT, rank_id.hex, *layout.pieces, after=newest
                )
            except RefConflict:
                continue  # Another push of the same tree was faster: look at what it wrote.
            self.metadata_bytes += layout.length
            return
        raise RefConflict(
            f"others wrote layouts of rank manifest {rank_id.short} {_LAYOUT_ATTEMPTS} times in a "
            "row",
            next_step="push again",
        )

    def _window_done(self, meter: ProgressMeter) -> Callable[[int], None]:
        def done(count_bytes: int) -> None:
            self.lease.renew_if_due()
            meter.add(count_bytes)

        return done

    def _release_lease(self) -> None:
        # The push has failed already, or has committed and this does nothing.
        with contextlib.suppress(SnapError):
            self.lease.release()


def push_directory(
    backend: Backend,
    options: StoreOptions,
    clock: Clock,
    request: PushRequest,
    meter: ProgressMeter,
) -> PushResult:
    """Store a directory as a snapshot and let a name point to it.

    Raises:
        SourceError: The tree cannot be stored as it stands.
        BackendError: The storage failed; what was stored so far is found by the next push.
        ConcurrencyError: Somebody else decided first; push again.
    """
    _check_labels(request.labels)
    overrides = [parse_class_override(text) for text in request.class_overrides]
    if request.rank_glob is not None:
        parse_rank_glob(request.rank_glob)
    meter.enter("scan")
    tree = scan_tree(request.directory, skip_special=request.skip_special)
    seen = recognise(tree, rank_glob=request.rank_glob, class_overrides=overrides)
    meter.enter("store", tree.size_bytes)
    with _Writer(backend, options, clock, meter) as writer:
        ranks = _plan_ranks(writer, tree, seen)
        for rank in ranks:
            for source in rank.sources:
                number = rank.builder.add_stream(data_class=source.data_class, origin=source.origin)
                writer.ingest.store(source, rank.builder, number)
        writer.ingest.drain()
        check_tree_unchanged(tree, skip_special=request.skip_special)
        meter.enter("commit")
        writer.packer.finish()
        entries = [_write_rank(writer, rank) for rank in ranks]
        snapshot = _write_root(writer, request, seen, entries)
        writer.lease.commit(snapshot)
        generation = set_ref(backend, clock, request.name, snapshot)
        return PushResult(
            snapshot=snapshot,
            name=request.name,
            generation=generation,
            kind=seen.kind,
            ranks={entry.rank: entry.rank_id for entry in entries},
            ingest=writer.ingest.totals,
            packed=writer.packer.totals,
            metadata_bytes=writer.metadata_bytes,
            skipped=tuple(path.decode("utf-8", "backslashreplace") for path in tree.skipped),
            warnings=(*seen.warnings, *writer.warnings),
        )


def _check_labels(labels: Mapping[str, str]) -> None:
    for key, value in labels.items():
        if not 0 < len(key) <= limits.LABEL_KEY_CHARS_MAX:
            raise UsageError(f"a label's key has 1 to {limits.LABEL_KEY_CHARS_MAX} characters")
        if len(value) > limits.LABEL_VALUE_CHARS_MAX:
            raise UsageError(
                f"the label {key} has {len(value)} characters",
                next_step=f"keep it to {limits.LABEL_VALUE_CHARS_MAX}",
            )


def _plan_ranks(writer: _Writer, tree: ScannedTree, seen: Recognised) -> list[_Rank]:
    ranks = []
    for number, items in seen.partition.items():
        builder = RankBuilder(number)
        writer.keep(builder.close)
        sources, entries = plan_file_streams(tree, items)
        for source in sources:
            writer.keep(source.close)
        ranks.append(_Rank(builder, sources, entries, {}))
    return ranks


def _write_rank(writer: _Writer, rank: _Rank) -> RankEntry:
    """Store a rank manifest and where its bytes are."""
    builder = rank.builder
    built = builder.build_manifest(rank.tree, rank.placement)
    rank_id = RankId(built.root.raw)
    layout, packs = builder.build_layout(built.root, writer.frames, writer.clock)
    for kind, names in (
        (ObjectKind.PACK, [pack.hex for pack in packs]),
        (ObjectKind.RANK, [rank_id.hex]),
    ):
        revive(writer.backend, writer.clock, kind, names)
    writer.put(ObjectKind.RANK, rank_id.hex, built)
    writer.put_layout(rank_id, layout)
    return RankEntry(
        rank=builder.rank,
        manifest=rank_id.hex,
        logical_bytes=builder.logical_bytes,
        data_bytes=builder.data_bytes,
        files=sum(entry.type is EntryType.FILE for entry in rank.tree),
    )


def _same_places(backend: Backend, rank_id: RankId, number: int, layout: Built) -> bool:
    """Whether the newest layout says the same as ours, but for who wrote it and when."""
    try:
        reader = EnvelopeReader(
            backend, ObjectKind.LAYOUT, f"{rank_id.hex}/{number:08d}", magic=LAYOUT_MAGIC
        )
    except SnapError:
        return False  # Damaged or gone: ours will be the newest.
    ours = parse_header(
        b"".join(layout.pieces[:1]), magic=LAYOUT_MAGIC, object_length=layout.length
    )
    return _places(reader.envelope) == _places(ours)


def _places(envelope: Envelope) -> list[tuple[bytes, bytes]]:
    return [(info.tag, info.digest) for info in envelope.sections if info.tag != b"META"]


def _write_root(
    writer: _Writer, request: PushRequest, seen: Recognised, entries: list[RankEntry]
) -> SnapshotId:
    manifest = RootManifest(
        created=format_utc(writer.clock.now_ns()),
        kind=seen.kind,
        ranks=tuple(entries),
        labels=dict(request.labels),
        requirements=dict(seen.requirements),
        writer=version.WRITER,
    )
    data, snapshot = encode_snapshot(manifest)
    writer.put(ObjectKind.SNAPSHOT, snapshot.hex, Built([data], snapshot, len(data)))
    return snapshot
