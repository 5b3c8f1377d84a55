"""Where objects lie: kind and name to key and back (`format_spec/01-objects.md`).

A key is a relative path of plain ASCII components; every backend stores an object under its key.
Names are checked here and nowhere else. A key that comes back from a listing is hostile: whatever
is not exactly the key of an object (`lost+found`, `.nfs0001`, an editor's backup) names nothing.
"""

from __future__ import annotations

import re

from snapstore.backend.base import ObjectKind
from snapstore.errors import UsageError

__all__ = [
    "KEY_CHARS_MAX",
    "TEMPORARIES",
    "is_folder",
    "key_of",
    "listing_prefix",
    "name_of",
    "object_text",
    "parent_keys",
]

TEMPORARIES = "tmp"
"""Where unfinished objects lie in backends that need such a place. No kind has this name."""

KEY_CHARS_MAX = 512
"""Longest key or prefix: a ref has at most 255 + 2 + 128 + 9 characters and its kind's 5."""

_HEX64 = "[0-9a-f]{64}"
_HEX32 = "[0-9a-f]{32}"
_NUMBER = "(?!0{8})[0-9]{8}"
# The grammar of `snapstore.ids`: a component neither starts nor ends with a dot, so that neither
# '..' nor a hidden file can be meant, and never starts with the '@' that sets a tag apart.
_COMPONENT = "[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_REF_CHARS = "(?=[^@]{1,255}/@[^/]{1,128}/)"
_MARKED = "(?:packs|indexes|ranks|snapshots)"
_WORD = "[a-z](?:[a-z0-9-]{0,30}[a-z0-9])?"

_SHARDED = frozenset({ObjectKind.PACK, ObjectKind.INDEX, ObjectKind.RANK, ObjectKind.SNAPSHOT})
_SHARD_CHARS = 2

_NAMES: dict[ObjectKind, re.Pattern[str]] = {
    ObjectKind.CONFIG: re.compile(""),
    **{kind: re.compile(_HEX64) for kind in _SHARDED},
    ObjectKind.LAYOUT: re.compile(f"{_HEX64}/{_NUMBER}"),
    ObjectKind.REF: re.compile(
        f"{_REF_CHARS}{_COMPONENT}(?:/{_COMPONENT})*/@{_COMPONENT}/{_NUMBER}"
    ),
    ObjectKind.LEASE: re.compile(f"{_HEX32}/{_NUMBER}"),
    ObjectKind.MARK: re.compile(f"{_MARKED}/{_HEX64}/{_NUMBER}"),
    # One component, since a store on files cannot have both a hint `a` and a hint `a/b`.
    ObjectKind.HINT: re.compile(f"{_WORD}/(?=.{{1,128}}$){_COMPONENT}"),
}
_FOLDERS: dict[ObjectKind, re.Pattern[str]] = {
    **{kind: re.compile("[0-9a-f]{2}") for kind in _SHARDED},
    ObjectKind.LAYOUT: re.compile(_HEX64),
    ObjectKind.REF: re.compile(
        f"(?=[^@]{{1,256}}(?:@|$)){_COMPONENT}(?:/{_COMPONENT})*(?:/@{_COMPONENT})?"
    ),
    ObjectKind.LEASE: re.compile(_HEX32),
    ObjectKind.MARK: re.compile(f"{_MARKED}(?:/{_HEX64})?"),
    ObjectKind.HINT: re.compile(_WORD),
}
_PREFIX = re.compile("(?:[A-Za-z0-9._@-]+/)*[A-Za-z0-9._@-]*")
_SHARDED_PREFIX = re.compile("[0-9a-f]{0,64}")


def key_of(kind: ObjectKind, name: str) -> str:
    """Build the key under which an object of that kind and name is stored.

    Raises:
        UsageError: No object of this kind can have that name.
    """
    if len(name) > KEY_CHARS_MAX or _NAMES[kind].fullmatch(name) is None:
        raise UsageError(f"no object of kind {kind.name} can be named {name[:120]!r}")
    if kind is ObjectKind.CONFIG:
        return ObjectKind.CONFIG.value
    if kind in _SHARDED:
        return f"{kind.value}/{name[:_SHARD_CHARS]}/{name}"
    return f"{kind.value}/{name}"


def name_of(kind: ObjectKind, key: str) -> str | None:
    """Read an object's name back from a key found in a listing; `None` if it is nobody's key."""
    if kind is ObjectKind.CONFIG:
        return "" if key == kind.value else None
    folder, _, rest = key.partition("/")
    if folder != kind.value or len(key) > KEY_CHARS_MAX:
        return None
    name = rest
    if kind in _SHARDED:
        shard, _, name = rest.partition("/")
        if shard != name[:_SHARD_CHARS]:
            return None
    return name if _NAMES[kind].fullmatch(name) else None


def object_text(kind: ObjectKind, name: str) -> str:
    """Name an object for people; the config has no name of its own."""
    return f"{kind.name} {name}" if name else kind.name


def is_folder(kind: ObjectKind, key: str) -> bool:
    """Whether objects of the kind can lie somewhere below `key`, so that a walk should enter."""
    if kind is ObjectKind.CONFIG or len(key) > KEY_CHARS_MAX:
        return False
    top, slash, rest = key.partition("/")
    if top != kind.value:
        return False
    return not slash or _FOLDERS[kind].fullmatch(rest) is not None


def listing_prefix(kind: ObjectKind, prefix: str) -> str | None:
    """Turn a prefix of names into the longest prefix of keys; `None` if no name starts so.

    Raises:
        UsageError: The prefix tries to leave the kind, or is longer than any name.
    """
    components = prefix.split("/")
    if (
        len(prefix) > KEY_CHARS_MAX
        or _PREFIX.fullmatch(prefix) is None
        or not {".", ".."}.isdisjoint(components)
    ):
        raise UsageError(f"no name can start with {prefix[:120]!r}")
    if kind is ObjectKind.CONFIG:
        return None if prefix else kind.value
    if kind not in _SHARDED:
        return f"{kind.value}/{prefix}"
    if _SHARDED_PREFIX.fullmatch(prefix) is None:
        return None
    if len(prefix) < _SHARD_CHARS:
        return f"{kind.value}/{prefix}"
    return f"{kind.value}/{prefix[:_SHARD_CHARS]}/{prefix}"


def parent_keys(key: str) -> list[str]:
    """The folders that hold a key, innermost first, ending with `` for the store itself."""
    parts = key.split("/")
    return ["/".join(parts[:depth]) for depth in range(len(parts) - 1, -1, -1)]
