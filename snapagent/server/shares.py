"""How users share the daemon's places, so that none of them can take all. Numbers only.

Root is not bounded: it can end what others began anyway.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["excess", "may_join", "next_to_start"]

_ROOT: Final = 0


def may_join(uid: int, begun: Sequence[int], places: int) -> bool:
    """Tell whether a user may take a place: whoever has some only where more are left than that.

    So one user gets half of them at most, the next one half of the rest, and so on: there is one
    left for somebody who has none yet.

    Args:
        uid: Who wants one.
        begun: Whose the jobs are that are at work or wait.
        places: How many there are.
    """
    free = places - len(begun)
    return free > 0 if uid == _ROOT else begun.count(uid) < free


def next_to_start(waiting: Sequence[int], at_work: Sequence[int], places: int) -> int | None:
    """Choose which of those that wait starts: the first one of the user with the fewest at work.

    The last free place is for somebody who has none, so that long jobs of one user do not keep
    all others waiting.

    Args:
        waiting: Whose those are, in the order in which they came.
        at_work: Whose the jobs are that are at work.
        places: How many may be.

    Returns:
        Its index; None if none may start now.
    """
    free = places - len(at_work)
    if free <= 0:
        return None
    busy = collections.Counter(at_work)
    allowed = [
        index for index, uid in enumerate(waiting) if free > 1 or uid == _ROOT or not busy[uid]
    ]
    return min(allowed, key=lambda index: (busy[waiting[index]], index), default=None)


def excess(ended: Sequence[int], kept: int) -> list[int]:
    """Choose what is forgotten of jobs that have ended: the oldest of whoever has the most.

    Args:
        ended: Whose they are, the oldest first.
        kept: How many stay.

    Returns:
        Indexes, in no order.
    """
    of_user: dict[int, collections.deque[int]] = {}
    for index, uid in enumerate(ended):
        of_user.setdefault(uid, collections.deque()).append(index)
    return [
        max(of_user.values(), key=lambda own: (len(own), -own[0])).popleft()
        for _ in range(len(ended) - kept)
    ]
