"""Waiting for a condition, for tests that watch what they did not start themselves."""

from collections.abc import Callable

from snapagent.precedence import Precedence
from snapstore.clock import SystemClock

POLL_S = 0.005
WAIT_S_MAX = 30.0


def is_held_up(precedence: Precedence) -> bool:
    """Tell whether who gives way has to wait now: only then it asks whether to give up."""
    asked: list[bool] = []

    def is_over() -> bool:
        asked.append(True)
        return True

    precedence.give_way(is_over)
    return bool(asked)


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = WAIT_S_MAX) -> None:
    """Return once the condition holds.

    Raises:
        TimeoutError: It did not in time.
    """
    clock = SystemClock()
    deadline = clock.monotonic_s() + seconds
    while not condition():
        if clock.monotonic_s() > deadline:
            raise TimeoutError(f"waited {seconds} s in vain until {what}")
        clock.sleep_s(POLL_S)
