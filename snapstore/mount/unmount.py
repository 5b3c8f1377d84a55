"""Taking mounts away: ours when asked, and dead ones that would be in the way."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from snapstore.clock import SystemClock
from snapstore.errors import ConcurrencyError, LookupFailed, TargetError, UsageError
from snapstore.mount.table import (
    TYPE,
    State,
    answered,
    mounted_at,
    mounted_inside,
    place_of,
    seen_elsewhere,
    state_of,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Unmounted", "clear_dead", "detach", "unmount"]

_COMMAND_S_MAX = 30.0
_POLL_S = 0.05
_DOCUMENT_BYTES_MAX = 1 << 16
_ENDING_S = 2.0


class NotMounted(LookupFailed):
    """Nothing is mounted there."""


class MountBusy(ConcurrencyError):
    """Somebody uses the mount; it is as it was."""

    retryable = True


class AlreadyMounted(ConcurrencyError):
    """A snapshot is mounted there; it is as it was."""


class Unmounted(NamedTuple):
    """What became of a mount that was taken away.

    Attributes:
        has_ended: Whether the process that served it has ended, as far as is known.
        seen_by: Processes of other mount namespaces that still have it.
    """

    has_ended: bool
    seen_by: list[int]


def unmount(
    directory: Path, *, force: bool = False, lazy: bool = False, wait_s: float
) -> Unmounted:
    """Take a mount away; returns when it and its daemon are gone.

    Containers that were started meanwhile have a mount of their own of it. Then the daemon goes on
    for them, and this returns.

    Args:
        directory: The mount point.
        force: Fail what readers wait for, and detach; everywhere.
        lazy: Detach at once; the daemon ends when the last file is closed, which is not waited for.
        wait_s: How long to wait for the end of the daemon.

    Raises:
        LookupFailed: Nothing is mounted there.
        UsageError: Something else is mounted there.
        ConcurrencyError: It is in use, or something is mounted inside of it.
    """
    directory = place_of(directory)
    found = mounted_at(directory)
    if found is None:
        raise NotMounted(
            f"nothing is mounted on {str(directory)!r}", next_step="`findmnt` lists all mounts"
        )
    if found.type != TYPE:
        raise UsageError(
            f"what is mounted on {str(directory)!r} is no snapshot, but of type {found.type}",
            next_step="use `umount`",
        )
    state = state_of(directory)
    if state is State.SILENT and not (force or lazy):
        raise MountBusy(
            f"the process that serves {str(directory)!r} does not answer",
            next_step="add --force, which fails whoever waits for it, or --lazy",
        )
    # Those in one that does not answer cannot be reached any more, so they go with it.
    inside = mounted_inside(found) if state is State.LIVING else []
    if inside:
        raise MountBusy(
            f"something is mounted inside of {str(directory)!r}, on {str(inside[0])!r}",
            next_step="unmount that first; it would be taken away as well",
        )
    # Asked while it answers; a dead one has no daemon to wait for.
    daemon = _daemon(directory) if state is State.LIVING else None
    try:
        if force:
            _try_command(["umount", "--force", str(directory)])
        if mounted_at(directory) is not None:
            detach(directory, lazy=lazy or force)
        has_ended = daemon is None or _ended(daemon, 0 if lazy else wait_s, found.device)
        return Unmounted(has_ended, [] if has_ended else seen_elsewhere(found.device))
    finally:
        if daemon is not None:
            os.close(daemon)


def clear_dead(directory: Path) -> bool:
    """Take away a mount whose daemon is gone, and whatever dead one is below it.

    Returns:
        Whether there was one.

    Raises:
        ConcurrencyError: A snapshot is mounted there that is served.
    """
    was_there = False
    while True:
        found = mounted_at(directory)
        if found is None or not found.type.startswith("fuse"):
            return was_there
        state = state_of(directory)
        if state is not State.DEAD:
            if found.type != TYPE:
                return was_there
            silent = ", and its process does not answer" if state is State.SILENT else ""
            raise AlreadyMounted(
                f"{found.source} is mounted on {str(directory)!r} already{silent}",
                next_step="`snapstore umount` it first, or give another directory",
            )
        detach(directory, lazy=True)
        was_there = True


def detach(directory: Path, *, lazy: bool) -> None:
    """Unmount by the system's programs: as root by `umount`, else by `fusermount3`.

    Raises:
        ConcurrencyError: It is in use.
        TargetError: It cannot be unmounted.
    """
    if os.geteuid() == 0:
        command = ["umount", *(["--lazy"] if lazy else []), str(directory)]
    else:
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), str(directory)]
    complaint = _try_command(command)
    if complaint is None or mounted_at(directory) is None:
        return
    if "busy" in complaint:
        raise MountBusy(
            f"the mount on {str(directory)!r} is in use",
            next_step="end what uses it (`fuser -vm DIR` lists that), or add --lazy",
        )
    raise TargetError(
        f"cannot unmount {str(directory)!r}: {complaint}",
        next_step="unmount it as the user who has mounted it, or as root",
    )


def _try_command(command: list[str]) -> str | None:
    """Run a program; what it complains about, or None if it did what it should."""
    program = shutil.which(command[0])
    if program is None:
        raise TargetError(
            f"there is no {command[0]} on this machine",
            next_step="install Debian's packages mount and fuse3, or their like",
        )
    done = subprocess.run(  # noqa: S603 - fixed programs, no shell
        [program, *command[1:]],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=_COMMAND_S_MAX,
        check=False,
    )
    return None if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


def _daemon(directory: Path) -> int | None:
    """Open the process that serves a mount, if it says and can be seen.

    Anybody may say so who mounts something of this type: the process is only waited for.
    """

    def read() -> bytes:
        try:
            with (directory / ".snapstore" / "mount.json").open("rb") as file:
                return file.read(_DOCUMENT_BYTES_MAX)
        except OSError:
            return b""

    with contextlib.suppress(OSError, OverflowError, ValueError, KeyError, TypeError):
        return os.pidfd_open(int(json.loads(answered(read) or b"")["pid"]))
    return None


def _ended(daemon: int, wait_s: float, device: str) -> bool:
    """Wait for the end of the daemon, or until it is clear that it goes on for others."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + wait_s
    poll = select.poll()
    poll.register(daemon, select.POLLIN)
    while not poll.poll(_POLL_S * 1000):
        if clock.monotonic_s() >= deadline_s:
            return False
        if device and seen_elsewhere(device):
            # They may be ending as well; one more look, for those that are.
            return bool(poll.poll(_ENDING_S * 1000))
    return True
