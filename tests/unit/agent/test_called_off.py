"""What clients cancelled before it came: remembered for each user apart, and not for ever."""

from snapagent.server.called_off import IDS_MAX, USERS_MAX, CalledOff


def test_it_is_taken_once_and_by_its_user() -> None:
    called = CalledOff()
    called.add(1, "a")
    called.add(1, "a")
    assert not called.take(2, "a")
    assert called.take(1, "a")
    assert not called.take(1, "a")


def test_it_is_bounded() -> None:
    called = CalledOff()
    called.add(0, "kept")
    for number in range(2 * IDS_MAX):
        called.add(1, str(number))
    assert not called.take(1, str(IDS_MAX - 1))
    assert called.take(1, str(IDS_MAX))
    assert called.take(0, "kept")
    for uid in range(2, 2 * USERS_MAX):
        called.add(uid, "x")
    assert not called.take(1, str(2 * IDS_MAX - 1))
