"""Check that a tree can be recreated below a directory without ever leaving it.

The format has the same rules; they are checked again right where a mistake would write to the
wrong place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapstore.errors import Malformed
from snapstore.format import limits
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.fstree import parent_path, show_path, split_path

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["checked_entries"]

_MODE_END = 1 << 12
_OWNER_END = 1 << 32
_TIME_END = 1 << 63


def checked_entries(entries: Iterable[TreeEntry]) -> dict[bytes, TreeEntry]:
    """Merge the trees of several ranks and return the paths in order.

    Raises:
        Malformed: A path leaves the tree or comes twice, a parent is missing or no directory, a
            hard link leads to no earlier file, or a number is out of its range.
        LimitExceeded: A path is too long.
    """
    merged: dict[bytes, TreeEntry] = {}
    for entry in entries:
        known = merged.setdefault(entry.path, entry)
        if known is not entry and (entry.type is not EntryType.DIRECTORY or known != entry):
            raise Malformed(f"{show_path(entry.path)} is there twice")
    ordered = {path: merged[path] for path in sorted(merged)}
    for entry in ordered.values():
        _check_place(entry, ordered)
        _check_numbers(entry)
        _check_target(entry, ordered)
    return ordered


def _check_place(entry: TreeEntry, entries: dict[bytes, TreeEntry]) -> None:
    if not split_path(entry.path):
        if entry.type is not EntryType.DIRECTORY:
            raise Malformed("the root of the tree is no directory")
        return
    above = parent_path(entry.path)
    if not above:
        return
    if above not in entries or entries[above].type is not EntryType.DIRECTORY:
        raise Malformed(f"{show_path(entry.path)} is below something that is no directory")


def _check_numbers(entry: TreeEntry) -> None:
    owners_fit = 0 <= entry.uid < _OWNER_END and 0 <= entry.gid < _OWNER_END
    size_fits = 0 <= entry.size_bytes <= limits.STREAM_BYTES_MAX
    if entry.type is not EntryType.FILE:
        size_fits = entry.size_bytes == 0
    time_fits = -_TIME_END <= entry.mtime_ns < _TIME_END
    if not (0 <= entry.mode < _MODE_END and owners_fit and size_fits and time_fits):
        raise Malformed(f"{show_path(entry.path)} has an owner, mode, size or time out of range")


def _check_target(entry: TreeEntry, entries: dict[bytes, TreeEntry]) -> None:
    if entry.type is EntryType.SYMLINK:
        length = len(entry.target)
        if not 0 < length <= limits.SYMLINK_TARGET_BYTES_MAX or b"\0" in entry.target:
            raise Malformed(f"the symlink {show_path(entry.path)} has an impossible target")
    elif entry.type is EntryType.HARDLINK:
        first = entries.get(entry.target)
        if first is None or first.type is not EntryType.FILE or first.path >= entry.path:
            raise Malformed(f"the hard link {show_path(entry.path)} leads to no earlier file")
