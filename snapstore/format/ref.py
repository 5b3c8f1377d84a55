"""Refs: one generation of a mutable name (`format_spec/05-names-refs.md`, section 2)."""

from typing import Final, Literal

import msgspec

from snapstore.format import limits
from snapstore.format.canonical import Hex32, Hex64, Time, check_time, decode_document, encode
from snapstore.ids import SnapshotId
from snapstore.units import BytesLike

__all__ = ["Ref", "decode_ref", "encode_ref"]

FORMAT: Final = "snapstore/ref"


class Ref(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a name pointed to from one generation on.

    Attributes:
        created: When this generation was written.
        nonce: Random, of the writer; tells it after a lost reply that it has won.
        snapshot: The snapshot id as hexadecimal digits, or None: deleted.
    """

    created: Time
    nonce: Hex32
    snapshot: Hex64 | None
    format: Literal["snapstore/ref"] = FORMAT
    version: Literal[1] = 1

    @property
    def snapshot_id(self) -> SnapshotId | None:
        """The snapshot, or None: deleted."""
        return None if self.snapshot is None else SnapshotId.parse(self.snapshot)


def encode_ref(ref: Ref) -> bytes:
    """Encode one generation.

    Raises:
        Malformed: A value is not what the format says.
    """
    data = encode(ref, what="ref")
    decode_ref(data)
    return data


def decode_ref(data: BytesLike) -> Ref:
    """Check and decode one generation.

    Raises:
        FormatError: It is not what the format says.
    """
    ref = decode_document(
        data, Ref, format_word=FORMAT, what="ref", limit_bytes=limits.REF_BYTES_MAX
    )
    check_time(ref.created, what="ref created")
    return ref
