"""The storage port: seven verbs that every backend implements and one contract suite tests.

A backend stores opaque bytes under a kind and a name and never looks into them. It implements
`format_spec/01-objects.md` (keys) and the guarantees S1 to S6 of `format_spec/SEMANTICS.md`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapstore.units import BytesLike

__all__ = ["CONTENT_NAMED", "Backend", "Capabilities", "ObjectInfo", "ObjectKind"]


class ObjectKind(enum.Enum):
    """The kinds of object; the value is the first component of the key."""

    CONFIG = "snapstore.json"
    PACK = "packs"
    INDEX = "indexes"
    RANK = "ranks"
    SNAPSHOT = "snapshots"
    LAYOUT = "layouts"
    REF = "refs"
    LEASE = "leases"
    MARK = "marks"
    HINT = "hints"


CONTENT_NAMED = frozenset({ObjectKind.PACK, ObjectKind.INDEX, ObjectKind.RANK, ObjectKind.SNAPSHOT})
"""Kinds whose name is a digest of their content: *already present* means success."""


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What is known about a stored object without reading it."""

    name: str
    size_bytes: int
    modified_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """What this storage can do, as declared values.

    Attributes:
        url: The store's URL, without credentials; for messages.
        writable: Whether writing may be tried at all (`False`: a read-only mount).
        readers_in_parallel: Ranged reads worth having in flight at once.
        read_bytes_best: Size of one ranged read from which throughput no longer grows.
    """

    url: str
    writable: bool
    readers_in_parallel: int
    read_bytes_best: int

    @property
    def is_service(self) -> bool:
        """Whether requests go to a service, which lets each wait and is busy at times."""
        return self.url.startswith("s3:")


class Backend(Protocol):
    """A place for objects. Every method may block and may be called from any thread at once.

    Errors are translated once, here, into `snapstore.errors`; nothing else escapes. Names and
    prefixes that no object can have are a `UsageError` with every verb (`list` may raise it with
    its first item).
    """

    @property
    def capabilities(self) -> Capabilities:
        """The declared abilities; cheap and constant."""
        ...

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """Fill all of `into` with the object's bytes from `offset` on.

        Idempotent; a retry may fill the buffer again from the start. The buffer stays the
        caller's and its content is undefined after an error. An empty buffer still needs the
        object and an offset within it. An object named by its content may stay readable for up to
        a minute after somebody else deleted it.

        Raises:
            ObjectNotFound: No such object at present.
            RangeNotSatisfiable: The object ends before the range does.
        """
        ...

    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """Store the concatenated pieces under a name that must not exist yet.

        Returns once the bytes are durable under the name. A reader never finds a part of them; it
        may find all of them shortly before, and a power loss may then take them away. Safe to
        retry: the same bytes under the same name succeed. Of several concurrent writers of
        different bytes exactly one succeeds. The pieces are not kept.

        Raises:
            ObjectExists: The name is taken by other bytes. Kinds named by content compare the
                length only, all others the bytes.
            OutOfSpace: No room; nothing exists under the name.
            AccessDenied: This user may not write.
        """
        ...

    def stat(self, kind: ObjectKind, name: str) -> ObjectInfo:
        """Size and age of an object, at least as fresh as the last `put_new` that returned.

        Raises:
            ObjectNotFound: No such object at present.
        """
        ...

    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """Names of a kind that start with `prefix`, in no given order.

        May be stale: an object just written may be missing, one just deleted still there. A
        `prefix` that ends in '/' costs no more than what is below it.
        """
        ...

    def delete(self, kind: ObjectKind, name: str) -> None:
        """Remove an object. One that is already gone is success.

        Need not survive a power loss, after which the object may be back, whole.
        """
        ...

    def close(self) -> None:
        """Release connections and descriptors. Idempotent; no other call may follow."""
        ...
