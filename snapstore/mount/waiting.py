"""Readers that wait for a store and have a signal to take.

The kernel lets nobody go, not even who is killed, before the request that it has handed out is
answered; and pyfuse3 does not pass on that it would like to have an answer now. So who waits for
longer is looked at: whether a signal is pending that they would take.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pyfuse3
import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["WaitingReaders", "has_signal"]

_LOOK_S = 0.2


class WaitingReaders:
    """Who waits now. Used by the event loop alone."""

    def __init__(self) -> None:
        self._scopes: dict[trio.CancelScope, int] = {}
        self._some = trio.Event()

    @contextlib.contextmanager
    def interruptible(self, pid: int) -> Iterator[None]:
        """Answer with `EINTR` instead, if who waits has a signal to take."""
        with trio.CancelScope() as scope:
            self._scopes[scope] = pid
            self._some.set()
            try:
                yield
            finally:
                del self._scopes[scope]
        if scope.cancelled_caught:
            raise pyfuse3.FUSEError(errno.EINTR)

    async def watch(self) -> None:
        """Look at who waits, again and again."""
        while True:
            await self._some.wait()
            await trio.sleep(_LOOK_S)
            if not self._scopes:
                self._some = trio.Event()
            for scope, pid in [*self._scopes.items()]:
                if has_signal(pid):
                    scope.cancel()


def has_signal(pid: int) -> bool:
    """Whether a signal is pending that a thread neither blocks nor ignores."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    masks = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in {"SigPnd", "ShdPnd", "SigBlk", "SigIgn"}:
            masks[name] = int(value, 16)
    pending = masks.get("SigPnd", 0) | masks.get("ShdPnd", 0)
    return bool(pending & ~masks.get("SigBlk", 0) & ~masks.get("SigIgn", 0))
