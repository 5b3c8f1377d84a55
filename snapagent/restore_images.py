"""What CRIU is given of a snapshot during a restore, and what it is spared.

CRIU reads its images through a stream, which cannot skip: so images of pages hold only what it has
to load itself, packed. Private memory that a userfaultfd can fill comes later.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import ipaddress
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from snapagent.criu.ghosts import REMAPS_IMAGE, rename_ghosts
from snapagent.criu.laziness import with_lazy_marks
from snapagent.criu.pagemaps import build_pagemap
from snapagent.errors import AgentError
from snapagent.lazy.memory import TaskMemory
from snapagent.preflight import read_images
from snapstore import criu
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from concurrent.futures import Future

    from snapagent.criu.ghosts import Ghosts
    from snapagent.criu.image_pipe import ImagePipe
    from snapagent.criu.image_set import ImageSet
    from snapagent.preflight import Images
    from snapstore import SnapshotFile

__all__ = ["DumpFacts", "StreamedImages", "pieces", "read_facts"]

_PIECE_BYTES = 1 << 20
_AHEAD_BYTES_MIN = 64 << 20
"""Of an image that CRIU loads itself; smaller ones are not worth threads."""
_AHEAD_PIECE_BYTES = 8 << 20
_AHEAD_THREADS = 4
_GHOST_PATHS_BYTES_MAX = 64 << 10
"""They go to the supervisor in one message."""


@dataclasses.dataclass(frozen=True, slots=True)
class DumpFacts:
    """What the small images say.

    Attributes:
        images: What the small images say.
        tasks: Memory to be filled lazily, by process id.
        eager: For each image of pages the ranges `(offset, length)` that CRIU loads itself.
        eager_bytes: Their sum.
        lazy_bytes: What comes later.
        shared_bytes: Of the eager ones, those of shared memory.
        rewritten: Images that CRIU gets otherwise than they were captured; see `laziness`, and
            `criu.ghosts` for files that had no name any more.
        renamed: Images that CRIU asks for by other names than they were captured under.
        ghosts: Paths of what CRIU makes for a moment, which this restore alone has; of very many,
            the first ones.
    """

    images: Images
    tasks: dict[int, TaskMemory]
    eager: dict[str, list[tuple[int, int]]]
    eager_bytes: int
    lazy_bytes: int
    shared_bytes: int
    rewritten: dict[str, bytes]
    renamed: dict[str, str]
    ghosts: list[str]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that sockets are bound to, other than the loopback and unspecified ones."""
        bound = {socket.source_address for socket in self.images.files.inet}
        return tuple(sorted(address for address in bound if address and _is_of_a_link(address)))

    @property
    def is_shell_job(self) -> bool:
        """Whether the tree was not a session of its own."""
        root = self.images.processes[0]
        return root.sid != root.pid


def _is_of_a_link(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast)


def read_facts(images: ImageSet) -> DumpFacts:
    """Read the small images of a dump, for one restore: each has names of its own for ghosts.

    Args:
        images: Of the dump.

    Raises:
        AgentError: An image is missing, or the dump is one that this agent cannot restore.
        FormatError: An image is not what CRIU writes.
    """
    small = read_images(images.get)
    tasks: dict[int, TaskMemory] = {}
    eager: dict[str, list[tuple[int, int]]] = {}
    rewritten: dict[str, bytes] = {}
    lazy_bytes = shared_bytes = 0
    for name in images.names:
        if not (name.startswith("pagemap-") and name.endswith(".img")):
            continue
        pagemap = criu.parse_pagemap(images.read(name), name)
        pages = f"pages-{pagemap.pages_id}.img"
        _check_pages(images, name, pagemap, pages)
        owner = name.removeprefix("pagemap-").removesuffix(".img")
        memory = small.memories.get(int(owner)) if owner.isdecimal() else None
        if memory is not None:
            marked = with_lazy_marks(pagemap, memory.vmas)
            if marked is not pagemap:
                rewritten[name] = build_pagemap(
                    marked.pages_id, (entry[:3] for entry in marked.entries())
                )
            pagemap = marked
        loaded = _eager_ranges(pagemap, all_of_it=memory is None)
        eager.setdefault(pages, []).extend(loaded)
        count = sum(length for _, length in loaded)
        lazy_bytes += pagemap.present_bytes - count
        if memory is not None:
            tasks[int(owner)] = _task_memory(images, int(owner), memory, pagemap, pages)
        else:
            shared_bytes += count
    ghosts = _rename_ghosts(images, small)
    if ghosts is not None:
        rewritten[REMAPS_IMAGE] = ghosts.remaps
    return DumpFacts(
        images=small,
        tasks=tasks,
        eager=eager,
        eager_bytes=sum(length for ranges in eager.values() for _, length in ranges),
        lazy_bytes=lazy_bytes,
        shared_bytes=shared_bytes,
        rewritten=rewritten,
        renamed=ghosts.images if ghosts is not None else {},
        ghosts=_first_paths(ghosts.paths) if ghosts is not None else [],
    )


def _rename_ghosts(images: ImageSet, small: Images) -> Ghosts | None:
    data = images.get(REMAPS_IMAGE)
    if data is None:
        return None
    return rename_ghosts(criu.parse_remaps(data, REMAPS_IMAGE), small.files.regular)


def _first_paths(paths: list[str]) -> list[str]:
    sizes = itertools.accumulate(2 * len(os.fsencode(path)) for path in paths)
    return [path for path, size in zip(paths, sizes, strict=True) if size <= _GHOST_PATHS_BYTES_MAX]


class StreamedImages:
    """Gives images to CRIU as it asks for them. Thread-safe."""

    def __init__(self, images: ImageSet, facts: DumpFacts) -> None:
        self._images = images
        self._eager = facts.eager
        self._rewritten = facts.rewritten
        self._renamed = facts.renamed

    def find(self, name: str) -> Callable[[ImagePipe], None] | None:
        """Return what writes an image into a pipe, or none if there is no such image."""
        name = self._renamed.get(name, name)
        if name not in self._images:
            return None
        if name in self._rewritten:
            return lambda pipe: pipe.write(self._rewritten[name])
        if name in self._eager:
            return lambda pipe: self._write_ranges(name, pipe)
        return lambda pipe: pipe.write(self._images.read(name))

    def _write_ranges(self, name: str, pipe: ImagePipe) -> None:
        file = self._images.open(name)
        if sum(length for _, length in self._eager[name]) < _AHEAD_BYTES_MIN:
            buffer = memoryview(bytearray(_PIECE_BYTES))
            for offset, length in pieces(self._eager[name], _PIECE_BYTES):
                file.read_into(offset, buffer[:length], streaming=length == _PIECE_BYTES)
                pipe.write(buffer[:length])
            return
        with contextlib.closing(_read_ahead(file, self._eager[name])) as read:
            for data in read:
                pipe.write_steadily(data)


def _read_ahead(file: SnapshotFile, ranges: list[tuple[int, int]]) -> Generator[memoryview]:
    """Read pieces by several threads, and give them in order; each is valid until the next.

    CRIU takes them one after the other, so that reading and checking would else wait for it.
    """
    free = [memoryview(bytearray(_AHEAD_PIECE_BYTES)) for _ in range(_AHEAD_THREADS + 1)]
    waiting: collections.deque[tuple[Future[None], memoryview, int]] = collections.deque()

    def read(offset: int, into: memoryview) -> None:
        file.read_into(offset, into, streaming=into.nbytes == _AHEAD_PIECE_BYTES)

    pool = ThreadPoolExecutor(_AHEAD_THREADS, thread_name_prefix="snapagent-ahead")
    try:
        left = pieces(ranges, _AHEAD_PIECE_BYTES)
        while True:
            while free and (one := next(left, None)) is not None:
                offset, length = one
                buffer = free.pop()
                waiting.append((pool.submit(read, offset, buffer[:length]), buffer, length))
            if not waiting:
                return
            done, buffer, length = waiting.popleft()
            done.result()
            yield buffer[:length]
            free.append(buffer)
    finally:
        pool.shutdown(cancel_futures=True)


def pieces(ranges: list[tuple[int, int]], size_bytes: int) -> Generator[tuple[int, int]]:
    """Divide ranges `(offset, length)` into pieces of at most some bytes."""
    for offset, length in ranges:
        for start in range(0, length, size_bytes):
            yield offset + start, min(size_bytes, length - start)


def _check_pages(images: ImageSet, name: str, pagemap: criu.Pagemap, pages: str) -> None:
    if pagemap.has_parent:
        raise AgentError(
            f"{name} needs the images of an earlier dump",
            next_step="capture the process again, without --track-mem and --prev-images-dir",
        )
    there = images.size_bytes(pages) if pages in images else 0
    if there < pagemap.present_bytes:
        # CRIU would wait for the rest for ever.
        raise AgentError(
            f"{pages} has {there} bytes where {name} promises {pagemap.present_bytes}",
            next_step="the dump is not whole: capture the process again",
        )


def _eager_ranges(pagemap: criu.Pagemap, *, all_of_it: bool) -> list[tuple[int, int]]:
    """Where in the image of pages is what CRIU loads itself, neighbours joined."""
    present = (pagemap.flags & criu.PageFlag.PRESENT) != 0
    chosen = present if all_of_it else present & ((pagemap.flags & criu.PageFlag.LAZY) == 0)
    offsets = pagemap.offsets[chosen].astype(np.int64)
    lengths = pagemap.counts[chosen].astype(np.int64) * PAGE_BYTES
    if not len(offsets):
        return []
    begins = np.flatnonzero(np.append(True, offsets[1:] != offsets[:-1] + lengths[:-1]))
    joined = np.add.reduceat(lengths, begins)
    return list(zip(offsets[begins].tolist(), joined.tolist(), strict=True))


def _task_memory(
    images: ImageSet, pid: int, memory: criu.Memory, pagemap: criu.Pagemap, pages: str
) -> TaskMemory:
    vmas = memory.vmas.mapped()
    mappings = list(zip(vmas.starts.tolist(), vmas.ends.tolist(), strict=True))
    return TaskMemory(
        pid=pid, pagemap=pagemap, mappings=mappings, image=pages, file=images.open(pages)
    )
