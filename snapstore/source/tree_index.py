"""Look up paths of a scanned tree, and read its small files, while its layout is worked out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from snapstore.errors import FormatError
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.fstree import parent_path, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["SourceTree", "TreeIndex", "WarningList", "join_path", "path_text"]

WARNINGS_MAX = 50

T = TypeVar("T")


class WarningList:
    """What was found odd, in the order found; only counted from some number on."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._more = 0

    def add(self, text: str) -> None:
        """Add a sentence for the user, without the full stop."""
        if len(self._texts) < WARNINGS_MAX:
            self._texts.append(text)
        else:
            self._more += 1

    def result(self) -> list[str]:
        """Return all of them."""
        return self._texts + ([f"and {self._more} more warnings"] if self._more else [])


class SourceTree(Protocol):
    """A tree whose small files can be read: scanned, or in memory."""

    @property
    def entries(self) -> tuple[TreeEntry, ...]:
        """Every path, sorted by its bytes; the root, with an empty path, is first."""
        ...

    def read(
        self, entry: TreeEntry, *, size_bytes_max: int, is_prefix_enough: bool = False
    ) -> bytes:
        """Read a small file whole, or the beginning of a larger one where that is enough.

        Raises:
            LimitExceeded: It is larger than `size_bytes_max`; nothing was read.
            SnapError: It cannot be read.
        """
        ...


class TreeIndex:
    """The paths of a tree by name and by directory."""

    def __init__(self, tree: SourceTree, warnings: WarningList) -> None:
        self.tree = tree
        self.warnings = warnings
        self._by_path = {entry.path: entry for entry in tree.entries}
        self._children: dict[bytes, list[bytes]] = {}
        for entry in tree.entries[1:]:
            self._children.setdefault(parent_path(entry.path), []).append(entry.path)

    def directories(self) -> Iterator[bytes]:
        """Yield the path of every directory, parents first."""
        for entry in self.tree.entries:
            if entry.type is EntryType.DIRECTORY:
                yield entry.path

    def file(self, path: bytes) -> TreeEntry | None:
        """Return the file that a path names, through hard links but not through symlinks."""
        entry = self._by_path.get(path)
        if entry is not None and entry.type is EntryType.HARDLINK:
            entry = self._by_path[entry.target]
        return entry if entry is not None and entry.type is EntryType.FILE else None

    def entry(self, path: bytes) -> TreeEntry | None:
        """Return what a path names."""
        return self._by_path.get(path)

    def names(self, directory: bytes) -> list[bytes]:
        """Return the names in a directory, sorted."""
        skip = len(directory) + 1 if directory else 0
        return [path[skip:] for path in self._children.get(directory, ())]

    def read(
        self, path: bytes, parse: Callable[[bytes, str], T], *, size_bytes_max: int
    ) -> T | None:
        """Parse a small file; one that is not there or does not parse gives none.

        The latter is worth a warning, never a refusal: a push stores what it does not understand.

        Raises:
            SourceError: The file cannot be read or changed since the scan.
        """
        entry = self.file(path)
        if entry is None:
            return None
        try:
            data = self.tree.read(entry, size_bytes_max=size_bytes_max)
            return parse(data, path_text(path))
        except FormatError as error:
            self.warnings.add(f"{show_path(path)} is stored as a plain file: {error}")
            return None


def join_path(directory: bytes, name: bytes) -> bytes:
    """Return the path of a name in a directory."""
    return directory + b"/" + name if directory else name


def path_text(path: bytes) -> str:
    """Write a raw path as text that any encoding takes."""
    return path.decode("utf-8", "backslashreplace")
