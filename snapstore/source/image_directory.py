"""Work out one directory of CRIU images: the role of each file, and what the dump needs.

Whatever does not parse is stored as a plain file, with a warning.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, TypeVar

from snapstore.fstree import show_path
from snapstore.source import criu_files, criu_images, criu_memory
from snapstore.source.classes import FileRole
from snapstore.source.criu_pagemap import Pagemap, parse_pagemap
from snapstore.source.tree_index import TreeIndex, join_path
from snapstore.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapstore.source.criu_files import MappedFile
    from snapstore.source.criu_images import Core, CpuInfo, DumpLog, Inventory, Process

__all__ = ["ImageFacts", "read_image_directory"]

T = TypeVar("T")

IMAGE_BYTES_MAX = 64 * MIB
"""Enough for the pagemap of four terabytes; no other image that is read comes near."""
LOG_BYTES_READ = 64 * KIB

_PAGEMAP = re.compile(rb"pagemap-(?:shmem-)?[0-9]+\.img")
_MM = re.compile(rb"mm-[0-9]+\.img")
_PAGES = re.compile(rb"pages-.*\.img", re.DOTALL)
_IMAGE = re.compile(rb".*\.img|stats-dump|stats-restore|irmap-cache", re.DOTALL)
_INVENTORY = b"inventory.img"
_PARENT = b"parent"


@dataclasses.dataclass(slots=True)
class ImageFacts:
    """What one image directory says.

    Attributes:
        directory: Its path.
        roles: Of its files, by path; those it says nothing of are missing.
        pagemaps: For each pages image that fits, the path of its pagemap.
        inventory: Of the dump; missing where only the pages are in this directory.
        version_min: The oldest CRIU that writes such images, where that can be told.
    """

    directory: bytes
    roles: dict[bytes, FileRole] = dataclasses.field(default_factory=dict)
    pagemaps: dict[bytes, bytes] = dataclasses.field(default_factory=dict)
    inventory: Inventory | None = None
    version_min: str | None = None
    processes: tuple[Process, ...] = ()
    cores: dict[int, Core] = dataclasses.field(default_factory=dict)
    mapped_files: tuple[MappedFile, ...] = ()
    cpus: tuple[CpuInfo, ...] = ()
    log: DumpLog | None = None


def read_image_directory(index: TreeIndex, directory: bytes) -> ImageFacts | None:
    """Read the images of a directory; none if it is no directory of CRIU images.

    An inventory makes it one. Without it, as on the receiving side of a page server, only
    pagemaps and the pages they describe are taken for images.

    Raises:
        SourceError: A file cannot be read or changed since the scan.
    """
    names = index.names(directory)
    facts = ImageFacts(directory)
    if _INVENTORY in names:
        facts.inventory = index.read(
            join_path(directory, _INVENTORY),
            criu_images.parse_inventory,
            size_bytes_max=IMAGE_BYTES_MAX,
        )
        if facts.inventory is None:
            return None
        for name in names:
            if _IMAGE.fullmatch(name) and not _PAGES.fullmatch(name):
                facts.roles[join_path(directory, name)] = FileRole.CRIU_IMAGE
        _read_processes(index, facts, names)
    has_wide_counts = _read_pagemaps(index, facts, names)
    if facts.inventory is None and not facts.roles:
        return None
    facts.version_min = _version_min(facts.inventory, has_wide_counts=has_wide_counts)
    facts.log = _read_log(index, directory)
    return facts


def _read_processes(index: TreeIndex, facts: ImageFacts, names: list[bytes]) -> None:
    def path(name: bytes) -> bytes:
        return join_path(facts.directory, name)

    facts.processes = _read(index, facts, path(b"pstree.img"), criu_images.parse_pstree) or ()
    for process in facts.processes:
        core = _read(index, facts, path(b"core-%d.img" % process.pid), criu_images.parse_core)
        if core is not None:
            facts.cores[process.pid] = core
    files_name = b"files.img" if b"files.img" in names else b"reg-files.img"
    files = _read(index, facts, path(files_name), criu_files.parse_files) or {}
    memories = [
        _read(index, facts, path(name), criu_memory.parse_mm)
        for name in names
        if _MM.fullmatch(name)
    ]
    facts.mapped_files = criu_files.mapped_files(files, [m for m in memories if m is not None])
    facts.cpus = _read(index, facts, path(b"cpuinfo.img"), criu_images.parse_cpuinfo) or ()


def _read_pagemaps(index: TreeIndex, facts: ImageFacts, names: list[bytes]) -> bool:
    """Match pages images with the pagemaps that describe them; say whether counts are wide."""
    has_wide_counts = False
    claims: dict[bytes, list[tuple[bytes, Pagemap]]] = {}
    for name in names:
        if not _PAGEMAP.fullmatch(name):
            continue
        path = join_path(facts.directory, name)
        pagemap = _read(index, facts, path, parse_pagemap)
        if pagemap is None:
            continue
        facts.roles[path] = FileRole.CRIU_IMAGE
        has_wide_counts |= pagemap.has_wide_counts
        if pagemap.has_parent and _PARENT not in names:
            index.warnings.add(
                f"{show_path(path)} refers to pages of an earlier dump, which is not in the tree"
            )
        pages = join_path(facts.directory, b"pages-%d.img" % pagemap.pages_id)
        claims.setdefault(pages, []).append((path, pagemap))
    for pages, claimants in claims.items():
        _check_pages(index, facts, pages, claimants)
    if facts.inventory is not None:
        for path in (join_path(facts.directory, n) for n in names if _PAGES.fullmatch(n)):
            if path not in claims:
                index.warnings.add(f"no pagemap describes {show_path(path)}")
    return has_wide_counts


def _check_pages(
    index: TreeIndex, facts: ImageFacts, pages: bytes, claimants: list[tuple[bytes, Pagemap]]
) -> None:
    """Believe a pages image to be one if one pagemap describes it and it is long enough."""
    path, pagemap = claimants[0]
    file = index.file(pages)
    if len(claimants) > 1:
        index.warnings.add(f"{len(claimants)} pagemaps describe {show_path(pages)}")
    elif file is None:
        if pagemap.present_bytes:
            index.warnings.add(
                f"{show_path(pages)} is missing, which {show_path(path)} describes: "
                "CRIU cannot restore this"
            )
    elif file.size_bytes < pagemap.present_bytes:
        index.warnings.add(
            f"{show_path(pages)} has {file.size_bytes} bytes, but {show_path(path)} describes "
            f"{pagemap.present_bytes}: CRIU would wait for the rest without end"
        )
    else:
        facts.roles[pages] = FileRole.CRIU_PAGES
        facts.pagemaps[pages] = path


def _read_log(index: TreeIndex, directory: bytes) -> DumpLog | None:
    entry = index.file(join_path(directory, b"dump.log"))
    if entry is None:
        return None
    # CRIU names its version and the kernel in the first lines.
    data = index.tree.read(entry, size_bytes_max=LOG_BYTES_READ, is_prefix_enough=True)
    return criu_images.parse_dump_log(data)


def _version_min(inventory: Inventory | None, *, has_wide_counts: bool) -> str | None:
    """Tell the oldest CRIU that could have written this, which is the oldest to restore it.

    Images hold no version; only what they use gives it away.
    """
    if has_wide_counts or (inventory is not None and inventory.has_uprobes):
        return "4.2"
    if inventory is not None and (inventory.run_id or inventory.plugins):
        return "4.1"
    return None


def _read(
    index: TreeIndex, facts: ImageFacts, path: bytes, parse: Callable[[bytes, str], T]
) -> T | None:
    """Parse an image of this directory; one that does not parse is a plain file."""
    result = index.read(path, parse, size_bytes_max=IMAGE_BYTES_MAX)
    if result is None and index.file(path) is not None:
        facts.roles[path] = FileRole.OTHER
    return result
