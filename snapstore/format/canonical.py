"""The one JSON encoding that is hashed (`format_spec/01-objects.md`, section 3).

msgspec with sorted keys already writes the canonical form of strings, keys and integers. What it
allows beyond that (numbers that are no 64-bit integers, any depth) is refused here, on both sides.
"""

from __future__ import annotations

import datetime as dt
import enum
import re
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from snapstore.errors import LimitExceeded, Malformed, UnsupportedVersion
from snapstore.format import limits

if TYPE_CHECKING:
    from snapstore.units import BytesLike

__all__ = [
    "Hex32",
    "Hex64",
    "Natural",
    "Time",
    "Word",
    "check_bytes_max",
    "check_time",
    "check_values",
    "decode",
    "decode_document",
    "decode_head",
    "decode_typed",
    "encode",
    "encode_typed",
]

T = TypeVar("T")

INT64_MIN = -(1 << 63)
INT64_MAX = (1 << 63) - 1

TIME_PATTERN = r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\Z"

Hex32 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""A nonce, lease id or store id."""
Hex64 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""A digest."""
Time = Annotated[str, msgspec.Meta(pattern=TIME_PATTERN)]
Word = Annotated[
    str, msgspec.Meta(pattern=rf"\A[a-z0-9][a-z0-9._-]{{0,{limits.WORD_CHARS_MAX - 1}}}\Z")
]
Natural = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]

_ENCODER = msgspec.json.Encoder(order="sorted")


class _Head(msgspec.Struct):
    """What every document of any version has."""

    format: str
    version: Annotated[int, msgspec.Meta(ge=INT64_MIN, le=INT64_MAX)]


def encode(value: object, *, what: str = "document") -> bytes:
    """Encode a value of dictionaries, lists, strings, integers, booleans, null and structs.

    Raises:
        Malformed: It holds something that canonical JSON cannot say.
    """
    check_values(value, what=what)
    return encode_typed(value, what=what)


def encode_typed(value: object, *, what: str = "document") -> bytes:
    """Encode a value whose types already exclude floats and wide integers, without a look.

    Raises:
        Malformed: A string is no valid Unicode.
    """
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError as error:
        raise Malformed(f"{what}: a string is not valid Unicode: {error.reason}") from error


def decode(data: BytesLike, as_type: type[T], *, what: str = "document") -> T:
    """Decode canonical JSON; refuse all that differs from the encoding of what it decodes to.

    Raises:
        Malformed: It is not JSON, not of this type, or not canonical.
    """
    value = decode_typed(data, as_type, what=what)
    check_values(value, what=what)
    return value


def decode_typed(data: BytesLike, as_type: type[T], *, what: str = "document") -> T:
    """Like `decode`, for a type that already excludes floats, wide integers and open values.

    Raises:
        Malformed: It is not JSON, not of this type, or not canonical.
    """
    value = _decode(data, as_type, what=what)
    if encode_typed(value, what=what) != data:
        raise Malformed(f"{what}: not in canonical form")
    return value


def decode_document(
    data: BytesLike, as_type: type[T], *, format_word: str, what: str, limit_bytes: int
) -> T:
    """Decode a document that says its own format and version, looking at these two first.

    Raises:
        LimitExceeded: It is larger than documents of this kind may be.
        Malformed: It is not canonical JSON of this format.
        UnsupportedVersion: It is of a newer version.
    """
    decode_head(data, _Head, format_word=format_word, what=what, limit_bytes=limit_bytes)
    return decode(data, as_type, what=what)


def decode_head(
    data: BytesLike, as_type: type[T], *, format_word: str, what: str, limit_bytes: int
) -> T:
    """Check format and version of a document, then look at some of its keys and at no others.

    What may change between versions is not checked; use `decode_document` for that.

    Raises:
        LimitExceeded: It is larger than documents of this kind may be.
        Malformed: It is not JSON of this format.
        UnsupportedVersion: It is of a newer version.
    """
    check_bytes_max(len(data), limit_bytes, what=what)
    head = _decode(data, _Head, what=what)
    if head.format != format_word:
        raise Malformed(f"{what}: format is {head.format[:80]!r}, not {format_word!r}")
    check_version(head.version, what=what)
    return _decode(data, as_type, what=what)


def check_version(version: int, *, what: str) -> None:
    """Refuse a version that this code cannot read.

    Raises:
        UnsupportedVersion: It is newer.
        Malformed: There is no such version.
    """
    if version > 1:
        raise UnsupportedVersion(
            f"this {what} needs a snapstore that reads store format {version}",
            next_step="upgrade snapstore",
        )
    if version != 1:
        raise Malformed(f"{what}: version {version} does not exist")


def check_bytes_max(length: int, limit_bytes: int, *, what: str) -> None:
    """Refuse an object that is larger than its kind may be.

    Raises:
        LimitExceeded: It is.
    """
    if length > limit_bytes:
        raise LimitExceeded(f"{what}: {length} bytes, more than the limit of {limit_bytes}")


def check_time(text: str, *, what: str) -> None:
    """Refuse what is not a time of the form `2026-11-30T05:00:00Z`.

    Raises:
        Malformed: It is not, or no such moment exists.
    """
    try:
        if re.match(TIME_PATTERN, text) is None:
            raise ValueError(text)  # noqa: TRY301 - one message for both
        dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise Malformed(f"{what}: not a time in UTC with whole seconds: {text[:40]!r}") from error


def check_values(value: object, *, what: str) -> None:
    """Refuse, without recursion, what canonical JSON cannot say or what is nested too deeply.

    Raises:
        Malformed: A float, an integer beyond 64 bits, a key that is no string, another type.
        LimitExceeded: More than `limits.JSON_DEPTH_MAX` levels.
    """
    level: list[object] = [value]
    depth = 0
    while level:
        deeper: list[object] = []
        nested = False
        for item in level:
            nested |= _check_value(item, deeper, what=what)
        depth += nested
        if depth > limits.JSON_DEPTH_MAX:
            raise LimitExceeded(f"{what}: nested more than {limits.JSON_DEPTH_MAX} levels deep")
        level = deeper


def _check_value(item: object, deeper: list[object], *, what: str) -> bool:
    """Check one value; add what it holds to `deeper`, and tell whether it is a level of nesting."""
    if item is None or isinstance(item, bool | str):
        return False
    if isinstance(item, int):
        if not INT64_MIN <= item <= INT64_MAX:
            raise Malformed(f"{what}: an integer does not fit 64 bits")
        return False
    if isinstance(item, enum.Enum):
        deeper.append(item.value)
        return False
    if isinstance(item, dict):
        if not all(isinstance(key, str) for key in item):
            raise Malformed(f"{what}: a key is not a string")
        deeper.extend(item.values())
    elif isinstance(item, msgspec.Struct):
        deeper.extend(getattr(item, name) for name in item.__struct_fields__)
    elif isinstance(item, list | tuple):
        deeper.extend(item)
    else:
        raise Malformed(f"{what}: holds a {type(item).__name__}")
    return True


def _decode(data: BytesLike, as_type: type[T], *, what: str) -> T:
    try:
        return msgspec.json.decode(data, type=as_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"{what}: {str(error)[:200]}") from error
    except RecursionError as error:
        raise LimitExceeded(
            f"{what}: nested more than {limits.JSON_DEPTH_MAX} levels deep"
        ) from error
