"""Hints: advice under a name that anybody may replace (`format_spec/05-names-refs.md`, 5).

Nothing may depend on a hint, so there is no order of writers to keep and nothing to sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.layout import key_of
from snapstore.errors import BackendError, FormatError, ObjectExists
from snapstore.format import limits
from snapstore.format.canonical import check_bytes_max
from snapstore.repository.objects import read_object

if TYPE_CHECKING:
    from snapstore.units import BytesLike

__all__ = ["get_hint", "put_hint"]

_ATTEMPTS = 4


def put_hint(backend: Backend, topic: str, name: str, data: BytesLike) -> None:
    """Store a hint, in the place of one that is there; see `Store.put_hint`.

    Raises:
        UsageError: No hint can have that name.
        LimitExceeded: It is too long.
        BackendError: The storage failed, or cannot be written.
    """
    key = f"{topic}/{name}"
    check_bytes_max(len(data), limits.HINT_BYTES_MAX, what=key_of(ObjectKind.HINT, key))
    for _ in range(_ATTEMPTS):
        try:
            backend.put_new(ObjectKind.HINT, key, [data])
        except ObjectExists:
            backend.delete(ObjectKind.HINT, key)
        else:
            return
    # Others replace it all the time; whatever is or will be there is as good as ours.


def get_hint(backend: Backend, topic: str, name: str, *, limit_bytes: int) -> bytes | None:
    """Read a hint; None if there is none that can be read. See `Store.get_hint`.

    Raises:
        UsageError: No hint can have that name.
    """
    key = f"{topic}/{name}"
    key_of(ObjectKind.HINT, key)
    try:
        return bytes(read_object(backend, ObjectKind.HINT, key, limit_bytes=limit_bytes))
    except (BackendError, FormatError):
        return None
