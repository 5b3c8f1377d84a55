"""Marks: the state of a removal (`format_spec/05-names-refs.md`, section 4)."""

import enum
from typing import Final, Literal

import msgspec

from snapstore.format import limits
from snapstore.format.canonical import Hex32, Time, check_time, decode_document, encode
from snapstore.units import BytesLike

__all__ = ["Mark", "MarkState", "decode_mark", "encode_mark", "may_follow"]

FORMAT: Final = "snapstore/mark"


class MarkState(enum.Enum):
    """How far a removal is; the value is the stored word."""

    CONDEMNED = "condemned"
    REVIVED = "revived"
    DELETING = "deleting"
    DELETED = "deleted"


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation of a mark.

    Attributes:
        created: When this generation was written.
        nonce: Random, of the writer; tells it after a lost reply that it has won.
        state: How far the removal is.
    """

    created: Time
    nonce: Hex32
    state: MarkState
    format: Literal["snapstore/mark"] = FORMAT
    version: Literal[1] = 1


def may_follow(new: MarkState, previous: MarkState | None) -> bool:
    """Whether a generation in state `new` may be written after one in state `previous`."""
    if new is MarkState.CONDEMNED:
        return previous is None or previous is MarkState.REVIVED
    if new is MarkState.REVIVED:
        return previous is MarkState.CONDEMNED or previous is MarkState.DELETED
    if new is MarkState.DELETED:
        return previous is MarkState.DELETING
    return previous is MarkState.CONDEMNED


def encode_mark(mark: Mark) -> bytes:
    """Encode one generation.

    Raises:
        Malformed: A value is not what the format says.
    """
    data = encode(mark, what="mark")
    decode_mark(data)
    return data


def decode_mark(data: BytesLike) -> Mark:
    """Check and decode one generation.

    Raises:
        FormatError: It is not what the format says.
    """
    mark = decode_document(
        data, Mark, format_word=FORMAT, what="mark", limit_bytes=limits.MARK_BYTES_MAX
    )
    check_time(mark.created, what="mark created")
    return mark
