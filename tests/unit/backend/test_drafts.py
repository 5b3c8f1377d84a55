"""Objects that are written part by part: nobody sees them before they have a name."""

import contextlib
import errno
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.drafts import Draft, begin_draft, has_drafts
from snapstore.backend.files import OsFileCalls
from snapstore.backend.layout import TEMPORARIES
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.posix import PosixBackend
from snapstore.backend.retry import RetryingBackend, RetryPolicy
from snapstore.errors import (
    AccessDenied,
    BackendError,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    TransientBackendError,
)
from snapstore.testing.clock import ManualClock
from snapstore.testing.nfs import NfsClient, NfsFault, NfsFaults, NfsServer
from snapstore.units import MIB, PAGE_BYTES
from tests.support.processes import open_fds
from tests.support.samples import random_bytes

NAME, OTHER = "ab" * 32, "cd" * 32


def write(draft: Draft, pieces: Sequence[tuple[int, bytes]]) -> None:
    for offset, data in pieces:
        draft.write(offset, [memoryview(data)])


def read(backend: Backend, name: str = NAME) -> bytes:
    size = backend.stat(ObjectKind.PACK, name).size_bytes
    into = bytearray(size)
    backend.get_range(ObjectKind.PACK, name, 0, memoryview(into))
    return bytes(into)


def leftovers(root: Path) -> list[Path]:
    return [*(root / TEMPORARIES).iterdir()]


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[PosixBackend]:
    with contextlib.closing(PosixBackend.create(tmp_path / "s")) as one:
        yield one


def test_it_has_no_name_until_it_is_published(backend: PosixBackend, tmp_path: Path) -> None:
    """Proves: S2."""
    draft = begin_draft(backend)
    assert leftovers(tmp_path / "s") == []
    body = random_bytes(2 * MIB + 5, 1).tobytes()
    write(draft, [(PAGE_BYTES, body), (0, b"head")])
    assert len(leftovers(tmp_path / "s")) == 1
    assert [*backend.list(ObjectKind.PACK)] == []
    draft.publish(ObjectKind.PACK, NAME)
    assert read(backend) == b"head" + bytes(PAGE_BYTES - 4) + body
    draft.discard()
    draft.discard()
    assert leftovers(tmp_path / "s") == []
    assert read(backend) == b"head" + bytes(PAGE_BYTES - 4) + body


def test_what_is_discarded_was_never_there(backend: PosixBackend, tmp_path: Path) -> None:
    opened = open_fds()
    draft = begin_draft(backend)
    write(draft, [(0, b"data")])
    draft.discard()
    assert leftovers(tmp_path / "s") == []
    assert open_fds() == opened
    with pytest.raises(ObjectNotFound):
        backend.stat(ObjectKind.PACK, NAME)


def test_the_same_object_again_is_success(backend: PosixBackend) -> None:
    """Proves: I4."""
    backend.put_new(ObjectKind.PACK, NAME, [b"data"])
    draft = begin_draft(backend)
    write(draft, [(0, b"data")])
    draft.publish(ObjectKind.PACK, NAME)
    draft.discard()
    assert read(backend) == b"data"


def test_a_name_that_is_taken_leaves_the_draft(backend: PosixBackend, tmp_path: Path) -> None:
    """What a packer does when a name is taken by damaged bytes: more bytes, another name."""
    backend.put_new(ObjectKind.PACK, NAME, [b"dat"])
    draft = begin_draft(backend)
    write(draft, [(0, b"data")])
    with pytest.raises(ObjectExists):
        draft.publish(ObjectKind.PACK, NAME)
    write(draft, [(4, b" with salt")])
    draft.publish(ObjectKind.PACK, OTHER)
    draft.discard()
    assert (read(backend), read(backend, OTHER)) == (b"dat", b"data with salt")
    assert leftovers(tmp_path / "s") == []


def test_who_may_not_write_begins_nothing(backend: PosixBackend, tmp_path: Path) -> None:
    with pytest.raises(AccessDenied):
        begin_draft(PosixBackend(tmp_path / "s", readonly=True))


def test_which_storage_has_drafts(backend: PosixBackend) -> None:
    clock = ManualClock()
    assert has_drafts(backend)
    assert has_drafts(RetryingBackend(backend, rng=random.Random(1), clock=clock))
    assert not has_drafts(MemoryBackend())


@pytest.mark.slow
@given(
    size=st.integers(0, 40),
    parts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=8),
)
def test_any_parts_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, size: int, parts: list[tuple[int, int]]
) -> None:
    backend = PosixBackend.create(tmp_path_factory.mktemp("drafts") / "s")
    wanted = bytearray(size)
    draft = begin_draft(backend)
    write(draft, [(0, bytes(size))])
    for number, (offset, length) in enumerate(parts, 1):
        data = bytes([number]) * length
        wanted += bytes(max(0, offset + length - len(wanted)))
        wanted[offset : offset + length] = data
        write(draft, [(offset, data)])
    draft.publish(ObjectKind.PACK, NAME)
    draft.discard()
    assert read(backend) == wanted
    backend.close()


# --- storage in trouble ---

ROOT = Path("/export/store")


def on_nfs(*planned: tuple[int, NfsFault]) -> RetryingBackend:
    """A store that is tried three times, on a mount where calls of those sorts and numbers fail."""
    clock = ManualClock()
    server = NfsServer(clock)
    PosixBackend.create(ROOT, files=NfsClient(server, clock)).close()
    client = NfsClient(server, clock, faults=NfsFaults(planned))
    inner = PosixBackend(ROOT, clock=clock, files=client)
    policy = RetryPolicy(attempts_max=3)
    return RetryingBackend(inner, rng=random.Random(1), clock=clock, policy=policy)


@pytest.mark.parametrize(
    "planned",
    [
        [(0, NfsFault("pwritev", errno.EIO)), (2, NfsFault("pwritev", 0))],
        [(number, NfsFault("pwritev", 0)) for number in range(4)],
        [(0, NfsFault("link", errno.EIO))],
        [(0, NfsFault("link", errno.EIO, done=True))],
        [(0, NfsFault("link", errno.EEXIST, done=True))],
        [(1, NfsFault("open", errno.ESTALE))],
    ],
)
def test_what_may_be_repeated_is(planned: list[tuple[int, NfsFault]]) -> None:
    backend = on_nfs(*planned)
    draft = begin_draft(backend)
    write(draft, [(0, b"some"), (4, b" more"), (9, b" data")])
    draft.publish(ObjectKind.PACK, NAME)
    draft.discard()
    assert read(backend) == b"some more data"
    assert isinstance(backend.inner, PosixBackend)
    assert backend.inner.sweep_temporaries(-1) == 0


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_lost_bytes_are_not_published(call: str) -> None:
    """Goal: what could not be made durable is never claimed to be, however often it is tried.

    Proves: S1.
    """
    backend = on_nfs((0, NfsFault("fsync" if call == "fsync" else "close", errno.EIO)))
    draft = begin_draft(backend)
    write(draft, [(0, b"data")])
    with pytest.raises(BackendError, match="are lost") as caught:
        draft.publish(ObjectKind.PACK, NAME)
    assert not isinstance(caught.value, TransientBackendError)
    with pytest.raises(BackendError, match="are lost"):
        draft.write(4, [memoryview(b"more")])
    draft.discard()
    with pytest.raises(ObjectNotFound):
        backend.stat(ObjectKind.PACK, NAME)


def test_bytes_that_a_file_system_swallows_are_missed(tmp_path: Path) -> None:
    class Swallowing(OsFileCalls):
        @override
        def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
            return super().pwritev(fd, [pieces[0][:-1]], offset) + 1

    PosixBackend.create(tmp_path / "s")
    draft = begin_draft(PosixBackend(tmp_path / "s", files=Swallowing()))
    write(draft, [(0, b"bytes")])
    with pytest.raises(TransientBackendError, match="4 bytes stored of 5"):
        draft.publish(ObjectKind.PACK, NAME)
    draft.discard()
    assert leftovers(tmp_path / "s") == []


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    class Full(OsFileCalls):
        @override
        def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    PosixBackend.create(tmp_path / "s")
    draft = begin_draft(PosixBackend(tmp_path / "s", files=Full()))
    with pytest.raises(OutOfSpace):
        write(draft, [(0, b"bytes")])
    draft.discard()
    assert leftovers(tmp_path / "s") == []
