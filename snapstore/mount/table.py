"""What is mounted where: the kernel's table of this mount namespace, read only."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "TYPE",
    "Mounted",
    "State",
    "answered",
    "mounted_at",
    "mounted_inside",
    "place_of",
    "seen_elsewhere",
    "state_of",
]

_Answer = TypeVar("_Answer")

TYPE = "fuse.snapstore"
"""The type that our mounts have in the table."""

_TABLE = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(rb"\\([0-7]{3})")
_ANSWER_S_MAX = 5.0
_LINKS_MAX = 40
_DEAD = {errno.ENOTCONN, errno.ECONNABORTED}


class State(enum.Enum):
    """What can be said of who serves a mount."""

    LIVING = "it answers"
    SILENT = "it does not answer"
    DEAD = "it is gone"


class Mounted(NamedTuple):
    """One line of the table.

    Attributes:
        number: Its own, and `parent` that of what it is mounted on.
        device: `MAJOR:MINOR`.
        directory: The mount point, raw.
        type: Of the file system, such as `fuse.snapstore`.
        source: What is mounted, as its maker calls it.
    """

    number: int
    parent: int
    device: str
    directory: bytes
    type: str
    source: str


def place_of(directory: Path) -> Path:
    """Resolve symbolic links, as far as there are any, without asking what is mounted there.

    The mount itself may be dead, or hang: reading a link there is refused by the kernel.
    """
    place = os.path.abspath(directory)  # noqa: PTH100 - resolves no links
    for _ in range(_LINKS_MAX):
        parent, name = os.path.split(place)
        place = os.path.join(os.path.realpath(parent), name)  # noqa: PTH118 - as the others here
        try:
            link = os.readlink(place)  # noqa: PTH115 - as the others here
        except OSError:
            break
        place = os.path.abspath(os.path.join(os.path.dirname(place), link))  # noqa: PTH100, PTH118, PTH120
    return Path(place)


def mounted_at(directory: Path) -> Mounted | None:
    """Tell what is mounted on a directory, the topmost of several; None if nothing is.

    Looks at the table alone, so it does not hang where a file system does.
    """
    wanted = os.fsencode(place_of(directory))
    found = None
    for line in _TABLE.read_bytes().splitlines():
        entry = _parse(line)
        if entry is not None and entry.directory == wanted:
            found = entry
    return found


def mounted_inside(mount: Mounted) -> list[Path]:
    """Tell where in a mount others are mounted; not what lies hidden below it."""
    entries = [_parse(line) for line in _TABLE.read_bytes().splitlines()]
    below: dict[int, list[Mounted]] = {}
    for entry in entries:
        if entry is not None and entry.parent != entry.number:
            below.setdefault(entry.parent, []).append(entry)
    found: list[Mounted] = []
    waiting = [mount]
    while waiting:
        # Taken out, so that a table that was read while it changed has no circles.
        inside = below.pop(waiting.pop().number, [])
        found += inside
        waiting += inside
    return [Path(os.fsdecode(entry.directory)) for entry in found]


def state_of(directory: Path) -> State:
    """Tell whether who serves a mount answers; takes no longer than a few seconds."""

    def ask() -> State:
        try:
            # What `stat` tells may be what the kernel remembers; this is always asked.
            os.statvfs(directory)
        except OSError as error:
            return State.DEAD if error.errno in _DEAD else State.LIVING
        return State.LIVING

    return answered(ask) or State.SILENT


def answered(question: Callable[[], _Answer]) -> _Answer | None:
    """Ask something of a file system; None if no answer comes within a few seconds."""
    found: list[_Answer] = []
    # Who asks a process that is stopped gets no answer and cannot be called back.
    asking = threading.Thread(
        target=lambda: found.append(question()), daemon=True, name="mount-state"
    )
    asking.start()
    asking.join(_ANSWER_S_MAX)
    return found[0] if found else None


def seen_elsewhere(device: str) -> list[int]:
    """The processes, as far as they may be looked at, that have a mount of a device."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                lines = (folder / "mountinfo").read_bytes().splitlines()
                if any(_is_of(line, device) for line in lines):
                    found.append(int(folder.name))
    return sorted(found)


def _is_of(line: bytes, device: str) -> bool:
    entry = _parse(line)
    return entry is not None and entry.device == device and entry.type == TYPE


def _parse(line: bytes) -> Mounted | None:
    fields, _, rest = line.partition(b" - ")
    before, after = fields.split(b" "), rest.split(b" ")
    if len(before) < 6 or len(after) < 2:
        return None
    directory = _ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), before[4])
    return Mounted(
        int(before[0]),
        int(before[1]),
        before[2].decode(),
        directory,
        os.fsdecode(after[0]),
        os.fsdecode(after[1]),
    )
