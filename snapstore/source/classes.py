"""What kind of data a file holds, which decides how it is cut into chunks.

The class comes from the role that a file was seen to have, else from its name; the user's word
(`--class GLOB=CLASS`) is above both.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import TYPE_CHECKING

from snapstore.errors import UsageError
from snapstore.source.globs import PathGlob

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ClassOverride", "DataClass", "FileRole", "class_of", "parse_class_override"]


class DataClass(enum.Enum):
    """How the bytes of a file change between snapshots; the value is the stored word."""

    PAGES = "pages"
    """Memory images: rewritten in short runs of pages, shifted by whole pages."""
    TENSORS = "tensors"
    """Weights, and memory of devices as others dump it: large arrays, shifted by odd amounts."""
    GENERIC = "generic"
    """Anything else."""
    DEVICE = "device"
    """Memory of a GPU, from the start of one allocation: nothing in it shifts."""


class FileRole(enum.Enum):
    """What a file is to the checkpoint it is part of."""

    CRIU_PAGES = "criu-pages"
    """Memory of a process; its pagemap parsed and fits."""
    CRIU_IMAGE = "criu-image"
    """Any other image of CRIU."""
    GPU_DEVICE = "gpu-device"
    """Memory of one GPU as the CUDA driver handed it out."""
    GPU_SHARD = "gpu-shard"
    """Allocations that a GPU memory service saved."""
    ROOTFS_DIFF = "rootfs-diff"
    """What the container changed in its root file system."""
    MANIFEST = "manifest"
    """A document about the files beside it."""
    OTHER = "other"


_CLASS_OF_ROLE = {
    FileRole.CRIU_PAGES: DataClass.PAGES,
    FileRole.CRIU_IMAGE: DataClass.GENERIC,
    FileRole.GPU_DEVICE: DataClass.TENSORS,
    FileRole.GPU_SHARD: DataClass.TENSORS,
    FileRole.ROOTFS_DIFF: DataClass.GENERIC,
    FileRole.MANIFEST: DataClass.GENERIC,
}
_PAGES_NAME = re.compile(rb"pages-.*\.img", re.DOTALL)
_TENSORS_NAME = re.compile(rb".*\.(?:bin|safetensors|pt|bin\.part-[0-9]+)", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class ClassOverride:
    """The user's word on the class of all files that a glob matches."""

    glob: PathGlob
    data_class: DataClass


def parse_class_override(text: str) -> ClassOverride:
    """Read `GLOB=CLASS`, such as `*.weights=tensors`; see `PathGlob` for what a glob matches.

    Raises:
        UsageError: There is no `=`, or the class or the glob is not one.
    """
    glob, equals, word = text.rpartition("=")
    classes = {data_class.value: data_class for data_class in DataClass}
    if not equals or word not in classes:
        raise UsageError(
            f"not a class of files: {text[:120]!r}",
            next_step=f"write GLOB=CLASS with one of the classes {', '.join(classes)}",
        )
    return ClassOverride(glob=PathGlob.parse(glob), data_class=classes[word])


def class_of(path: bytes, role: FileRole, overrides: Sequence[ClassOverride] = ()) -> DataClass:
    """Decide the class of a file; of several overrides that match, the last one counts."""
    for override in reversed(overrides):
        if override.glob.match(path) is not None:
            return override.data_class
    if role in _CLASS_OF_ROLE:
        return _CLASS_OF_ROLE[role]
    name = path.rpartition(b"/")[2]
    if _PAGES_NAME.fullmatch(name):
        return DataClass.PAGES
    return DataClass.TENSORS if _TENSORS_NAME.fullmatch(name) else DataClass.GENERIC
