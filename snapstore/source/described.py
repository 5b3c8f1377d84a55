"""Say what files in memory are, exactly as a push says it of the same files in a directory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from snapstore.errors import UsageError
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.fstree import parent_path, show_path
from snapstore.source.made_tree import checked_path, with_directories
from snapstore.source.recognise import recognise
from snapstore.source.scan import bytes_to_read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapstore.format.rank import RankNumber
    from snapstore.units import BytesLike

__all__ = ["Described", "DescribedFile", "describe_images"]


@dataclasses.dataclass(frozen=True, slots=True)
class DescribedFile:
    """What one file is.

    Attributes:
        rank: The number of the rank that it belongs to, or `host`.
        role: What it is to the checkpoint: `criu-pages`, `criu-image`, `other` and so on.
        data_class: How a push cuts it: `pages`, `tensors` or `generic`.
    """

    rank: RankNumber
    role: str
    data_class: str


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """What a set of files is; `SnapshotWriter.commit` takes the first three.

    Attributes:
        kind: `criu`, `nvidia-snapshot`, `cuda-custom-storage`, `gms` or `directory`.
        requirements: What they tell of where the checkpoint can run.
        warnings: What is odd about them.
        files: What each file is, by path.
    """

    kind: str
    requirements: dict[str, object]
    warnings: tuple[str, ...]
    files: dict[str, DescribedFile]


def describe_images(
    files: Mapping[str, BytesLike], sizes: Mapping[str, int] | None = None
) -> Described:
    """Say what a push would say of a directory with these files.

    CRIU images directly in the tree, and all that cannot be told apart by rank, belong to `host`.

    Args:
        files: What is in each file, by path below the root of the tree. Of `dump.log` the first
            64 KiB are enough.
        sizes: The sizes of files whose bytes are not needed, above all `pages-*.img`, and of those
            of which only the beginning is given. All others must be in `files`.

    Raises:
        UsageError: A path cannot be one, or bytes are missing that tell what the files are.
    """
    sizes = sizes or {}
    texts = {checked_path(path): path for path in (*files, *sizes)}
    _refuse_twice(texts)
    nothing = TreeEntry(path=b"", type=EntryType.DIRECTORY, mode=0, uid=0, gid=0, mtime_ns=0)
    entries = with_directories(
        [
            msgspec.structs.replace(
                nothing, path=raw, type=EntryType.FILE, size_bytes=_size(text, files, sizes)
            )
            for raw, text in texts.items()
        ],
        nothing,
    )
    tree = _TreeInMemory(tuple(entries), {raw: files.get(text) for raw, text in texts.items()})
    seen = recognise(tree)
    return Described(
        kind=seen.kind,
        requirements=dict(seen.requirements),
        warnings=tuple(seen.warnings),
        files={
            texts[item.entry.path]: DescribedFile(rank, item.role.value, item.data_class.value)
            for rank, items in seen.partition.items()
            for item in items
            if item.entry.type is EntryType.FILE
        },
    )


def _refuse_twice(paths: Mapping[bytes, str]) -> None:
    for path in paths:
        above = parent_path(path)
        while above:
            if above in paths:
                raise UsageError(
                    f"{show_path(above)} cannot be both a file and a directory",
                    next_step=f"give another path than {paths[path][:120]!r}",
                )
            above = parent_path(above)


def _size(path: str, files: Mapping[str, BytesLike], sizes: Mapping[str, int]) -> int:
    given = memoryview(files.get(path, b"")).nbytes
    size = sizes.get(path, given)
    if size < given:
        raise UsageError(
            f"{path[:120]!r} cannot have {size} bytes: {given} of them are given",
            next_step="give the size of the whole file, or none",
        )
    return size


@dataclasses.dataclass(frozen=True, slots=True)
class _TreeInMemory:
    """Files of which some have their bytes at hand."""

    entries: tuple[TreeEntry, ...]
    data: Mapping[bytes, BytesLike | None]

    def read(
        self, entry: TreeEntry, *, size_bytes_max: int, is_prefix_enough: bool = False
    ) -> bytes:
        """See `SourceTree.read`."""
        wanted = bytes_to_read(entry, size_bytes_max, is_prefix_enough=is_prefix_enough)
        data = bytes(memoryview(self.data[entry.path] or b"")[:wanted])
        if len(data) < wanted:
            raise UsageError(
                f"of {show_path(entry.path)} only {len(data)} of {wanted} bytes are given",
                next_step="give all of it: it tells what the files are",
            )
        return data
