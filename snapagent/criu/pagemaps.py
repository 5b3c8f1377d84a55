"""Write the pagemap of a task or a shared memory segment as CRIU 4.2 and later write it.

Pure: entries in, bytes out. `snapstore` has the other direction.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ENTRIES_MAX", "build_pagemap"]

ENTRIES_MAX = 1 << 22
"""So many a store's reader accepts. CRIU cuts entries at 1 MiB: four terabytes reach this."""

_MAGICS = struct.pack("<II", 0x54564319, 0x56084025)  # any image, then a pagemap
_LENGTH = struct.Struct("<I")
_COMPAT_NR_PAGES = b"\x10\x00"
"""Field 2, always zero: the page count of CRIU before 4.2, which is required and has 32 bits."""


def build_pagemap(pages_id: int, entries: Iterable[tuple[int, int, int]]) -> bytes:
    """Return the bytes of `pagemap-*.img`, byte for byte those of CRIU.

    Args:
        pages_id: The data is in `pages-<pages_id>.img`.
        entries: Address, number of pages and flags of each run, in the order of the data.
    """
    parts = [_MAGICS]
    head = b"\x08" + _varint(pages_id)
    parts += (_LENGTH.pack(len(head)), head)
    for vaddr, nr_pages, flags in entries:
        message = b"".join(
            (
                b"\x08" + _varint(vaddr),
                _COMPAT_NR_PAGES,
                b"\x20" + _varint(flags),
                b"\x28" + _varint(nr_pages),
            )
        )
        parts += (_LENGTH.pack(len(message)), message)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    """Write a number in groups of seven bits, the lowest first."""
    octets = bytearray()
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
