"""Typed identifiers and the grammar of names (`format_spec/05-names-refs.md`).

Pure values: no I/O, no clock. All are immutable and hashable.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from blake3 import blake3
from typing_extensions import override

from snapstore.errors import Malformed, UsageError

__all__ = [
    "DIGEST_BYTES",
    "ChunkId",
    "Digest",
    "PackId",
    "RankId",
    "RefName",
    "SnapshotId",
    "SnapshotRef",
    "parse_snapshot_ref",
]

DIGEST_BYTES = 32
NAME_CHARS_MAX = 255
TAG_CHARS_MAX = 128
TAG_DEFAULT = "latest"

_HEX = re.compile(r"[0-9a-f]{64}")
_COMPONENT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Digest:
    """A BLAKE3-256 digest; the base of every content-derived id."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != DIGEST_BYTES:
            raise Malformed(f"a digest has {DIGEST_BYTES} bytes, not {len(self.raw)}")

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> Self:
        """Hash `data` (releases the GIL for more than 2 KiB)."""
        return cls(blake3(data).digest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read 64 lower-case hexadecimal digits.

        Raises:
            Malformed: The text is anything else.
        """
        if _HEX.fullmatch(text) is None:
            raise Malformed(f"not a digest of 64 lower-case hexadecimal digits: {text[:80]!r}")
        return cls(bytes.fromhex(text))

    @property
    def hex(self) -> str:
        """All 64 digits."""
        return self.raw.hex()

    @property
    def short(self) -> str:
        """The first 12 digits: enough for people and for messages, never for machines."""
        return self.raw[:6].hex()

    @override
    def __str__(self) -> str:
        return self.hex


class ChunkId(Digest):
    """Digest of a chunk's plaintext."""

    __slots__ = ()


class PackId(Digest):
    """Digest of all bytes of a pack."""

    __slots__ = ()


class RankId(Digest):
    """Root digest of a rank manifest."""

    __slots__ = ()


class SnapshotId(Digest):
    """Digest of a root manifest's canonical JSON."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class RefName:
    """A mutable name: slash-separated components and a tag."""

    name: str
    tag: str = TAG_DEFAULT

    def __post_init__(self) -> None:
        _check_name(self.name)
        if len(self.tag) > TAG_CHARS_MAX or _COMPONENT.fullmatch(self.tag) is None:
            raise UsageError(
                f"not a tag: {self.tag[:80]!r}",
                next_step="use letters, digits, '.', '_' and '-', starting and ending with one "
                f"of the first two, at most {TAG_CHARS_MAX} characters",
            )

    @override
    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotRef:
    """What a user points at: a ref, or one exact snapshot under a display name."""

    ref: RefName
    snapshot: SnapshotId | None = None

    @override
    def __str__(self) -> str:
        if self.snapshot is None:
            return str(self.ref)
        return f"{self.ref.name}@b3:{self.snapshot.hex}"


def parse_snapshot_ref(text: str) -> SnapshotRef:
    """Read `name`, `name:tag` or `name@b3:<64 hex>`.

    Raises:
        UsageError: The text follows none of the three forms.
    """
    name, at, exact = text.partition("@")
    if at:
        if not exact.startswith("b3:") or _HEX.fullmatch(exact[3:]) is None:
            raise UsageError(
                f"not an exact snapshot: {text[:120]!r}", next_step="write NAME@b3:<64 hex digits>"
            )
        return SnapshotRef(RefName(name), SnapshotId.parse(exact[3:]))
    name, colon, tag = text.partition(":")
    return SnapshotRef(RefName(name, tag) if colon else RefName(name))


def _check_name(name: str) -> None:
    components = name.split("/")
    if len(name) > NAME_CHARS_MAX or not all(_COMPONENT.fullmatch(part) for part in components):
        raise UsageError(
            f"not a snapshot name: {name[:120]!r}",
            next_step="join components by '/', such as team/model/engine: letters, digits, '.', "
            "'_' and '-', starting and ending with one of the first two, "
            f"{NAME_CHARS_MAX} characters in all",
        )
