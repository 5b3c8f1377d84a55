"""Serving the pages of a snapshot to plain CRIU, for those who drive CRIU themselves.

`criu lazy-pages --page-server` asks for the pages of private memory over a socket. Everything else
`criu restore --lazy-pages` wants as files in a directory: the small images, and images of pages
that hold only what CRIU loads itself, at the offsets that the pagemaps say; the rest are holes.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
import socket
from typing import TYPE_CHECKING, Self

import numpy as np

from snapagent.criu.image_set import find_images
from snapagent.criu.page_server import PageServer
from snapagent.errors import AgentError, ProtocolError
from snapagent.restore_images import pieces, read_facts
from snapstore.criu import PageFlag
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from snapagent.lazy.memory import TaskMemory
    from snapstore import Store

__all__ = ["PagesService"]

_PIECE_BYTES = 4 << 20
_IMAGE_MODE = 0o600


@dataclasses.dataclass(frozen=True, slots=True)
class _Runs:
    """Where the pages of one task are: runs of addresses and of offsets, ascending."""

    memory: TaskMemory
    starts: list[int]
    ends: list[int]
    offsets: list[int]


class PagesService:
    """A page server for all tasks of one snapshot. A context manager; many clients at once."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        images: str | None = None,
        address: tuple[str, int] = ("127.0.0.1", 0),
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Find the snapshot and listen; clients are served from `start` on.

        Args:
            store: Where the snapshot is; must stay open.
            name: `name`, `name:tag` or `name@b3:<id>`.
            images: Directory of the dump in the snapshot, if it holds several.
            address: Host and port to listen at; port 0 for any. Whoever can connect can read the
                memory of the processes.
            on_error: Told of each client that had to be ended.

        Raises:
            AgentError: The snapshot holds no processes, or the address cannot be had.
        """
        snapshot = store.snapshot(name)
        self.snapshot_id = snapshot.id.hex
        self._images = find_images(snapshot, images)
        self._facts = read_facts(self._images)
        reader = _StoreReader(self._facts.tasks)
        try:
            listener = socket.create_server(address)
        except OSError as error:
            raise AgentError(
                f"cannot listen at {address[0]}:{address[1]}: {error.strerror}",
                next_step="choose another address with --listen",
            ) from error
        host, port = listener.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        self._server = PageServer(listener, reader, on_error=on_error)

    @property
    def sent_bytes(self) -> int:
        """Bytes of pages that all clients were sent so far."""
        return self._server.sent_bytes

    def start(self) -> None:
        """Serve on threads of its own."""
        self._server.start()

    def close(self) -> None:
        """Hang up on all clients and stop listening. Idempotent."""
        self._server.close()

    def write_images(self, directory: Path) -> int:
        """Write what `criu restore --lazy-pages` needs beside the pages; return the bytes written.

        Args:
            directory: Made if it is not there; images in it are not overwritten.

        Raises:
            AgentError: It cannot be written, or has images already.
        """
        written = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in self._images.names:
                fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _IMAGE_MODE)
                try:
                    written += self._write_image(name, fd)
                finally:
                    os.close(fd)
        except OSError as error:
            raise AgentError(
                f"cannot write images to {directory}: {error.strerror}",
                next_step="give an empty directory",
            ) from error
        return written

    def _write_image(self, name: str, fd: int) -> int:
        """Write one image; of an image of pages only some ranges, at their offsets."""
        ranges = self._facts.eager.get(name)
        if ranges is None:
            data = self._facts.rewritten.get(name) or self._images.read(name)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            return len(data)
        file = self._images.open(name)
        os.ftruncate(fd, file.size_bytes)
        buffer = memoryview(bytearray(_PIECE_BYTES))
        total = 0
        for offset, length in pieces(ranges, _PIECE_BYTES):
            file.read_into(offset, buffer[:length])
            total += os.pwrite(fd, buffer[:length], offset)
        return total

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _StoreReader:
    """Gives pages by process and address. Thread-safe."""

    def __init__(self, tasks: dict[int, TaskMemory]) -> None:
        self._runs = {pid: _runs_of(memory) for pid, memory in tasks.items()}

    def read(self, pid: int, vaddr: int, nr_pages_max: int, into: memoryview) -> int:
        """Read pages that follow one another from an address on; see `PageReader`."""
        runs = self._runs.get(pid)
        row = bisect.bisect_right(runs.starts, vaddr) - 1 if runs is not None else -1
        if runs is None or row < 0 or vaddr >= runs.ends[row] or vaddr % PAGE_BYTES:
            raise ProtocolError(f"a client asks for {vaddr:#x} of process {pid}, which has no page")
        count = min(nr_pages_max, (runs.ends[row] - vaddr) // PAGE_BYTES)
        offset = runs.offsets[row] + vaddr - runs.starts[row]
        runs.memory.file.read_into(offset, into[: count * PAGE_BYTES])
        return count


def _runs_of(memory: TaskMemory) -> _Runs:
    """Join entries of a pagemap that go on where the one before ends, here and in the image."""
    pagemap = memory.pagemap
    present = (pagemap.flags & np.uint64(PageFlag.PRESENT)) != 0
    starts = pagemap.vaddrs[present].astype(np.int64)
    lengths = pagemap.counts[present].astype(np.int64) * PAGE_BYTES
    offsets = pagemap.offsets[present].astype(np.int64)
    ends = starts + lengths
    goes_on = (starts[1:] == ends[:-1]) & (offsets[1:] == offsets[:-1] + lengths[:-1])
    first = np.flatnonzero(np.append(True, ~goes_on)) if len(starts) else np.empty(0, np.int64)
    last = np.append(first[1:] - 1, len(starts) - 1) if len(starts) else first
    return _Runs(memory, starts[first].tolist(), ends[last].tolist(), offsets[first].tolist())
