"""Many share, or one owns; who waits to own goes first."""

import threading

import pytest

from snapagent.lazy.shared_lock import SharedLock

WAIT_S = 10


class Holder:
    """A thread that holds a lock until it is told to let go."""

    def __init__(self, lock: SharedLock, how: str) -> None:
        self.has_it = threading.Event()
        self._let_go = threading.Event()

        def hold() -> None:
            with getattr(lock, how)():
                self.has_it.set()
                assert self._let_go.wait(WAIT_S)

        self._thread = threading.Thread(target=hold)
        self._thread.start()

    def let_go(self) -> None:
        self._let_go.set()
        self._thread.join()


def wait_until_somebody_waits(lock: SharedLock) -> None:
    while not lock._waiting:
        pass


def test_many_share() -> None:
    lock = SharedLock()
    holders = [Holder(lock, "shared") for _ in range(3)]
    assert all(holder.has_it.wait(WAIT_S) for holder in holders)
    for holder in holders:
        holder.let_go()


def test_an_owner_goes_before_new_sharers() -> None:
    lock = SharedLock()
    first, second = Holder(lock, "shared"), Holder(lock, "shared")
    assert first.has_it.wait(WAIT_S)
    assert second.has_it.wait(WAIT_S)
    owner = Holder(lock, "owned")
    wait_until_somebody_waits(lock)
    late = Holder(lock, "shared")
    first.let_go()
    assert not owner.has_it.is_set()
    assert not late.has_it.is_set()
    second.let_go()
    assert owner.has_it.wait(WAIT_S)
    assert not late.has_it.is_set()
    owner.let_go()
    assert late.has_it.wait(WAIT_S)
    late.let_go()


def test_it_is_free_after_an_error() -> None:
    lock = SharedLock()
    for how in (lock.shared, lock.owned, lock.shared, lock.owned):
        with pytest.raises(ZeroDivisionError), how():
            _ = 1 / 0
    owner = Holder(lock, "owned")
    assert owner.has_it.wait(WAIT_S)
    owner.let_go()
