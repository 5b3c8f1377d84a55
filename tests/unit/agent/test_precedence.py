"""Who goes first, and that nobody waits for ever."""

import threading

from snapagent.precedence import Precedence
from snapstore.testing.clock import ManualClock
from tests.support.waiting import is_held_up


def test_others_wait_for_the_last_one() -> None:
    precedence = Precedence(clock=ManualClock())
    assert not is_held_up(precedence)
    with precedence.taken():
        with precedence.taken():
            assert is_held_up(precedence)
        assert is_held_up(precedence)
    assert not is_held_up(precedence)


def test_where_there_is_always_somebody_all_work_in_turn() -> None:
    clock = ManualClock()
    precedence = Precedence(ahead_s=3, behind_s=2, clock=clock)
    clock.advance_s(100)
    seen = []
    with precedence.taken():
        for _ in range(10):
            seen.append(is_held_up(precedence))
            clock.advance_s(1)
    assert seen == [True, True, True, False, False] * 2
    with precedence.taken():
        assert is_held_up(precedence), "it begins anew"


def test_who_waits_goes_on_when_it_is_free() -> None:
    precedence = Precedence(clock=ManualClock())
    waits = threading.Event()

    def looks() -> bool:
        waits.set()
        return False

    waiter = threading.Thread(target=precedence.give_way, args=(looks,))
    with precedence.taken():
        waiter.start()
        assert waits.wait(30)
        assert waiter.is_alive()
    waiter.join(30)
    assert not waiter.is_alive()
