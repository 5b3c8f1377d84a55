"""Recognise what a directory to push is: its ranks, the role and class of each file, its needs.

Reads only small files, and only those whose names say that they tell something. Nothing that is
found in a tree makes this fail: what does not parse is stored as a plain file, with a warning.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from snapstore.format.tree import EntryType, TreeEntry
from snapstore.fstree import parent_path, show_path
from snapstore.source.classes import ClassOverride, DataClass, FileRole, class_of
from snapstore.source.image_directory import ImageFacts, read_image_directory
from snapstore.source.nvidia import (
    SnapshotManifest,
    find_gpu_layout,
    read_snapshot_manifest,
    staging_directories,
)
from snapstore.source.ranks import HOST, RankKey, assign_ranks, parse_rank_glob
from snapstore.source.requirements import JsonValue, build_requirements
from snapstore.source.tree_index import SourceTree, TreeIndex, WarningList, join_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapstore.source.nvidia import GpuLayout

__all__ = ["Recognised", "SourceEntry", "recognise"]


@dataclasses.dataclass(frozen=True, slots=True)
class SourceEntry:
    """A path of the tree and what it is.

    Attributes:
        entry: The path with its metadata.
        role: What a file is to the checkpoint; OTHER for anything but files.
        data_class: How a file's bytes are to be cut; GENERIC for anything but files.
        pagemap: For CRIU_PAGES, the path of the pagemap that describes it; else empty.
    """

    entry: TreeEntry
    role: FileRole = FileRole.OTHER
    data_class: DataClass = DataClass.GENERIC
    pagemap: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class Recognised:
    """A tree divided up.

    Attributes:
        kind: `nvidia-snapshot`, `criu`, `cuda-custom-storage`, `gms` or `directory`.
        partition: The host side first, then the ranks, ascending; each sorted by path, complete
            with the directories above its paths, so that it can be recreated alone. Directories
            are thus in several of them, everything else is in one.
        requirements: What the checkpoint tells of where it can run (`build_requirements`).
        warnings: What was found odd, for the user.
    """

    kind: str
    partition: dict[RankKey, list[SourceEntry]]
    requirements: dict[str, JsonValue]
    warnings: list[str]


def recognise(
    tree: SourceTree,
    *,
    rank_glob: str | None = None,
    class_overrides: Sequence[ClassOverride] = (),
) -> Recognised:
    """Divide a tree into ranks and say what each file is.

    Args:
        tree: The tree; a scanned one is still in place.
        rank_glob: Overrides all that is known of ranks; see `parse_rank_glob`.
        class_overrides: The user's word on classes; see `class_of`.

    Raises:
        UsageError: `rank_glob` is not one.
        SourceError: A file cannot be read or changed since the scan.
    """
    glob = None if rank_glob is None else parse_rank_glob(rank_glob)
    warnings = WarningList()
    index = TreeIndex(tree, warnings)
    images, manifests = _read_directories(index)
    layout = find_gpu_layout(index)
    roles = _roles(images, manifests, layout)
    pagemaps = {path: pagemap for facts in images for path, pagemap in facts.pagemaps.items()}
    items = {
        entry.path: SourceEntry(
            entry=entry,
            role=roles.get(entry.path, FileRole.OTHER),
            data_class=class_of(entry.path, roles.get(entry.path, FileRole.OTHER), class_overrides),
            pagemap=pagemaps.get(entry.path, b""),
        )
        if entry.type is EntryType.FILE
        else SourceEntry(entry=entry)
        for entry in tree.entries
    }
    ranks = assign_ranks(index, layout, glob)
    partition = _partition(items, ranks, warnings)
    requirements = build_requirements(images, manifests, layout.devices, ranks, warnings)
    return Recognised(
        kind=_kind(images, manifests, layout),
        partition=partition,
        requirements=requirements,
        warnings=warnings.result(),
    )


def _read_directories(index: TreeIndex) -> tuple[list[ImageFacts], list[SnapshotManifest]]:
    images: list[ImageFacts] = []
    manifests: list[SnapshotManifest] = []
    for directory in index.directories():
        facts = read_image_directory(index, directory)
        if facts is not None:
            images.append(facts)
        manifest = read_snapshot_manifest(index, directory)
        if manifest is not None:
            manifests.append(manifest)
            # The manifest is written before the dump; CRIU writes the inventory last.
            if facts is None or facts.inventory is None:
                index.warnings.add(
                    f"{show_path(directory)} has a manifest.yaml but no inventory.img of CRIU: "
                    "this capture was not finished"
                )
    if manifests:
        for directory in staging_directories(index):
            index.warnings.add(f"{show_path(directory)} holds captures that were not finished")
    return images, manifests


def _roles(
    images: list[ImageFacts], manifests: list[SnapshotManifest], layout: GpuLayout
) -> dict[bytes, FileRole]:
    roles: dict[bytes, FileRole] = {}
    for facts in images:
        roles |= facts.roles
    for manifest in manifests:
        roles[join_path(manifest.directory, b"manifest.yaml")] = FileRole.MANIFEST
        roles[join_path(manifest.directory, b"rootfs-diff.tar")] = FileRole.ROOTFS_DIFF
    return roles | layout.roles


def _kind(images: list[ImageFacts], manifests: list[SnapshotManifest], layout: GpuLayout) -> str:
    if manifests:
        return "nvidia-snapshot"
    if images:
        return "criu"
    if layout.devices:
        return "cuda-custom-storage"
    return "gms" if layout.rank_directories else "directory"


def _partition(
    items: dict[bytes, SourceEntry], ranks: dict[bytes, RankKey], warnings: WarningList
) -> dict[RankKey, list[SourceEntry]]:
    """Put every path into its rank, and above it the directories that it needs there."""
    parts: dict[RankKey, dict[bytes, SourceEntry]] = {HOST: {}}
    for path, item in items.items():
        rank = ranks[path]
        if item.entry.type is EntryType.HARDLINK:
            # Two names of one file cannot be in two ranks: each is recreated on its own.
            first = ranks[item.entry.target]
            if first != rank:
                warnings.add(
                    f"{show_path(path)} is kept with its first name "
                    f"{show_path(item.entry.target)}, in rank {first} and not in rank {rank}"
                )
            rank = first
        if item.entry.type is EntryType.DIRECTORY:
            parts[HOST][path] = item
        part = parts.setdefault(rank, {})
        part[path] = item
        while path:
            path = parent_path(path)  # noqa: PLW2901
            if path in part:
                break
            part[path] = items[path]
    order: list[RankKey] = [HOST, *sorted(key for key in parts if isinstance(key, int))]
    return {key: [parts[key][path] for path in sorted(parts[key])] for key in order}
