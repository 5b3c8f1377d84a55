"""How a memory budget is divided. Pure arithmetic, in one place so that it adds up."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

from snapstore.cache.decoded import FILL_BYTES_MAX
from snapstore.format import limits
from snapstore.options import Compression
from snapstore.repository.ingest import INGEST_BUFFER_BYTES
from snapstore.repository.windows import WINDOW_BYTES
from snapstore.units import MIB

if TYPE_CHECKING:
    from snapstore.options import StoreOptions

__all__ = ["MemoryPlan"]

_INTERPRETER_BYTES = 64 * MIB
"""Python with numpy and all that is imported, 56 MiB measured at rest, and a margin."""

_THREAD_BYTES = 6 * MIB
_THREAD_BYTES_MAX_EFFORT = 20 * MIB
"""A worker's codecs, scratch and temporary arrays, measured as the slope over 1 to 16 threads."""

PACK_BYTES = 64 * MIB
"""Large enough for object storage, small enough that two of them fit most budgets."""

_LOADED_EIGHTHS = 15
"""A pack that never lies in memory is nearly twice as long: half as many files, each of which costs
twenty calls of the system, and with its footer still within `limits.PACK_BYTES_MAX`."""

READ_BYTES = 8 * MIB
"""One read of neighbouring frames: more is no faster on disk, NFS or object storage."""

_SMALL_BUDGET_BYTES = 512 * MIB
_WINDOWS_MIN = 2
_READERS_AHEAD = 1
"""One more than there are cores: while it waits for the storage the others decode."""

_WINDOWS_AHEAD = 3
"""Windows beyond one per worker: to read into, to decide about, to pack."""
_CATALOG_BYTES_MIN = 8 * MIB

_PACK_SHARE = 6
"""A sixth of the budget at most is for packs, unless that is fewer than two."""

_HELD_SHARE = 24
"""A 24th of the budget, 8 MiB of the smallest, is for files that arrive side by side."""

_WINDOWS_FILLED_MAX = 8
"""Files that fill windows in place: as many as a machine has GPUs."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes and counts of everything large that an operation allocates.

    Attributes:
        threads: Workers that read, cut, hash and encode; no more than the budget has room for.
        readers: Reads in flight where the storage answers at once.
        readers_max: Reads in flight that the budget has room for.
        window_buffers: Windows in the pipeline.
        windows_spare: Windows that the budget has room for besides.
        pack_bytes: At what size a pack is closed.
        packs_in_flight: Packs that are filled or written at once.
        loaded_pack_bytes: At what size a pack is closed that never lies in memory.
        catalog_bytes: Known chunks.
        read_bytes: The longest read.
        held_bytes: Beginnings and ends of files that arrive, until they are enough for a window.
        windows_filled: Windows that may wait half full for the rest of a file.
    """

    threads: int
    readers: int
    readers_max: int
    window_buffers: int
    windows_spare: int
    pack_bytes: int
    packs_in_flight: int
    catalog_bytes: int
    read_bytes: int
    loaded_pack_bytes: int
    held_bytes: int = 0
    windows_filled: int = 0

    @classmethod
    def for_arrivals(cls, options: StoreOptions) -> Self:
        """Divide the budget of `options` for a snapshot whose files arrive side by side."""
        plan = cls.of(options, held_bytes=options.memory_bytes // _HELD_SHARE)
        # If there is room for none besides those of the pipeline, it lends one: it has two.
        filled = min(_WINDOWS_FILLED_MAX, max(plan.windows_spare, 1))
        return dataclasses.replace(plan, windows_filled=filled)

    @classmethod
    def of(cls, options: StoreOptions, *, held_bytes: int = 0) -> Self:
        """Divide the budget of `options`, most of which is for windows."""
        budget = options.memory_bytes
        pack_bytes = PACK_BYTES if budget >= _SMALL_BUDGET_BYTES else 16 * MIB
        packs_in_flight = _packs_in_flight(options)
        # A window holds its buffer and, until they are packed, its encoded frames.
        per_window = INGEST_BUFFER_BYTES + WINDOW_BYTES
        windows_min_bytes = _WINDOWS_MIN * per_window
        is_max = options.compression is Compression.MAX
        per_thread = _THREAD_BYTES_MAX_EFFORT if is_max else _THREAD_BYTES
        left = budget - _INTERPRETER_BYTES - packs_in_flight * (pack_bytes + 8 * MIB)
        room_bytes = left - windows_min_bytes - _CATALOG_BYTES_MIN
        held_bytes = min(held_bytes, room_bytes - per_thread)
        left -= held_bytes
        room = (room_bytes - held_bytes) // per_thread
        threads = min(options.threads_effective, room)
        left -= threads * per_thread
        catalog_bytes = min(budget // 8, left - windows_min_bytes)
        windows = (left - catalog_bytes) // per_window
        # A reader holds stored bytes, a decoded frame and the planes of one.
        per_reader = READ_BYTES + 2 * limits.FRAME_PLAIN_BYTES_MAX + 2 * MIB
        if options.node_cache is not None:
            # What is fetched for either part of the node's cache.
            per_reader += READ_BYTES + FILL_BYTES_MAX
        readers_max = (budget - _INTERPRETER_BYTES) // per_reader
        return cls(
            threads=threads,
            readers=min(options.threads_effective + _READERS_AHEAD, readers_max),
            readers_max=readers_max,
            window_buffers=min(windows, threads + _WINDOWS_AHEAD),
            windows_spare=max(windows - threads - _WINDOWS_AHEAD, 0),
            pack_bytes=pack_bytes,
            packs_in_flight=packs_in_flight,
            loaded_pack_bytes=pack_bytes * _LOADED_EIGHTHS // 8,
            catalog_bytes=catalog_bytes,
            read_bytes=READ_BYTES,
            held_bytes=held_bytes,
        )


def _packs_in_flight(options: StoreOptions) -> int:
    """One that is filled, and as many that are hashed and stored at a time as keep up with that.

    A thread hashes and writes half a gigabyte a second into new pages of a file system, where
    workers hand over several.
    """
    affordable = options.memory_bytes // _PACK_SHARE // PACK_BYTES
    return max(2, min(1 + options.threads_effective, affordable))
