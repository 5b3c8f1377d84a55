"""Decoded frames kept for the next read: least recently used, within a budget of bytes.

Reading files in small pieces touches the same frame again and again, and to check any byte of a
frame takes all of it. Frames are immutable, so one cache serves all snapshots of a store.
"""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from snapstore.repository.verifier import Claim

__all__ = ["DecodedFrame", "FrameCache", "FrameKey"]


class FrameKey(NamedTuple):
    """Where a frame is and what a layout says of it.

    All of it: two layouts may say different things of the same place, and one of them lies.
    """

    pack: bytes
    offset: int
    stored_length: int
    plain_length: int
    codec: int
    checksum: bytes


class DecodedFrame:
    """The bytes of a frame, and which claims about them were found to be true."""

    __slots__ = ("checked", "data")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.checked: set[Claim] = set()


class FrameCache:
    """Decoded frames by key. Thread-safe; a frame is loaded by one thread at a time."""

    def __init__(self, *, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._frames: collections.OrderedDict[FrameKey, DecodedFrame] = collections.OrderedDict()
        self._held_bytes = 0
        self._loading: set[FrameKey] = set()
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes of the frames that are kept; never more than the budget."""
        with self._changed:
            return self._held_bytes

    def get(
        self,
        wanted: Sequence[FrameKey],
        load: Callable[[Sequence[FrameKey]], Iterable[tuple[FrameKey, DecodedFrame]]],
    ) -> dict[FrameKey, DecodedFrame]:
        """Give all of `wanted`; what is neither here nor being loaded comes from `load`.

        Whoever waits for another thread has loaded its own part before, so nobody waits in a
        circle. An error of `load` is its caller's; those who waited try for themselves.
        """
        found: dict[FrameKey, DecodedFrame] = {}
        while True:
            mine = self._claim(wanted, found)
            if not mine:
                return found
            try:
                for key, frame in load(mine):
                    found[key] = frame
                    self._keep(key, frame)
            finally:
                with self._changed:
                    self._loading.difference_update(mine)
                    self._changed.notify_all()

    def _claim(
        self, wanted: Sequence[FrameKey], found: dict[FrameKey, DecodedFrame]
    ) -> list[FrameKey]:
        """Take what is here and choose what to load; waits if others load all of the rest."""
        with self._changed:
            while True:
                missing = []
                for key in dict.fromkeys(wanted):
                    if key in found:
                        continue
                    frame = self._frames.get(key)
                    if frame is None:
                        missing.append(key)
                    else:
                        self._frames.move_to_end(key)
                        found[key] = frame
                mine = [key for key in missing if key not in self._loading]
                if mine or not missing:
                    self._loading.update(mine)
                    return mine
                self._changed.wait()

    def _keep(self, key: FrameKey, frame: DecodedFrame) -> None:
        with self._changed:
            self._frames[key] = frame
            self._held_bytes += frame.data.nbytes
            while self._held_bytes > self.budget_bytes:
                _, oldest = self._frames.popitem(last=False)
                self._held_bytes -= oldest.data.nbytes
