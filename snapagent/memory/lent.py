"""Memory that the broker lends to a capture or a restore."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from snapagent.memory.placement import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from snapagent.gpu.owned import GpuMemory
    from snapagent.memory.buffers import FillBuffers
    from snapagent.memory.placement import Rank, SessionPlace

__all__ = ["Admissions", "AdmittedSession", "FrozenSession", "LentRegion"]


class LentRegion(NamedTuple):
    """A region, with a descriptor of one's own.

    That of a region of a GPU is to be imported by the CUDA driver; `device` is the GPU's UUID.
    """

    number: int
    address: int
    length: int
    huge: bool
    fd: int
    device: str = HOST


class FrozenSession:
    """Memory of one process that nobody writes to until `thaw`. Thread-safe."""

    def __init__(
        self,
        session: str,
        rank: Rank,
        regions: Sequence[LentRegion],
        thaw: Callable[[], None],
        connected: Callable[[], list[int]],
        gpus: GpuMemory,
    ) -> None:
        self.session = session
        self.gpus = gpus
        """Of which some of the memory may be."""
        self.rank = rank
        self.regions = tuple(regions)
        """In the order of allocation."""
        self.connected = connected
        """Tell which processes of the workload have a connection with the broker now."""
        self._thaw = thaw
        self._is_over = False

    def thaw(self) -> None:
        """Let the workload have it again. Nobody may read it any more. Idempotent."""
        if not self._is_over:
            self._is_over = True
            _close(self.regions)
            self._thaw()


class AdmittedSession:
    """Memory of one process that is being restored. Thread-safe, but for `close_regions`."""

    def __init__(
        self,
        place: SessionPlace,
        regions: Sequence[LentRegion],
        *,
        filled: Callable[[], None],
        hand_over: Callable[[Collection[int]], None],
        abort: Callable[[], None],
        was_resumed: Callable[[], bool],
    ) -> None:
        self.place = place
        self.regions = tuple(regions)
        """As those of `place`."""
        self.filled = filled
        """Let the workload have it: all of it is there and was checked."""
        self.hand_over = hand_over
        """Say which processes were restored, once they are no longer below the owner."""
        self.abort = abort
        """Free all of it. Idempotent."""
        self._was_resumed = was_resumed
        self._is_closed = False

    @property
    def was_resumed(self) -> bool:
        """Whether the workload has mapped it."""
        return self._was_resumed()

    def close_regions(self) -> None:
        """Close the descriptors: nobody fills any more. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            _close(self.regions)


class Admissions:
    """All memory of one restore."""

    def __init__(
        self, sessions: list[AdmittedSession], buffers: FillBuffers, gpus: GpuMemory
    ) -> None:
        self.sessions = sessions
        self.buffers = buffers
        """To fill them with."""
        self.gpus = gpus
        """Of which some of the memory may be."""

    def hand_over(self, pids: Collection[int]) -> None:
        """Say which processes were restored; memory of those that end is freed."""
        for session in self.sessions:
            session.hand_over(pids)

    def abort(self) -> None:
        """Free all of it; nobody may fill it any more. Idempotent."""
        for session in self.sessions:
            session.abort()
            session.close_regions()


def _close(regions: Sequence[LentRegion]) -> None:
    for region in regions:
        os.close(region.fd)
