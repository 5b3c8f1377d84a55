"""Settings of one open store: values only, checked once, the same for library and command line."""

from __future__ import annotations

import dataclasses
import enum
import os
from pathlib import Path

from snapstore.errors import UsageError
from snapstore.units import GIB, MIB

__all__ = [
    "NODE_CACHE_VARIABLE",
    "STORE_URL_VARIABLE",
    "Compression",
    "Integrity",
    "StoreOptions",
    "index_cache_default",
    "node_cache_default",
    "store_url_default",
]

STORE_URL_VARIABLE = "SNAPSTORE_URL"
NODE_CACHE_VARIABLE = "SNAPSTORE_CACHE"

MEMORY_BYTES_DEFAULT = 1 * GIB
CACHE_BYTES_DEFAULT = 64 * MIB
MEMORY_BYTES_MIN = 192 * MIB
"""Two packs being written, three segments being cut, and the interpreter with its libraries."""

INDEX_CACHE_BYTES_DEFAULT = 8 * GIB
"""Room for the indexes of about 5 TB of page images, or 40 TB of tensors."""


class Compression(enum.Enum):
    """How much time is spent on making frames smaller."""

    AUTO = "auto"
    NONE = "none"
    FAST = "fast"
    MAX = "max"


class Integrity(enum.Enum):
    """What is checked before bytes are used (`format_spec/SEMANTICS.md`, I6)."""

    FAST = "fast"
    STRONG = "strong"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store is worked with; immutable.

    Attributes:
        memory_bytes: What push and pull may hold in buffers and tables, whatever the snapshot.
        threads: Threads that read, hash, code and write; 0 means one per usable core.
        compression: Effort spent on frames.
        integrity: What is checked of what is pulled or read.
        cache_bytes: Decoded frames kept for files that are read in place, by all of them together
            and besides `memory_bytes`; 0 keeps none.
        index_cache: Where this machine keeps checksums of large indexes, and copies of those of
            remote stores; by default below the user's cache directory.
        index_cache_bytes: What that may take; 0 for no cache.
        node_cache: The directory of the node's cache, which what is read goes through; see
            `NodeCache`. None: everything comes from the store.
        patience_s: How long to try again what the storage says may succeed later; by default two
            minutes for a service and one for a directory, and no longer than that.
    """

    memory_bytes: int = MEMORY_BYTES_DEFAULT
    threads: int = 0
    compression: Compression = Compression.AUTO
    integrity: Integrity = Integrity.STRONG
    index_cache: Path | None = None
    index_cache_bytes: int = INDEX_CACHE_BYTES_DEFAULT
    cache_bytes: int = CACHE_BYTES_DEFAULT
    node_cache: Path | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes < MEMORY_BYTES_MIN:
            raise UsageError(
                f"a memory budget of {self.memory_bytes} bytes is too small",
                next_step=f"give at least {MEMORY_BYTES_MIN // MIB}MiB",
            )
        if self.threads < 0:
            raise UsageError(
                f"cannot work with {self.threads} threads", next_step="give 0 for one per core"
            )
        if self.index_cache_bytes < 0:
            raise UsageError(
                f"an index cache of {self.index_cache_bytes} bytes cannot be",
                next_step="give 0 for none",
            )
        if self.patience_s is not None and not self.patience_s >= 0:
            raise UsageError(
                f"cannot wait for {self.patience_s} seconds", next_step="give 0 to try once"
            )
        if self.cache_bytes < 0:
            raise UsageError(
                f"cannot keep {self.cache_bytes} bytes", next_step="give 0 to keep nothing"
            )

    @property
    def threads_effective(self) -> int:
        """The number of worker threads after resolving 0."""
        return self.threads or len(os.sched_getaffinity(0))


def index_cache_default() -> Path | None:
    """The directory for what is kept of indexes, if this user has a place for caches."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # which the XDG specification says to ignore
        caches = Path(os.environ.get("HOME", ""), ".cache")
    return caches / "snapstore" / "indexes" if caches.is_absolute() else None


def node_cache_default() -> Path | None:
    """The directory of the node's cache from the environment, if it is set there."""
    named = os.environ.get(NODE_CACHE_VARIABLE)
    return Path(named) if named else None


def store_url_default() -> str | None:
    """The store's URL from the environment, if it is set there."""
    return os.environ.get(STORE_URL_VARIABLE) or None
