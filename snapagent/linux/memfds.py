"""Memory as files: made, sealed so that nobody can shrink them, and recognised again."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["NAME", "check_memfd", "has_open", "large_page_bytes", "make_memfd"]

NAME: Final = "snapagent-memory"
"""What `/proc/PID/maps` shows of them."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SHOWN = f"/memfd:{NAME}"
_MEMINFO = Path("/proc/meminfo")


def make_memfd(length: int, *, huge: bool) -> int:
    """Make a file of zeros in memory that has this length for ever.

    Whoever maps it can rely on its length: without the seals, another process that has it could
    cut it, and touching the mapping would be SIGBUS.

    Args:
        length: Whole pages of the kind.
        huge: Of large pages; they are set aside at once.

    Raises:
        OSError: There is no such memory.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge else 0)
    fd = os.memfd_create(NAME, flags)
    try:
        os.ftruncate(fd, length)
        if huge:
            # Reserves the pages, so that a lack of them is an error here and not SIGBUS later.
            _reserve_pages(fd, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_memfd(fd: int, length: int) -> bool:
    """Tell whether a file that somebody sent is memory of this length that nobody can cut."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        found = os.fstat(fd)
    except OSError:
        return False
    is_sealed = seals == _SEALS and flags & os.O_ACCMODE == os.O_RDWR
    return is_sealed and stat.S_ISREG(found.st_mode) and found.st_size == length


def large_page_bytes() -> int:
    """How large the kernel's default large page is; 0 without any."""
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("Hugepagesize:"):
            return int(line.split()[1]) << 10
    return 0


def has_open(pid: int) -> bool:
    """Tell whether a process maps such memory, or has it open; false if it has ended."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            if any(_SHOWN in line for line in maps):
                return True
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    return any(_is_memory(f"/proc/{pid}/fd/{name}") for name in names)


def _is_memory(link: str) -> bool:
    try:
        return os.readlink(link).startswith(_SHOWN)
    except OSError:
        return False


def _reserve_pages(fd: int, length: int) -> None:
    """Set large pages aside: what was mapped once stays reserved for the file."""
    mmap.mmap(fd, length).close()
