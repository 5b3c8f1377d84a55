"""Every backend keeps the contract of the storage port, and what its file calls promise."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapstore.backend.files import FileCalls, OsFileCalls
from snapstore.backend.memory import MemoryBackend, MemoryObjects
from snapstore.backend.posix import PosixBackend
from snapstore.backend.retry import RetryingBackend
from snapstore.backend.s3 import S3Backend
from snapstore.backend.s3_location import S3Location
from snapstore.backend.trace import TracingBackend
from snapstore.clock import SystemClock
from snapstore.testing.clock import ManualClock
from snapstore.testing.contract import CHECKS, Check, Subject
from snapstore.testing.nfs import NfsClient, NfsServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (a file system to test on, not a place for secrets)


def memory_subject() -> Subject:
    objects = MemoryObjects()
    return Subject(
        open=lambda: MemoryBackend(objects),
        open_readonly=lambda: MemoryBackend(objects, readonly=True),
    )


def posix_subject(root: Path) -> Subject:
    PosixBackend.create(root).close()
    return Subject(
        open=lambda: PosixBackend(root),
        open_readonly=lambda: PosixBackend(root, readonly=True),
        url=root.as_uri(),
        open_on=lambda wrap: PosixBackend(root, files=wrap(OsFileCalls())),
    )


def nfs_subject() -> Subject:
    """Each handle is another machine, and no cache ever expires by itself."""
    clock, root = ManualClock(), Path("/export/store")
    server = NfsServer(clock)
    PosixBackend.create(root, files=NfsClient(server, clock)).close()

    def open_on(wrap: Callable[[FileCalls], FileCalls] = lambda files: files) -> PosixBackend:
        return PosixBackend(root, clock=clock, files=wrap(NfsClient(server, clock)))

    return Subject(
        open=open_on,
        open_readonly=lambda: PosixBackend(
            root, readonly=True, clock=clock, files=NfsClient(server, clock)
        ),
        open_on=open_on,
    )


def wrapped_subject() -> Subject:
    """The wrappers change nothing about the contract."""
    inner = memory_subject()

    def open_wrapped() -> RetryingBackend:
        traced = TracingBackend(inner.open(), clock=SystemClock())
        return RetryingBackend(traced, rng=random.Random(1), clock=SystemClock())

    return Subject(open=open_wrapped, open_readonly=inner.open_readonly)


def s3_subject(url: str) -> Subject:
    location = S3Location.parse(url)
    return Subject(
        open=lambda: S3Backend(location, SystemClock()),
        open_readonly=lambda: S3Backend(location, SystemClock(), readonly=True),
        url=url,
    )


# What each subject has for the checks that need more than the port.
NEEDS = {
    "memory": {"nothing", "readonly"},
    "wrapped": {"nothing", "readonly"},
    "posix": {"nothing", "readonly", "url", "files"},
    "tmpfs": {"nothing", "readonly", "url", "files"},
    "nfs": {"nothing", "readonly", "files"},
    "s3": {"nothing", "readonly", "url"},
}


@pytest.fixture
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    match request.param:
        case "memory":
            yield memory_subject()
        case "wrapped":
            yield wrapped_subject()
        case "posix":
            yield posix_subject(tmp_path / "a store")
        case "nfs":
            yield nfs_subject()
        case "s3":
            server = request.getfixturevalue("s3")
            yield s3_subject(server.url(request.getfixturevalue("s3_bucket"), "a/store"))
        case _:
            if not SHARED_MEMORY.is_dir():
                pytest.skip(f"no {SHARED_MEMORY}")
            root = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
            yield posix_subject(root)
            shutil.rmtree(root)


def cases() -> Iterator[object]:
    for name, needs in NEEDS.items():
        for check in CHECKS:
            marks = [pytest.mark.slow] if check.need == "url" else []
            if name == "s3":
                marks.append(pytest.mark.s3)
            if check.need in needs:
                yield pytest.param(name, check, id=f"{name}-{check.name}", marks=marks)


@pytest.mark.parametrize(("subject", "check"), [*cases()], indirect=["subject"])
def test_contract(check: Check, subject: Subject, rng: random.Random) -> None:
    assert not check.lacking(subject)
    check.run(subject, rng)


def test_a_check_says_what_a_subject_lacks() -> None:
    lacking = {check.need for check in CHECKS if check.lacking(memory_subject())}
    assert lacking == {"url", "files"}


def test_checks_have_names_and_statements_of_their_own() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert len({check.statement for check in CHECKS}) == len(CHECKS)
    assert all(check.statement.endswith(".") for check in CHECKS)


def test_checks_leave_nothing_behind(rng: random.Random) -> None:
    objects = MemoryObjects()
    subject = Subject(open=lambda: MemoryBackend(objects))
    for check in CHECKS:
        if not check.lacking(subject):
            check.run(subject, rng)
    assert objects.below("") == []
