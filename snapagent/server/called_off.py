"""Jobs that their clients cancelled before the requests that begin them had come.

A client that chose the id of its job may cancel it at any time, also while its first request is
under way on another connection, and the two may come in either order. Not thread-safe.
"""

from __future__ import annotations

import collections
from typing import Final

__all__ = ["CalledOff"]

IDS_MAX: Final = 64
"""Of one user; the oldest is forgotten."""
USERS_MAX: Final = 256


class CalledOff:
    """Remembers ids for a while, those of each user apart."""

    def __init__(self) -> None:
        self._ids: collections.OrderedDict[int, collections.deque[str]] = collections.OrderedDict()

    def add(self, uid: int, job_id: str) -> None:
        """Remember that a user wants no such job."""
        ids = self._ids.setdefault(uid, collections.deque(maxlen=IDS_MAX))
        self._ids.move_to_end(uid)
        if job_id not in ids:
            ids.append(job_id)
        if len(self._ids) > USERS_MAX:
            self._ids.popitem(last=False)

    def take(self, uid: int, job_id: str) -> bool:
        """Whether that is so; it is forgotten with that."""
        ids = self._ids.get(uid, ())
        if job_id not in ids:
            return False
        self._ids[uid].remove(job_id)
        return True
