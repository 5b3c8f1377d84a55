"""The file tree of a rank manifest (`format_spec/04-manifests.md`, section 3).

Pure: bytes in, values out. A tree that passes `check_tree` can be recreated below a directory
without ever leaving it.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = ["EntryType", "TreeEntry"]


class EntryType(enum.Enum):
    """What a path is; the value is the stored word."""

    DIRECTORY = "directory"
    FILE = "file"
    SYMLINK = "symlink"
    HARDLINK = "hardlink"


class TreeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One path of a tree, with everything that comes back when it is pulled.

    Attributes:
        path: Relative, raw bytes, components joined by `/`; empty for the root of the tree.
        type: What the path is.
        mode: The 12 permission bits.
        uid: Owner.
        gid: Group.
        mtime_ns: Modification time in nanoseconds since the epoch; may be negative.
        xattrs: Extended attributes, sorted by name.
        size_bytes: Length of a file; 0 for others.
        stream: Number of the stream that holds a file's bytes; 0 for an empty file.
        offset: Where in the stream the file begins.
        target: What a symlink says (not resolved), or the path of the first name of the file
            that a hardlink is another name of. Empty otherwise.
    """

    path: bytes
    type: EntryType
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    size_bytes: int = 0
    stream: int = 0
    offset: int = 0
    target: bytes = b""
