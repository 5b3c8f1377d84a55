"""Control groups of another process: finding them, and going there as well.

For a container's limits to hold for what is restored into it, and for whoever ends a container by
its groups to find it. Version 1, version 2 and both at once.
"""

from __future__ import annotations

import errno
import os

__all__ = ["files_to_join", "join"]

MOUNT_ROOT = 3
MOUNT_POINT = 4


def files_to_join(pid: int) -> list[str]:
    """Return the files to write to for this process to be in all groups that another is in.

    Raises:
        OSError: there is no such process, or a group of it is nowhere mounted here.
    """
    ours = _groups("self")
    files = []
    for controllers, path in _groups(str(pid)).items():
        if ours.get(controllers) == path:
            continue
        directory = _directory(controllers, path)
        if directory is None:
            message = f"the control group {path} of process {pid} is not mounted where this runs"
            raise OSError(errno.ENOENT, message)
        files.append(f"{directory}/cgroup.procs")
    return files


def join(files: list[str]) -> None:
    """Move this process to groups found before. Needs its view of the file system, and root."""
    for path in files:
        with open(path, "w") as file:
            file.write("0")


def _groups(process: str) -> dict[str, str]:
    """Return the group that a process is in, by controllers as the kernel writes them."""
    with open(f"/proc/{process}/cgroup") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    return {controllers: path for _, controllers, path in lines}


def _directory(controllers: str, path: str) -> str | None:
    """Return where the group of a hierarchy is mounted; version 2 has no controllers here."""
    with open("/proc/self/mountinfo") as file:
        lines = [line.split() for line in file]
    for fields in lines:
        kind, _, options = fields[fields.index("-") + 1 :]
        if not controllers:
            found = kind == "cgroup2"
        else:
            found = kind == "cgroup" and set(controllers.split(",")) <= set(options.split(","))
        root = fields[MOUNT_ROOT].rstrip("/")
        if found and (path == root or path.startswith(f"{root}/")):
            directory = (fields[MOUNT_POINT] + path.removeprefix(root)).rstrip("/")
            # A path that leads out of what is visible begins with `/..`.
            if "/.." not in path and os.path.isdir(directory):
                return directory
    return None
