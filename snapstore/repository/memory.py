"""How a memory budget is divided. Pure arithmetic, in one place so that it adds up."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

from snapstore.format import limits
from snapstore.repository.ingest import INGEST_BUFFER_BYTES
from snapstore.repository.windows import WINDOW_BYTES
from snapstore.units import MIB

if TYPE_CHECKING:
    from snapstore.options import StoreOptions

__all__ = ["MemoryPlan"]

_INTERPRETER_BYTES = 96 * MIB
"""Python with numpy and the codecs' own working memory, measured at rest and under load."""

PACK_BYTES = 64 * MIB
"""Large enough for object storage, small enough that two of them fit most budgets."""

READ_BYTES = 8 * MIB
"""One read of neighbouring frames: more is no faster on disk, NFS or object storage."""

_SMALL_BUDGET_BYTES = 512 * MIB
_WINDOWS_MIN = 2


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes and counts of everything large that an operation allocates.

    Attributes:
        threads: Workers that read, cut, hash and encode.
        readers: Reads in flight; fewer than `threads` where the budget forbids more.
        window_buffers: Windows in the pipeline.
        pack_bytes: At what size a pack is closed.
        packs_in_flight: Packs that are filled or written at once.
        catalog_bytes: Known chunks.
        read_bytes: The longest read.
    """

    threads: int
    readers: int
    window_buffers: int
    pack_bytes: int
    packs_in_flight: int
    catalog_bytes: int
    read_bytes: int

    @classmethod
    def of(cls, options: StoreOptions) -> Self:
        """Divide the budget of `options`."""
        budget = options.memory_bytes
        threads = options.threads_effective
        pack_bytes = PACK_BYTES if budget >= _SMALL_BUDGET_BYTES else 16 * MIB
        packs_in_flight = 2
        left = budget - _INTERPRETER_BYTES - packs_in_flight * (pack_bytes + 8 * MIB)
        # A window holds its buffer and, until they are packed, its encoded frames.
        per_window = INGEST_BUFFER_BYTES + WINDOW_BYTES
        catalog_bytes = min(budget // 8, left - _WINDOWS_MIN * per_window)
        windows = (left - catalog_bytes) // per_window
        # A reader holds stored bytes, a decoded frame and the planes of one.
        per_reader = READ_BYTES + 2 * limits.FRAME_PLAIN_BYTES_MAX
        return cls(
            threads=threads,
            readers=min(threads, (budget - _INTERPRETER_BYTES) // per_reader),
            window_buffers=min(windows, 2 * threads + 4),
            pack_bytes=pack_bytes,
            packs_in_flight=packs_in_flight,
            catalog_bytes=catalog_bytes,
            read_bytes=READ_BYTES,
        )
