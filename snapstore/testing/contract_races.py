"""Checks of the contract: several clients at once, lost replies, and what each of them sees."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from snapstore.backend import open_backend
from snapstore.backend.base import Backend, ObjectKind
from snapstore.errors import ObjectExists, ObjectNotFound, TransientBackendError
from snapstore.testing.contract_base import Session, check, collect, expect, expect_error
from snapstore.testing.contract_objects import read
from snapstore.testing.faults import Fault, FaultyBackend
from snapstore.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.queues import SimpleQueue
    from multiprocessing.synchronize import Barrier

__all__ = ["CHECKS"]

_WRITERS = 8
_ROUNDS = 5
_TRIES = 3
_PATIENCE_S = 60.0

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@check()
def what_is_written_is_seen_by_all(session: Session) -> None:
    """Whatever a client believed before, it sees every `put_new` that returned (S1, S6)."""
    writer, reader = session.open(), session.open()
    for number in range(1, 4):
        for kind, name in (
            (ObjectKind.REF, session.ref(number)),
            (ObjectKind.PACK, session.pack()),
        ):
            with expect_error(ObjectNotFound, "stat before the write"):
                reader.stat(kind, name)
            writer.put_new(kind, name, [b"seen"])
            expect(reader.stat(kind, name).size_bytes == len(b"seen"), "wrong size")
            expect(read(reader, kind, name) == b"seen", "wrong bytes")
            with expect_error(ObjectNotFound, "stat of another name"):
                reader.stat(ObjectKind.REF, session.ref(number + 1))


@check()
def what_is_deleted_is_gone_for_all(session: Session) -> None:
    """Whatever a client believed before, a deleted object is absent, and its name is free."""
    writer, reader = session.open(), session.open()
    for _ in range(3):
        name = session.ref()
        writer.put_new(ObjectKind.REF, name, [b"there"])
        reader.stat(ObjectKind.REF, name)
        list(reader.list(ObjectKind.REF, name))
        writer.delete(ObjectKind.REF, name)
        with expect_error(ObjectNotFound, "stat of a deleted object"):
            reader.stat(ObjectKind.REF, name)
        writer.put_new(ObjectKind.REF, name, [b"again"])
        reader.delete(ObjectKind.REF, name)
        with expect_error(ObjectNotFound, "stat of a deleted object"):
            writer.stat(ObjectKind.REF, name)


@check()
def one_of_many_threads_wins(session: Session) -> None:
    """Of concurrent writers of different bytes exactly one succeeds (S3), here 8 threads."""
    handles = [session.open() for _ in range(_WRITERS)]
    for _ in range(_ROUNDS):
        name = session.ref()
        bodies = [session.data(500 + number) for number in range(_WRITERS)]
        wins = _put_at_once(handles, ObjectKind.REF, name, bodies)
        expect(sum(wins) == 1, f"{sum(wins)} of {_WRITERS} writers of different bytes succeeded")
        winner = bodies[wins.index(True)]
        expect(read(session.open(), ObjectKind.REF, name) == winner, "a loser's bytes are there")
        session.open().delete(ObjectKind.REF, name)


@check()
def the_same_bytes_from_many_threads_succeed(session: Session) -> None:
    """Concurrent writers of the same bytes all succeed."""
    handles = [session.open() for _ in range(_WRITERS)]
    for kind, name in ((ObjectKind.PACK, session.pack()), (ObjectKind.REF, session.ref())):
        data = session.data(64 * KIB)
        wins = _put_at_once(handles, kind, name, [data] * _WRITERS)
        expect(all(wins), f"{sum(wins)} of {_WRITERS} writers of the same bytes succeeded")
        expect(read(session.open(), kind, name) == data, "other bytes came back")


@check("url")
def one_of_many_processes_wins(session: Session) -> None:
    """Of concurrent writers of different bytes exactly one succeeds (S3), here 8 processes."""
    url = session.subject.url
    assert url is not None
    # Fresh processes, without this one's threads and locks, that need not import all this again.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    barrier, outcomes = context.Barrier(_WRITERS), context.SimpleQueue()
    names = [session.ref(number) for number in range(1, _ROUNDS + 1)]
    bodies = [session.data(100 + number) for number in range(_WRITERS)]
    processes = [
        context.Process(target=_write_all, args=(url, names, body, barrier, outcomes))
        for body in bodies
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_PATIENCE_S)
        expect(process.exitcode == 0, f"a writer ended with {process.exitcode}")
    won = [outcomes.get() for _ in processes]
    for number, name in enumerate(names):
        winners = [body for body, wins in won if wins[number]]
        expect(len(winners) == 1, f"{len(winners)} writers of different bytes succeeded")
        expect(read(session.open(), ObjectKind.REF, name) == winners[0], "a loser's bytes")


@check()
def readers_see_all_or_nothing(session: Session) -> None:
    """While objects are written, each is absent or whole for everybody (S2)."""
    names = [session.pack() for _ in range(20)]
    data = session.data(200 * KIB)
    done = threading.Event()

    def look(backend: Backend) -> int:
        seen = 0
        while not done.is_set():
            for name in names:
                try:
                    found = read(backend, ObjectKind.PACK, name)
                except ObjectNotFound:
                    continue
                expect(found == data, f"{len(found)} of {len(data)} bytes were seen")
                seen += 1
        return seen

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(look, session.open()) for _ in range(3)]
        try:
            writer = session.open()
            for name in names:
                writer.put_new(ObjectKind.PACK, name, [data])
        finally:
            done.set()
        for reader in readers:
            reader.result()


@check()
def many_threads_share_a_handle(session: Session) -> None:
    """All verbs may be called from any number of threads at once."""
    backend = session.open()
    names = [session.pack() for _ in range(100)]
    bodies = {name: session.data(2000) for name in names}

    def use(name: str) -> bool:
        backend.put_new(ObjectKind.PACK, name, [bodies[name]])
        into = bytearray(1000)
        for offset in (0, 1000, 500):
            backend.get_range(ObjectKind.PACK, name, offset, memoryview(into))
            expect(into == bodies[name][offset : offset + 1000], "wrong bytes")
        return backend.stat(ObjectKind.PACK, name).size_bytes == len(bodies[name])

    expect(all(_at_once(use, names)), "wrong sizes")
    listed = {info.name for info in backend.list(ObjectKind.PACK)}
    expect(listed.issuperset(names), "objects are missing from a listing")
    _at_once(lambda name: backend.delete(ObjectKind.PACK, name), names)


@check()
def a_write_without_reply_may_be_repeated(session: Session) -> None:
    """After a lost reply the same write succeeds, and the object is there once (S4)."""
    inner = session.open()
    for kind, name in session.one_of_each().items():
        data = session.data(300)
        backend = FaultyBackend(inner, {0: Fault.LOST_REPLY})
        with expect_error(TransientBackendError, "a lost reply"):
            backend.put_new(kind, name, [data])
        backend.put_new(kind, name, [data])
        with expect_error(ObjectExists, "another writer's bytes after a lost reply"):
            session.open().put_new(kind, name, [data + b"x"])
        expect(read(session.open(), kind, name) == data, "other bytes came back")


@check()
def a_listing_survives_changes(session: Session) -> None:
    """A listing goes on while objects come and go, and gives those that stayed."""
    backend = session.open()
    stays = [session.pack() for _ in range(10)]
    goes = [session.pack() for _ in range(10)]
    for name in (*stays, *goes):
        backend.put_new(ObjectKind.PACK, name, [b"x"])
    listing: Iterator[str] = (info.name for info in backend.list(ObjectKind.PACK))
    seen = {next(listing)}
    for name in goes:
        backend.delete(ObjectKind.PACK, name)
    backend.put_new(ObjectKind.PACK, session.pack(), [b"x"])
    seen.update(listing)
    expect(seen.issuperset(stays), "objects that were there all the time are missing")


def _put_at_once(
    handles: Sequence[Backend], kind: ObjectKind, name: str, bodies: Sequence[bytes]
) -> list[bool]:
    """Let each body be written by a thread and a client of its own; tell who succeeded."""
    barrier = threading.Barrier(len(bodies), timeout=_PATIENCE_S)

    def put(number: int) -> bool:
        barrier.wait()
        return _wins(handles[number], kind, name, bodies[number])

    return _at_once(put, range(len(bodies)))


def _at_once(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    with ThreadPoolExecutor(_WRITERS) as pool:
        return list(pool.map(work, items))


def _wins(backend: Backend, kind: ObjectKind, name: str, body: bytes) -> bool:
    """Write once; tell whether these are the bytes that are there.

    A storage that so many ask at once may be too busy to answer, and that is no answer to the
    question who won. The same write again is one: it succeeds for whoever had won (S4).
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(TransientBackendError):
            return _wins_now(backend, kind, name, body)
    return _wins_now(backend, kind, name, body)


def _wins_now(backend: Backend, kind: ObjectKind, name: str, body: bytes) -> bool:
    try:
        backend.put_new(kind, name, [body])
    except ObjectExists:
        return False
    return True


def _write_all(
    url: str,
    names: Sequence[str],
    body: bytes,
    barrier: Barrier,
    outcomes: SimpleQueue[tuple[bytes, list[bool]]],
) -> None:
    """Run in a process of its own: race for each name in turn."""
    backend = open_backend(url)
    wins = []
    for name in names:
        barrier.wait(_PATIENCE_S)
        wins.append(_wins(backend, ObjectKind.REF, name, body))
    backend.close()
    outcomes.put((body, wins))


CHECKS = collect(globals())
