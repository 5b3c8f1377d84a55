"""CRIU as a program: its arguments, and what its logs say when it fails."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from snapagent.errors import CriuFailed

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "GHOST_BYTES_MAX",
    "criu_failed",
    "dump_arguments",
    "read_run_id",
    "restore_arguments",
    "says_outside",
]

_LOG_LEVEL = "-v3"
_LOG_BYTES_MAX = 4 << 20
_LOG_HEAD_BYTES = 64 << 10
_RUN_ID = re.compile(rb"\bCRIU run id = ([0-9a-f-]{36})\b")
_LINES_SHOWN = 6
_HARMLESS = b"Can't setup RLIMIT_NOFILE for self"
"""In every log where `CAP_SYS_RESOURCE` is missing."""
_LEADS_OUTSIDE = "External socket is used"
"""What it says of a connection with a process outside of the tree."""
_TELLING = re.compile(rb"\bError\b|\bWarn\b.*(?:fail|refus)", re.IGNORECASE)


GHOST_BYTES_MAX = 1 << 30
"""How large a removed file may be that becomes part of the images."""


def dump_arguments(
    *, pid: int, directory: str, page_socket: str, leave_running: bool, shell_job: bool
) -> list[str]:
    """Arguments of a dump whose images and pages all go into sockets.

    Args:
        pid: As CRIU sees it.
        directory: The work directory as CRIU sees it: sockets, hook script and log.
        page_socket: Number of a descriptor that CRIU inherits, an end of a socket pair.
        leave_running: Let the processes go on afterwards.
        shell_job: The tree has a terminal or is no session of its own.
    """
    return [
        "dump",
        "--tree",
        str(pid),
        "--page-server",
        "--ps-socket",
        page_socket,
        "--link-remap",
        "--ghost-limit",
        str(GHOST_BYTES_MAX),
        *(["--leave-running"] if leave_running else []),
        *_common(directory, "dump.log", shell_job=shell_job),
    ]


def restore_arguments(*, directory: str, shell_job: bool, tcp_close: bool) -> list[str]:
    """Arguments of a restore whose images come from a socket, private memory by userfaultfd.

    Args:
        directory: The work directory as CRIU sees it: sockets, hook script and log.
        shell_job: The tree had a terminal or was no session of its own.
        tcp_close: The dump was made so; else connections come back.
    """
    return [
        "restore",
        "--restore-detached",
        "--lazy-pages",
        *_common(directory, "restore.log", shell_job=shell_job, tcp_close=tcp_close),
    ]


def _common(directory: str, log: str, *, shell_job: bool, tcp_close: bool = False) -> list[str]:
    connections = ["--tcp-close"] if tcp_close else ["--tcp-established"]
    return [
        "--stream",
        "--images-dir",
        directory,
        "--work-dir",
        directory,
        "--action-script",
        f"{directory}/hook",
        _LOG_LEVEL,
        "--log-file",
        log,
        "--file-locks",
        "--manage-cgroups=ignore",
        *connections,
        "--network-lock",
        "nftables",
        *(["--shell-job"] if shell_job else []),
    ]


def read_run_id(log: Path) -> str:
    """Return the id of a run of CRIU, which its network lock is named after.

    It is in the head of its log; empty if it is not there.
    """
    try:
        with log.open("rb") as file:
            found = _RUN_ID.search(file.read(_LOG_HEAD_BYTES))
    except OSError:
        return ""
    return found[1].decode("ascii") if found else ""


def criu_failed(doing: str, status: int, log: Path) -> CriuFailed:
    """Make the error of a CRIU that ended with an error, with the lines of its log that matter.

    Args:
        doing: `dump` or `restore`.
        status: Exit status, negative for a signal.
        log: Its log; need not be there.
    """
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    lines = _telling_lines(log)
    error = CriuFailed(
        f"criu {doing} {how}" + (f": {lines[0]}" if lines else ""),
        next_step="run snapagent preflight, which tells of known obstacles",
    )
    for line in lines[1:]:
        error.add_note(line)
    return error


def says_outside(failed: CriuFailed) -> bool:
    """Tell whether CRIU failed of a connection that leads out of the tree."""
    return any(_LEADS_OUTSIDE in text for text in (str(failed), *getattr(failed, "__notes__", ())))


def _telling_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            size = log.stat().st_size
            file.seek(max(0, size - _LOG_BYTES_MAX))
            data = file.read(_LOG_BYTES_MAX)
    except OSError:
        return []
    lines = [line for line in data.splitlines() if _TELLING.search(line) and _HARMLESS not in line]
    # The first error is the cause; what follows is the unwinding.
    return [line.decode("utf-8", "backslashreplace").strip() for line in lines[:_LINES_SHOWN]]
