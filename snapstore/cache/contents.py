"""What is in a cache, for people and for who counts: values only."""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["CacheEntry", "CacheStats", "CacheTier", "TierStats"]


class CacheTier(enum.Enum):
    """The two parts of a cache."""

    PACKS = "packs"
    DECODED = "decoded"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One cache file.

    Attributes:
        tier: Which part it is of.
        name: Of the file.
        label: What it holds: the kind and name of an object, or a path in the snapshot by which
            it was opened first.
        size_bytes: How long that is.
        held_bytes: How much of it is there.
        used_ns: When it was used last, in nanoseconds since the epoch.
        is_pinned: It stays.
    """

    tier: CacheTier
    name: str
    label: str
    size_bytes: int
    held_bytes: int
    used_ns: int
    is_pinned: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Totals of one part of a cache.

    Attributes:
        directory: Where it is; None if there is no such part.
        budget_bytes: What it may take.
        used_bytes: What it takes.
        pinned_bytes: What of that is pinned.
        files: Cache files.
    """

    directory: str | None
    budget_bytes: int
    used_bytes: int
    pinned_bytes: int
    files: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Totals of a cache.

    Attributes:
        packs: Stored bytes on disk.
        decoded: Decoded files in memory.
        pins: Pinned snapshots.
    """

    packs: TierStats
    decoded: TierStats
    pins: int
