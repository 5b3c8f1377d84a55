"""Sizes and alignment: binary units, human-readable text, and the arithmetic of alignment."""

from __future__ import annotations

import re

from snapstore.errors import UsageError

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "PAGE_BYTES",
    "BytesLike",
    "align_up",
    "format_bytes",
    "parse_bytes",
]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

PAGE_BYTES = 4096
"""The page of x86-64 and arm64 Linux, the unit of CRIU's images and of frame alignment."""

BytesLike = bytes | bytearray | memoryview
"""What every function that only reads bytes accepts (C-contiguous, one byte an item)."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def align_up(value: int, alignment: int) -> int:
    """Round `value` up to the next multiple of `alignment` (a power of two)."""
    assert alignment & (alignment - 1) == 0, alignment
    return (value + alignment - 1) & -alignment


def parse_bytes(text: str) -> int:
    """Read a size such as `1GiB`, `512MiB`, `1G` or `4096`; K, M, G and T alone are binary.

    Raises:
        UsageError: The text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"not a size: {text!r}", next_step="write it like 512MiB or 1GiB")
    number, unit, binary = match.groups()
    decimal = unit and not binary and text.strip().upper().endswith("B")
    return int(float(number) * (1000 if decimal else 1024) ** _POWERS[unit.upper()])


def format_bytes(count: int) -> str:
    """Write a byte count with three significant digits in decimal units, as disks are sold."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
