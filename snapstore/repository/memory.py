"""How a memory budget is divided. Pure arithmetic, in one place so that it adds up."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

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

_SMALL_BUDGET_BYTES = 512 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes and counts of everything large that an operation allocates."""

    threads: int
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
        catalog_bytes = budget // 8
        left = budget - _INTERPRETER_BYTES - packs_in_flight * (pack_bytes + 8 * MIB)
        # A window holds its buffer and, until they are packed, its encoded frames.
        per_window = INGEST_BUFFER_BYTES + WINDOW_BYTES
        buffers = (left - catalog_bytes) // per_window
        readers = max(2, min(2 * threads, (budget - _INTERPRETER_BYTES) // (24 * MIB)))
        return cls(
            threads=threads,
            window_buffers=max(2, min(buffers, 2 * threads + 4)),
            pack_bytes=pack_bytes,
            packs_in_flight=packs_in_flight,
            catalog_bytes=catalog_bytes,
            read_bytes=min(8 * MIB, (budget - _INTERPRETER_BYTES) // (3 * readers)),
        )
