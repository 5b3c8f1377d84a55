"""What must not be removed: the cached files of snapshots that somebody pinned."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

import msgspec

from snapstore.units import MIB

if TYPE_CHECKING:
    from snapstore.cache.directory import CacheDirectory

__all__ = ["Pin", "Pins"]

_PIN_BYTES_MAX = 256 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """What one pin holds.

    Attributes:
        snapshot: Id of the snapshot, in hex.
        label: The name under which it was pinned.
        files: Names of cache files of either tier, whether or not they are there yet.
    """

    snapshot: str
    label: str
    files: tuple[str, ...]


class Pins:
    """A directory of pins. Thread-safe and safe among processes."""

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._seen: frozenset[tuple[str, int, int]] | None = None
        self._held: frozenset[str] = frozenset()

    def add(self, pin: Pin) -> None:
        """Pin a snapshot, or replace its pin.

        Raises:
            OSError: It cannot be written.
        """
        self._directory.write(pin.snapshot, msgspec.json.encode(pin), replace=True)

    def remove(self, snapshot: str) -> bool:
        """Take a pin away; says whether there was one."""
        if snapshot not in self._directory.names():
            return False
        self._directory.unlink(snapshot)
        return True

    def all(self) -> list[Pin]:
        """Every pin that can be read."""
        found = []
        for name in sorted(self._directory.names()):
            try:
                data = self._directory.read(name, _PIN_BYTES_MAX)
                found.append(msgspec.json.decode(data, type=Pin))
            except (OSError, msgspec.MsgspecError):
                continue  # It is being written or removed, or holds nothing any more.
        return found

    def holds(self, name: str) -> bool:
        """Whether a cache file is pinned."""
        with self._lock:
            seen = self._directory.versions()
            if seen != self._seen:
                self._held = frozenset(file for pin in self.all() for file in pin.files)
                self._seen = seen
            return name in self._held
