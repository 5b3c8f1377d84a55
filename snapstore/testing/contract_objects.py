"""Checks of the contract: what is stored is what is read, under its own name and no other."""

from __future__ import annotations

import array
import dataclasses

from snapstore.backend.base import CONTENT_NAMED, Backend, ObjectInfo, ObjectKind
from snapstore.errors import (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    RangeNotSatisfiable,
    UsageError,
)
from snapstore.testing.contract_base import Session, check, collect, expect, expect_error
from snapstore.units import KIB, MIB, BytesLike

__all__ = ["CHECKS", "HOSTILE_NAMES", "HOSTILE_PREFIXES", "read"]

_PIECES_MANY = 3000
_ID = "0123456789abcdef" * 4

HOSTILE_NAMES: tuple[str, ...] = (
    ".",
    "..",
    "/",
    "../" + _ID,
    "/etc/passwd",
    "a\0b",
    _ID[:-1],
    _ID + "0",
    _ID.upper(),
    _ID + "\n",
    _ID[:-1] + "٣",
    f"{_ID[:2]}/{_ID}",
    f"{_ID}/1",
    f"{_ID}/00000000",
    f"{_ID}/000000001",
    f"{_ID}/0000000a",
    f"{_ID}/../{_ID}/00000001",
    "team/../x/@v1/00000001",
    "team//x/@v1/00000001",
    "/team/x/@v1/00000001",
    "team/x/@v1/00000001/",
    "team/x/v1/00000001",
    "team/x/@v1/0000001",
    "team/x/@../00000001",
    "team/.x/@v1/00000001",
    "team/x./@v1/00000001",
    "team/@x/@v1/00000001",
    "team/x/@v1/@v2/00000001",
    "té/@v1/00000001",
    "team/\udc80/@v1/00000001",
    "n" * 256 + "/@v1/00000001",
    "n/@" + "t" * 129 + "/00000001",
    "a/" * 200 + "@v1/00000001",
    "refs/" + _ID + "/00000001",
    "packs/../" + _ID + "/00000001",
    "word/../../snapstore.json",
    "word/a/b",
    "Word/a",
    "word/" + "n" * 129,
    "n" * 100_000,
)
"""Names that no kind has, except that some would be the config's if names were joined blindly."""

HOSTILE_PREFIXES: tuple[str, ...] = (
    "..",
    "../",
    "a/../",
    "/",
    "/etc",
    "a//",
    "a\0",
    "é",
    "n" * 999,
)


def read(backend: Backend, kind: ObjectKind, name: str) -> bytes:
    """Read a whole object."""
    into = bytearray(backend.stat(kind, name).size_bytes)
    backend.get_range(kind, name, 0, memoryview(into))
    return bytes(into)


# --- writing ---


@check()
def stored_bytes_come_back(session: Session) -> None:
    """An object holds the concatenated pieces, whatever they are made of."""
    backend, name = session.open(), session.pack()
    words = array.array("Q", [1, 2, 3])
    pieces: list[BytesLike] = [b"", session.data(10), bytearray(session.data(4096)), b""]
    pieces.append(memoryview(words).cast("B"))
    backend.put_new(ObjectKind.PACK, name, pieces)
    expect(read(backend, ObjectKind.PACK, name) == b"".join(pieces), "other bytes came back")


@check()
def every_kind_is_stored(session: Session) -> None:
    """Objects of every kind are stored, read, listed and deleted alike."""
    backend = session.open()
    for kind, name in session.one_of_each().items():
        data = session.data(100)
        backend.put_new(kind, name, [data])
        expect(read(backend, kind, name) == data, f"other bytes of {kind} came back")
        expect(name in _names(backend, kind), f"a {kind} is not listed")
        backend.delete(kind, name)
        with expect_error(ObjectNotFound, f"stat of a deleted {kind}"):
            backend.stat(kind, name)


@check()
def empty_objects_exist(session: Session) -> None:
    """An object may be empty: of no pieces, or of empty ones."""
    backend = session.open()
    none, empty = session.pack(), session.ref()
    backend.put_new(ObjectKind.PACK, none, [])
    backend.put_new(ObjectKind.REF, empty, [b"", b""])
    expect(read(backend, ObjectKind.PACK, none) == b"", "bytes in an empty pack")
    expect(read(backend, ObjectKind.REF, empty) == b"", "bytes in an empty ref")
    with expect_error(ObjectExists, "other bytes for an empty object"):
        backend.put_new(ObjectKind.REF, empty, [b"x"])


@check()
def many_pieces_are_one_object(session: Session) -> None:
    """There may be more pieces than one system call takes."""
    backend, name = session.open(), session.pack()
    pieces = [session.data(session.rng.randrange(3) * 501) for _ in range(_PIECES_MANY)]
    backend.put_new(ObjectKind.PACK, name, pieces)
    expect(read(backend, ObjectKind.PACK, name) == b"".join(pieces), "other bytes came back")


@check()
def pieces_are_not_kept(session: Session) -> None:
    """The caller may reuse its buffers as soon as `put_new` has returned."""
    backend, name = session.open(), session.pack()
    data = session.data(64 * KIB)
    buffer = bytearray(data)
    backend.put_new(ObjectKind.PACK, name, [buffer])
    buffer[:] = bytes(len(buffer))
    expect(read(backend, ObjectKind.PACK, name) == data, "the object changed with the buffer")


@check()
def the_same_bytes_again_succeed(session: Session) -> None:
    """`put_new` may be repeated with the same bytes, by anybody, for every kind."""
    one, other = session.open(), session.open()
    for kind, name in session.one_of_each().items():
        data = session.data(3000)
        one.put_new(kind, name, [data])
        one.put_new(kind, name, [data[:7], data[7:]])
        other.put_new(kind, name, [data])
        expect(read(other, kind, name) == data, f"other bytes of {kind} came back")


@check()
def other_bytes_are_refused(session: Session) -> None:
    """A name taken by other bytes raises `ObjectExists` and keeps its bytes (S5)."""
    backend = session.open()
    data = session.data(MIB + 100)
    changed = bytearray(data)
    changed[-1] ^= 1
    for kind, name in session.one_of_each().items():
        backend.put_new(kind, name, [data])
        for body in (data + b"x", data[:-1], b"", changed):
            if body is changed and kind in CONTENT_NAMED:
                continue
            with expect_error(ObjectExists, f"other bytes for a {kind}"):
                backend.put_new(kind, name, [body])
        expect(read(backend, kind, name) == data, f"a refused write changed a {kind}")


@check()
def content_names_compare_lengths(session: Session) -> None:
    """Kinds named by content compare the length only, and keep what is there."""
    backend, name = session.open(), session.pack()
    data = session.data(5000)
    backend.put_new(ObjectKind.PACK, name, [data])
    backend.put_new(ObjectKind.PACK, name, [bytes(len(data))])
    expect(read(backend, ObjectKind.PACK, name) == data, "a pack was overwritten")


@check()
def the_config_is_written_once(session: Session) -> None:
    """The config is an object like others, of empty name; whoever is first has made the store."""
    backend = session.open()
    try:
        there = read(backend, ObjectKind.CONFIG, "")
    except ObjectNotFound:
        there = session.data(50)
        session.name(ObjectKind.CONFIG, "")
        backend.put_new(ObjectKind.CONFIG, "", [there])
    with expect_error(ObjectExists, "a second config"):
        backend.put_new(ObjectKind.CONFIG, "", [there + b"x"])
    backend.put_new(ObjectKind.CONFIG, "", [there])
    expect(read(session.open(), ObjectKind.CONFIG, "") == there, "the config changed")
    expect([info.name for info in backend.list(ObjectKind.CONFIG)] == [""], "config not listed")


# --- reading ---


@check()
def any_range_is_read(session: Session) -> None:
    """Every range of an object is read, into any part of a buffer, and nothing around it."""
    backend, name = session.open(), session.pack()
    data = session.data(MIB + 3)
    backend.put_new(ObjectKind.PACK, name, [data])
    ranges = [(session.rng.randrange(len(data)), session.rng.randrange(99_999)) for _ in range(50)]
    for offset, length in [(0, len(data)), (len(data) - 1, 1), (1, 4095), (4095, 2), *ranges]:
        want = data[offset : offset + length]
        buffer = bytearray(b"\xaa" * (len(want) + 20))
        backend.get_range(ObjectKind.PACK, name, offset, memoryview(buffer)[7 : 7 + len(want)])
        expect(buffer == b"\xaa" * 7 + want + b"\xaa" * 13, f"wrong bytes at {offset} + {length}")


@check()
def wide_buffers_are_filled(session: Session) -> None:
    """A buffer may have items of more than one byte."""
    backend, name = session.open(), session.pack()
    words = array.array("Q", range(1000))
    backend.put_new(ObjectKind.PACK, name, [words.tobytes()])
    into = array.array("Q", bytes(8 * len(words)))
    backend.get_range(ObjectKind.PACK, name, 0, memoryview(into))
    expect(into == words, "wrong words came back")


@check()
def ranges_beyond_the_end_are_refused(session: Session) -> None:
    """A range that the object does not hold raises `RangeNotSatisfiable`, however large."""
    backend = session.open()
    for kind, name in ((ObjectKind.PACK, session.pack()), (ObjectKind.REF, session.ref())):
        backend.put_new(kind, name, [session.data(1000)])
        for offset, length in (
            (0, 1001),
            (999, 2),
            (1000, 1),
            (5000, 1),
            (2**63 - 1, 1),
            (2**64, 9),
        ):
            with expect_error(RangeNotSatisfiable, f"range {offset} + {length} of 1000"):
                backend.get_range(kind, name, offset, memoryview(bytearray(length)))
        with expect_error(RangeNotSatisfiable, "a negative offset"):
            backend.get_range(kind, name, -1, memoryview(bytearray(1)))


@check()
def empty_ranges_need_the_object(session: Session) -> None:
    """An empty range succeeds within an object and its end, and needs the object."""
    backend, name = session.open(), session.pack()
    nothing = memoryview(bytearray())
    with expect_error(ObjectNotFound, "an empty range of nothing"):
        backend.get_range(ObjectKind.PACK, name, 0, nothing)
    backend.put_new(ObjectKind.PACK, name, [b"abc"])
    for offset in range(4):
        backend.get_range(ObjectKind.PACK, name, offset, nothing)
    with expect_error(RangeNotSatisfiable, "an empty range beyond the end"):
        backend.get_range(ObjectKind.PACK, name, 4, nothing)


@check()
def absent_objects_are_not_found(session: Session) -> None:
    """Reading a name that nobody wrote raises `ObjectNotFound`."""
    backend = session.open()
    for kind, name in session.one_of_each().items():
        with expect_error(ObjectNotFound, f"stat of an absent {kind}"):
            backend.stat(kind, name)
        with expect_error(ObjectNotFound, f"reading an absent {kind}"):
            backend.get_range(kind, name, 0, memoryview(bytearray(1)))


@check()
def stat_tells_size_and_age(session: Session) -> None:
    """`stat` gives the name, the length, and one time that all clients agree on."""
    backend, name = session.open(), session.ref()
    backend.put_new(ObjectKind.REF, name, [session.data(1234)])
    info = backend.stat(ObjectKind.REF, name)
    expect(dataclasses.replace(info, modified_ns=0) == ObjectInfo(name, 1234, 0), f"got {info}")
    expect(info.modified_ns > 0, "no time of writing")
    expect(session.open().stat(ObjectKind.REF, name) == info, "two clients disagree")


# --- listing ---


@check()
def listings_agree_with_stat(session: Session) -> None:
    """A listing gives what `stat` gives, each object once, and no other kind's objects."""
    backend, names = session.open(), session.one_of_each()
    for kind, name in names.items():
        backend.put_new(kind, name, [session.data(50)])
    for kind, name in names.items():
        for handle in (backend, session.open()):
            listed = [info for info in handle.list(kind) if info.name in names.values()]
            expect(listed == [backend.stat(kind, name)], f"listing {kind} gave {listed}")


@check()
def prefixes_select_names(session: Session) -> None:
    """A listing gives exactly the names that start with the prefix, wherever it is cut."""
    backend = session.open()
    stored = {session.ref(number) for number in (1, 2, 11)}
    beside = session.name(ObjectKind.REF, session.ref().replace("/@t/", "/deeper/@t/"))
    for name in (*stored, beside):
        backend.put_new(ObjectKind.REF, name, [b"r"])
    for end in range(len("contract/"), len(beside) + 1):
        for prefix in (session.ref()[:end], beside[:end]):
            want = {name for name in (*stored, beside) if name.startswith(prefix)}
            got = _names(backend, ObjectKind.REF, prefix)
            expect(got == want, f"prefix {prefix!r} gave {got}, not {want}")


@check()
def prefixes_select_digests(session: Session) -> None:
    """Prefixes work for names of 64 digits too, whatever folders lie in between."""
    backend = session.open()
    name = session.pack()
    backend.put_new(ObjectKind.PACK, name, [b"p"])
    for end in range(len(name) + 1):
        expect(name in _names(backend, ObjectKind.PACK, name[:end]), f"not below {name[:end]!r}")
    for prefix in (name + "0", name[:1] + "/", name[:2] + "/", name[:5].upper() + "Z", "@", "zz"):
        expect(not _names(backend, ObjectKind.PACK, prefix), f"something below {prefix!r}")


# --- deleting ---


@check()
def deleting_again_succeeds(session: Session) -> None:
    """An object that is gone, or never was, is deleted with success, by anybody."""
    one, other = session.open(), session.open()
    for kind, name in session.one_of_each().items():
        one.delete(kind, name)
        one.put_new(kind, name, [b"x"])
        other.delete(kind, name)
        other.delete(kind, name)
        one.delete(kind, name)
        for handle in (one, other):
            with expect_error(ObjectNotFound, f"stat of a deleted {kind}"):
                handle.stat(kind, name)
            expect(name not in _names(session.open(), kind), f"a deleted {kind} is listed")


@check()
def deleted_names_are_free(session: Session) -> None:
    """After a deletion another object may take the name, and is what everybody reads."""
    one, other = session.open(), session.open()
    for kind, name in session.one_of_each().items():
        second = b"first" if kind in CONTENT_NAMED else b"other"
        one.put_new(kind, name, [b"first"])
        read(other, kind, name)
        one.delete(kind, name)
        other.put_new(kind, name, [second])
        for handle in (one, other):
            expect(read(handle, kind, name) == second, f"an old {kind} came back")


# --- names ---


@check()
def hostile_names_are_refused(session: Session) -> None:
    """A name that its kind cannot have raises `UsageError`, for every verb, and does nothing."""
    backend = session.open()
    for kind, valid in session.one_of_each().items():
        for name in ("", valid + "/", "/" + valid, valid + "\0", valid + "\n", *HOSTILE_NAMES):
            doing = f"{kind} {name[:60]!r}"
            with expect_error(UsageError, f"stat of {doing}"):
                backend.stat(kind, name)
            with expect_error(UsageError, f"reading {doing}"):
                backend.get_range(kind, name, 0, memoryview(bytearray(1)))
            with expect_error(UsageError, f"writing {doing}"):
                backend.put_new(kind, name, [b"x"])
            with expect_error(UsageError, f"deleting {doing}"):
                backend.delete(kind, name)
    with expect_error(UsageError, "a config with a name"):
        backend.stat(ObjectKind.CONFIG, "x")


@check()
def hostile_prefixes_are_refused(session: Session) -> None:
    """A prefix that leads out of its kind raises `UsageError` before its first item."""
    backend = session.open()
    for kind in ObjectKind:
        for prefix in HOSTILE_PREFIXES:
            with expect_error(UsageError, f"listing {kind} {prefix[:60]!r}"):
                next(backend.list(kind, prefix), None)


@check()
def names_differing_in_case_differ(session: Session) -> None:
    """Names that differ in case only are different names."""
    backend, name = session.open(), session.ref()
    upper = session.name(ObjectKind.REF, name.replace("contract/", "CONTRACT/"))
    backend.put_new(ObjectKind.REF, name, [b"lower"])
    backend.put_new(ObjectKind.REF, upper, [b"upper"])
    expect(read(backend, ObjectKind.REF, name) == b"lower", "case is ignored")


# --- reading only ---


@check("readonly")
def reading_only_reads(session: Session) -> None:
    """A storage opened for reading only is read and listed like any other."""
    name = session.pack()
    session.open().put_new(ObjectKind.PACK, name, [b"abc"])
    backend = session.open_readonly()
    expect(not backend.capabilities.writable, "it says that it may be written")
    expect(read(backend, ObjectKind.PACK, name) == b"abc", "other bytes came back")
    expect(name in _names(backend, ObjectKind.PACK), "a pack is not listed")


@check("readonly")
def reading_only_refuses_writes(session: Session) -> None:
    """A storage opened for reading only raises `AccessDenied` for writes, and keeps its objects."""
    name, absent = session.pack(), session.pack()
    session.open().put_new(ObjectKind.PACK, name, [b"abc"])
    backend = session.open_readonly()
    with expect_error(AccessDenied, "writing"):
        backend.put_new(ObjectKind.PACK, absent, [b"x"])
    with expect_error(AccessDenied, "deleting"):
        backend.delete(ObjectKind.PACK, name)
    expect(read(backend, ObjectKind.PACK, name) == b"abc", "a refused deletion deleted")
    with expect_error(ObjectNotFound, "a refused write"):
        session.open().stat(ObjectKind.PACK, absent)


# --- handles ---


@check()
def capabilities_are_constant(session: Session) -> None:
    """The declared abilities are sane, and always the same."""
    backend = session.open()
    first = backend.capabilities
    backend.put_new(ObjectKind.PACK, session.pack(), [b"x"])
    expect(backend.capabilities == first, "they changed")
    expect(first.writable, "a storage that was opened for writing is not writable")
    expect(first.readers_in_parallel > 0 and first.read_bytes_best > 0, f"not sane: {first}")
    expect("://" in first.url, f"not a URL: {first.url}")


@check()
def closing_again_succeeds(session: Session) -> None:
    """`close` may be called again, and other handles go on."""
    closed, name = session.open(), session.pack()
    closed.put_new(ObjectKind.PACK, name, [b"x"])
    read(closed, ObjectKind.PACK, name)
    closed.close()
    closed.close()
    expect(read(session.open(), ObjectKind.PACK, name) == b"x", "other bytes came back")


def _names(backend: Backend, kind: ObjectKind, prefix: str = "") -> set[str]:
    return {info.name for info in backend.list(kind, prefix)}


CHECKS = collect(globals())
