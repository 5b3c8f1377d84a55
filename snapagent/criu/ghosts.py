"""Files that had no name any more: each restore has numbers of its own for them.

CRIU makes such a file again beside where it was, as `NAME.cr.NUMBER.ghost`, opens it and removes
the name. The number is that of its image, so two restores of one snapshot would make the same
name. Here each gets random numbers: in the image that lists the files, which CRIU is given with
these numbers, and in the names by which it asks for their content. What a restore that was killed
has left can then be told from what belongs to others.

Pure, but for the random numbers.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import TYPE_CHECKING

from snapagent.criu.image_file import build_image, varint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from snapstore.criu import RegularFile, Remap

__all__ = ["REMAPS_IMAGE", "Ghosts", "rename_ghosts"]

REMAPS_IMAGE = "remap-fpath.img"

_MAGIC_REMAPS = 0x59133954
_TARGET_ID_FIELD = b"\x10"
_IS_GHOST = b"\x18\x01"
_DIGITS_MAX = 8
_NAME_BYTES_MAX = 255
_MARKS_BYTES = len(".cr.") + len(".ghost")
_TRIES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Ghosts:
    """The same files, by other numbers.

    Attributes:
        remaps: The image that lists them, for CRIU.
        images: For each image of a content that CRIU may ask for, as which one it was captured.
        paths: What CRIU makes for a moment. Of a file in a folder that is gone it is in the
            nearest one above it that is there. Directories are not among them: they get the names
            that they had.
    """

    remaps: bytes
    images: dict[str, str]
    paths: list[str]


def rename_ghosts(remaps: Sequence[Remap], files: Mapping[int, RegularFile]) -> Ghosts | None:
    """Draw new numbers for all ghosts; none if there are no ghosts.

    Args:
        remaps: What `remap-fpath.img` of the snapshot says.
        files: The files of `files.img` by their id.
    """
    ghosts = [remap for remap in remaps if remap.kind == "ghost"]
    if not ghosts:
        return None
    names = {id(ghost): files[ghost.file_id].name for ghost in ghosts if ghost.file_id in files}
    digits: dict[int, int] = {}
    for ghost in ghosts:
        room = _room_digits(names.get(id(ghost), ""))
        digits[ghost.target_id] = min(room, digits.get(ghost.target_id, _DIGITS_MAX))
    new_ids = _draw(digits)
    return Ghosts(
        remaps=build_image(_MAGIC_REMAPS, [_message(remap, new_ids) for remap in remaps]),
        images={_image_name(new): _image_name(old) for old, new in new_ids.items()},
        paths=[
            f"{names[id(ghost)]}.cr.{new_ids[ghost.target_id]:x}.ghost"
            for ghost in ghosts
            if id(ghost) in names
        ],
    )


def _room_digits(path: str) -> int:
    """How long a number may be beside a file's own name; a longer one would make CRIU fail."""
    own = len(os.fsencode(path.rpartition("/")[2]))
    return max(0, min(_DIGITS_MAX, _NAME_BYTES_MAX - _MARKS_BYTES - own))


def _draw(digits: Mapping[int, int]) -> dict[int, int]:
    """Give each old number a new one of so many digits; where there is no room it stays."""
    taken = set(digits)
    drawn: dict[int, int] = {}
    for old, count in digits.items():
        # Drawn again if somebody has it; with few digits that may be in vain.
        tries = (secrets.randbelow(16**count) for _ in range(_TRIES))
        new = next((new for new in tries if new and new not in taken), old)
        taken.add(new)
        drawn[old] = new
    return drawn


def _message(remap: Remap, new_ids: Mapping[int, int]) -> bytes:
    """Return the entry with its new number; whatever else it says stays as it is."""
    if remap.kind != "ghost":
        return remap.message
    # Of a field that is there twice the last one counts: so no other one is touched.
    return remap.message + _TARGET_ID_FIELD + varint(new_ids[remap.target_id]) + _IS_GHOST


def _image_name(ghost_id: int) -> str:
    return f"ghost-file-{ghost_id:x}.img"
