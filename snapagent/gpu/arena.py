"""Page-locked memory that pieces of snapshots pass through, on their way to a GPU or from it.

Locking pages takes most of a second for each gibibyte, so it is done once, when the agent starts.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from snapagent.gpu.driver import memory_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapagent.gpu.driver import Gpu

__all__ = ["SLOT_BYTES", "PinnedArena", "Slot", "near_gpu"]

SLOT_BYTES: Final = 4 << 20
"""As long as a frame can be. Measured as the best size, too: what was read stays in the processor's
cache until it was checked and copied."""

_NODES = Path("/sys/devices/system/node")


class Slot(NamedTuple):
    """Page-locked memory of `SLOT_BYTES`."""

    address: int
    view: memoryview


class PinnedArena:
    """Slots of page-locked memory near one GPU, for all that moves bytes to it or from it.

    Thread-safe. A context manager.
    """

    def __init__(self, gpu: Gpu, *, slots: int) -> None:
        """Allocate them, all at once.

        Args:
            gpu: Stays open for as long as this is used.
            slots: How many; 4 MiB each.

        Raises:
            GpuFailed: The system does not lock so many pages.
        """
        assert slots > 0, slots
        self.slots = slots
        self._gpu = gpu
        with near_gpu(gpu):
            self._address = gpu.host_alloc(slots * SLOT_BYTES)
        memory = memory_at(self._address, slots * SLOT_BYTES)
        self._free = [
            Slot(self._address + begin, memory[begin : begin + SLOT_BYTES])
            for begin in range(0, slots * SLOT_BYTES, SLOT_BYTES)
        ]
        self._returned = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory. All slots must be back. Idempotent."""
        with self._returned:
            if self._free:
                assert len(self._free) == self.slots, "slots are lent while their arena is closed"
                self._free = []
                self._gpu.host_free(self._address)

    @contextlib.contextmanager
    def borrow(self, count: int) -> Iterator[list[Slot]]:
        """Lend slots to one thread, which waits until there are as many, and asks once only.

        Nothing may still read or write them when they come back.
        """
        assert 0 < count <= self.slots, (count, self.slots)
        with self._returned:
            self._returned.wait_for(lambda: len(self._free) >= count)
            # The last ones that came back may still be in a cache.
            lent = [self._free.pop() for _ in range(count)]
        try:
            yield lent
        finally:
            with self._returned:
                self._free += lent
                self._returned.notify_all()


@contextlib.contextmanager
def near_gpu(gpu: Gpu) -> Iterator[None]:
    """Keep the calling thread on processors near a GPU, where the machine tells which those are."""
    own = os.sched_getaffinity(0)
    near = own & _processors(gpu.device.numa_node)
    if not near or near == own:
        yield
        return
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _processors(node: int | None) -> set[int]:
    """Read which processors a node of memory has; none if that cannot be known."""
    if node is None:
        return set()
    try:
        text = (_NODES / f"node{node}" / "cpulist").read_text(encoding="ascii")
        found: set[int] = set()
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return found
