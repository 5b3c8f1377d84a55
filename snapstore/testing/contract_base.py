"""What a check of the contract is made of: a subject, a session, and ways to say what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Literal

from snapstore.backend.base import Backend, ObjectKind
from snapstore.errors import CapabilityMissing, SnapError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping

    from snapstore.backend.files import FileCalls

__all__ = ["Check", "Session", "Subject", "check", "collect", "expect", "expect_error"]

Need = Literal["nothing", "readonly", "url", "files"]
_LACKING: dict[Need, str] = {
    "nothing": "",
    "readonly": "no way to open the storage for reading only",
    "url": "no URL by which another process finds the storage",
    "files": "no files below",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """The storage under test, which may already hold other objects.

    Attributes:
        open: Opens it anew, as independent as can be: another client, another connection.
        open_readonly: Opens it for reading only.
        url: Where another process finds it with `open_backend`.
        open_on: For backends on `FileCalls`: opens it with its file calls wrapped.
    """

    open: Callable[[], Backend]
    open_readonly: Callable[[], Backend] | None = None
    url: str | None = None
    open_on: Callable[[Callable[[FileCalls], FileCalls]], Backend] | None = None


class Session:
    """One run of one check: its handles, its names, and the removal of what it made."""

    def __init__(self, subject: Subject, rng: random.Random) -> None:
        self.subject = subject
        self.rng = rng
        self._handles: list[Backend] = []
        self._names: list[tuple[ObjectKind, str]] = []
        self._chain = f"contract/{rng.randbytes(8).hex()}/@t"

    def close(self) -> None:
        """Remove what the check stored, and close its handles."""
        with contextlib.suppress(SnapError):
            cleaner = self.open()
            for kind, name in self._names:
                cleaner.delete(kind, name)
        for handle in self._handles:
            handle.close()

    def open(self) -> Backend:
        """Open one more independent handle, closed at the end."""
        return self.keep(self.subject.open())

    def open_readonly(self) -> Backend:
        """Open a handle for reading only, closed at the end."""
        assert self.subject.open_readonly is not None
        return self.keep(self.subject.open_readonly())

    def open_on(self, wrap: Callable[[FileCalls], FileCalls]) -> Backend:
        """Open a handle with wrapped file calls; the caller closes it, since it may be dead."""
        assert self.subject.open_on is not None
        return self.subject.open_on(wrap)

    def keep(self, handle: Backend) -> Backend:
        """Close a handle at the end."""
        self._handles.append(handle)
        return handle

    def data(self, size_bytes: int) -> bytes:
        """Random bytes."""
        return self.rng.randbytes(size_bytes)

    def digest(self) -> str:
        """A new name of 64 digits."""
        return self.rng.randbytes(32).hex()

    def pack(self) -> str:
        """A new name for a pack, deleted at the end."""
        return self.name(ObjectKind.PACK, self.digest())

    def ref(self, number: int = 1) -> str:
        """A name in this check's chain of refs, deleted at the end."""
        return self.name(ObjectKind.REF, f"{self._chain}/{number:08d}")

    def name(self, kind: ObjectKind, name: str) -> str:
        """Delete the object of that name at the end."""
        self._names.append((kind, name))
        return name

    def one_of_each(self) -> dict[ObjectKind, str]:
        """A new name for every kind but the config, of which a store has only one."""
        names = {
            ObjectKind.PACK: self.digest(),
            ObjectKind.INDEX: self.digest(),
            ObjectKind.RANK: self.digest(),
            ObjectKind.SNAPSHOT: self.digest(),
            ObjectKind.LAYOUT: f"{self.digest()}/00000001",
            ObjectKind.REF: f"{self._chain}/00000001",
            ObjectKind.LEASE: f"{self.digest()[:32]}/00000001",
            ObjectKind.MARK: f"packs/{self.digest()}/00000001",
            ObjectKind.HINT: f"contract/{self.digest()}",
        }
        for kind, name in names.items():
            self.name(kind, name)
        return names


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One statement of the contract and how to test it.

    Attributes:
        name: A stable word for reports.
        statement: What must be true.
        need: What a subject has to bring for it.
    """

    name: str
    statement: str
    need: Need
    body: Callable[[Session], None]

    def lacking(self, subject: Subject) -> str:
        """Why the check cannot be run on that subject; empty if it can."""
        there: dict[Need, bool] = {
            "nothing": True,
            "readonly": subject.open_readonly is not None,
            "url": subject.url is not None,
            "files": subject.open_on is not None,
        }
        return "" if there[self.need] else _LACKING[self.need]

    def run(self, subject: Subject, rng: random.Random) -> None:
        """Test the statement.

        Raises:
            CapabilityMissing: It is not true of this storage.
            SnapError: The storage failed where it should not have.
        """
        with contextlib.closing(Session(subject, rng)) as session:
            self.body(session)


def check(need: Need = "nothing") -> Callable[[Callable[[Session], None]], Check]:
    """Turn a function into a check; its name and the first line of its docstring describe it."""

    def turn(body: Callable[[Session], None]) -> Check:
        assert body.__doc__ is not None, body
        statement, _, _ = body.__doc__.partition("\n")
        return Check(body.__name__, statement, need, body)

    return turn


def collect(namespace: Mapping[str, object]) -> tuple[Check, ...]:
    """Return all checks of a module, in the order in which it defines them."""
    return tuple(value for value in namespace.values() if isinstance(value, Check))


def expect(condition: object, message: str) -> None:
    """Raise unless the condition holds; unlike `assert`, also under `python -O`."""
    if not condition:
        raise CapabilityMissing(f"the contract is broken: {message}")


@contextlib.contextmanager
def expect_error(wanted: type[SnapError], doing: str) -> Iterator[None]:
    """Raise unless the block raises exactly that error; others pass through."""
    try:
        yield
    except SnapError as error:
        if type(error) is not wanted:
            raise
    else:
        raise CapabilityMissing(f"the contract is broken: {doing} should raise {wanted.__name__}")
