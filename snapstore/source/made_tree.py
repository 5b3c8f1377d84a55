"""Trees that exist nowhere as a directory: paths of files, and the directories above them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from snapstore.errors import FormatError, UsageError
from snapstore.format.rank import HOST
from snapstore.format.tree import EntryType, TreeEntry, check_tree
from snapstore.fstree import parent_path, show_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from snapstore.format.rank import RankNumber

__all__ = ["checked_path", "with_directories", "with_directories_by_rank"]


def checked_path(path: str | bytes) -> bytes:
    """Turn the path of a file into the bytes that a tree has; text as the file system has it.

    Raises:
        UsageError: It is absolute, leads outside, or is too long.
    """
    raw = path.encode("utf-8", "surrogateescape") if isinstance(path, str) else path
    file = TreeEntry(path=raw, type=EntryType.FILE, mode=0, uid=0, gid=0, mtime_ns=0)
    root = msgspec.structs.replace(file, path=b"", type=EntryType.DIRECTORY)
    try:
        check_tree(with_directories([file], root))
    except FormatError as error:
        raise _no_path(raw) from error
    if not raw:
        raise _no_path(raw)
    return raw


def _no_path(raw: bytes) -> UsageError:
    return UsageError(
        f"no path of a file in a snapshot: {show_path(raw[:120])}",
        next_step="give one below the root, with components joined by /, none of them . or ..",
    )


def with_directories(files: Iterable[TreeEntry], root: TreeEntry) -> list[TreeEntry]:
    """Give the whole tree of some files, sorted: the root, and directories that are like it."""
    entries = {entry.path: entry for entry in files}
    for path in _above(entries):
        entries[path] = msgspec.structs.replace(root, path=path)
    entries[b""] = root
    return [entries[path] for path in sorted(entries)]


def with_directories_by_rank(
    files: Mapping[RankNumber, Iterable[TreeEntry]], root: TreeEntry
) -> dict[RankNumber, list[TreeEntry]]:
    """Give the tree of each rank, each complete in itself; the host's has all directories.

    The host is first, and there even if it has no files; the others ascend.
    """
    parts = {rank: {entry.path: entry for entry in entries} for rank, entries in files.items()}
    host = parts.setdefault(HOST, {})
    for part in list(parts.values()):
        for path in _above(part):
            host[path] = msgspec.structs.replace(root, path=path)
    order: list[RankNumber] = [HOST, *sorted(rank for rank in parts if isinstance(rank, int))]
    return {rank: with_directories(parts[rank].values(), root) for rank in order}


def _above(paths: Iterable[bytes]) -> set[bytes]:
    """All directories above some paths, without the root."""
    found: set[bytes] = set()
    for path in paths:
        parent = parent_path(path)
        while parent and parent not in found:
            found.add(parent)
            parent = parent_path(parent)
    return found
