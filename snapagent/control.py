"""The other end of a capture or restore: who watches it learns its states, and may end it.

The states are data: which there are, which may follow which, and which are the last.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final, Literal

from snapstore.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "CAPTURE_STATES",
    "ENDED",
    "RESTORE_STATES",
    "CaptureState",
    "Control",
    "RestoreState",
    "State",
]

Ended = Literal["done", "failed", "cancelled", "interrupted"]
CaptureState = Literal["queued", "preflight", "dumping", "committing"] | Ended
RestoreState = (
    Literal["queued", "preflight", "preparing", "restoring", "filling", "releasing"] | Ended
)
State = CaptureState | RestoreState

ENDED: Final[frozenset[State]] = frozenset({"done", "failed", "cancelled", "interrupted"})

_BROKEN_OFF: Final[tuple[State, ...]] = ("failed", "cancelled", "interrupted")
_LAST: Final[dict[State, tuple[State, ...]]] = dict.fromkeys(ENDED, ())

CAPTURE_STATES: Final[Mapping[State, tuple[State, ...]]] = {
    "queued": ("preflight", *_BROKEN_OFF),
    "preflight": ("dumping", *_BROKEN_OFF),
    "dumping": ("committing", *_BROKEN_OFF),
    "committing": ("done", *_BROKEN_OFF),
    **_LAST,
}
"""Of a capture, what may follow. The source stands still from somewhere in `dumping` on."""

RESTORE_STATES: Final[Mapping[State, tuple[State, ...]]] = {
    "queued": ("preflight", *_BROKEN_OFF),
    "preflight": ("preparing", *_BROKEN_OFF),
    "preparing": ("restoring", *_BROKEN_OFF),
    "restoring": ("filling", *_BROKEN_OFF),
    "filling": ("releasing", *_BROKEN_OFF),
    # The tree is on its own from somewhere in it on: there is no way back.
    "releasing": ("done", "failed", "interrupted"),
    **_LAST,
}
"""Of a restore, what may follow. The processes run in `filling`."""


class Control:
    """Watches one capture or restore, and cancels it. All methods may be called from any thread.

    The work calls `enter` and `ends_with`; whoever watches it calls `cancel`.
    """

    def __init__(self, on_state: Callable[[State], None] | None = None) -> None:
        """Watch.

        Args:
            on_state: Called on threads of the work before it goes on in that state. An exception
                ends the work, in `committing` as well: nothing has the name then.
        """
        self._on_state = on_state
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._too_late = False
        self._end: Callable[[BaseException], None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether somebody has cancelled it in time."""
        return self._reason is not None

    def enter(self, state: State) -> None:
        """Go on in a state.

        Raises:
            Interrupted: It was cancelled.
        """
        self.check()
        if self._on_state is not None:
            self._on_state(state)
        self.check()

    def settle(self) -> None:
        """Go on with what cannot be undone: from now on `cancel` says that it is too late.

        Raises:
            Interrupted: It was cancelled before.
        """
        with self._lock:
            if self._reason is not None:
                raise Interrupted(self._reason)
            self._too_late = True

    def check(self) -> None:
        """Go on only if it was not cancelled.

        Raises:
            Interrupted: It was.
        """
        with self._lock:
            if self._reason is not None:
                raise Interrupted(self._reason)

    @contextlib.contextmanager
    def ends_with(self, end: Callable[[BaseException], None]) -> Iterator[None]:
        """Let `cancel` call this while the block runs; it must return soon, and be repeatable.

        Raises:
            Interrupted: It was cancelled before.
        """
        with self._lock:
            self._end = end
        self.check()
        try:
            yield
        finally:
            with self._lock:
                self._end = None

    def cancel(self, reason: str = "cancelled") -> bool:
        """End the work soon: it raises `Interrupted`. False if it is too late for that."""
        with self._lock:
            if self._too_late:
                return False
            self._reason = self._reason or reason
            end = self._end
        if end is not None:
            end(Interrupted(reason))
        return True
