"""Read the build id out of an executable or library: which build of it a file is."""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

__all__ = ["read_build_id"]

_MAGIC = b"\x7fELF"
_NOTE_SEGMENT = 4
_BUILD_ID_NOTE = 3
_OWNER = b"GNU\0"

SEGMENTS_MAX = 256
NOTES_BYTES_MAX = 1 << 16
BUILD_ID_BYTES_MAX = 64


class _Layout(NamedTuple):
    """Where what stands in the file's header and in a segment's: of 32 and of 64 bits."""

    header_bytes: int
    header: str
    segment_bytes: int
    segment: str


_LAYOUTS = {
    1: _Layout(52, "28xI10xHH6x", 32, "IIxxxxxxxxI12x"),
    2: _Layout(64, "32xQ14xHH6x", 56, "IxxxxQ16xQ16x"),
}


def read_build_id(fd: int) -> str | None:
    """Return the build id of an open file in hexadecimal; none if it has none or is no ELF file.

    Raises:
        OSError: The file cannot be read.
    """
    ident = os.pread(fd, 16, 0)
    if len(ident) < 16 or ident[:4] != _MAGIC or ident[4] not in _LAYOUTS:
        return None
    order = ">" if ident[5] == 2 else "<"
    layout = _LAYOUTS[ident[4]]
    header = os.pread(fd, layout.header_bytes, 0)
    if len(header) < layout.header_bytes:
        return None
    table, entry_bytes, count = struct.unpack(order + layout.header, header)
    if entry_bytes != layout.segment_bytes or count > SEGMENTS_MAX or table >= 1 << 62:
        return None
    segments = os.pread(fd, count * entry_bytes, table)
    if len(segments) < count * entry_bytes:
        return None
    for kind, offset, size in struct.iter_unpack(order + layout.segment, segments):
        if kind == _NOTE_SEGMENT and size <= NOTES_BYTES_MAX and offset < 1 << 62:
            found = _build_id(os.pread(fd, size, offset), order)
            if found is not None:
                return found
    return None


def _build_id(notes: bytes, order: str) -> str | None:
    at = 0
    while at + 12 <= len(notes):
        name_bytes, value_bytes, kind = struct.unpack_from(order + "III", notes, at)
        name = at + 12
        value = name + (name_bytes + 3 & ~3)
        if kind == _BUILD_ID_NOTE and notes[name : name + name_bytes] == _OWNER:
            found = notes[value : value + value_bytes]
            is_whole = len(found) == value_bytes and 0 < value_bytes <= BUILD_ID_BYTES_MAX
            return found.hex() if is_whole else None
        at = value + (value_bytes + 3 & ~3)
    return None
