"""Write images as CRIU 4.2 and later write them. Pure: messages in, bytes out."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["build_image", "varint"]

_MAGIC_ANY_IMAGE = 0x54564319
_MAGICS = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


def build_image(magic: int, messages: Iterable[bytes]) -> bytes:
    """Return an image of this type with these messages, one an entry."""
    parts = [_MAGICS.pack(_MAGIC_ANY_IMAGE, magic)]
    for message in messages:
        parts += (_LENGTH.pack(len(message)), message)
    return b"".join(parts)


def varint(value: int) -> bytes:
    """Write a number in groups of seven bits, the lowest first."""
    octets = bytearray()
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
