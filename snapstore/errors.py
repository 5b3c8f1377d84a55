"""The error tree of the library: who must act, whether to try again, what the store is left in.

::

    SnapError
    ├─ UsageError              a name, option or URL that cannot be meant (exit 2)
    ├─ SourceError             the tree to push cannot be stored as it stands (exit 1)
    │    SourceChanged · UnsupportedFileType
    ├─ TargetError             the place to restore to cannot be used (exit 1)
    ├─ BackendError            the storage said no, or said nothing (exit 5)
    │    ObjectNotFound (3) · ObjectExists (6) · RangeNotSatisfiable (4) · AccessDenied
    │    OutOfSpace (8) · CapabilityMissing · TransientBackendError
    ├─ FormatError             bytes that are not what the format says (exit 4)
    │    Malformed · LimitExceeded · UnsupportedVersion (1) · UnsupportedFeature (1)
    ├─ IntegrityError          well-formed bytes with the wrong content, or missing ones (exit 4)
    │    DigestMismatch · MissingChunk · MissingPack · DanglingRef
    ├─ ConcurrencyError        somebody else decided first (exit 6)
    │    LeaseLost · RefConflict
    ├─ LookupFailed            the name, id or path is not in this store (exit 3)
    │    StoreNotFound · SnapshotNotFound · RefNotFound · PathNotFound
    ├─ PolicyRefused           policy, signature or hardware says no (exit 7)
    └─ Interrupted             the caller asked to stop (exit 130)

`AssertionError` stays outside the tree: it means a bug of ours, is never caught, and leaves the
store readable because nothing is published before it is complete.

None of these derives from `ValueError` or `OSError`, so a handler for those never swallows one.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessDenied",
    "BackendError",
    "CapabilityMissing",
    "ConcurrencyError",
    "DanglingRef",
    "DigestMismatch",
    "FormatError",
    "IntegrityError",
    "Interrupted",
    "LeaseLost",
    "LimitExceeded",
    "LookupFailed",
    "Malformed",
    "MissingChunk",
    "MissingPack",
    "ObjectExists",
    "ObjectNotFound",
    "OutOfSpace",
    "PathNotFound",
    "PolicyRefused",
    "RangeNotSatisfiable",
    "RefConflict",
    "RefNotFound",
    "SnapError",
    "SnapshotNotFound",
    "SourceChanged",
    "SourceError",
    "StoreNotFound",
    "TargetError",
    "TransientBackendError",
    "UnsupportedFeature",
    "UnsupportedFileType",
    "UnsupportedVersion",
    "UsageError",
]


class SnapError(Exception):
    """Root of everything this library raises on purpose.

    Attributes:
        exit_code: What a command line program should exit with.
        retryable: Whether the same call may succeed later without anybody changing anything.
        next_step: What the reader of the message should do now; may be empty.
    """

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step

    @property
    def code(self) -> str:
        """The class name, the stable word by which programs tell errors apart."""
        return type(self).__name__


class UsageError(SnapError):
    """A name, option or URL that cannot be meant. Nothing was read or written."""

    exit_code = 2


class SourceError(SnapError):
    """The tree to push cannot be stored as it stands. Nothing was published under the name."""


class SourceChanged(SourceError):
    """A file changed while it was read. Nothing was published under the name."""

    retryable = True


class UnsupportedFileType(SourceError):
    """The tree holds a socket, fifo or device. Nothing was published under the name."""


class TargetError(SnapError):
    """The place to restore to cannot be used. What was there before is untouched."""


class BackendError(SnapError):
    """The storage refused or failed; the store holds what it held, perhaps plus garbage."""

    exit_code = 5


class ObjectNotFound(BackendError):
    """No object has that name at present."""

    exit_code = 3


class ObjectExists(BackendError):
    """The name is taken by an object with other bytes; it was not touched."""

    exit_code = 6


class RangeNotSatisfiable(BackendError):
    """The object ends before the asked range does: it is shorter than its readers were told."""

    exit_code = 4


class AccessDenied(BackendError):
    """The storage does not let this user do that (includes a read-only file system)."""


class OutOfSpace(BackendError):
    """The storage is full or over quota. Nothing incomplete has a final name."""

    exit_code = 8


class CapabilityMissing(BackendError):
    """The storage lacks something the store's guarantees rest on, such as put-if-absent."""


class TransientBackendError(BackendError):
    """The storage did not answer, or asked for patience. The operation may have happened."""

    retryable = True


class FormatError(SnapError):
    """Bytes that are not what the format says. Nothing was taken from them."""

    exit_code = 4


class Malformed(FormatError):
    """A magic, length, count, order or value that no writer of this format produces."""


class LimitExceeded(FormatError):
    """A count or size above the bound that `format_spec/01-objects.md` sets for it."""


class UnsupportedVersion(FormatError):
    """The object is of a newer format version. Upgrade to read it; it was not touched."""

    exit_code = 1


class UnsupportedFeature(FormatError):
    """The object requires a feature this program does not know. It was not touched."""

    exit_code = 1


class IntegrityError(SnapError):
    """The right kind of bytes with the wrong content, or bytes that are gone."""

    exit_code = 4


class DigestMismatch(IntegrityError):
    """Bytes do not have the digest under which they were stored. They were not used."""


class MissingChunk(IntegrityError):
    """No index of the store knows where this chunk is."""


class MissingPack(IntegrityError):
    """A pack that a layout or index points to is not in the store."""


class DanglingRef(IntegrityError):
    """A ref names a snapshot, or a snapshot a rank manifest, that is not in the store."""


class ConcurrencyError(SnapError):
    """Somebody else decided first. The store is as they left it."""

    exit_code = 6


class LeaseLost(ConcurrencyError):
    """The lease was revoked: all writes of its holder must stop. Start the push over."""

    retryable = True


class RefConflict(ConcurrencyError):
    """Another writer moved the ref in between, again and again."""

    retryable = True


class LookupFailed(SnapError):
    """The name, id or path is not in this store."""

    exit_code = 3


class StoreNotFound(LookupFailed):
    """There is no store at this URL."""


class SnapshotNotFound(LookupFailed):
    """No snapshot has this id."""


class RefNotFound(LookupFailed):
    """No snapshot has this name and tag."""


class PathNotFound(LookupFailed):
    """The snapshot has no such path."""


class PolicyRefused(SnapError):
    """Policy, a signature or the hardware forbids it."""

    exit_code = 7


class Interrupted(SnapError):
    """The caller asked to stop. Nothing partial has a final name; run it again to go on."""

    exit_code = 130
    retryable = True
