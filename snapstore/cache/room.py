"""How much a tier may take, counted among processes, and making room in it (N5).

The count lies in a small file and is changed under a lock. Who is killed after it has taken room
and before it has used it leaves the count too high, never too low; it is taken anew whenever it
says that there is no room left.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from typing import TYPE_CHECKING

from snapstore.cache.handle import Handle
from snapstore.cache.locks import Patience, try_lock_file, unlock_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from snapstore.cache.directory import CacheDirectory, Occupant
    from snapstore.clock import Clock

__all__ = ["Room"]

_COUNT = struct.Struct("<Q")
_PATIENCE_S = 10.0
_SLACK_SHARE = 32
"""Making room makes some more than is asked for: it means looking at every file."""


class Room:
    """The budget of one tier. Thread-safe and safe among processes."""

    def __init__(
        self,
        state: CacheDirectory,
        name: str,
        budget_bytes: int,
        clock: Clock,
        *,
        survey: Callable[[], Sequence[Occupant]],
        evict: Callable[[Occupant], bool],
    ) -> None:
        """Open the count; take it if nobody has yet.

        Args:
            state: Where the count lies.
            name: The name of its file.
            budget_bytes: What the tier may take.
            clock: For waiting.
            survey: Gives the files, those first that should go first.
            evict: Removes one unless it has to stay; says whether it did.

        Raises:
            OSError: The count cannot be opened.
        """
        self.budget_bytes = budget_bytes
        self._clock = clock
        self._survey = survey
        self._evict = evict
        self._lock = threading.Lock()
        self._handle = Handle(state.open_file(name, create=True))
        with self._locked() as locked, self._handle.used() as fd:
            if locked and os.fstat(fd).st_size != _COUNT.size:
                self._store(_total(survey()))

    @property
    def used_bytes(self) -> int:
        """What the count says."""
        with self._handle.used() as fd:
            data = os.pread(fd, _COUNT.size, 0)
        return int(_COUNT.unpack(data)[0]) if len(data) == _COUNT.size else self.budget_bytes

    def take(self, count_bytes: int) -> bool:
        """Count bytes that are about to be written, after making room; False if there is none."""
        if count_bytes > self.budget_bytes:
            return False
        try:
            with self._locked() as locked:
                if not locked:
                    return False
                used = self.used_bytes
                if used + count_bytes > self.budget_bytes:
                    used = self._make_room(count_bytes + self.budget_bytes // _SLACK_SHARE)
                fits = used + count_bytes <= self.budget_bytes
                self._store(used + count_bytes if fits else used)
                return fits
        except OSError:
            return False

    def give_back(self, count_bytes: int) -> None:
        """Uncount bytes that were not written after all."""
        with contextlib.suppress(OSError), self._locked() as locked:
            if locked:
                self._store(max(self.used_bytes - count_bytes, 0))

    def shrink(self, wanted_bytes: int) -> None:
        """Remove what may go until so much less is used: the file system has no room."""
        with contextlib.suppress(OSError), self._locked() as locked:
            if locked:
                used = _total(self._survey())
                self._store(self._evict_until(max(used - wanted_bytes, 0)))

    def evict(self, limit_bytes: int, *, among: frozenset[str] | None = None) -> int:
        """Remove files until no more than that is used; gives how many bytes were freed.

        Args:
            limit_bytes: What may stay.
            among: Names of the files that may go; by default all.

        Raises:
            OSError: The count cannot be used.
        """
        with self._locked():
            before = _total(self._survey())
            after = self._evict_until(limit_bytes, among=among)
            self._store(after)
            return before - after

    def fitting(self, wanted_bytes: int, kept_bytes: int) -> int:
        """How many of so many bytes can be there at once, beside others that stay.

        If they are not all, what is kept free for later is left out: it would be taken from them.
        """
        left = self.budget_bytes - kept_bytes
        if wanted_bytes <= left:
            return wanted_bytes
        return max(left - self.budget_bytes // _SLACK_SHARE, 0)

    def trim(self) -> None:
        """Remove files until the budget holds: of what many write at once some is not counted."""
        with contextlib.suppress(OSError):
            self.evict(self.budget_bytes)

    def close(self) -> None:
        """Close the count, once nobody uses it. Idempotent."""
        self._handle.close()

    def _make_room(self, needed: int) -> int:
        return self._evict_until(max(self.budget_bytes - needed, 0))

    def _evict_until(self, limit_bytes: int, *, among: frozenset[str] | None = None) -> int:
        occupants = self._survey()
        used = _total(occupants)
        for occupant in occupants:
            if used <= limit_bytes:
                break
            if (among is None or occupant.name in among) and self._evict(occupant):
                used -= occupant.size_bytes
        return used

    def _store(self, used: int) -> None:
        with self._handle.used() as fd:
            os.pwrite(fd, _COUNT.pack(used), 0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Keep other threads and processes out; False if one of them takes too long."""
        # A descriptor shares its lock among threads, so they need one of their own.
        with self._lock, self._handle.used() as fd:
            patience = Patience(self._clock, _PATIENCE_S)
            while not (locked := try_lock_file(fd)):
                if not patience.wait():
                    break
            try:
                yield locked
            finally:
                if locked:
                    unlock_file(fd)


def _total(occupants: Sequence[Occupant]) -> int:
    return sum(occupant.size_bytes for occupant in occupants)
