"""What is mounted where: the kernel's table of this mount namespace, read only."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["TYPE", "Mounted", "is_dead", "mounted_at"]

TYPE = "fuse.snapstore"
"""The type that our mounts have in the table."""

_TABLE = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(rb"\\([0-7]{3})")
_DEAD = {errno.ENOTCONN, errno.ECONNABORTED}


class Mounted(NamedTuple):
    """One line of the table.

    Attributes:
        device: `MAJOR:MINOR`.
        directory: The mount point, raw.
        type: Of the file system, such as `fuse.snapstore`.
        source: What is mounted, as its maker calls it.
    """

    device: str
    directory: bytes
    type: str
    source: str


def mounted_at(directory: Path) -> Mounted | None:
    """Tell what is mounted on a directory, the topmost of several; None if nothing is.

    Looks at the table alone, so it does not hang where a file system does.
    """
    # Only the parents are resolved: the mount itself may be dead, or hang.
    absolute = Path(os.path.abspath(directory))  # noqa: PTH100 - resolves no links
    wanted = os.fsencode(absolute.parent.resolve() / absolute.name)
    found = None
    for line in _TABLE.read_bytes().splitlines():
        entry = _parse(line)
        if entry is not None and entry.directory == wanted:
            found = entry
    return found


def is_dead(directory: Path) -> bool:
    """Whether a file system is mounted there whose daemon is gone."""
    try:
        # What `stat` tells may be what the kernel remembers; this is always asked.
        os.statvfs(directory)
    except OSError as error:
        return error.errno in _DEAD
    return False


def _parse(line: bytes) -> Mounted | None:
    fields, _, rest = line.partition(b" - ")
    before, after = fields.split(b" "), rest.split(b" ")
    if len(before) < 6 or len(after) < 2:
        return None
    directory = _ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), before[4])
    return Mounted(before[2].decode(), directory, os.fsdecode(after[0]), os.fsdecode(after[1]))
