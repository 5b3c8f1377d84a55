"""The file tree of a rank manifest (`format_spec/04-manifests.md`, section 3).

Pure: bytes in, values out. A tree that passes `check_tree` can be recreated below a directory
without ever leaving it.
"""

import binascii
import enum
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format import limits
from snapstore.format.canonical import (
    INT64_MAX,
    INT64_MIN,
    check_bytes_max,
    decode_typed,
    encode_typed,
)
from snapstore.units import BytesLike

__all__ = ["EntryType", "TreeEntry", "check_tree", "decode_tree", "encode_tree"]

MODE_MAX = 0o7777
ID_MAX = (1 << 32) - 1


class EntryType(enum.Enum):
    """What a path is; the value is the stored word."""

    DIRECTORY = "directory"
    FILE = "file"
    SYMLINK = "symlink"
    HARDLINK = "hardlink"


class TreeEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One path of a tree, with everything that comes back when it is pulled.

    Attributes:
        path: Relative, raw bytes, components joined by `/`; empty for the root of the tree.
        type: What the path is.
        mode: The 12 permission bits.
        uid: Owner.
        gid: Group.
        mtime_ns: Modification time in nanoseconds since the epoch; may be negative.
        xattrs: Extended attributes, sorted by name.
        size_bytes: Length of a file; 0 for others.
        stream: Number of the stream that holds a file's bytes; 0 for an empty file.
        offset: Where in the stream the file begins.
        target: What a symlink says (not resolved), or the path of the first name of the file
            that a hardlink is another name of. Empty otherwise.
    """

    path: bytes
    type: EntryType
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    size_bytes: int = 0
    stream: int = 0
    offset: int = 0
    target: bytes = b""


_Mode = Annotated[int, msgspec.Meta(ge=0, le=MODE_MAX)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]
_Signed = Annotated[int, msgspec.Meta(ge=INT64_MIN, le=INT64_MAX)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=limits.STREAM_BYTES_MAX)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=limits.STREAM_BYTES_MAX)]
_Stream = Annotated[int, msgspec.Meta(ge=0, lt=limits.RANK_STREAMS_MAX)]


class _Stored(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """An entry as it is written; the fields are in the order of the keys."""

    gid: _Id
    mode: _Mode
    mtime_ns: _Signed
    offset: _Bytes | UnsetType = UNSET
    path: str | UnsetType = UNSET
    path_b64: str | UnsetType = UNSET
    size: _Size | UnsetType = UNSET
    stream: _Stream | UnsetType = UNSET
    target: str | UnsetType = UNSET
    target_b64: str | UnsetType = UNSET
    type: EntryType
    uid: _Id
    xattrs: tuple[tuple[str, str], ...] | UnsetType = UNSET


def encode_tree(entries: Sequence[TreeEntry]) -> bytes:
    """Encode the section `TREE`.

    Raises:
        Malformed: A rule of the format is broken, such as the order of the entries.
        LimitExceeded: A path, target or the whole is too long.
    """
    check_tree(entries)
    data = encode_typed([_to_stored(entry) for entry in entries], what="tree")
    check_bytes_max(len(data), limits.RANK_TREE_BYTES_MAX, what="tree")
    return data


def decode_tree(data: BytesLike) -> list[TreeEntry]:
    """Check and decode the section `TREE`.

    Raises:
        Malformed: It is no canonical JSON of a tree, or could lead outside itself.
        LimitExceeded: A path, target or the whole is too long.
    """
    check_bytes_max(len(data), limits.RANK_TREE_BYTES_MAX, what="tree")
    stored = decode_typed(data, list[_Stored], what="tree")
    entries = [_from_stored(one) for one in stored]
    check_tree(entries)
    return entries


def check_tree(entries: Iterable[TreeEntry]) -> None:
    """Check all rules of a tree; no path of one that passes leads outside.

    Raises:
        Malformed: A rule is broken.
        LimitExceeded: A path, target or attribute is too long.
    """
    directories: set[bytes] = set()
    files: set[bytes] = set()
    previous: bytes | None = None
    for entry in entries:
        path = entry.path
        if previous is None:
            if path or entry.type is not EntryType.DIRECTORY:
                raise Malformed("tree: the first entry is not the root directory")
        else:
            if path <= previous:
                raise Malformed(f"tree: {path[:80]!r} is out of order, or there twice")
            _check_path(path, directories)
        _check_entry(entry, files)
        if entry.type is EntryType.DIRECTORY:
            directories.add(path)
        elif entry.type is EntryType.FILE:
            files.add(path)
        previous = path
    if previous is None:
        raise Malformed("tree: no entry")


def _check_path(path: bytes, directories: set[bytes]) -> None:
    # All components but the last are those of a parent that was checked as an entry itself.
    parent, slash, name = path.rpartition(b"/")
    if len(path) > limits.PATH_BYTES_MAX or len(name) > limits.COMPONENT_BYTES_MAX:
        raise LimitExceeded(f"tree: a path or component is too long: {path[:80]!r}...")
    if not name or name in {b".", b".."} or b"\0" in name or (slash and not parent):
        raise Malformed(f"tree: path {path[:80]!r}")
    if parent not in directories:
        raise Malformed(f"tree: {path[:80]!r} has no directory above it")


def _check_entry(entry: TreeEntry, files: set[bytes]) -> None:
    if entry.type is EntryType.FILE:
        if not 0 <= entry.size_bytes <= limits.STREAM_BYTES_MAX:
            raise LimitExceeded(f"tree: {entry.path[:80]!r} has {entry.size_bytes} bytes")
        if entry.size_bytes == 0 and (entry.stream or entry.offset):
            raise Malformed(f"tree: {entry.path[:80]!r} is empty, yet in a stream")
    elif entry.size_bytes or entry.stream or entry.offset:
        raise Malformed(f"tree: {entry.path[:80]!r} is no file, yet in a stream")
    if entry.type is EntryType.SYMLINK:
        _check_symlink_target(entry)
    elif entry.type is EntryType.HARDLINK:
        if entry.target not in files:
            raise Malformed(f"tree: {entry.path[:80]!r} links to what is no earlier file")
    elif entry.target:
        raise Malformed(f"tree: {entry.path[:80]!r} is no link, yet has a target")
    if entry.xattrs:
        _check_xattrs(entry)


def _check_symlink_target(entry: TreeEntry) -> None:
    if len(entry.target) > limits.SYMLINK_TARGET_BYTES_MAX:
        raise LimitExceeded(f"tree: the target of {entry.path[:80]!r} is too long")
    if not entry.target or b"\0" in entry.target:
        raise Malformed(f"tree: {entry.path[:80]!r} has target {entry.target[:80]!r}")


def _check_xattrs(entry: TreeEntry) -> None:
    where = f"tree: extended attributes of {entry.path[:80]!r}"
    if len(entry.xattrs) > limits.XATTRS_MAX:
        raise LimitExceeded(f"{where}: {len(entry.xattrs)}")
    previous = b""
    total = 0
    for name, value in entry.xattrs:
        if len(name) > limits.XATTR_NAME_BYTES_MAX:
            raise LimitExceeded(f"{where}: a name of {len(name)} bytes")
        if name <= previous or b"\0" in name:
            raise Malformed(f"{where}: name {name[:80]!r} is empty, out of order or there twice")
        previous = name
        total += len(name) + len(value)
    if total > limits.XATTRS_BYTES_MAX:
        raise LimitExceeded(f"{where}: {total} bytes together")


def _to_stored(entry: TreeEntry) -> _Stored:
    stored = _Stored(
        gid=entry.gid,
        mode=entry.mode,
        mtime_ns=entry.mtime_ns,
        type=entry.type,
        uid=entry.uid,
    )
    _check_numbers(entry)
    try:
        stored.path = entry.path.decode()
    except UnicodeDecodeError:
        stored.path_b64 = _to_base64(entry.path)
    if entry.size_bytes:
        stored.size = entry.size_bytes
        stored.stream = entry.stream
        stored.offset = entry.offset
    if entry.target:
        try:
            stored.target = entry.target.decode()
        except UnicodeDecodeError:
            stored.target_b64 = _to_base64(entry.target)
    if entry.xattrs:
        stored.xattrs = tuple(_xattr_to_stored(name, value) for name, value in entry.xattrs)
    return stored


def _check_numbers(entry: TreeEntry) -> None:
    good = (
        0 <= entry.mode <= MODE_MAX
        and 0 <= entry.uid <= ID_MAX
        and 0 <= entry.gid <= ID_MAX
        and INT64_MIN <= entry.mtime_ns <= INT64_MAX
        and 0 <= entry.stream < limits.RANK_STREAMS_MAX
        and 0 <= entry.offset <= limits.STREAM_BYTES_MAX
    )
    if not good:
        raise Malformed(f"tree: a number of {entry.path[:80]!r} is out of range")


def _from_stored(stored: _Stored) -> TreeEntry:
    path = _text_or_base64(stored.path, stored.path_b64, what="path")
    if path is None:
        raise Malformed("tree: an entry without path")
    in_stream = {stored.size is UNSET, stored.stream is UNSET, stored.offset is UNSET}
    if len(in_stream) != 1:
        raise Malformed(f"tree: {path[:80]!r} needs all of size, stream and offset, or none")
    target = _text_or_base64(stored.target, stored.target_b64, what="target")
    if target == b"":
        raise Malformed(f"tree: {path[:80]!r} has an empty target")
    if stored.xattrs is UNSET:
        xattrs: tuple[tuple[bytes, bytes], ...] = ()
    elif not stored.xattrs:
        raise Malformed(f"tree: {path[:80]!r} has an empty list of extended attributes")
    else:
        xattrs = tuple((name.encode(), _from_base64(value)) for name, value in stored.xattrs)
    return TreeEntry(
        path=path,
        type=stored.type,
        mode=stored.mode,
        uid=stored.uid,
        gid=stored.gid,
        mtime_ns=stored.mtime_ns,
        xattrs=xattrs,
        size_bytes=0 if stored.size is UNSET else stored.size,
        stream=0 if stored.stream is UNSET else stored.stream,
        offset=0 if stored.offset is UNSET else stored.offset,
        target=target or b"",
    )


def _text_or_base64(text: str | UnsetType, base64: str | UnsetType, *, what: str) -> bytes | None:
    if text is not UNSET:
        if base64 is not UNSET:
            raise Malformed(f"tree: an entry with both {what} and {what}_b64")
        return text.encode()
    if base64 is UNSET:
        return None
    raw = _from_base64(base64)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw
    raise Malformed(f"tree: {what}_b64 of what is valid UTF-8: {raw[:80]!r}")


def _to_base64(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).decode("ascii")


def _from_base64(text: str) -> bytes:
    try:
        raw = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise Malformed(f"tree: not base64: {text[:80]!r}") from error
    # Strict decoding still accepts stray bits before the padding, which would be a second spelling.
    if _to_base64(raw) != text:
        raise Malformed(f"tree: not canonical base64: {text[:80]!r}")
    return raw


def _xattr_to_stored(name: bytes, value: bytes) -> tuple[str, str]:
    try:
        return name.decode(), _to_base64(value)
    except UnicodeDecodeError as error:
        raise Malformed(f"tree: the name of an attribute is not UTF-8: {name[:80]!r}") from error
