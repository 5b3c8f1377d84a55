"""Files that CRIU makes for a moment in a restore, and leaves behind when it is killed then.

Each restore has names of its own for them (see `criu.ghosts`), so that only its own are removed.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["remove_ghosts", "remove_ghosts_below"]


def remove_ghosts(paths: Sequence[str]) -> None:
    """Remove what CRIU may have left, as far as that goes.

    Args:
        paths: Absolute paths. Where the folder is gone, CRIU has taken the nearest one above it.
    """
    for path in paths:
        folder, name = os.path.split(path)
        while folder.strip("/") and not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))


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
