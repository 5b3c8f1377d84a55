"""Opening a storage by its URL as the subject of the contract."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from snapstore.backend import open_backend
from snapstore.backend.base import ObjectKind
from snapstore.backend.files import OsFileCalls
from snapstore.backend.posix import PosixBackend
from snapstore.errors import ObjectNotFound, StoreNotFound, UsageError
from snapstore.testing.contract_base import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapstore.backend.base import Backend

__all__ = ["subject_of"]


def subject_of(url: str, *, mounts: Sequence[Path] = ()) -> Subject:
    """Prepare the storage at a URL, made if it is missing, as the contract wants it.

    Args:
        url: Where it is.
        mounts: Directories in which the same storage is mounted, as several machines have it. Each
            handle that a check opens is on the next of them. All must be below different mount
            points of one export and end in the same directory as the URL.

    Raises:
        UsageError: The URL cannot be meant, or it has no mounts.
        BackendError: It cannot be reached or written.
    """
    with contextlib.closing(open_backend(url, create=True)) as backend:
        if not isinstance(backend, PosixBackend):
            if mounts:
                raise UsageError("only a storage in a directory can be mounted twice")
            return Subject(
                open=lambda: open_backend(url),
                open_readonly=lambda: open_backend(url, readonly=True),
                url=url,
            )
        everywhere = [*mounts] or [Path(backend.root)]
        for mount in mounts:
            _require_same(backend, mount)
        places = _in_turn(everywhere)
    return Subject(
        open=lambda: PosixBackend(places()),
        open_readonly=lambda: PosixBackend(places(), readonly=True),
        url=url,
        open_on=lambda wrap: PosixBackend(places(), files=wrap(OsFileCalls())),
    )


def _require_same(backend: Backend, mount: Path) -> None:
    """Check that what is written here is seen there: a mount may be missing, or a typo."""
    name = f"contract/{secrets.token_hex(16)}"
    backend.put_new(ObjectKind.HINT, name, [b"here"])
    try:
        with contextlib.closing(PosixBackend(mount, readonly=True)) as there:
            there.stat(ObjectKind.HINT, name)
    except (ObjectNotFound, StoreNotFound) as error:
        raise UsageError(
            f"{str(mount)!r} is not a mount of {backend.capabilities.url}",
            next_step="give directories in which the same storage is mounted",
        ) from error
    finally:
        backend.delete(ObjectKind.HINT, name)


def _in_turn(places: Sequence[Path]) -> Callable[[], Path]:
    turns = itertools.cycle(places)
    lock = threading.Lock()

    def take() -> Path:
        with lock:
            return next(turns)

    return take
