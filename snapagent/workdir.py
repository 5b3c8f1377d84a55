"""Work directories: sockets, scripts and logs of one capture or restore, gone when it ends.

Each is locked by whoever works in it, so that one whose owner was killed is told from one in use
and removed by the next that makes its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
from typing import TYPE_CHECKING

from snapagent.errors import AgentError, CaptureRunning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from snapagent.config import AgentConfig

__all__ = ["WorkDirectory", "make_run_directory", "remove_abandoned", "work_directory"]

_NAME_BYTES = 4
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SOCKET_PATH_BYTES_MAX = 107
"""`sun_path`, less its NUL."""
_LONGEST_SOCKET = "streamer-capture.sock"
_OURS = re.compile(r"(?:capture-[0-9]{1,10}|restore-[0-9a-f]{8})")
"""Names of work directories. Whatever else lies beside them is somebody's: the run directory may be
one that others use as well."""


class WorkDirectory:
    """A directory of one's own.

    Attributes:
        path: Where it is.
        lock: Descriptor that says that it is in use; a helper process that inherits it keeps it so.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock


@contextlib.contextmanager
def work_directory(
    config: AgentConfig, doing: str, *, only_of: int | None = None
) -> Iterator[WorkDirectory]:
    """Make a work directory for the length of a `with` block.

    Args:
        config: Where.
        doing: A word for its name.
        only_of: A process with which nobody else may be doing that now.

    Raises:
        CaptureRunning: Somebody else does it with that process.
        AgentError: It cannot be made.
    """
    parent = config.run_directory
    name = secrets.token_hex(_NAME_BYTES) if only_of is None else str(only_of)
    path = parent / f"{doing}-{name}"
    if len(os.fsencode(path / _LONGEST_SOCKET)) > _SOCKET_PATH_BYTES_MAX:
        raise AgentError(
            f"{parent} is too long a path for sockets", next_step="set SNAPAGENT_RUN_DIR"
        )
    try:
        make_run_directory(parent)
        with _locked(parent):
            _remove_abandoned(parent)
            path.mkdir(mode=0o700)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except FileExistsError as error:
        raise CaptureRunning(
            f"process {only_of} is being captured already, in {path}",
            next_step="wait until that has ended",
        ) from error
    except OSError as error:
        raise AgentError(
            f"cannot work in {parent}: {error.strerror}",
            next_step="run as root, or set SNAPAGENT_RUN_DIR",
        ) from error
    try:
        yield WorkDirectory(path, lock)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def make_run_directory(path: Path, mode: int = 0o700) -> None:
    """Make the run directory if there is none.

    Raises:
        AgentError: It is such that another user could put a script there for CRIU to run, or a
            socket for others to trust.
        OSError: It cannot be made.
    """
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    found = path.stat()
    is_shared = found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX
    if is_shared or found.st_uid not in {0, os.geteuid()}:
        raise AgentError(
            f"other users may change what is in {path}",
            next_step=f"chown {os.geteuid()} and chmod go-w it, or set another run_directory",
        )


@contextlib.contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """Keep others out: they would take a directory that is not locked yet for an abandoned one."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def remove_abandoned(config: AgentConfig) -> tuple[list[str], list[str]]:
    """Remove what those left that were killed together with their supervisor.

    Returns:
        The names of what was removed, and of those in which somebody still works.
    """
    parent = config.run_directory
    with contextlib.suppress(OSError), _locked(parent):
        return _remove_abandoned(parent)
    return [], []


def _remove_abandoned(parent: Path) -> tuple[list[str], list[str]]:
    removed, busy = [], []
    for path in parent.iterdir():
        if _OURS.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path.name)
            except BlockingIOError:
                busy.append(path.name)
            finally:
                os.close(fd)
    return removed, busy
