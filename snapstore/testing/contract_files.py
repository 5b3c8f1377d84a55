"""Checks of the contract for backends on files: the order of calls, and death between them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING

from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.drafts import begin_draft
from snapstore.backend.layout import TEMPORARIES
from snapstore.errors import ObjectNotFound
from snapstore.testing.contract_base import Session, check, collect, expect
from snapstore.testing.contract_objects import read
from snapstore.testing.faults import FileCall, KillableFiles, Killed
from snapstore.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapstore.backend.files import FileCalls

__all__ = ["CHECKS"]

_CALLS_MAX = 200


@check("files")
def bytes_are_durable_before_their_name(session: Session) -> None:
    """The bytes are synced, and the file closed, before the object has its name (S1)."""
    with _traced(session) as (backend, files):
        for kind, name in session.one_of_each().items():
            files.calls.clear()
            backend.put_new(kind, name, [session.data(10 * KIB)])
            link = _links(files.calls)[0]
            order = [c.call for c in files.calls[:link] if c.path == files.calls[link].path]
            last_write = len(order) - order[::-1].index("writev")
            expect(order[0] == "open", f"{kind}: {order}")
            expect("fsync" in order[last_write:], f"{kind} is not synced: {order}")
            expect(order[-1] == "close", f"{kind} is not closed: {order}")


@check("files")
def a_draft_is_durable_before_its_name(session: Session) -> None:
    """An object that is written part by part is synced and closed before it has its name (S1)."""
    with _traced(session) as (backend, files):
        name, data = session.pack(), session.data(10 * KIB)
        _put_draft(backend, name, data)
        link = _links(files.calls)[0]
        order = [c.call for c in files.calls[:link] if c.path == files.calls[link].path]
        last_write = len(order) - order[::-1].index("pwritev")
        expect("fsync" in order[last_write:], f"a draft is not synced: {order}")
        expect(order[-1] == "close", f"a draft is not closed: {order}")
        folder = files.calls[link].target.rpartition("/")[0]
        synced = {c.path for c in files.calls[link:] if c.call == "fsync"}
        expect(folder in synced, f"{folder} is not synced after a draft was published")
    expect(read(session.open(), ObjectKind.PACK, name) == data, "a draft has other bytes")


@check("files")
def names_are_durable_before_return(session: Session) -> None:
    """The folder is synced after the object has its name, and so are all new folders above (S1)."""
    with _traced(session) as (backend, files):
        for kind, name in session.one_of_each().items():
            files.calls.clear()
            backend.put_new(kind, name, [b"x"])
            link = _links(files.calls)[-1]
            target = files.calls[link].target
            made = [c.path for c in files.calls if c.call == "mkdir"]
            synced = {c.path for c in files.calls[link:] if c.call == "fsync"}
            for path in (target, *made):
                folder = path.rpartition("/")[0]
                expect(folder in synced, f"{kind}: {folder} is not synced after {path} was made")


@check("files")
def a_name_found_is_made_durable(session: Session) -> None:
    """An object that another writer left is durable before `put_new` says that it is there (S1)."""
    for kind, name in session.one_of_each().items():
        session.open().put_new(kind, name, [b"x"])
        with _traced(session) as (backend, files):
            backend.put_new(kind, name, [b"x"])
            synced = {c.path for c in files.calls if c.call == "fsync"}
            key_folders = [path for path in synced if f"/{kind.value}" in path]
            expect(key_folders, f"{kind}: no folder was synced, only {synced}")


@check("files")
def readers_write_nothing(session: Session) -> None:
    """Reading, listing and looking make no file, no folder and no name."""
    name = session.pack()
    session.open().put_new(ObjectKind.PACK, name, [b"x"])
    with _traced(session) as (backend, files):
        read(backend, ObjectKind.PACK, name)
        for kind in ObjectKind:
            list(backend.list(kind))
        with contextlib.suppress(ObjectNotFound):
            backend.stat(ObjectKind.REF, session.ref())
        writes = {"writev", "pwritev", "link", "unlink", "mkdir", "fsync"}
        expect(not writes.intersection(c.call for c in files.calls), "a reader wrote")


@check("files")
def a_chain_is_listed_alone(session: Session) -> None:
    """Listing below a folder looks at nothing but that folder."""
    name = session.ref()
    session.open().put_new(ObjectKind.REF, name, [b"x"])
    prefix = name.rpartition("/")[0] + "/"
    with _traced(session) as (backend, files):
        expect([info.name for info in backend.list(ObjectKind.REF, prefix)] == [name], "not listed")
        folders = [c.path for c in files.calls if c.call == "listdir"]
        expect(len(folders) == 1, f"listing {prefix} looked at {folders}")
        expect(folders[0].endswith("/" + prefix.rstrip("/")), f"it looked at {folders}")


@check("files")
def death_anywhere_leaves_all_or_nothing(session: Session) -> None:
    """A writer that dies before any of its file calls leaves the whole object or none (S4)."""
    for kind in (ObjectKind.PACK, ObjectKind.REF):
        for calls in itertools.count():
            expect(calls < _CALLS_MAX, "put_new never ends")
            name = session.pack() if kind is ObjectKind.PACK else _new_ref(session)
            data = session.data(3 * KIB)
            put = functools.partial(_put_pieces, kind=kind, name=name, data=data)
            died = _dies(session, put, calls)
            survivor = session.open()
            try:
                expect(read(survivor, kind, name) == data, f"part of a {kind} after {calls} calls")
            except ObjectNotFound:
                expect(died, f"a {kind} is absent though put_new returned")
            survivor.put_new(kind, name, [data])
            expect(read(session.open(), kind, name) == data, f"{kind}: not repaired by a retry")
            if not died:
                break


@check("files")
def a_draft_that_dies_leaves_all_or_nothing(session: Session) -> None:
    """Who dies before any file call of a draft leaves the whole object or none (S2, S4)."""
    for calls in itertools.count():
        expect(calls < _CALLS_MAX, "a draft never ends")
        name, data = session.pack(), session.data(3 * KIB)
        died = _dies(session, functools.partial(_put_draft, name=name, data=data), calls)
        survivor = session.open()
        try:
            expect(read(survivor, ObjectKind.PACK, name) == data, f"part, after {calls} calls")
        except ObjectNotFound:
            expect(died, "a draft is absent though it was published")
        survivor.put_new(ObjectKind.PACK, name, [data])
        expect(read(session.open(), ObjectKind.PACK, name) == data, "not repaired by a retry")
        if not died:
            break


def _put_draft(backend: Backend, name: str, data: bytes) -> None:
    """Write an object in two parts, the second first."""
    draft = begin_draft(backend)
    view = memoryview(data)
    try:
        draft.write(KIB, [view[KIB:]])
        draft.write(0, [view[:100], view[100:KIB]])
        draft.publish(ObjectKind.PACK, name)
    finally:
        draft.discard()


def _put_pieces(backend: Backend, kind: ObjectKind, name: str, data: bytes) -> None:
    backend.put_new(kind, name, [data[:100], data[100:]])


def _new_ref(session: Session) -> str:
    """A ref in folders of its own, so that their making is among the calls."""
    return session.name(ObjectKind.REF, f"contract/{session.digest()}/@t/00000001")


def _dies(session: Session, put: Callable[[Backend], None], calls: int) -> bool:
    """Write something until that many calls were made; tells whether that was its end."""
    with _traced(session) as (backend, files):
        files.arm(calls)
        try:
            put(backend)
        except Killed:
            return True
        finally:
            files.disarm()
            _sweep(files)
    return False


def _sweep(files: KillableFiles) -> None:
    """Remove the temporary files that a writer left when it died."""
    for path in {call.path for call in files.calls if f"/{TEMPORARIES}/put-" in call.path}:
        with contextlib.suppress(OSError):
            files.unlink(path)


@contextlib.contextmanager
def _traced(session: Session) -> Iterator[tuple[Backend, KillableFiles]]:
    wrapped: list[KillableFiles] = []

    def wrap(inner: FileCalls) -> KillableFiles:
        wrapped.append(KillableFiles(inner))
        return wrapped[0]

    backend = session.open_on(wrap)
    files = wrapped[0]
    files.calls.clear()
    try:
        yield backend, files
    finally:
        backend.close()
        files.abandon()


def _links(calls: list[FileCall]) -> list[int]:
    """Where among the calls `link` was tried; the last time it worked."""
    return [number for number, call in enumerate(calls) if call.call == "link"]


CHECKS = collect(globals())
