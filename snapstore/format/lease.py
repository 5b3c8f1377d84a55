"""Leases: the state of one push (`format_spec/05-names-refs.md`, section 3)."""

import enum
from typing import Annotated, Final, Literal

import msgspec

from snapstore.errors import Malformed
from snapstore.format import limits
from snapstore.format.canonical import Hex32, Hex64, Time, check_time, decode_document, encode
from snapstore.units import BytesLike

__all__ = ["Lease", "LeaseState", "decode_lease", "encode_lease", "may_follow"]

FORMAT: Final = "snapstore/lease"


class LeaseState(enum.Enum):
    """How far a push is; the value is the stored word."""

    ACQUIRED = "acquired"
    RENEWED = "renewed"
    COMMITTED = "committed"
    RELEASED = "released"
    REVOKED = "revoked"


_LIVE = frozenset({LeaseState.ACQUIRED, LeaseState.RENEWED})


class Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation of a lease.

    Attributes:
        created: When this generation was written.
        holder: Who, for people.
        nonce: Random; all generations of one holder share it, and it is their identity.
        snapshot: Set in the state committed and in no other; hexadecimal digits.
        state: How far the push is.
        ttl_s: For how long after `created` no pruner should try to revoke it.
    """

    created: Time
    holder: Annotated[str, msgspec.Meta(max_length=limits.HOLDER_CHARS_MAX)]
    nonce: Hex32
    snapshot: Hex64 | None = None
    state: LeaseState
    ttl_s: Annotated[int, msgspec.Meta(ge=1, le=limits.LEASE_TTL_S_MAX)]
    format: Literal["snapstore/lease"] = FORMAT
    version: Literal[1] = 1


def may_follow(new: LeaseState, previous: LeaseState | None) -> bool:
    """Whether a generation in state `new` may be written after one in state `previous`."""
    if new is LeaseState.ACQUIRED:
        return previous is None
    return previous in _LIVE


def encode_lease(lease: Lease) -> bytes:
    """Encode one generation.

    Raises:
        Malformed: A value is not what the format says.
    """
    data = encode(lease, what="lease")
    decode_lease(data)
    return data


def decode_lease(data: BytesLike) -> Lease:
    """Check and decode one generation.

    Raises:
        FormatError: It is not what the format says.
    """
    lease = decode_document(
        data, Lease, format_word=FORMAT, what="lease", limit_bytes=limits.LEASE_BYTES_MAX
    )
    check_time(lease.created, what="lease created")
    if (lease.snapshot is not None) != (lease.state is LeaseState.COMMITTED):
        raise Malformed(f"lease: a snapshot belongs to committed only, not to {lease.state.value}")
    return lease
