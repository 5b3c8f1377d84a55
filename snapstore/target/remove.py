"""Remove a directory with all it holds, whatever its modes and depth, following no symlink."""

from __future__ import annotations

import os
import stat

from snapstore.fstree import chmod_path_fd, open_directory_below, parent_below

__all__ = ["remove_tree"]


def remove_tree(parent_fd: int, name: bytes) -> None:
    """Remove a directory of the caller's own. Needs no stack and no descriptors for depth.

    Raises:
        OSError: Something cannot be removed; part of the tree may be gone.
    """
    directory = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    root_fd = os.open(name, directory | os.O_PATH, dir_fd=parent_fd)
    try:
        directories = [b""]
        for path in directories:  # grows while it is walked: parents come before children
            _unlock(root_fd, path)
            directories.extend(_empty(root_fd, path))
        for path in reversed(directories[1:]):
            with parent_below(root_fd, path) as (above_fd, last):
                os.rmdir(last, dir_fd=above_fd)
    finally:
        os.close(root_fd)
    os.rmdir(name, dir_fd=parent_fd)


def _unlock(root_fd: int, path: bytes) -> None:
    """Make sure that a directory may be listed and changed."""
    fd = open_directory_below(root_fd, path)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) & stat.S_IRWXU != stat.S_IRWXU:
            chmod_path_fd(fd, stat.S_IRWXU)
    finally:
        os.close(fd)


def _empty(root_fd: int, path: bytes) -> list[bytes]:
    """Remove everything in a directory but the directories in it, whose paths are returned."""
    inner: list[bytes] = []
    fd = open_directory_below(root_fd, path, os.O_RDONLY)
    try:
        with os.scandir(fd) as listing:
            names = [os.fsencode(item.name) for item in listing]
        for name in names:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                inner.append(path + b"/" + name if path else name)
            else:
                os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    return inner
