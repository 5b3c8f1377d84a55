"""Which rank of the job a path belongs to.

A rank is what is restored in parallel: one process with its devices. What cannot be told apart,
such as the CRIU images of a process tree, belongs to the *host* side.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

from snapstore.errors import UsageError
from snapstore.format import limits
from snapstore.format.tree import EntryType
from snapstore.fstree import parent_path, show_path
from snapstore.source.globs import NUMBER, PathGlob

if TYPE_CHECKING:
    from snapstore.format.tree import TreeEntry
    from snapstore.source.nvidia import GpuLayout
    from snapstore.source.tree_index import TreeIndex

__all__ = ["HOST", "RankKey", "assign_ranks", "parse_rank_glob"]

RankKey = int | Literal["host"]
"""The number of a rank, or the host side; the stored word."""

HOST: Final = "host"

_RANK_DIRECTORY = re.compile(rb"rank[-_]?([0-9]{1,9})")
_RANK_FILE = re.compile(rb"rank[-_]?([0-9]{1,9})\.bin")


def parse_rank_glob(text: str) -> PathGlob:
    """Read a glob in which `{N}` stands for the number of the rank.

    Raises:
        UsageError: It is no glob, or has no `{N}`.
    """
    if NUMBER not in text:
        raise UsageError(
            f"no {NUMBER} in the glob of ranks {text[:120]!r}",
            next_step="write {N} where the number of the rank is: gpu-{N}/ or rank{N}.bin",
        )
    return PathGlob.parse(text)


def assign_ranks(
    index: TreeIndex, layout: GpuLayout, glob: PathGlob | None
) -> dict[bytes, RankKey]:
    """Decide the rank of every path.

    With a glob, what it matches has the number at `{N}` and the rest is the host's. Without one:
    folders `rank-N` or `rankN`, GPU memory as `find_gpu_layout` numbers it, and files `rankN.bin`
    at the top. The outermost directory that has a rank decides for all below it.
    """
    ranks: dict[bytes, RankKey] = {}
    for entry in index.tree.entries:
        above = ranks[parent_path(entry.path)] if entry.path else HOST
        if above != HOST:
            ranks[entry.path] = above
            continue
        is_directory = entry.type is EntryType.DIRECTORY
        if glob is not None:
            number = glob.match(entry.path, is_directory=is_directory)
        else:
            number = _usual_rank(entry, layout)
        if number is not None and number > limits.RANK_NUMBER_MAX:
            index.warnings.add(
                f"{show_path(entry.path)} is on the host's side: the rank {number} is above "
                f"{limits.RANK_NUMBER_MAX}"
            )
            number = None
        ranks[entry.path] = HOST if number is None else number
    return ranks


def _usual_rank(entry: TreeEntry, layout: GpuLayout) -> int | None:
    name = entry.path.rpartition(b"/")[2]
    if entry.type is EntryType.DIRECTORY:
        match = _RANK_DIRECTORY.fullmatch(name)
        return int(match[1]) if match else layout.rank_directories.get(entry.path)
    if entry.path in layout.rank_files:
        return layout.rank_files[entry.path]
    match = _RANK_FILE.fullmatch(entry.path)
    return int(match[1]) if match else None
