"""All names of a store as directories: `team/model/engine/TAG/…`, read anew every few seconds.

A tag that is also a component of a longer name would be two things in one place; it is then shown
as `:TAG`, which any tag may be called by.
"""

from __future__ import annotations

import datetime as dt
import logging
import stat
import threading
from typing import TYPE_CHECKING

from snapstore.errors import BackendError, PathNotFound, StoreNotFound
from snapstore.ids import SnapshotRef
from snapstore.mount.control import ControlFiles
from snapstore.mount.nodes import CONTROL, CONTROL_NAME, ROOT, Attributes, Forest, inode_of
from snapstore.mount.snapshot_tree import SnapshotTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapstore.clock import Clock
    from snapstore.errors import SnapError
    from snapstore.ids import RefName, SnapshotId
    from snapstore.repository.file_reader import SnapshotFile
    from snapstore.repository.refs import ResolvedRef
    from snapstore.repository.snapshot import Snapshot
    from snapstore.repository.store import Store

__all__ = ["NamesTree"]

log = logging.getLogger(__name__)

REFRESH_S = 2.0
"""How old what is shown of the store's names may be."""

_LOADED_MAX = 8
"""Snapshots kept in memory though nothing of them is in use."""


class NamesTree:
    """The names of a store as the first tree of a forest (`Tree`)."""

    def __init__(
        self,
        forest: Forest,
        store: Store,
        clock: Clock,
        *,
        describe: Callable[[Snapshot | None], bytes],
    ) -> None:
        self._number = forest.next_number
        assert self._number == 0, "the kernel begins with the first tree"
        forest.add(self)
        self._forest = forest
        self._store = store
        self._clock = clock
        self._describe = describe
        self._lock = threading.Lock()
        self._read_s: float | None = None
        self._numbers: dict[str, int] = {"": ROOT}
        self._paths = {ROOT: ""}
        self._children: dict[str, dict[bytes, int]] = {"": {}}
        self._trees: dict[tuple[RefName, SnapshotId], SnapshotTree] = {}
        self._idle: list[SnapshotTree] = []
        self._damaged: set[RefName] = set()
        self._mtime_ns = clock.now_ns()
        self._control = ControlFiles(
            self._number,
            {b"mount.json": lambda: describe(None)},
            {},
            mtime_ns=self._mtime_ns,
        )

    # -- what the kernel asks

    def may_block(self, local: int) -> bool:
        """See `Tree.may_block`."""
        return local < CONTROL and not self._is_fresh()

    def child(self, local: int, name: bytes) -> int | None:
        """See `Tree.child`."""
        if local >= CONTROL:
            return self._control.child(local, name)
        self._refresh()
        found = self._children.get(self._paths[local], {})
        inode = found.get(name)
        if inode is None and local == ROOT and name == CONTROL_NAME:
            return inode_of(self._number, CONTROL)
        if inode is None and name.startswith(b":"):
            inode = found.get(name[1:])
            is_tag = inode is not None and self._forest.at(inode)[0] is not self
            return inode if is_tag else None
        return inode

    def children(self, local: int) -> Sequence[tuple[bytes, int]]:
        """See `Tree.children`."""
        if local >= CONTROL:
            return self._control.children(local)
        self._refresh()
        return [*self._children.get(self._paths[local], {}).items()]

    def attributes(self, local: int) -> Attributes:
        """See `Tree.attributes`."""
        if local >= CONTROL:
            return self._control.attributes(local)
        return Attributes(
            inode=inode_of(self._number, local),
            mode=stat.S_IFDIR | 0o755,
            links=2,
            mtime_ns=self._mtime_ns,
            settled=False,
            keeps_name=False,
        )

    def target(self, local: int) -> bytes:
        """See `Tree.target`; there is no such node."""
        raise PathNotFound(f"{self.path(local)} is no symbolic link")

    def xattrs(self, local: int) -> tuple[tuple[bytes, bytes], ...]:
        """See `Tree.xattrs`."""
        del local
        return ()

    def document(self, local: int) -> bytes | None:
        """See `Tree.document`."""
        return self._control.document(local) if local >= CONTROL else None

    def open(self, local: int) -> SnapshotFile:
        """See `Tree.open`; there is no such node."""
        raise PathNotFound(f"{self.path(local)} is no file")

    def path(self, local: int) -> str:
        """See `Tree.path`."""
        return f"/{self._paths.get(local, CONTROL_NAME.decode())}"

    def forgotten(self) -> None:
        """See `Tree.forgotten`."""

    # -- following the store

    def _is_fresh(self) -> bool:
        return self._read_s is not None and self._clock.monotonic_s() - self._read_s < REFRESH_S

    def _refresh(self) -> None:
        """Read the names of the store, if what is known of them is old; blocks.

        Raises:
            BackendError: The storage failed.
            StoreNotFound: The store is gone.
        """
        # While one asks a store that may be away, the others go on with what is known.
        if not self._lock.acquire(blocking=self._read_s is None):
            return
        try:
            if not self._is_fresh():
                found = [*self._store.list(damaged=self._tell_damaged)]
                if not found:
                    # A volume that was unmounted is no store from which all was removed.
                    self._store.require_present()
                self._arrange(found)
                self._read_s = self._clock.monotonic_s()
        except (BackendError, StoreNotFound) as error:
            if self._read_s is None:
                raise
            log.warning("the names of the store are those of before: %s", error)
        finally:
            self._lock.release()

    def _arrange(self, found: list[ResolvedRef]) -> None:
        children: dict[str, dict[bytes, int]] = {"": {}}
        for ref in found:
            self._add_directories(ref.name.name, children)
        for ref in found:
            within = children[ref.name.name]
            name = ref.name.tag.encode()
            within[b":" + name if name in within else name] = self._root_of(ref)
        if children != self._children:
            self._mtime_ns = self._clock.now_ns()
        self._children = children

    def _add_directories(self, path: str, children: dict[str, dict[bytes, int]]) -> None:
        if path in children:
            return
        children[path] = {}
        number = self._numbers.setdefault(path, ROOT + len(self._numbers))
        self._paths[number] = path
        above, _, name = path.rpartition("/")
        self._add_directories(above, children)
        children[above][name.encode()] = inode_of(self._number, number)

    def _root_of(self, ref: ResolvedRef) -> int:
        """The inode of the root of what a name points to: another one if that changes."""
        key = (ref.name, ref.snapshot)
        tree = self._trees.get(key)
        if tree is None:
            exact = SnapshotRef(ref.name, ref.snapshot)
            tree = SnapshotTree(
                self._forest.next_number,
                lambda: self._store.snapshot(exact),
                describe=self._describe,
                created_ns=_nanoseconds(ref.created),
                at=f"/{ref.name.name}/{ref.name.tag}",
                forgotten=self._note_idle,
            )
            self._trees[key] = tree
            self._forest.add(tree)
        return inode_of(tree.number, ROOT)

    def _note_idle(self, tree: SnapshotTree) -> None:
        """Let go of the snapshots that are out of use for the longest time."""
        if tree in self._idle:
            self._idle.remove(tree)
        if tree.is_loaded:
            self._idle.append(tree)
        while len(self._idle) > _LOADED_MAX:
            self._idle.pop(0).let_go()

    def _tell_damaged(self, name: RefName, error: SnapError) -> None:
        if name not in self._damaged:
            self._damaged.add(name)
            log.error("%s: %s", name, error)


def _nanoseconds(created: str) -> int:
    return int(dt.datetime.fromisoformat(created).timestamp()) * 1_000_000_000
