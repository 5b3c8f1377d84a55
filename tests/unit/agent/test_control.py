"""State machines of captures and restores, and how somebody cancels them."""

import threading

import pytest

from snapagent.control import CAPTURE_STATES, ENDED, RESTORE_STATES, Control
from snapstore.errors import Interrupted


@pytest.mark.parametrize("states", [CAPTURE_STATES, RESTORE_STATES])
def test_every_state_can_be_reached_and_ends(states: dict[str, tuple[str, ...]]) -> None:
    reached = {"queued"}
    while more := {after for state in reached for after in states[state]} - reached:
        reached |= more
    assert reached == set(states)
    for state, after in states.items():
        assert (not after) == (state in ENDED)
        assert not after or {"failed", "interrupted"} <= set(after)


def test_states_are_told_in_order() -> None:
    told: list[str] = []
    control = Control(told.append)
    control.enter("preflight")
    control.enter("dumping")
    assert told == ["preflight", "dumping"]


def test_cancelled_work_goes_no_further() -> None:
    told: list[str] = []
    control = Control(told.append)
    assert control.cancel("enough")
    with pytest.raises(Interrupted, match="enough"):
        control.enter("preflight")
    assert not told


def test_cancel_ends_what_is_under_way() -> None:
    control = Control()
    ended: list[BaseException] = []
    with control.ends_with(ended.append):
        thread = threading.Thread(target=control.cancel)
        thread.start()
        thread.join()
        assert isinstance(ended[0], Interrupted)
    assert control.cancel()
    assert len(ended) == 1


def test_too_late_to_cancel() -> None:
    control = Control()
    control.settle()
    assert not control.cancel()
    assert not control.cancelled
    control.check()


def test_what_was_cancelled_does_not_settle() -> None:
    control = Control()
    control.cancel()
    with pytest.raises(Interrupted):
        control.settle()
