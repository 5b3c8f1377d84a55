"""The images of one dump inside a snapshot: found, listed, and the small ones read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapagent.errors import AgentError

if TYPE_CHECKING:
    from snapstore import Snapshot, SnapshotEntry, SnapshotFile

__all__ = ["ImageSet", "find_images"]

_INVENTORY = b"inventory.img"
_SMALL_BYTES_MAX = 256 << 20
"""Images other than pages; the largest real ones are pagemaps of terabytes."""

_KEPT_BYTES_MAX = 1 << 20
"""Larger ones are read again when CRIU asks for them."""


class ImageSet:
    """Images by the names that CRIU gives them. Thread-safe."""

    def __init__(self, snapshot: Snapshot, directory: bytes, entries: list[SnapshotEntry]) -> None:
        """Take the files right below a directory of a snapshot."""
        self.snapshot = snapshot
        self.directory = directory
        start = len(directory) + 1 if directory else 0
        self._entries = {os.fsdecode(entry.path[start:]): entry for entry in entries}
        self._kept: dict[str, bytes] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        """All of them, sorted."""
        return sorted(self._entries)

    def size_bytes(self, name: str) -> int:
        """Length of an image."""
        return self._entries[name].size_bytes

    def path(self, name: str) -> str:
        """Where in the snapshot an image is."""
        return os.fsdecode(self._entries[name].path)

    def open(self, name: str) -> SnapshotFile:
        """Open an image for reading in place."""
        return self.snapshot.open(self._entries[name].path)

    def get(self, name: str) -> bytes | None:
        """Read a whole image that is not one of pages, if there is such an image."""
        return self.read(name) if name in self._entries else None

    def read(self, name: str) -> bytes:
        """Read a whole image that is not one of pages; it is kept, since CRIU will ask for it.

        Raises:
            AgentError: There is none, or it is larger than any real one.
        """
        if name in self._kept:
            return self._kept[name]
        entry = self._entries.get(name)
        if entry is None:
            raise AgentError(
                f"snapshot {self.snapshot.id.short} has no {self._shown(name)}",
                next_step="it is no whole dump: capture the process again",
            )
        if entry.size_bytes > _SMALL_BYTES_MAX:
            raise AgentError(
                f"{self._shown(name)} has {entry.size_bytes} bytes, more than any real one",
                next_step="restore another snapshot",
            )
        data = self.open(name).read_at(0, entry.size_bytes)
        if len(data) <= _KEPT_BYTES_MAX:
            self._kept[name] = data
        return data

    def _shown(self, name: str) -> str:
        return os.fsdecode(self.directory + b"/" if self.directory else b"") + name


def find_images(snapshot: Snapshot, directory: str | None = None) -> ImageSet:
    """Find the dump in a snapshot.

    Args:
        snapshot: Captured by the agent, or a pushed directory that holds a dump.
        directory: Where the dump is, if there are several.

    Raises:
        AgentError: There is no dump, or there are several and nobody said which.
    """
    entries = list(snapshot.walk())
    homes = [_parent(e.path) for e in entries if e.is_file and _name(e.path) == _INVENTORY]
    if directory is not None:
        homes = [home for home in homes if home == os.fsencode(directory.strip("/"))]
    if not homes:
        where = f" in {directory}" if directory is not None else ""
        raise AgentError(
            f"snapshot {snapshot.id.short} holds no process{where}: no inventory.img",
            next_step="`snapstore show` tells what it is; `snapstore pull` brings files back",
        )
    if len(homes) > 1:
        shown = ", ".join(os.fsdecode(home) or "." for home in homes)
        raise AgentError(
            f"snapshot {snapshot.id.short} holds {len(homes)} dumps: {shown}",
            next_step="say which with --images DIR",
        )
    home = homes[0]
    return ImageSet(snapshot, home, [e for e in entries if e.is_file and _parent(e.path) == home])


def _parent(path: bytes) -> bytes:
    return path.rpartition(b"/")[0]


def _name(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]
