"""A bounded set of open descriptors, lent to readers, least recently used first to go."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapstore.clock import Clock

__all__ = ["DESCRIPTORS_MAX", "DescriptorCache"]

DESCRIPTORS_MAX = 64
"""Well below the usual limit of 1024 open files, and more than the readers worth having."""

DESCRIPTOR_AGE_S_MAX = 60.0
"""After this long a name is looked up again, so that an object that somebody removed or repaired
is noticed, and its space is not held for the life of the process."""


@dataclasses.dataclass(slots=True, eq=False)
class _Held:
    fd: int
    opened_s: float
    users: int = 1
    cached: bool = True


class DescriptorCache:
    """Lends descriptors by path. Thread-safe; one that is in use is never closed.

    More than `capacity` may be open while more than that many readers hold one each.
    """

    def __init__(
        self,
        opener: Callable[[str], int],
        closer: Callable[[int], None],
        clock: Clock,
        *,
        capacity: int = DESCRIPTORS_MAX,
    ) -> None:
        self._opener = opener
        self._closer = closer
        self._clock = clock
        self._capacity = capacity
        self._lock = threading.Lock()
        self._held: collections.OrderedDict[str, _Held] = collections.OrderedDict()
        self._closed = False

    @contextlib.contextmanager
    def lend(self, path: str) -> Iterator[int]:
        """Lend a descriptor of `path` for the length of a `with` block.

        Raises whatever `opener` raises when the path is not open yet.
        """
        held = self._take(path) or self._open(path)
        try:
            yield held.fd
        finally:
            self._give_back(held)

    def forget(self, path: str) -> None:
        """Make the next reader open the path anew. Present readers keep what they have."""
        with self._lock:
            held = self._held.pop(path, None)
            fds = self._drop([held] if held else [])
        self._close_all(fds)

    def close(self) -> None:
        """Close all that is idle now, and the rest when it is given back. Idempotent."""
        with self._lock:
            self._closed = True
            fds = self._drop(list(self._held.values()))
            self._held.clear()
        self._close_all(fds)

    def _take(self, path: str) -> _Held | None:
        with self._lock:
            assert not self._closed, path
            held = self._held.get(path)
            if held is None:
                return None
            if self._clock.monotonic_s() - held.opened_s <= DESCRIPTOR_AGE_S_MAX:
                held.users += 1
                self._held.move_to_end(path)
                return held
            del self._held[path]
            fds = self._drop([held])
        self._close_all(fds)
        return None

    def _open(self, path: str) -> _Held:
        # Outside the lock: opening may take a round trip to a server. Two readers may open the
        # same path at once; the later one takes the place and the earlier closes when it is done.
        held = _Held(self._opener(path), self._clock.monotonic_s())
        with self._lock:
            loser = self._held.pop(path, None)
            leaving = [loser] if loser else []
            if self._closed:
                held.cached = False
            else:
                self._held[path] = held
            while len(self._held) > self._capacity:
                leaving.append(self._held.popitem(last=False)[1])
            fds = self._drop(leaving)
        self._close_all(fds)
        return held

    def _give_back(self, held: _Held) -> None:
        with self._lock:
            held.users -= 1
            assert held.users >= 0, held
            last = held.users == 0 and not held.cached
        if last:
            self._close_all([held.fd])

    @staticmethod
    def _drop(leaving: list[_Held]) -> list[int]:
        for held in leaving:
            held.cached = False
        return [held.fd for held in leaving if held.users == 0]

    def _close_all(self, fds: list[int]) -> None:
        # Nothing was written through these, so an error of close loses nothing.
        for fd in fds:
            with contextlib.suppress(OSError):
                self._closer(fd)
