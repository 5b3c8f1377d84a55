"""One writing of a snapshot: what a push and a writer of arriving bytes have in common.

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
    Interrupted,
    ObjectExists,
    ObjectNotFound,
    RefConflict,
    SnapError,
    UsageError,
)
from snapstore.format import limits
from snapstore.format.envelope import LAYOUT_MAGIC, Built, Envelope, parse_header
from snapstore.format.rank import HOST
from snapstore.format.snapshot import RankEntry, RootManifest, encode_snapshot
from snapstore.format.tree import EntryType
from snapstore.ids import RankId, RefName, SnapshotId
from snapstore.repository.buffers import BufferPool
from snapstore.repository.catalog import Catalog
from snapstore.repository.chains import append_generation, head_number
from snapstore.repository.frames import FrameTable
from snapstore.repository.index_cache import IndexCache
from snapstore.repository.ingest import INGEST_BUFFER_BYTES, Ingest, IngestTotals
from snapstore.repository.leases import PushLease, deleting_names, revive
from snapstore.repository.objects import EnvelopeReader
from snapstore.repository.packer import Packer, PackerTotals
from snapstore.repository.refs import set_ref

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from snapstore.format.rank import RankNumber
    from snapstore.format.tree import TreeEntry
    from snapstore.options import StoreOptions
    from snapstore.progress import ProgressMeter
    from snapstore.repository.memory import MemoryPlan
    from snapstore.repository.rank_builder import RankBuilder

__all__ = ["Publication", "PushResult", "RankParts", "WriteSession", "check_labels"]

_LAYOUT_ATTEMPTS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """What a push, or another writer of a snapshot, did.

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a snapshot says of itself, besides its ranks.

    Attributes:
        name: Which name it gets.
        kind: What it is.
        labels: Kept in the root manifest.
        requirements: What it tells of where it can run.
        skipped: Paths that were left out, for the result.
        warnings: For the result.
    """

    name: RefName
    kind: str
    labels: Mapping[str, str]
    requirements: Mapping[str, object]
    skipped: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RankParts:
    """One rank all of whose streams went through, and its tree."""

    builder: RankBuilder
    tree: Sequence[TreeEntry]
    placement: Mapping[str, object] = dataclasses.field(default_factory=dict)


class WriteSession:
    """What one writer of a snapshot holds; `__exit__` leaves nothing running.

    Used by one thread, but for what it says of its parts.

    Attributes:
        backend: Where everything goes.
        clock: The time.
        lease: What this write holds, until `publish` commits it.
        buffers: For windows.
        ingest: What stores them.
        metadata_bytes: Of the manifests and layouts that were written.
        in_a_hurry: Set by who wants to stop soon, without waiting for a storage that is not there.
    """

    def __init__(
        self,
        backend: Backend,
        options: StoreOptions,
        clock: Clock,
        meter: ProgressMeter,
        *,
        plan: MemoryPlan,
    ) -> None:
        """Acquire a lease and learn what the store has.

        Raises:
            AccessDenied: The store cannot be written.
            BackendError: It cannot be read.
        """
        self.backend = backend
        self.clock = clock
        self.metadata_bytes = 0
        self.in_a_hurry = False
        self._meter = meter
        self.lease = PushLease(backend, clock)
        # If anything below fails, the lease is given back at once.
        with contextlib.ExitStack() as stack:
            stack.callback(self._release_lease)
            self._frames = FrameTable()
            catalog = stack.enter_context(
                Catalog(
                    self._frames,
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
            self._packer = Packer(
                backend,
                self._frames,
                plan=plan,
                deleting=deleting.__contains__,
                damaged_indexes=loaded.damaged,
                copiers=executor if plan.threads > 2 else None,
            )
            stack.callback(self._packer.abort)
            self.buffers = BufferPool(count=plan.window_buffers, size_bytes=INGEST_BUFFER_BYTES)
            self.ingest = Ingest(
                frames=self._frames,
                catalog=catalog,
                packer=self._packer,
                executor=executor,
                buffers=self.buffers,
                compression=options.compression,
                progress=self._window_done,
            )
            self._loaded = loaded
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.ExitStack() as hurry:
            # Whoever interrupts does not want to wait for a storage that does not answer.
            interrupted = kind is not None and (
                not issubclass(kind, Exception) or issubclass(kind, Interrupted)
            )
            if (interrupted or self.in_a_hurry) and isinstance(self.backend, RetryingBackend):
                hurry.enter_context(self.backend.in_a_hurry())
            self._stack.close()

    @property
    def warnings(self) -> list[str]:
        """What was found to be damaged in the store so far."""
        return self._loaded.warnings

    def keep(self, callback: Callable[[], None]) -> None:
        """Have something called when the session ends, after the workers have."""
        self._kept.callback(callback)

    def stop_first(self, callback: Callable[[], None]) -> None:
        """Have something called when the session ends, before the workers do."""
        self._stack.callback(callback)

    def publish(self, what: Publication, ranks: Sequence[RankParts]) -> PushResult:
        """Store what is left, and let the name point to all of it (I1).

        Returns once it is durable. All windows must have gone through.

        Raises:
            FormatError: The format cannot say `what`.
            BackendError: The storage failed; what was stored so far is found by the next push.
            ConcurrencyError: Somebody else decided first; start over.
            Interrupted: Somebody wants to stop; nothing has the name.
        """
        self._meter.enter("commit")
        self._packer.finish()
        entries = [self._write_rank(rank) for rank in ranks]
        data, snapshot = encode_snapshot(self._root(what, entries))
        self.put(ObjectKind.SNAPSHOT, snapshot.hex, Built([data], snapshot, len(data)))
        if self.in_a_hurry:
            # The storage may have answered long after it was given up.
            raise Interrupted(f"storing {what.name} was aborted", next_step="start over")
        self.lease.commit(snapshot)
        generation = set_ref(self.backend, self.clock, what.name, snapshot)
        return PushResult(
            snapshot=snapshot,
            name=what.name,
            generation=generation,
            kind=what.kind,
            ranks={entry.rank: entry.rank_id for entry in entries},
            ingest=self.ingest.totals,
            packed=self._packer.totals,
            metadata_bytes=self.metadata_bytes,
            skipped=tuple(what.skipped),
            warnings=(*what.warnings, *self.warnings),
        )

    def check(self, what: Publication) -> None:
        """Look that the format can say what is to be published, before it is too late.

        Raises:
            FormatError: It cannot.
        """
        nothing = RankEntry(rank=HOST, manifest="0" * 64, logical_bytes=0, data_bytes=0, files=0)
        encode_snapshot(self._root(what, [nothing]))

    def _root(self, what: Publication, entries: Sequence[RankEntry]) -> RootManifest:
        return RootManifest(
            created=format_utc(self.clock.now_ns()),
            kind=what.kind,
            ranks=tuple(entries),
            labels=dict(what.labels),
            requirements=dict(what.requirements),
            writer=version.WRITER,
        )

    def _write_rank(self, rank: RankParts) -> RankEntry:
        """Store a rank manifest and where its bytes are."""
        builder = rank.builder
        built = builder.build_manifest(rank.tree, dict(rank.placement))
        rank_id = RankId(built.root.raw)
        layout, packs = builder.build_layout(built.root, self._frames, self.clock)
        for kind, names in (
            (ObjectKind.PACK, [pack.hex for pack in packs]),
            (ObjectKind.RANK, [rank_id.hex]),
        ):
            revive(self.backend, self.clock, kind, names)
        self.put(ObjectKind.RANK, rank_id.hex, built)
        self._put_layout(rank_id, layout)
        return RankEntry(
            rank=builder.rank,
            manifest=rank_id.hex,
            logical_bytes=builder.logical_bytes,
            data_bytes=builder.data_bytes,
            files=sum(entry.type is EntryType.FILE for entry in rank.tree),
        )

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

    def _put_layout(self, rank_id: RankId, layout: Built) -> None:
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

    def _window_done(self, count_bytes: int) -> None:
        self.lease.renew_if_due()
        self._meter.add(count_bytes)

    def _release_lease(self) -> None:
        # The session has failed already, or has committed and this does nothing.
        with contextlib.suppress(SnapError):
            self.lease.release()


def check_labels(labels: Mapping[str, str]) -> None:
    """Refuse labels that the format does not take.

    Raises:
        UsageError: A key or a value is too long, or a key empty.
    """
    for key, value in labels.items():
        if not 0 < len(key) <= limits.LABEL_KEY_CHARS_MAX:
            raise UsageError(f"a label's key has 1 to {limits.LABEL_KEY_CHARS_MAX} characters")
        if len(value) > limits.LABEL_VALUE_CHARS_MAX:
            raise UsageError(
                f"the label {key} has {len(value)} characters",
                next_step=f"keep it to {limits.LABEL_VALUE_CHARS_MAX}",
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
