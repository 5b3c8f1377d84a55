"""Pushing a directory: the use case that puts the parts of the writing side in order."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from snapstore.repository.file_streams import plan_file_streams
from snapstore.repository.memory import MemoryPlan
from snapstore.repository.rank_builder import RankBuilder
from snapstore.repository.write_session import (
    Publication,
    PushResult,
    RankParts,
    WriteSession,
    check_labels,
)
from snapstore.source.classes import parse_class_override
from snapstore.source.ranks import parse_rank_glob
from snapstore.source.recognise import Recognised, recognise
from snapstore.source.scan import ScannedTree, check_tree_unchanged, scan_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from snapstore.backend.base import Backend
    from snapstore.clock import Clock
    from snapstore.ids import RefName
    from snapstore.options import StoreOptions
    from snapstore.progress import ProgressMeter

__all__ = ["PushRequest", "PushResult", "push_directory"]


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
    check_labels(request.labels)
    overrides = [parse_class_override(text) for text in request.class_overrides]
    if request.rank_glob is not None:
        parse_rank_glob(request.rank_glob)
    meter.enter("scan")
    tree = scan_tree(request.directory, skip_special=request.skip_special)
    seen = recognise(tree, rank_glob=request.rank_glob, class_overrides=overrides)
    meter.enter("store", tree.size_bytes)
    what = Publication(
        name=request.name,
        kind=seen.kind,
        labels=request.labels,
        requirements=seen.requirements,
        skipped=[path.decode("utf-8", "backslashreplace") for path in tree.skipped],
        warnings=seen.warnings,
    )
    with WriteSession(backend, options, clock, meter, plan=MemoryPlan.of(options)) as session:
        ranks = _store_ranks(session, tree, seen)
        check_tree_unchanged(tree, skip_special=request.skip_special)
        return session.publish(what, ranks)


def _store_ranks(session: WriteSession, tree: ScannedTree, seen: Recognised) -> list[RankParts]:
    ranks = []
    planned = []
    for number, items in seen.partition.items():
        builder = RankBuilder(number)
        session.keep(builder.close)
        sources, entries = plan_file_streams(tree, items)
        for source in sources:
            session.keep(source.close)
        ranks.append(RankParts(builder, entries))
        planned.append((builder, sources))
    for builder, sources in planned:
        for source in sources:
            number = builder.add_stream(data_class=source.data_class, origin=source.origin)
            session.ingest.store(source, builder, number)
    session.ingest.drain()
    return ranks
