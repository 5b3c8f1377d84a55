"""Write the pagemap of a task or a shared memory segment as CRIU 4.2 and later write it.

Pure: entries in, bytes out. `snapstore` has the other direction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapagent.criu.image_file import build_image, varint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ENTRIES_MAX", "build_pagemap"]

ENTRIES_MAX = 1 << 22
"""So many a store's reader accepts. CRIU cuts entries at 1 MiB: four terabytes reach this."""

_MAGIC_PAGEMAP = 0x56084025
_COMPAT_NR_PAGES = b"\x10\x00"
"""Field 2, always zero: the page count of CRIU before 4.2, which is required and has 32 bits."""


def build_pagemap(pages_id: int, entries: Iterable[tuple[int, int, int]]) -> bytes:
    """Return the bytes of `pagemap-*.img`, byte for byte those of CRIU.

    Args:
        pages_id: The data is in `pages-<pages_id>.img`.
        entries: Address, number of pages and flags of each run, in the order of the data.
    """
    return build_image(_MAGIC_PAGEMAP, _messages(pages_id, entries))


def _messages(pages_id: int, entries: Iterable[tuple[int, int, int]]) -> Iterator[bytes]:
    yield b"\x08" + varint(pages_id)
    for vaddr, nr_pages, flags in entries:
        yield b"".join(
            (
                b"\x08" + varint(vaddr),
                _COMPAT_NR_PAGES,
                b"\x20" + varint(flags),
                b"\x28" + varint(nr_pages),
            )
        )
