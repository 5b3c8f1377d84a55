"""The images of a snapshot that decide where it can be restored, read and put together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

from snapagent.errors import PreflightFailed
from snapstore.criu import (
    Core,
    Inventory,
    Memory,
    OpenFiles,
    PageFlag,
    Process,
    TaskIds,
    Terminal,
    VmaStatus,
    WorkingDirectory,
    own_namespaces,
    parse_core,
    parse_fs,
    parse_ids,
    parse_inventory,
    parse_mm,
    parse_open_files,
    parse_pagemap,
    parse_pstree,
    parse_remaps,
    parse_tty_info,
)
from snapstore.units import MIB, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from snapstore import Snapshot

__all__ = ["Images", "read_images", "snapshot_reader"]

T = TypeVar("T")

IMAGE_BYTES_MAX = 64 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Images:
    """What the images of one dump say.

    Attributes:
        cores: By pid, of those that were alive, like the next four.
        private_bytes: Of all address spaces, what the images have or are filled from.
        shared_bytes: Likewise of shared memory, which is loaded before the start.
        own_namespaces: Kinds of namespaces that a restore creates anew.
        terminals: Numbers of pseudo terminals whose other end is not in the dump.
        removed: Ids of files that had no name any more; CRIU recreates them.
    """

    inventory: Inventory
    processes: tuple[Process, ...]
    cores: dict[int, Core]
    ids: dict[int, TaskIds]
    memories: dict[int, Memory]
    directories: dict[int, WorkingDirectory]
    files: OpenFiles
    terminals: frozenset[int]
    removed: frozenset[int]
    private_bytes: int
    shared_bytes: int
    own_namespaces: frozenset[str]

    @property
    def pids(self) -> frozenset[int]:
        """The ids of all processes and threads.

        Of one that had ended and not been waited for CRIU writes ids of threads that mean nothing.
        """
        alive = [process for process in self.processes if process.pid in self.cores]
        threads = (thread for process in alive for thread in process.threads)
        return frozenset((*(process.pid for process in self.processes), *threads))


def snapshot_reader(snapshot: Snapshot) -> Callable[[str], bytes | None]:
    """Return what reads a small file in the root of a snapshot; none where there is no such."""
    names = {entry.path for entry in snapshot.walk() if entry.is_file}

    def read(name: str) -> bytes | None:
        if name.encode() not in names:
            return None
        with snapshot.open(name) as file:
            if file.size_bytes > IMAGE_BYTES_MAX:
                raise PreflightFailed(f"{name} of the snapshot has {file.size_bytes} bytes")
            return file.read_at(0, file.size_bytes)

    return read


def read_images(read: Callable[[str], bytes | None]) -> Images:
    """Read the images of a dump.

    Args:
        read: Returns the contents of an image; none if there is no such image.

    Raises:
        PreflightFailed: There is no dump.
        FormatError: An image is not what it should be.
    """
    inventory = _parsed(read, "inventory.img", parse_inventory)
    processes = _parsed(read, "pstree.img", parse_pstree)
    files = _parsed(read, "files.img", parse_open_files)
    if inventory is None or processes is None or files is None:
        raise PreflightFailed(
            "the snapshot has no inventory.img, pstree.img or files.img in its root: it is no "
            "dump of CRIU's",
            next_step="see with `snapstore show` what it holds; `snapstore pull` gets it out",
        )
    cores = _of_each(processes, read, "core", parse_core)
    ids = _of_each(processes, read, "ids", parse_ids)
    memories = _of_each(processes, read, "mm", parse_mm)
    pagemaps = _of_each(processes, read, "pagemap", parse_pagemap)
    own: frozenset[str] = frozenset()
    if processes[0].pid in ids:
        own = own_namespaces(inventory, ids[processes[0].pid])
    kept = [
        int(pagemap.counts[(pagemap.flags & (PageFlag.PRESENT | PageFlag.LAZY)) != 0].sum())
        for pagemap in pagemaps.values()
    ]
    return Images(
        inventory=inventory,
        processes=processes,
        cores=cores,
        ids=ids,
        memories=memories,
        directories=_of_each(processes, read, "fs", parse_fs),
        files=files,
        terminals=_terminals_of_others(_parsed(read, "tty-info.img", parse_tty_info) or ()),
        removed=frozenset(
            remap.file_id for remap in _parsed(read, "remap-fpath.img", parse_remaps) or ()
        ),
        private_bytes=sum(kept) * PAGE_BYTES,
        shared_bytes=_shared_bytes(read, memories.values()),
        own_namespaces=own,
    )


def _parsed(
    read: Callable[[str], bytes | None], name: str, parse: Callable[[bytes, str], T]
) -> T | None:
    data = read(name)
    return None if data is None else parse(data, name)


def _of_each(
    processes: tuple[Process, ...],
    read: Callable[[str], bytes | None],
    kind: str,
    parse: Callable[[bytes, str], T],
) -> dict[int, T]:
    found = {}
    for process in processes:
        value = _parsed(read, f"{kind}-{process.pid}.img", parse)
        if value is not None:
            found[process.pid] = value
    return found


def _terminals_of_others(terminals: tuple[Terminal, ...]) -> frozenset[int]:
    fed = {one.pty for one in terminals if one.is_master}
    return frozenset(one.pty for one in terminals if one.pty is not None and one.pty not in fed)


def _shared_bytes(read: Callable[[str], bytes | None], memories: Iterable[Memory]) -> int:
    """Sum up the pages of all shared memory that some process maps."""
    kinds = VmaStatus.ANON_SHARED | VmaStatus.MEMFD | VmaStatus.SYSV_IPC
    shared = {
        number for memory in memories for number in memory.vmas.having(kinds).object_ids.tolist()
    }
    total = 0
    for number in shared:
        name = f"pagemap-shmem-{number}.img"
        data = read(name)
        total += 0 if data is None else parse_pagemap(data, name).present_bytes
    return total
