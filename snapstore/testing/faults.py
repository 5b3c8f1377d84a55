"""Faults on purpose: storage that fails, lies or fills up, and processes that die in between."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
from typing import TYPE_CHECKING, TypeVar

from snapstore.errors import OutOfSpace, RangeNotSatisfiable, TransientBackendError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from snapstore.backend.base import Backend, Capabilities, ObjectInfo, ObjectKind
    from snapstore.backend.files import FileCalls, FileStat
    from snapstore.units import BytesLike

__all__ = ["Fault", "FaultyBackend", "FileCall", "KillableFiles", "Killed"]

_Result = TypeVar("_Result")


class Killed(BaseException):
    """The process died here. No `except Exception` may live through it."""


class Fault(enum.Enum):
    """What goes wrong with one operation of a backend."""

    FAIL_BEFORE = "fails without being carried out"
    LOST_REPLY = "is carried out, then fails as if it had not been"
    FULL_DISK = "finds no space"
    TRUNCATE = "stores, shows or reads only the first half"
    WRONG_BYTES = "stores or reads one wrong bit"
    KILL_BEFORE = "the process dies before it"
    KILL_AFTER = "the process dies after it"


class FaultyBackend:
    """Lets chosen operations go wrong (`Backend`). Thread-safe.

    Operations are numbered from 0 in the order in which they begin, over all verbs but `close`;
    `operations` says how many there were, so that a test can let each of them fail in turn. After
    a death every further operation raises `Killed` again: not even clean-up code runs.

    Truncation and wrong bytes apply to what an operation moves; where it moves none, or for a
    verb that cannot fill a disk, the operation succeeds.
    """

    def __init__(
        self, inner: Backend, faults: Mapping[int, Fault], *, rng: random.Random | None = None
    ) -> None:
        """Plan the faults; `rng` chooses which bit is wrong, else it is one in the middle."""
        self._inner = inner
        self._faults = faults
        self._rng = rng
        self._lock = threading.Lock()
        self._dead = False
        self.operations = 0

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return self._inner.capabilities

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        with self._faulty() as fault:
            if fault is Fault.TRUNCATE and into.nbytes:
                self._inner.get_range(kind, name, offset, into[: into.nbytes // 2])
                raise RangeNotSatisfiable(f"{kind.name} {name} ends early (injected)")
            self._inner.get_range(kind, name, offset, into)
            if fault is Fault.WRONG_BYTES and into.nbytes:
                self._spoil(into)

    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""
        with self._faulty() as fault:
            if fault is Fault.FULL_DISK:
                raise OutOfSpace(f"no space for {kind.name} {name} (injected)")
            if fault in {Fault.TRUNCATE, Fault.WRONG_BYTES}:
                data = bytearray(b"".join(pieces))
                if fault is Fault.TRUNCATE:
                    del data[len(data) // 2 :]
                elif data:
                    self._spoil(memoryview(data))
                pieces = [data]
            self._inner.put_new(kind, name, pieces)

    def stat(self, kind: ObjectKind, name: str) -> ObjectInfo:
        """See `Backend.stat`."""
        with self._faulty() as fault:
            info = self._inner.stat(kind, name)
            if fault is Fault.TRUNCATE:
                return dataclasses.replace(info, size_bytes=info.size_bytes // 2)
            return info

    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`. The operation begins with the first item."""
        with self._faulty() as fault:
            found = [*self._inner.list(kind, prefix)]
            if fault is Fault.TRUNCATE:
                del found[len(found) // 2 :]
        yield from found

    def delete(self, kind: ObjectKind, name: str) -> None:
        """See `Backend.delete`."""
        with self._faulty():
            self._inner.delete(kind, name)

    def close(self) -> None:
        """See `Backend.close`."""
        self._inner.close()

    @contextlib.contextmanager
    def _faulty(self) -> Iterator[Fault | None]:
        with self._lock:
            if self._dead:
                raise Killed("dead already")
            number = self.operations
            self.operations += 1
            fault = self._faults.get(number)
            self._dead = fault is Fault.KILL_BEFORE
        if fault is Fault.KILL_BEFORE:
            raise Killed(f"before operation {number}")
        if fault is Fault.FAIL_BEFORE:
            raise TransientBackendError(f"operation {number} failed (injected)")
        yield fault
        if fault is Fault.LOST_REPLY:
            raise TransientBackendError(f"no reply to operation {number} (injected)")
        if fault is Fault.KILL_AFTER:
            self._dead = True
            raise Killed(f"after operation {number}")

    def _spoil(self, data: memoryview) -> None:
        view = data.cast("B")
        if self._rng is None:
            view[view.nbytes // 2] ^= 1
        else:
            view[self._rng.randrange(view.nbytes)] ^= 1 << self._rng.randrange(8)


@dataclasses.dataclass(frozen=True, slots=True)
class FileCall:
    """One file call that was begun: its name, and the path it is about (also of a descriptor)."""

    call: str
    path: str
    target: str = ""


class KillableFiles:
    """Records file calls, and stops the process before a chosen one (`FileCalls`). Thread-safe.

    Once dead, every call raises `Killed`; `abandon` then closes the descriptors that the kernel
    would close, without a call of the dead process.
    """

    def __init__(self, inner: FileCalls) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}
        self._calls_left: int | None = None
        self.calls: list[FileCall] = []

    def arm(self, calls: int) -> None:
        """Let that many more calls happen, and die before the next one."""
        self._calls_left = calls

    def disarm(self) -> None:
        """Let all calls happen again: what calls now is not the process that died."""
        self._calls_left = None

    def abandon(self) -> None:
        """Close what the dead process had open."""
        for fd in self._paths:
            with contextlib.suppress(OSError):
                self._inner.close(fd)
        self._paths.clear()

    def open(self, path: str, flags: int) -> int:
        """See `FileCalls.open`."""
        fd = self._run(FileCall("open", path), lambda: self._inner.open(path, flags))
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        """See `FileCalls.close`."""
        self._begin(FileCall("close", self._paths.get(fd, "")))
        # Forgotten first: the kernel may give the number to another thread at once.
        self._paths.pop(fd, None)
        self._inner.close(fd)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """See `FileCalls.pread`."""
        return self._run(self._of("pread", fd), lambda: self._inner.pread(fd, into, offset))

    def writev(self, fd: int, pieces: Sequence[memoryview]) -> int:
        """See `FileCalls.writev`."""
        return self._run(self._of("writev", fd), lambda: self._inner.writev(fd, pieces))

    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        """See `FileCalls.pwritev`."""
        return self._run(self._of("pwritev", fd), lambda: self._inner.pwritev(fd, pieces, offset))

    def set_direct(self, fd: int, *, direct: bool) -> bool:
        """See `FileCalls.set_direct`; no boundary, since nothing outside the process changes."""
        return self._inner.set_direct(fd, direct=direct)

    def fsync(self, fd: int) -> None:
        """See `FileCalls.fsync`."""
        self._run(self._of("fsync", fd), lambda: self._inner.fsync(fd))

    def fstat(self, fd: int) -> FileStat:
        """See `FileCalls.fstat`."""
        return self._run(self._of("fstat", fd), lambda: self._inner.fstat(fd))

    def lstat(self, path: str) -> FileStat:
        """See `FileCalls.lstat`."""
        return self._run(FileCall("lstat", path), lambda: self._inner.lstat(path))

    def link(self, source: str, target: str) -> None:
        """See `FileCalls.link`."""
        self._run(FileCall("link", source, target), lambda: self._inner.link(source, target))

    def unlink(self, path: str) -> None:
        """See `FileCalls.unlink`."""
        self._run(FileCall("unlink", path), lambda: self._inner.unlink(path))

    def mkdir(self, path: str) -> None:
        """See `FileCalls.mkdir`."""
        self._run(FileCall("mkdir", path), lambda: self._inner.mkdir(path))

    def listdir(self, path: str) -> list[str]:
        """See `FileCalls.listdir`."""
        return self._run(FileCall("listdir", path), lambda: self._inner.listdir(path))

    def is_readonly(self, path: str) -> bool:
        """See `FileCalls.is_readonly`."""
        return self._run(FileCall("is_readonly", path), lambda: self._inner.is_readonly(path))

    def _of(self, call: str, fd: int) -> FileCall:
        return FileCall(call, self._paths.get(fd, ""))

    def _begin(self, call: FileCall) -> None:
        with self._lock:
            if self._calls_left is not None:
                if self._calls_left == 0:
                    raise Killed(f"before {call.call} of {call.path}")
                self._calls_left -= 1
            self.calls.append(call)

    def _run(self, call: FileCall, operation: Callable[[], _Result]) -> _Result:
        self._begin(call)
        return operation()
