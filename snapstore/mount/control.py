"""The directory `.snapstore` of a mount: manifests as JSON, and what the mount is."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from snapstore.mount.nodes import CONTROL, Attributes, inode_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ControlFiles"]

_RANKS = b"ranks"


class ControlFiles:
    """The nodes of `.snapstore`: some documents, and a folder of more.

    A document is made when it is first asked for, since its length is told before it is read.
    """

    def __init__(
        self,
        tree: int,
        documents: Mapping[bytes, Callable[[], bytes]],
        ranks: Mapping[bytes, Callable[[], bytes]],
        *,
        mtime_ns: int,
    ) -> None:
        self._tree = tree
        self._mtime_ns = mtime_ns
        self._makers = [*documents.values(), *ranks.values()]
        self._made: dict[int, bytes] = {}
        first = CONTROL + 2
        names = [*documents, *ranks]
        numbers = {name: first + index for index, name in enumerate(names)}
        folder = {name: inode_of(tree, numbers[name]) for name in documents}
        self._folders = {CONTROL: folder}
        if ranks:
            folder[_RANKS] = inode_of(tree, CONTROL + 1)
            self._folders[CONTROL + 1] = {name: inode_of(tree, numbers[name]) for name in ranks}

    def child(self, local: int, name: bytes) -> int | None:
        """See `Tree.child`."""
        return self._folders.get(local, {}).get(name)

    def children(self, local: int) -> Sequence[tuple[bytes, int]]:
        """See `Tree.children`."""
        return [*self._folders.get(local, {}).items()]

    def attributes(self, local: int) -> Attributes:
        """See `Tree.attributes`; makes the document."""
        inode = inode_of(self._tree, local)
        if local in self._folders:
            return Attributes(
                inode=inode, mode=stat.S_IFDIR | 0o555, links=2, mtime_ns=self._mtime_ns
            )
        size = len(self.document(local) or b"")
        return Attributes(
            inode=inode,
            mode=stat.S_IFREG | 0o444,
            size_bytes=size,
            data_bytes=size,
            mtime_ns=self._mtime_ns,
        )

    def document(self, local: int) -> bytes | None:
        """See `Tree.document`."""
        if local in self._folders:
            return None
        made = self._made.get(local)
        if made is None:
            made = self._made.setdefault(local, self._makers[local - CONTROL - 2]())
        return made
