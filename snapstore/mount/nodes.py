"""What a mount shows, without the kernel: trees of nodes, and the numbers of their inodes.

A number names a tree and a node of it, and is never used again for another node.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapstore.repository.file_reader import SnapshotFile

__all__ = ["CONTROL", "CONTROL_NAME", "ROOT", "Attributes", "Forest", "Tree", "inode_of", "tree_of"]

_LOCAL_BITS = 40
_LOCAL_MASK = (1 << _LOCAL_BITS) - 1

ROOT = 1
"""The root of every tree; of the first tree it is the number that the kernel begins with."""

CONTROL = 1 << (_LOCAL_BITS - 1)
"""The first number of what a tree has besides the nodes that it is made of."""

CONTROL_NAME = b".snapstore"
"""The directory with what is known of a mount, in the root of each tree.

As with the `.zfs` of others it is not listed, so that copies and comparisons of a tree see what was
pushed and nothing else.
"""


def inode_of(tree: int, local: int) -> int:
    """Make the number of a node."""
    return tree << _LOCAL_BITS | local


def tree_of(inode: int) -> int:
    """The number of the tree of a node."""
    return inode >> _LOCAL_BITS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """What `stat` tells of a node.

    Attributes:
        inode: Its number.
        mode: Type and permissions.
        links: How many names it has.
        uid: Owner.
        gid: Group.
        size_bytes: Length.
        data_bytes: What of it is not a hole.
        mtime_ns: Modification time.
        settled: Whether all of this stays so for as long as the number is used.
        keeps_name: Whether its name never comes to mean another node.
    """

    inode: int
    mode: int
    links: int = 1
    uid: int = 0
    gid: int = 0
    size_bytes: int = 0
    data_bytes: int = 0
    mtime_ns: int = 0
    settled: bool = True
    keeps_name: bool = True


class Tree(Protocol):
    """A tree of nodes, known by their local numbers. Safe from several threads."""

    def may_block(self, local: int) -> bool:
        """Whether to ask `child`, `children`, `document` or `attributes` of a node may take long.

        It does not for the attributes of `ROOT`.
        """
        ...

    def child(self, local: int, name: bytes) -> int | None:
        """The inode of a name in a directory; None if there is none."""
        ...

    def children(self, local: int) -> Sequence[tuple[bytes, int]]:
        """The names in a directory and their inodes, always in the same order."""
        ...

    def attributes(self, local: int) -> Attributes:
        """What `stat` tells of a node."""
        ...

    def target(self, local: int) -> bytes:
        """What a symbolic link says."""
        ...

    def xattrs(self, local: int) -> tuple[tuple[bytes, bytes], ...]:
        """The extended attributes of a node."""
        ...

    def document(self, local: int) -> bytes | None:
        """All of a small file that is made up here; None if it is no such file."""
        ...

    def open(self, local: int) -> SnapshotFile:
        """Open a file of a snapshot, which is not `document`."""
        ...

    def path(self, local: int) -> str:
        """What to call a node in messages."""
        ...

    def forgotten(self) -> None:
        """Told that the kernel knows no node of this tree any more."""
        ...


class Forest:
    """All trees of a mount, and how many nodes of each the kernel knows."""

    def __init__(self) -> None:
        self._trees: list[Tree] = []
        self._known: list[int] = []

    def add(self, tree: Tree) -> None:
        """Add a tree under `next_number`."""
        self._trees.append(tree)
        self._known.append(0)

    @property
    def next_number(self) -> int:
        """The number of the tree that is added next."""
        return len(self._trees)

    def at(self, inode: int) -> tuple[Tree, int]:
        """The tree of an inode, and which node of it that is."""
        return self._trees[inode >> _LOCAL_BITS], inode & _LOCAL_MASK

    def attributes(self, inode: int) -> Attributes:
        """What `stat` tells of an inode."""
        tree, local = self.at(inode)
        return tree.attributes(local)

    def look_up(self, parent: int, name: bytes) -> Attributes | None:
        """The attributes of what has a name in a directory; None if there is none."""
        tree, local = self.at(parent)
        found = tree.child(local, name)
        return None if found is None else self.attributes(found)

    def list(self, inode: int) -> list[tuple[bytes, Attributes]]:
        """All names in a directory, each with its attributes."""
        tree, local = self.at(inode)
        return [(name, self.attributes(child)) for name, child in tree.children(local)]

    def know(self, inode: int) -> None:
        """Note that the kernel was told of an inode."""
        self._known[inode >> _LOCAL_BITS] += 1

    def forget(self, inode: int, times: int) -> bool:
        """Note that the kernel forgets an inode that it was told of so many times.

        Returns:
            Whether it knows nothing of the whole tree any more.
        """
        number = inode >> _LOCAL_BITS
        self._known[number] -= times
        if self._known[number]:
            return False
        self._trees[number].forgotten()
        return True
