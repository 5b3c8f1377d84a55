"""The files of a mount that are open, and for a while those that were."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from snapstore.mount.fetching import OpenFile
from snapstore.mount.nodes import tree_of

if TYPE_CHECKING:
    from snapstore.mount.content import Content

__all__ = ["OpenFiles"]

_IDLE_MAX = 1024
"""Files nobody has open whose bytes in memory may serve who opens them next."""


class OpenFiles:
    """One entry for each file, however often it is open. Used by the event loop alone."""

    def __init__(self) -> None:
        self._files: dict[int, OpenFile] = {}
        self._users: collections.Counter[int] = collections.Counter()
        self._leaving: set[int] = set()
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __contains__(self, inode: int) -> bool:
        return inode in self._files

    def add(self, inode: int, content: Content, name: str) -> None:
        """Add a file, unless somebody else has meanwhile."""
        if inode in self._files:
            content.close()
        else:
            self._files[inode] = OpenFile(content, name)

    def use(self, inode: int) -> OpenFile:
        """Open a file once more."""
        self._users[inode] += 1
        self._idle.pop(inode, None)
        self._leaving.discard(inode)
        return self._files[inode]

    def done_with(self, inode: int) -> None:
        """Close what `use` has opened."""
        self._users[inode] -= 1
        if self._users[inode]:
            return
        del self._users[inode]
        self._idle[inode] = None
        if not self._files[inode].content.outlives_readers:
            self._leaving.add(inode)
        for leaving in [*self._leaving]:
            self._drop(leaving)
        if len(self._idle) > _IDLE_MAX:
            self._drop(next(iter(self._idle)))

    def drop_idle(self, inode: int) -> None:
        """Let go of all files of the tree that this node is of, if nobody has them open."""
        tree = tree_of(inode)
        for idle in [*self._idle]:
            if tree_of(idle) == tree:
                self._drop(idle)

    def _drop(self, inode: int) -> None:
        file = self._files[inode]
        if file.on_the_way:
            # It has to arrive first.
            self._idle.move_to_end(inode)
        else:
            file.content.close()
            del self._files[inode], self._idle[inode]
            self._leaving.discard(inode)
