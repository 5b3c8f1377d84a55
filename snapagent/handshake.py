"""The agent's side of NVIDIA Snapshot's handshake: files in a directory that a workload shares.

The directory belongs to the workload, which may put anything there: everything is done below one
descriptor of it, no link is followed, and what stands in the files is read with a limit.
`snapagent.workload.handshake` is the other side, and has the names.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from typing import TYPE_CHECKING, Final, Self

from snapagent.errors import AgentError
from snapagent.linux.probe import open_in_root
from snapagent.workload.handshake import (
    DIRECTORY_VARIABLES,
    READY,
    RESTORE_COMPLETE,
    SNAPSHOT_COMPLETE,
    restore_error_name,
    restore_ready_name,
)
from snapagent.workload.watch import FileWatch, Stopped

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["DEFAULT_DIRECTORY", "ControlDirectory", "RestoreFailed"]

DEFAULT_DIRECTORY: Final = "/snapshot-control"
"""Where pods have it, if their environment does not say otherwise."""

DONE: Final = b"done\n"
TEXT_BYTES_MAX: Final = 64 << 10
ENVIRONMENT_BYTES_MAX: Final = 1 << 20
NAMES_MAX: Final = 1000
"""More files than that are no control directory."""

_ANNOUNCEMENT = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}-restore-(?:ready|error)")


class RestoreFailed(AgentError):
    """The workload was restored, but says itself that it cannot serve."""


class ControlDirectory:
    """The directory of one workload. Any thread may call; close it when done."""

    def __init__(self, fd: int, name: str) -> None:
        """Take over a descriptor of the directory; the name is for messages."""
        self._fd = fd
        self.name: Final = name

    @classmethod
    def open(cls, path: str) -> Self:
        """Open one by its path here.

        Raises:
            AgentError: it is not there, or is no directory.
        """
        try:
            return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)
        except OSError as error:
            raise _unusable(path, error) from error

    @classmethod
    def of_process(cls, pid: int, path: str | None = None) -> Self:
        """Open the one that a process sees, in its container.

        Args:
            pid: Any process of the container, as seen from here.
            path: As the process sees it; else what its environment says, else `/snapshot-control`.

        Raises:
            AgentError: the process is gone, or has no such directory.
        """
        name = f"{path or 'the control directory'} of process {pid}"
        try:
            path = path or _path_in_environment(pid) or DEFAULT_DIRECTORY
            name = f"{path} of process {pid}"
            root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY
                # Links in the container lead to places of the container, never to ours.
                return cls(open_in_root(root, os.fsencode(path), flags), name)
            finally:
                os.close(root)
        except OSError as error:
            raise _unusable(name, error) from error

    # -- before a capture -------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Whether the workload says that it may be captured."""
        return self._has(READY)

    def wait_ready(self, timeout_s: float | None = None, bell: int | None = None) -> None:
        """Block until it says so.

        Args:
            timeout_s: How long at most; None waits for ever.
            bell: A descriptor that ends the wait when it can be read.

        Raises:
            AgentError: it does not say so in time, or the bell was rung.
        """
        self._await([READY], timeout_s, bell)

    def announce_captured(self) -> None:
        """Write `snapshot-complete`, for workloads that go on after their capture.

        Raises:
            AgentError: the directory cannot be written.
        """
        self._write_done(SNAPSHOT_COMPLETE)

    # -- around a restore -------------------------------------------------------------------------

    def clear_for_restore(self) -> None:
        """Take away what earlier lives and their agents wrote; before the processes run.

        Raises:
            AgentError: something cannot be removed.
        """
        self._remove(READY, SNAPSHOT_COMPLETE, RESTORE_COMPLETE, *self._announcements())

    def announce_restored(self) -> None:
        """Write `restore-complete`: the processes run, and may wake up.

        Raises:
            AgentError: the directory cannot be written.
        """
        self._write_done(RESTORE_COMPLETE)

    def wait_serving(
        self, framework: str, timeout_s: float | None = None, bell: int | None = None
    ) -> str:
        """Block until the restored workload says that it serves, and return what it wrote.

        Raises:
            RestoreFailed: it says that it cannot, and why.
            AgentError: it says nothing in time, or the bell was rung.
        """
        failed = restore_error_name(framework)
        found = self._await([restore_ready_name(framework), failed], timeout_s, bell)
        text = self._read(found)
        if found == failed:
            raise RestoreFailed(
                f"{framework} in {self.name} was restored but cannot serve:\n{text.rstrip()}"
            )
        return text

    # -- parts ------------------------------------------------------------------------------------

    def _await(self, names: list[str], timeout_s: float | None, bell: int | None) -> str:
        watch = FileWatch(f"/proc/self/fd/{self._fd}", names, whole_path=False)
        wanted = " or ".join(names)
        try:
            return watch.wait(timeout_s, bell)
        except TimeoutError as error:
            raise AgentError(f"no {wanted} in {self.name} within {timeout_s} s") from error
        except Stopped as error:
            raise AgentError(f"waiting for {wanted} in {self.name} was cancelled") from error
        except OSError as error:
            raise _unusable(self.name, error) from error

    def _has(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            return name in os.listdir(self._fd)
        return False

    def _announcements(self) -> list[str]:
        try:
            with os.scandir(self._fd) as entries:
                names = [entry.name for entry, _ in zip(entries, range(NAMES_MAX), strict=False)]
        except OSError as error:
            raise _unusable(self.name, error) from error
        return [name for name in names if _ANNOUNCEMENT.fullmatch(name)]

    def _remove(self, *names: str) -> None:
        for name in names:
            try:
                os.unlink(name, dir_fd=self._fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise AgentError(f"cannot remove {name} in {self.name}: {error}") from error

    def _write_done(self, name: str) -> None:
        """Let a file appear whole. A name that nobody knows beforehand cannot be a trap."""
        temporary = f".{name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o644, dir_fd=self._fd)
            try:
                # Whatever our umask is, the workload may be another user.
                os.fchmod(fd, 0o644)
                os.write(fd, DONE)
            finally:
                os.close(fd)
            os.replace(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._fd)
            raise AgentError(f"cannot write {name} into {self.name}: {error}") from error

    def _read(self, name: str) -> str:
        # Not blocking: it might be a fifo by now.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with open(os.open(name, flags, dir_fd=self._fd), "rb", buffering=0) as file:
                return (file.read(TEXT_BYTES_MAX) or b"").decode(errors="replace")
        except OSError as error:
            raise AgentError(f"cannot read {name} in {self.name}: {error}") from error

    def close(self) -> None:
        """Give the descriptor back. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _path_in_environment(pid: int) -> str | None:
    """Return what the environment of a process says, as it was when its program was started."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        entries = file.read(ENVIRONMENT_BYTES_MAX).split(b"\0")
    for variable in DIRECTORY_VARIABLES:
        prefix = os.fsencode(f"{variable}=")
        for entry in entries:
            if entry.startswith(prefix) and len(entry) > len(prefix):
                return os.fsdecode(entry.removeprefix(prefix))
    return None


def _unusable(name: str, error: OSError) -> AgentError:
    return AgentError(
        f"cannot use {name}: {error.strerror}; the workload needs a volume there that it shares "
        "with the agent"
    )
