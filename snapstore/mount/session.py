"""A mount from its beginning to its end: open the store, mount, serve, unmount."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyfuse3
import trio

from snapstore.clock import SystemClock, format_utc
from snapstore.errors import SnapError, TargetError, UsageError
from snapstore.mount.blocks import BlockMemory
from snapstore.mount.cached import Opener
from snapstore.mount.fetching import Fetcher
from snapstore.mount.names_tree import NamesTree
from snapstore.mount.nodes import CONTROL_NAME, Forest
from snapstore.mount.operations import ReadOnlyTree
from snapstore.mount.snapshot_tree import SnapshotTree
from snapstore.mount.table import mounted_at
from snapstore.mount.unmount import clear_dead, detach
from snapstore.mount.warm import restore_order
from snapstore.options import StoreOptions
from snapstore.repository.store import open_store
from snapstore.units import MIB
from snapstore.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from snapstore.mount.options import MountOptions
    from snapstore.repository.snapshot import Snapshot
    from snapstore.repository.store import Store

__all__ = ["serve"]

log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005
_INTERPRETER_BYTES = 112 * MIB
"""Python with all that is imported here, and what answering takes."""

_THREAD_BYTES = 20 * MIB
_FRAMES_BYTES_MIN = 32 * MIB
_TASKS_MAX = 1000
"""Requests that wait at once; the next would wait in the kernel, and with it all others."""

_SERVICE_THREADS = 6


class _Budget(NamedTuple):
    """How memory is divided."""

    threads: int
    frames_bytes: int
    blocks_bytes: int


def serve(options: MountOptions, ready: Callable[[Mapping[str, object]], None]) -> None:
    """Mount, answer until somebody unmounts or ends this process with SIGTERM, and clean up.

    Args:
        options: What and where.
        ready: Called once the mount answers, with what is mounted.

    Raises:
        LookupFailed: There is no such store or snapshot.
        TargetError: It cannot be mounted there.
        BackendError: The store cannot be read.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _require_directory(options.directory)
    is_service = options.url.startswith("s3:")
    budget = _divide(options, is_service=is_service)
    store_options = StoreOptions(
        cache_bytes=budget.frames_bytes,
        integrity=options.integrity,
        threads=budget.threads,
        node_cache=options.cache,
        # Also where nobody waits for a reader yet: at the beginning.
        patience_s=options.timeout_s,
    )
    with open_store(options.url, store_options, readonly=True) as store:
        _Mount(options, budget, store).run(ready)


def _require_directory(directory: Path) -> None:
    """Refuse what cannot be mounted on; a dead mount of before is taken away."""
    if clear_dead(directory):
        log.warning("took away what was mounted on %s, whose daemon was gone", directory)
    if not directory.is_dir():
        raise UsageError(
            f"{str(directory)!r} is no directory", next_step="make it, or give another"
        )
    if not Path("/dev/fuse").exists():
        raise TargetError(
            "there is no /dev/fuse on this machine",
            next_step="load the module `fuse`, or give the container that device and the "
            "privilege to mount",
        )


def _divide(options: MountOptions, *, is_service: bool) -> _Budget:
    cores = len(os.sched_getaffinity(0))
    threads = options.threads or (_SERVICE_THREADS if is_service else cores + 1)
    rest = options.memory_bytes - _INTERPRETER_BYTES
    threads = max(1, min(threads, rest // 2 // _THREAD_BYTES))
    rest -= threads * _THREAD_BYTES
    # Whole frames: those that lie across what is fetched at once are decoded once.
    frames_bytes = max(_FRAMES_BYTES_MIN, rest // 6)
    return _Budget(threads, frames_bytes, rest - frames_bytes)


class _Mount:
    """One mount while it lasts."""

    def __init__(self, options: MountOptions, budget: _Budget, store: Store) -> None:
        self._options = options
        self._budget = budget
        self._store = store
        self._clock = SystemClock()
        self._since = format_utc(self._clock.now_ns())
        self._forest = Forest()
        self._snapshot: Snapshot | None = None
        self._tree: SnapshotTree | None = None

    def run(self, ready: Callable[[Mapping[str, object]], None]) -> None:
        """Mount, serve, unmount."""
        options = self._options
        if options.name is None:
            NamesTree(self._forest, self._store, self._clock, describe=self._describe)
            size_bytes = 0
        else:
            self._snapshot = snapshot = self._store.snapshot(options.name)
            self._tree = SnapshotTree(
                0, lambda: snapshot, ranks=options.ranks, describe=self._describe
            )
            self._forest.add(self._tree)
            files = self._tree.load().files
            size_bytes = sum(rank.entry.logical_bytes for rank in files.ranks)
        operations = ReadOnlyTree(
            self._forest,
            Opener(self._store.cache, BlockMemory(budget_bytes=self._budget.blocks_bytes)),
            timeout_s=options.timeout_s,
            size_bytes=size_bytes,
        )
        _mount(operations, options)
        try:
            trio.run(self._serve, operations, ready)
        finally:
            pyfuse3.close(unmount=True)
            log.info("unmounted %s", options.directory)

    async def _serve(
        self, operations: ReadOnlyTree, ready: Callable[[Mapping[str, object]], None]
    ) -> None:
        async with trio.open_nursery() as nursery:
            operations.fetcher = Fetcher(
                nursery,
                threads=self._budget.threads,
                timeout_s=self._options.timeout_s,
                ahead_bytes_max=self._budget.blocks_bytes // 2,
            )
            nursery.start_soon(_end_on_signals, nursery.cancel_scope)
            nursery.start_soon(operations.watch)
            nursery.start_soon(self._begin, operations, ready)
            await pyfuse3.main(max_tasks=_TASKS_MAX)
            nursery.cancel_scope.cancel()

    async def _begin(
        self, operations: ReadOnlyTree, ready: Callable[[Mapping[str, object]], None]
    ) -> None:
        """Wait until the mount answers, say so, and do what is to be done in the background."""
        directory = self._options.directory
        # Asked as anybody would ask: through the kernel.
        await trio.to_thread.run_sync((directory / os.fsdecode(CONTROL_NAME)).stat)
        await trio.to_thread.run_sync(_set_read_ahead, directory, self._options.read_ahead_kib)
        log.info("mounted on %s", directory)
        await trio.to_thread.run_sync(ready, json.loads(self._describe(self._snapshot)))
        if self._options.warm:
            await self._warm(operations)

    async def _warm(self, operations: ReadOnlyTree) -> None:
        tree, snapshot = self._tree, self._snapshot
        assert tree is not None
        assert snapshot is not None
        # What was fetched must not be given up for what comes after it.
        room_bytes = self._budget.blocks_bytes * 3 // 4
        try:
            order = await trio.to_thread.run_sync(restore_order, self._store, snapshot, tree)
            done = await operations.warm(order, room_bytes=room_bytes)
        except SnapError as error:
            log.warning("stopped fetching everything: %s", error)
        else:
            what = "all" if done else "what memory has room for"
            log.info("fetched %s of snapshot %s", what, snapshot.id.short)

    def _describe(self, snapshot: Snapshot | None) -> bytes:
        """Write what this mount is, for `.snapstore/mount.json`."""
        options = self._options
        document = {
            "directory": str(options.directory),
            "integrity": options.integrity.value,
            "memory_bytes": options.memory_bytes,
            "mounted": self._since,
            "name": options.name,
            "pid": os.getpid(),
            "ranks": [*options.ranks] or None,
            "snapshot": None if snapshot is None else snapshot.id.hex,
            "store": self._store.url,
            "version": VERSION,
        }
        return json.dumps(document, sort_keys=True).encode() + b"\n"


def _mount(operations: ReadOnlyTree, options: MountOptions) -> None:
    """Make the mount; requests wait in the kernel until they are answered.

    Raises:
        TargetError: The system refuses.
    """
    words = {"ro", "default_permissions", "subtype=snapstore"}
    # A comma would end the option.
    source = (options.name or options.url).replace("\\", "_").replace(",", "_")
    words.add(f"fsname={source}")
    is_root = os.geteuid() == 0
    if is_root if options.allow_other is None else options.allow_other:
        words.add("allow_other")
    before = mounted_at(options.directory)
    try:
        pyfuse3.init(operations, str(options.directory), words)
    except RuntimeError as error:
        if mounted_at(options.directory) != before:
            # libfuse may have mounted before it found out that it cannot go on.
            detach(options.directory, lazy=True)
        raise TargetError(
            f"cannot mount on {str(options.directory)!r}: {error}",
            next_step="it takes root, or the package fuse3, a directory of one's own and, for "
            "--allow-other, `user_allow_other` in /etc/fuse.conf",
        ) from error


async def _end_on_signals(everything: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for number in signals:
            log.info("ends on %s", signal.Signals(number).name)
            everything.cancel()


def _set_read_ahead(directory: Path, kib: int) -> None:
    """Let the kernel read more ahead than its 128 KiB, which costs half of the speed."""
    found = mounted_at(directory)
    if not kib or found is None:
        return
    try:
        Path(f"/sys/class/bdi/{found.device}/read_ahead_kb").write_text(f"{kib}\n")
    except OSError as error:
        log.info("the kernel's read-ahead stays as it is: %s", error)
