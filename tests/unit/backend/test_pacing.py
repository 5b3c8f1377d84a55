"""One pace for all: slower when the server asks for it, back to nothing when it answers again."""

from concurrent.futures import ThreadPoolExecutor

from snapstore.backend.pacing import Pacer
from snapstore.testing.clock import ManualClock


def test_nobody_waits_until_somebody_complains() -> None:
    clock = ManualClock()
    pacer = Pacer(clock)
    for _ in range(10):
        pacer.wait()
        pacer.answered()
    assert clock.slept_s == []
    assert pacer.interval_s == 0


def test_starts_are_spread_whatever_the_thread() -> None:
    clock = ManualClock()
    pacer = Pacer(clock)
    for _ in range(3):
        pacer.slow_down()
    interval_s = pacer.interval_s
    with ThreadPoolExecutor(4) as executor:
        for future in [executor.submit(pacer.wait) for _ in range(11)]:
            future.result()
    # The first goes at once, and the others each an interval later at the earliest.
    assert clock.monotonic_s() >= 10 * interval_s * 0.999


def test_complaints_double_it_up_to_a_limit_and_answers_end_it() -> None:
    pacer = Pacer(ManualClock())
    seen = []
    for _ in range(20):
        pacer.slow_down()
        seen.append(pacer.interval_s)
    assert seen[1] == 2 * seen[0]
    assert seen[-1] == seen[-2] == 2.0
    answers = 0
    while pacer.interval_s:
        pacer.answered()
        answers += 1
    assert 30 < answers < 100
