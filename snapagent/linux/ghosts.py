"""Files that CRIU makes for a moment in a restore, and leaves behind when it is killed then.

A file that had lost its name is made again beside where it was, as `NAME.cr.NUMBER.ghost`, opened,
and removed at the end. One that stays takes up room, and makes the next restore fail.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["remove_ghosts", "remove_ghosts_below"]

_SUFFIX = re.compile(r"\.cr\.[0-9a-f]{1,8}\.ghost")


def remove_ghosts(paths: Sequence[str]) -> None:
    """Remove what CRIU may have left of these files, as far as that goes.

    Args:
        paths: Absolute paths that the files had.
    """
    by_folder: dict[str, set[str]] = {}
    for path in paths:
        folder, name = os.path.split(path)
        by_folder.setdefault(folder, set()).add(name)
    for folder, names in by_folder.items():
        with contextlib.suppress(OSError):
            for found in os.listdir(folder):
                suffix = _SUFFIX.search(found)
                if suffix and suffix.end() == len(found) and found[: suffix.start()] in names:
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(folder, found))


def remove_ghosts_below(root_fd: int, paths: Sequence[str]) -> None:
    """Do the same below another root directory. Only for a process with one thread: it forks."""
    pid = os.fork()
    if pid == 0:
        try:
            os.fchdir(root_fd)
            os.chroot(".")
            remove_ghosts(paths)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
