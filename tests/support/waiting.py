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


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return once the condition holds; fail after half a minute."""
    clock = SystemClock()
    deadline = clock.monotonic_s() + WAIT_S_MAX
    while not condition():
        assert clock.monotonic_s() < deadline, f"still waiting for: {what}"
        clock.sleep_s(POLL_S)
