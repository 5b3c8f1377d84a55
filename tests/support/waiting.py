"""Waiting for a condition, for tests that watch what they did not start themselves."""

from collections.abc import Callable

from snapstore.clock import SystemClock

POLL_S = 0.005
WAIT_S_MAX = 30.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return once the condition holds; fail after half a minute."""
    clock = SystemClock()
    deadline = clock.monotonic_s() + WAIT_S_MAX
    while not condition():
        assert clock.monotonic_s() < deadline, f"still waiting for: {what}"
        clock.sleep_s(POLL_S)
