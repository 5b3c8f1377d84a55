"""Writing a snapshot from bytes that arrive, from sockets, pipes or devices, with no directory.

Implements I1 of `format_spec/SEMANTICS.md` through the same session as a push; chunk ids are those
that a push of the same files gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from typing import TYPE_CHECKING

import msgspec

from snapstore.errors import FormatError, Interrupted, UsageError
from snapstore.format import limits
from snapstore.format.canonical import INT64_MAX, INT64_MIN
from snapstore.format.rank import HOST, RankMeta, encode_meta
from snapstore.format.tree import ID_MAX, MODE_MAX, EntryType, TreeEntry
from snapstore.fstree import parent_path, show_path
from snapstore.repository.arriving_file import HELD_BYTES_MIN, Allowance, FileWriter, Landing
from snapstore.repository.arriving_rank import ArrivingRank
from snapstore.repository.memory import MemoryPlan
from snapstore.repository.rank_builder import RankBuilder
from snapstore.repository.window_feed import WindowFeed
from snapstore.repository.write_session import (
    Publication,
    PushResult,
    RankParts,
    WriteSession,
    check_labels,
)
from snapstore.source.classes import DataClass, FileRole, class_of
from snapstore.source.made_tree import checked_path, with_directories_by_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from snapstore.backend.base import Backend
    from snapstore.clock import Clock
    from snapstore.format.rank import RankNumber
    from snapstore.ids import RefName
    from snapstore.options import StoreOptions
    from snapstore.progress import ProgressMeter
    from snapstore.units import BytesLike

__all__ = ["SnapshotWriter", "WriteRequest", "writing"]

_PLACEMENT_BYTES_MAX = 4 << 20
"""Leaves the rest of the section of a rank manifest to its streams."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """What a snapshot that is written is to be.

    Attributes:
        name: Which name it gets.
        labels: Kept in the root manifest.
        root_mode: Permissions of the root of the tree, and of the directories in it.
    """

    name: RefName
    labels: Mapping[str, str]
    root_mode: int = 0o700


@contextlib.contextmanager
def writing(
    backend: Backend,
    options: StoreOptions,
    clock: Clock,
    request: WriteRequest,
    meter: ProgressMeter,
) -> Iterator[SnapshotWriter]:
    """Begin a snapshot; what is not committed when the block ends was never there.

    Raises:
        UsageError: The labels or the mode cannot be.
        AccessDenied: The store cannot be written.
        BackendError: The storage failed.
    """
    check_labels(request.labels)
    _check_number(request.root_mode, MODE_MAX, what="mode")
    plan = MemoryPlan.for_arrivals(options)
    with WriteSession(backend, options, clock, meter, plan=plan) as session:
        meter.enter("store", 0)
        yield SnapshotWriter(session, request, plan)


class SnapshotWriter:
    """A snapshot that is being written; `Store.begin` makes it.

    Files may arrive side by side and interleaved in any order, each filled by a thread of its own;
    none waits for another. All methods are thread-safe, but `commit` is called once, when all files
    are closed. Memory stays within `StoreOptions.memory_bytes`, which limits how many files can be
    open at once: at least `files_open_max`, 321 with 1 GiB and 60 with 192 MiB. Of those that grow
    beyond 1 MiB, `files_in_place` are filled without a copy: as many as the budget has windows
    (25 MiB each) besides three more than threads, 8 at most and 1 at least. The bytes of others are
    copied once more; that is all the difference.

    When the `with` block ends without a commit, nothing has the name, and what was sent already is
    found by the next push or writer.
    """

    def __init__(self, session: WriteSession, request: WriteRequest, plan: MemoryPlan) -> None:
        self._session = session
        self._request = request
        self._held = Allowance(plan.held_bytes)
        self._plan = plan
        self._mtime_ns = session.clock.now_ns()
        self._lock = threading.Lock()
        self._ranks: dict[RankNumber, ArrivingRank] = {}
        self._types: dict[bytes, EntryType] = {b"": EntryType.DIRECTORY}
        """What each path is, in all ranks: those of a snapshot are one tree."""
        self._open: set[bytes] = set()
        self._given_up: bytes | None = None
        self._committed = False
        self._feed = WindowFeed(
            session.ingest, session.buffers, plan, renew=session.lease.renew_if_due
        )
        session.stop_first(self._feed.close)

    @property
    def files_in_place(self) -> int:
        """How many large files are filled without a copy at a time; follows from the budget."""
        return self._plan.windows_filled

    @property
    def files_open_max(self) -> int:
        """How many files can be open at once whatever they hold; follows from the budget."""
        return self._plan.held_bytes // 2 // HELD_BYTES_MIN

    def open_file(
        self,
        rank: RankNumber,
        path: str | bytes,
        *,
        data_class: str | None = None,
        mode: int = 0o600,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
    ) -> FileWriter:
        """Begin a file. Directories above it are made.

        Args:
            rank: The number of its rank, or `host`.
            path: Below the root of the tree; unique in the snapshot, over all ranks.
            data_class: How it is cut, `pages`, `tensors` or `generic`; by default what a push takes
                from such a name.
            mode: Permissions.
            uid: Owner; by default the user of this process.
            gid: Group; by default that of this process.
            mtime_ns: Time of modification; by default when the snapshot was begun.

        Raises:
            UsageError: There is such a path already, a value cannot be, or too many files are open
                for the memory budget.
            SnapError: The writing failed or was aborted.
        """
        self._feed.check()
        entry = TreeEntry(
            path=checked_path(path),
            type=EntryType.FILE,
            mode=_check_number(mode, MODE_MAX, what="mode"),
            uid=_check_number(os.geteuid() if uid is None else uid, ID_MAX, what="uid"),
            gid=_check_number(os.getegid() if gid is None else gid, ID_MAX, what="gid"),
            mtime_ns=self._mtime_ns if mtime_ns is None else _check_time(mtime_ns),
        )
        kind = _data_class(entry.path, data_class)
        self._reserve()
        try:
            target = self._admit(rank, entry.path)
        except BaseException:
            self._held.give(HELD_BYTES_MIN)
            raise
        landing = Landing(
            path=entry.path,
            feed=self._feed,
            held=self._held,
            begin=functools.partial(target.begin_stream, entry.path, kind),
            add_small=functools.partial(target.add_small, entry.path),
            ended=functools.partial(self._end_file, target, entry),
        )
        return FileWriter(landing)

    def add_file(
        self,
        rank: RankNumber,
        path: str | bytes,
        data: BytesLike,
        *,
        data_class: str | None = None,
        mode: int = 0o600,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
    ) -> None:
        """Add a whole file at once; see `open_file`."""
        with self.open_file(
            rank, path, data_class=data_class, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns
        ) as file:
            file.write(data)

    def commit(
        self,
        *,
        kind: str = "directory",
        requirements: Mapping[str, object] | None = None,
        warnings: Sequence[str] = (),
        placements: Mapping[RankNumber, Mapping[str, object]] | None = None,
    ) -> PushResult:
        """Store what is left and let the name point to the snapshot; durable when it returns.

        Args:
            kind: What it is, a word; see `describe_images`.
            requirements: What it tells of where it can run; plain JSON values.
            warnings: Repeated in the result.
            placements: Where ranks were in a machine's memory; plain JSON values, see
                `format_spec/04-manifests.md`. A rank without files can have one.

        Raises:
            UsageError: A file is still open or was given up, or the format cannot say this.
            SnapError: The writing failed or was aborted. Nothing has the name.
        """
        self._feed.check()
        what = Publication(
            name=self._request.name,
            kind=kind,
            labels=self._request.labels,
            requirements=requirements or {},
            warnings=warnings,
        )
        placements = placements or {}
        self._check_complete(what, placements)
        for rank in self._ranks.values():
            rank.flush_small()
        self._feed.finish()
        return self._session.publish(what, self._parts(placements))

    def abort(self) -> None:
        """Let every call of this writer and its files fail soon, with `Interrupted`.

        From any thread; wakes those who wait, and returns at once. A commit that is under way may
        still succeed.
        """
        self._session.in_a_hurry = True
        self._feed.stop(
            Interrupted(f"writing {self._request.name} was aborted", next_step="capture it again")
        )

    # -- files ------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        """Take what a file may always hold; if there is none left, small files make room."""
        if self._held.try_take(HELD_BYTES_MIN):
            return
        with self._lock:
            ranks = list(self._ranks.values())
        for rank in ranks:
            rank.flush_small()
        if not self._held.try_take(HELD_BYTES_MIN):
            raise UsageError(
                f"{len(self._open)} files are open at once, for which the memory does not suffice",
                next_step="close some before others are opened, or give the store more memory",
            )

    def _admit(self, number: RankNumber, path: bytes) -> ArrivingRank:
        """Take note of a new path and the directories above it."""
        if number != HOST:
            _check_number(number, limits.RANK_NUMBER_MAX, what="rank")
        with self._lock:
            if self._committed:
                raise UsageError(f"{self._request.name} is committed: no file can be added")
            above = [parent_path(path)]
            while above[-1]:
                above.append(parent_path(above[-1]))
            taken = [path] if path in self._types else []
            taken += [one for one in above if self._types.get(one) is EntryType.FILE]
            if taken:
                raise UsageError(
                    f"{show_path(path)} cannot be added: {show_path(taken[0])} is there already",
                    next_step="write each file once",
                )
            self._types |= dict.fromkeys(above, EntryType.DIRECTORY)
            self._types[path] = EntryType.FILE
            self._open.add(path)
            if number not in self._ranks:
                self._ranks[number] = self._new_rank(number)
            return self._ranks[number]

    def _new_rank(self, number: RankNumber) -> ArrivingRank:
        builder = RankBuilder(number)
        self._session.keep(builder.close)
        return ArrivingRank(builder, self._feed, self._held)

    def _end_file(self, rank: ArrivingRank, entry: TreeEntry, size_bytes: int | None) -> None:
        if size_bytes is not None:
            rank.end_file(msgspec.structs.replace(entry, size_bytes=size_bytes))
        with self._lock:
            self._open.discard(entry.path)
            if size_bytes is None:
                self._given_up = entry.path

    # -- the end ----------------------------------------------------------------------------------

    def _parts(self, placements: Mapping[RankNumber, Mapping[str, object]]) -> list[RankParts]:
        root = TreeEntry(
            path=b"",
            type=EntryType.DIRECTORY,
            mode=self._request.root_mode,
            uid=os.geteuid(),
            gid=os.getegid(),
            mtime_ns=self._mtime_ns,
        )
        for number in placements:
            if number not in self._ranks:
                self._ranks[number] = self._new_rank(number)
        files = {number: rank.entries() for number, rank in self._ranks.items()}
        trees = with_directories_by_rank(files, root)
        if HOST not in self._ranks:
            self._ranks[HOST] = self._new_rank(HOST)
        return [
            RankParts(self._ranks[number].builder, tree, placements.get(number, {}))
            for number, tree in trees.items()
        ]

    def _check_complete(
        self, what: Publication, placements: Mapping[RankNumber, Mapping[str, object]]
    ) -> None:
        with self._lock:
            if self._committed:
                raise UsageError(f"the commit of {what.name} was begun already")
            if self._open:
                raise UsageError(
                    f"{show_path(min(self._open))} is still open", next_step="close it first"
                )
            if self._given_up is not None:
                raise UsageError(
                    f"{show_path(self._given_up)} was not completed",
                    next_step="write the whole snapshot again",
                )
            self._check_placements(placements)
            try:
                self._session.check(what)
            except FormatError as error:
                raise UsageError(
                    f"a snapshot cannot be of kind {what.kind[:80]!r} with these requirements: "
                    f"{error}",
                    next_step="give a word, and plain JSON values of at most 4 MiB",
                ) from error
            self._committed = True

    def _check_placements(self, placements: Mapping[RankNumber, Mapping[str, object]]) -> None:
        for number, placement in placements.items():
            if number != HOST:
                _check_number(number, limits.RANK_NUMBER_MAX, what="rank")
            meta = RankMeta(rank=number, streams=(), placement=dict(placement))
            try:
                size = len(encode_meta(meta))
            except FormatError as error:
                raise UsageError(
                    f"the placement of rank {number} cannot be stored: {error}",
                    next_step="give plain JSON values",
                ) from error
            if size > _PLACEMENT_BYTES_MAX:
                raise UsageError(
                    f"the placement of rank {number} has {size} bytes, more than "
                    f"{_PLACEMENT_BYTES_MAX}",
                    next_step="say less of it",
                )


def _data_class(path: bytes, word: str | None) -> DataClass:
    if word is None:
        return class_of(path, FileRole.OTHER)
    try:
        return DataClass(word)
    except ValueError as error:
        raise UsageError(
            f"not a class of data: {word[:80]!r}",
            next_step=f"give one of {', '.join(one.value for one in DataClass)}",
        ) from error


def _check_time(value: int) -> int:
    if not INT64_MIN <= value <= INT64_MAX:
        raise UsageError(f"the time {value} cannot be", next_step="give nanoseconds since 1970")
    return value


def _check_number(value: int, most: int, *, what: str) -> int:
    if not 0 <= value <= most:
        raise UsageError(f"the {what} {value} cannot be", next_step=f"give 0 to {most}")
    return value
