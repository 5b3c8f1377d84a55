"""What the source and the target of a tree share: raw byte paths, and how to walk them safely.

Knows nothing of snapshots. A path here is relative, bytes as the kernel has them, its components
joined by `/`; the empty path is the root of the tree. No function follows a symlink below the
root, whatever the path says.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format import limits

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "chmod_path_fd",
    "is_kept_xattr",
    "open_directory_below",
    "parent_below",
    "parent_path",
    "show_path",
    "split_path",
]

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_XATTRS = frozenset(
    {b"security.capability", b"system.posix_acl_access", b"system.posix_acl_default"}
)


def is_kept_xattr(name: bytes) -> bool:
    """Say whether an extended attribute belongs to the tree.

    The rest is the machine's own business, such as SELinux labels: it is neither stored when a
    tree is pushed nor set when one is pulled.
    """
    return name in _KEPT_XATTRS or name.startswith((b"user.", b"trusted."))


def show_path(path: bytes) -> str:
    """Write a raw path for a message: quoted, one line, safe for a terminal."""
    return repr(path.decode("utf-8", "backslashreplace")) if path else "the root of the tree"


def parent_path(path: bytes) -> bytes:
    """Return the path of the directory that holds `path`; the root is its own parent."""
    return path.rpartition(b"/")[0]


def split_path(path: bytes) -> list[bytes]:
    """Split a path into components, none for the root.

    Raises:
        Malformed: A component is empty, `.` or `..`, or holds a NUL byte.
        LimitExceeded: The path or a component is too long.
    """
    if not path:
        return []
    if len(path) > limits.PATH_BYTES_MAX:
        raise LimitExceeded(
            f"a path of {len(path)} bytes: at most {limits.PATH_BYTES_MAX} are allowed"
        )
    components = path.split(b"/")
    for name in components:
        if name in {b"", b".", b".."} or b"\0" in name:
            raise Malformed(f"not a path below a directory: {show_path(path)}")
        if len(name) > limits.COMPONENT_BYTES_MAX:
            raise LimitExceeded(
                f"a name of {len(name)} bytes in {show_path(path)}: "
                f"at most {limits.COMPONENT_BYTES_MAX} are allowed"
            )
    return components


def open_directory_below(root_fd: int, path: bytes, flags: int = os.O_PATH) -> int:
    """Open a directory component by component, following no symlink; the caller closes it.

    `flags` are those of the last open. The default is enough for a `dir_fd` and asks for no
    permission on the directory itself; listing it needs `os.O_RDONLY`.

    Raises:
        OSError: As `open` has it. A component that is a symlink or a file gives `ENOTDIR`.
        Malformed: The path cannot be below a directory.
    """
    components = split_path(path)
    last = len(components)
    fd = os.open(b".", _DIRECTORY | (os.O_PATH if last else flags), dir_fd=root_fd)
    for index, name in enumerate(components, start=1):
        try:
            next_fd = os.open(name, _DIRECTORY | (flags if index == last else os.O_PATH), dir_fd=fd)
        finally:
            os.close(fd)
        fd = next_fd
    return fd


@contextlib.contextmanager
def parent_below(root_fd: int, path: bytes) -> Iterator[tuple[int, bytes]]:
    """Open the directory that holds `path` and give it with the last component.

    Raises:
        OSError: As `open_directory_below`.
        Malformed: The path is the root, which has no parent, or cannot be below a directory.
    """
    components = split_path(path)
    if not components:
        raise Malformed("the root of a tree has no name")
    fd = open_directory_below(root_fd, parent_path(path))
    try:
        yield fd, components[-1]
    finally:
        os.close(fd)


def chmod_path_fd(fd: int, mode: int) -> None:
    """Change the mode of what an `O_PATH` descriptor is of, which `fchmod` refuses to do.

    Raises:
        OSError: As `chmod` has it, and where /proc is missing or closed to this process.
    """
    Path(f"/proc/self/fd/{fd}").chmod(mode)
