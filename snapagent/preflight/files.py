"""Whether the files that a snapshot maps and opens are there, and are the same ones.

CRIU opens them by name, late in a restore, and stops at the first that differs. Here each is named
before anything is begun. Names are looked up as the restored process will: from the root directory
of the place that it comes to.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import TYPE_CHECKING, Final

from snapagent.linux.probe import open_in_root
from snapagent.preflight.elf import read_build_id

if TYPE_CHECKING:
    from snapagent.preflight.images import Images
    from snapagent.preflight.obstacles import Obstacles
    from snapstore.criu import RegularFile

__all__ = ["check_files"]

# Made by the kernel anew in each life; CRIU finds its own way with them.
_OF_THE_KERNEL: Final = ("/proc/", "/sys/", "/dev/pts/")
_ESCAPED: Final = re.compile(rb"\\x([0-9a-f]{2})")

_SAME_FILE: Final = (
    "put back the file of the capture, best by restoring in the same container image"
)


def check_files(found: Obstacles, images: Images, root: str) -> None:
    """Name each file that is missing, or has another size, mode or build id than was captured.

    Args:
        found: Takes what is found.
        images: Of the snapshot.
        root: The root directory of the place.
    """
    mapped: set[int] = set()
    for memory in images.memories.values():
        mapped |= memory.file_ids | {memory.exe_file_id}
    # A file is often mapped and open at once, which makes two of it in the images.
    mapped_names = {
        file.name for file_id, file in images.files.regular.items() if file_id in mapped
    }
    roots = {directory.root_id for directory in images.directories.values()}
    cwds = {directory.cwd_id for directory in images.directories.values()}
    handle = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for file_id, file in images.files.regular.items():
            if file_id in images.removed or file.is_external or not file.name.startswith("/"):
                continue
            if file.name.startswith(_OF_THE_KERNEL):
                continue
            if file_id in roots | cwds:
                kind = "root directory" if file_id in roots else "working directory"
            else:
                kind = "mapped file" if file.name in mapped_names else "open file"
            _check_file(found, handle, file, kind)
    finally:
        os.close(handle)


def _check_file(found: Obstacles, root: int, file: RegularFile, kind: str) -> None:
    is_mapped = kind == "mapped file"
    differs = "mapped-file-differs" if is_mapped else "open-file-differs"
    path = _path(root, file.name)
    try:
        handle = open_in_root(root, path, os.O_PATH)
    except OSError as error:
        word = "mapped-file-missing" if is_mapped else "open-file-missing"
        found.block(
            word,
            f"the {kind} {file.name} cannot be opened: {os.strerror(error.errno or 0)}",
            _SAME_FILE,
        )
        return
    try:
        here = os.fstat(handle)
    finally:
        os.close(handle)
    if file.mode is not None and stat.S_IFMT(file.mode) != stat.S_IFMT(here.st_mode):
        found.block(differs, f"the {kind} {file.name} is of another type now", _SAME_FILE)
        return
    if file.size_bytes is not None and here.st_size != file.size_bytes:
        found.block(
            differs,
            f"the {kind} {file.name} had {file.size_bytes} bytes and has {here.st_size} now",
            _SAME_FILE,
        )
    elif file.mode is not None and file.mode != here.st_mode:
        found.block(
            differs,
            f"the {kind} {file.name} had the mode {file.mode:o} and has {here.st_mode:o} now",
            f"chmod {stat.S_IMODE(file.mode):o} it",
        )
    elif file.build_id is not None and stat.S_ISREG(here.st_mode):
        build_id = _build_id(root, path)
        if build_id is not None and build_id != file.build_id:
            found.block(
                differs,
                f"the {kind} {file.name} was the build {file.build_id[:80]} and is {build_id} now",
                _SAME_FILE,
            )


def _path(root: int, name: str) -> bytes:
    """Return the name as bytes: what was no UTF-8 came as escapes, but those may be meant too."""
    path = name.encode()
    plain = _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), path)
    if plain != path:
        with contextlib.suppress(OSError):
            os.close(open_in_root(root, plain, os.O_PATH))
            return plain
    return path


def _build_id(root: int, path: bytes) -> str | None:
    with contextlib.suppress(OSError):
        handle = open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return read_build_id(handle)
        finally:
            os.close(handle)
    return None
