"""What is known of the memory to fill before any process exists: pagemaps, mappings and data."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

from snapagent.errors import AgentError
from snapagent.lazy.address_space import AddressSpace
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from snapagent.lazy.address_space import Numbers
    from snapstore import FileRange

__all__ = ["PagemapColumns", "PagesFile", "TaskMemory", "missing_memory"]

_FLAG_LAZY = 2
_FLAG_PRESENT = 4

_ADDRESS_END = 1 << 57
"""Behind every address that a process can have, with five levels of page tables."""


class PagesFile(Protocol):
    """A pages image. Thread-safe; `snapstore.SnapshotFile` is one."""

    @property
    def size_bytes(self) -> int:
        """Length of the image."""
        ...

    def ranges(self, *, about_bytes: int) -> Sequence[FileRange]:
        """Divide all of it into parts to read; data at most half as long again as asked for."""
        ...

    def read_into(self, offset: int, buffer: memoryview, *, streaming: bool = False) -> None:
        """Fill a buffer with the data from `offset` on, checked; `streaming` if read but once."""
        ...


class PagemapColumns(Protocol):
    """A parsed pagemap: one row an entry, ascending addresses."""

    @property
    def vaddrs(self) -> NDArray[np.uint64]:
        """Address of the first page."""
        ...

    @property
    def counts(self) -> NDArray[np.uint64]:
        """How many pages."""
        ...

    @property
    def flags(self) -> NDArray[np.uint64]:
        """CRIU's flags."""
        ...

    @property
    def offsets(self) -> NDArray[np.uint64]:
        """Where in the pages image the data begin, if they are there."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TaskMemory:
    """The memory of one task as it was captured.

    Attributes:
        pid: Its process id in the images.
        pagemap: Which pages it had.
        mappings: Start and end of each of its mappings, in any order.
        image: Path of the pages image, as hints name it.
        file: The pages image itself; tasks may share one.
    """

    pid: int
    pagemap: PagemapColumns
    mappings: Sequence[tuple[int, int]]
    image: str
    file: PagesFile


def missing_memory(memory: TaskMemory) -> AddressSpace:
    """Return what CRIU leaves to a userfaultfd when it restores a task.

    Raises:
        AgentError: The pagemap says what cannot be, or that data are elsewhere.
    """
    is_lazy = (memory.pagemap.flags & np.uint64(_FLAG_LAZY)) != 0
    columns = memory.pagemap
    if ((columns.flags[is_lazy] & np.uint64(_FLAG_PRESENT)) == 0).any():
        raise AgentError(
            f"{memory.image} does not have all memory of process {memory.pid}",
            next_step="restore a snapshot that was captured whole, not on top of another",
        )
    limit = np.uint64(_ADDRESS_END)
    vaddrs, counts, offsets = (
        column[is_lazy] for column in (columns.vaddrs, columns.counts, columns.offsets)
    )
    if (vaddrs >= limit).any() or (counts >= limit // np.uint64(PAGE_BYTES)).any():
        raise _impossible(memory, "an address that no process can have")
    if (offsets >= np.uint64(1 << 62)).any():
        raise _impossible(memory, "an offset that no file can have")
    starts, lengths, begins = _signed(vaddrs), _signed(counts) * PAGE_BYTES, _signed(offsets)
    if (((starts | begins) % PAGE_BYTES) != 0).any():
        raise _impossible(memory, "an address or offset in the middle of a page")
    if (starts[1:] < (starts + lengths)[:-1]).any() or (begins[1:] < (begins + lengths)[:-1]).any():
        raise _impossible(memory, "entries that overlap or are out of order")
    if len(begins) and begins[-1] + lengths[-1] > memory.file.size_bytes:
        raise _impossible(memory, f"more than the {memory.file.size_bytes} bytes that there are")
    borders = np.array([b for m in memory.mappings for b in m if 0 <= b < _ADDRESS_END], np.int64)
    return AddressSpace.build(starts, lengths, begins, borders)


def _signed(column: NDArray[np.uint64]) -> Numbers:
    return column.astype(np.int64)


def _impossible(memory: TaskMemory, what: str) -> AgentError:
    return AgentError(
        f"the pagemap of process {memory.pid} for {memory.image} tells of {what}",
        next_step="the snapshot is damaged: verify the store, or use another snapshot",
    )
