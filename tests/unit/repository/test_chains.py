"""Chains: the highest number is the state, whoever writes the next one first has decided."""

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.memory import MemoryBackend, MemoryObjects
from snapstore.backend.retry import RetryingBackend
from snapstore.errors import LimitExceeded, RefConflict, TransientBackendError
from snapstore.repository.chains import (
    append_generation,
    head_number,
    read_head,
    read_history,
)
from snapstore.testing.clock import ManualClock
from snapstore.testing.faults import Fault, FaultyBackend
from tests.unit.repository.parts import ForgetfulBackend

CHAIN = "team/model/@v1"


def append(backend: Backend, body: bytes, after: int) -> int:
    return append_generation(backend, ObjectKind.REF, CHAIN, body, after=after)


def chain_of(count: int, backend: MemoryBackend | None = None) -> MemoryBackend:
    backend = backend or MemoryBackend()
    for number in range(count):
        append(backend, b"body %d" % (number + 1), number)
    return backend


def test_a_chain_that_nobody_wrote() -> None:
    backend = MemoryBackend()
    assert head_number(backend, ObjectKind.REF, CHAIN) == 0
    assert read_head(backend, ObjectKind.REF, CHAIN) is None
    assert read_history(backend, ObjectKind.REF, CHAIN) == []


def test_numbers_follow_one_another() -> None:
    """Proves: C3, for fresh listings."""
    backend = chain_of(12)
    head = read_head(backend, ObjectKind.REF, CHAIN)
    assert head is not None
    assert (head.number, head.body) == (12, b"body 12")
    history = read_history(backend, ObjectKind.REF, CHAIN)
    assert [(one.number, one.body) for one in history] == [
        (number, b"body %d" % number) for number in range(1, 13)
    ]


@given(st.integers(0, 12), st.data())
def test_a_stale_listing_changes_nothing(count: int, data: st.DataObject) -> None:
    """Goal: the state of a chain is its highest number, also if listings lag behind. Proves: C3.

    Method: hide any of the newest generations from listings, never from reads by name.
    """
    backend = ForgetfulBackend()
    chain_of(count, backend)
    hidden = data.draw(st.integers(0, count))
    names = [f"{CHAIN}/{number:08d}" for number in range(1, count + 1)]
    backend.unnoticed.update(names[count - hidden :])
    assert head_number(backend, ObjectKind.REF, CHAIN) == count
    assert append(backend, b"next", count) == count + 1
    head = read_head(backend, ObjectKind.REF, CHAIN)
    assert head is not None
    assert (head.number, head.body) == (count + 1, b"next")


def test_a_listing_that_shows_what_is_gone_is_no_crash() -> None:
    """A generation may be listed and gone: then the chain has no head that can be read."""
    backend = ForgetfulBackend()
    chain_of(2, backend)
    name = f"{CHAIN}/00000002"
    backend.ghosts[ObjectKind.REF] = [backend.stat(ObjectKind.REF, name)]
    backend.delete(ObjectKind.REF, name)
    assert head_number(backend, ObjectKind.REF, CHAIN) == 2
    assert read_head(backend, ObjectKind.REF, CHAIN) is None
    assert [one.number for one in read_history(backend, ObjectKind.REF, CHAIN)] == [1]


def test_history_goes_on_behind_generations_that_were_removed() -> None:
    backend = chain_of(5)
    for number in (1, 2):
        backend.delete(ObjectKind.REF, f"{CHAIN}/{number:08d}")
    assert [one.number for one in read_history(backend, ObjectKind.REF, CHAIN)] == [3, 4, 5]
    assert append(backend, b"six", 5) == 6


def test_the_second_writer_of_a_number_loses() -> None:
    """Proves: C1, C2."""
    backend = chain_of(3)
    assert append(backend, b"first", 3) == 4
    with pytest.raises(RefConflict) as caught:
        append(backend, b"second", 3)
    assert caught.value.retryable
    head = read_head(backend, ObjectKind.REF, CHAIN)
    assert head is not None
    assert head.body == b"first"


def test_ones_own_body_is_no_conflict() -> None:
    """Bodies carry a nonce, so equal bytes are one's own. Proves: C4."""
    backend = chain_of(3)
    assert append(backend, b"mine", 3) == 4
    assert append(backend, b"mine", 3) == 4


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.FAIL_BEFORE])
def test_a_lost_reply_is_success_when_tried_again(fault: Fault) -> None:
    """Goal: whoever does not learn whether they have won finds out. Proves: C4.

    Method: the reply to `put_new` is lost, or the request. Through the retrying backend the append
    succeeds; without it, it fails, and appending the same body again succeeds in both cases.
    """
    faulty = FaultyBackend(MemoryBackend(), {0: fault})
    backend = RetryingBackend(faulty, rng=random.Random(1), clock=ManualClock())
    assert append(backend, b"mine", 0) == 1
    bare = FaultyBackend(MemoryBackend(), {0: fault})
    with pytest.raises(TransientBackendError):
        append(bare, b"mine", 0)
    assert append(bare, b"mine", 0) == 1


def test_a_full_chain_refuses_writes() -> None:
    backend = MemoryBackend()
    append(backend, b"last", 99_999_998)
    assert head_number(backend, ObjectKind.REF, CHAIN) == 99_999_999
    with pytest.raises(LimitExceeded, match="full"):
        append(backend, b"one more", 99_999_999)


def test_chains_whose_names_begin_alike_are_apart() -> None:
    backend = chain_of(2)
    for other in ("team/model/@v1.1", "team/model/@v", "team/@v1", "team/model/x/@v1"):
        append_generation(backend, ObjectKind.REF, other, b"x", after=0)
        assert head_number(backend, ObjectKind.REF, other) == 1
    assert head_number(backend, ObjectKind.REF, CHAIN) == 2


def test_threads_that_append_at_once_leave_one_history() -> None:
    """Goal: of several writers of one number exactly one wins, and no number is lost. Proves: C1.

    Method: eight threads append 25 generations each, reading the head again after each conflict.
    """
    objects = MemoryObjects()
    start = threading.Barrier(8)
    won: list[tuple[int, bytes]] = []

    def work(writer: int) -> None:
        backend = MemoryBackend(objects)
        start.wait()
        for turn in range(25):
            body = b"%d/%d" % (writer, turn)
            while True:
                newest = head_number(backend, ObjectKind.REF, CHAIN)
                try:
                    won.append((append(backend, body, newest), body))
                except RefConflict:
                    continue
                break

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = read_history(MemoryBackend(objects), ObjectKind.REF, CHAIN)
    assert [(one.number, one.body) for one in history] == sorted(won)
    assert [one.number for one in history] == list(range(1, 201))
