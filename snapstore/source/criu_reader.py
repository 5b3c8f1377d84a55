"""Read the frame and the wire format of CRIU's images, with every length and count bounded.

Nobody vouches for the bytes. Values only, no schema: `criu_images.py` and `criu_pagemap.py` know
which field means what. All errors name the file and the offset. Reading is lazy and takes time
linear in the bytes given.

Layout of an image: a common magic (`inventory.img` has none, nor had CRIU before 2.0; statistics
have another one), the magic of its type, then entries of a 32-bit length and a protobuf message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn

from snapstore.errors import LimitExceeded, Malformed
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ENTRY_BYTES_MAX", "UINT32_END", "UINT64_END", "Field", "ImageReader"]

MAGIC_COMMON = 0x54564319
MAGIC_SERVICE = 0x55105940

ENTRY_BYTES_MAX = 32 * MIB
"""The largest real entry is the one of `mm-*.img`: some 50 bytes for each of up to a million
mappings."""

UINT32_END = 1 << 32
UINT64_END = 1 << 64

_CONTINUES = 0x80
"""The bit of a varint's byte that says that another one follows."""
_VARINT_BITS_MAX = 70  # 64 bits in groups of 7

_WIRE_VARINT, _WIRE_FIXED64, _WIRE_BYTES, _WIRE_FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_WIRE_FIXED64: 8, _WIRE_FIXED32: 4}


class Field(NamedTuple):
    """One field of a message: a number, or the range of its bytes."""

    number: int
    is_bytes: bool
    value: int
    """The number, or where the bytes begin."""
    end: int
    """Where the bytes end."""


class ImageReader:
    """One image: its type, its entries, and the fields of their messages."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data = data
        self.name = name
        first = self._fixed32(0)
        has_two = first in (MAGIC_COMMON, MAGIC_SERVICE)
        self._start = 8 if has_two else 4
        self.magic = self._fixed32(4) if has_two else first

    def expect(self, magic: int) -> None:
        """Check the type of the image.

        Raises:
            Malformed: It is of another type.
        """
        if self.magic != magic:
            self.fail(0, f"the magic {self.magic:#010x} instead of {magic:#010x}")

    def fail(self, offset: int, reason: str) -> NoReturn:
        """Refuse the image.

        Raises:
            Malformed: Always.
        """
        raise Malformed(f"{self.name}: {reason} at byte {offset}")

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield where each entry's message begins and ends.

        Raises:
            Malformed: An entry ends behind the end of the file.
            LimitExceeded: An entry is larger than any real one.
        """
        position, size = self._start, len(self.data)
        while position < size:
            length = self._fixed32(position)
            start = position + 4
            if length > ENTRY_BYTES_MAX:
                raise LimitExceeded(f"{self.name}: an entry of {length} bytes at byte {position}")
            if length > size - start:
                self.fail(position, f"an entry of {length} bytes, but {size - start} are left,")
            position = start + length
            yield start, position

    def only_entry(self) -> tuple[int, int]:
        """Return where the message of an image with one entry begins and ends."""
        for span in self.entries():
            return span
        return self.fail(self._start, "no entry")

    def varint(self, position: int, end: int) -> tuple[int, int]:
        """Read a number of 1 to 10 bytes; return it and where the next byte is."""
        data = self.data
        value = shift = 0
        for at in range(position, end):
            byte = data[at]
            value |= (byte & ~_CONTINUES) << shift
            if byte < _CONTINUES:
                if value >= UINT64_END:
                    self.fail(position, "a number of more than 64 bits")
                return value, at + 1
            shift += 7
            if shift == _VARINT_BITS_MAX:
                self.fail(position, "a number of more than 10 bytes")
        return self.fail(position, "a number that goes on behind its message")

    def fields(self, start: int, end: int) -> Iterator[Field]:
        """Yield the fields of a message in their order, known or not."""
        position = start
        while position < end:
            at = position
            key, position = self.varint(position, end)
            number, wire = key >> 3, key & 7
            if number == 0:
                self.fail(at, "a field with number 0")
            if wire == _WIRE_VARINT:
                value, position = self.varint(position, end)
                yield Field(number, is_bytes=False, value=value, end=0)
                continue
            if wire == _WIRE_BYTES:
                length, position = self.varint(position, end)
            elif wire in _FIXED_BYTES:
                length = _FIXED_BYTES[wire]
            else:
                self.fail(at, f"a field of the unknown wire type {wire}")
            if length > end - position:
                self.fail(at, f"a field of {length} bytes, but {end - position} are left,")
            stop = position + length
            if wire == _WIRE_BYTES:
                yield Field(number, is_bytes=True, value=position, end=stop)
            else:
                value = int.from_bytes(self.data[position:stop], "little")
                yield Field(number, is_bytes=False, value=value, end=0)
            position = stop

    def number(self, field: Field, *, below: int = UINT32_END) -> int:
        """Take a field that must be a number, 32 bits of it unless said otherwise."""
        if field.is_bytes:
            self.fail(field.value, f"bytes where field {field.number} is a number")
        if field.value >= below:
            raise Malformed(f"{self.name}: field {field.number} is {field.value}, too large")
        return field.value

    def number64(self, field: Field) -> int:
        """Take a field that must be a number of up to 64 bits."""
        return self.number(field, below=UINT64_END)

    def span(self, field: Field) -> tuple[int, int]:
        """Take a field that must be a message or bytes; return where it is."""
        if not field.is_bytes:
            raise Malformed(f"{self.name}: a number where field {field.number} has bytes")
        return field.value, field.end

    def raw(self, field: Field, *, size_bytes_max: int) -> bytes:
        """Take a field that must be bytes, such as a file name."""
        start, end = self.span(field)
        if end - start > size_bytes_max:
            raise LimitExceeded(
                f"{self.name}: {end - start} bytes at byte {start}, at most {size_bytes_max} "
                f"are expected of field {field.number}"
            )
        return self.data[start:end]

    def text(self, field: Field, *, size_bytes_max: int) -> str:
        """Take a field that must be text; what is not UTF-8 becomes backslash escapes."""
        return self.raw(field, size_bytes_max=size_bytes_max).decode("utf-8", "backslashreplace")

    def repeated(self, field: Field) -> Iterator[int]:
        """Take 32-bit numbers, packed or one a field: both encodings are legal."""
        if not field.is_bytes:
            yield self.number(field)
            return
        position = field.value
        while position < field.end:
            value, position = self.varint(position, field.end)
            if value >= UINT32_END:
                self.fail(position, f"a number too large for field {field.number}")
            yield value

    def _fixed32(self, position: int) -> int:
        if position + 4 > len(self.data):
            self.fail(position, "the file ends in the middle of a number")
        return int.from_bytes(self.data[position : position + 4], "little")
