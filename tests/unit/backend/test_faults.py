"""The faults that other tests rely on are the faults that they ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.backend.files import OsFileCalls
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.posix import PosixBackend
from snapstore.errors import (
    ObjectNotFound,
    OutOfSpace,
    RangeNotSatisfiable,
    TransientBackendError,
)
from snapstore.testing.faults import Fault, FaultyBackend, KillableFiles, Killed

if TYPE_CHECKING:
    import random
    from pathlib import Path

PACK = "5a" * 32
REF = "team/x/@v1/00000001"
DATA = bytes(range(100))


@pytest.fixture
def inner() -> MemoryBackend:
    return MemoryBackend()


def put(backend: FaultyBackend) -> None:
    backend.put_new(ObjectKind.PACK, PACK, [DATA[:30], DATA[30:]])


def get(backend: FaultyBackend | MemoryBackend, size_bytes: int = len(DATA)) -> bytes:
    into = bytearray(size_bytes)
    backend.get_range(ObjectKind.PACK, PACK, 0, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize(
    ("fault", "error", "stored"),
    [
        (Fault.FAIL_BEFORE, TransientBackendError, 0),
        (Fault.LOST_REPLY, TransientBackendError, 1),
        (Fault.FULL_DISK, OutOfSpace, 0),
        (Fault.KILL_BEFORE, Killed, 0),
        (Fault.KILL_AFTER, Killed, 1),
    ],
)
def test_a_write_fails_before_or_after(
    inner: MemoryBackend, fault: Fault, error: type[BaseException], stored: int
) -> None:
    with pytest.raises(error):
        put(FaultyBackend(inner, {0: fault}))
    assert len([*inner.list(ObjectKind.PACK)]) == stored


def test_the_dead_do_nothing_more(inner: MemoryBackend) -> None:
    backend = FaultyBackend(inner, {1: Fault.KILL_AFTER})
    put(backend)
    with pytest.raises(Killed, match="after operation 1"):
        backend.stat(ObjectKind.PACK, PACK)
    with pytest.raises(Killed, match="dead"):
        backend.delete(ObjectKind.PACK, PACK)
    assert get(inner) == DATA
    assert backend.operations == 2


def test_storage_may_lie_when_it_writes(inner: MemoryBackend) -> None:
    backend = FaultyBackend(inner, {0: Fault.TRUNCATE, 2: Fault.WRONG_BYTES})
    put(backend)
    assert get(inner, 50) == DATA[:50]
    assert inner.stat(ObjectKind.PACK, PACK).size_bytes == 50
    backend.delete(ObjectKind.PACK, PACK)
    put(backend)
    assert sum(a != b for a, b in zip(get(inner), DATA, strict=True)) == 1


def test_storage_may_lie_when_it_reads(inner: MemoryBackend, rng: random.Random) -> None:
    backend = FaultyBackend(
        inner, {1: Fault.WRONG_BYTES, 2: Fault.TRUNCATE, 3: Fault.TRUNCATE}, rng=rng
    )
    put(backend)
    wrong = get(backend)
    assert sum((a ^ b).bit_count() for a, b in zip(wrong, DATA, strict=True)) == 1
    with pytest.raises(RangeNotSatisfiable):
        get(backend)
    assert backend.stat(ObjectKind.PACK, PACK).size_bytes == 50
    assert get(backend) == DATA


def test_listings_may_be_cut(inner: MemoryBackend) -> None:
    backend = FaultyBackend(inner, {1: Fault.TRUNCATE})
    put(backend)
    assert [*backend.list(ObjectKind.PACK)] == []
    assert len([*backend.list(ObjectKind.PACK)]) == 1


def test_a_killed_process_calls_nothing_more(tmp_path: Path) -> None:
    """Kill in the middle of a write: the temporary file stays, since nobody cleans up."""
    PosixBackend.create(tmp_path / "s")
    files = KillableFiles(OsFileCalls())
    backend = PosixBackend(tmp_path / "s", files=files)
    before = len(files.calls)
    files.arm(2)
    with pytest.raises(Killed):
        backend.put_new(ObjectKind.REF, REF, [DATA])
    assert [call.call for call in files.calls[before:]] == ["open", "writev"]
    files.abandon()
    assert [path.stat().st_size for path in (tmp_path / "s" / "tmp").iterdir()] == [len(DATA)]
    with pytest.raises(Killed):
        backend.stat(ObjectKind.REF, REF)
    files.disarm()
    with pytest.raises(ObjectNotFound):
        backend.stat(ObjectKind.REF, REF)
