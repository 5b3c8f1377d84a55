"""Where a dump's bytes go: images and pages as files of a snapshot that is being written."""

from __future__ import annotations

import array
import threading
from typing import TYPE_CHECKING, Final

from snapagent.criu.pagemaps import build_pagemap
from snapagent.errors import AgentError

if TYPE_CHECKING:
    from snapagent.criu.image_pipe import ImagePipe
    from snapagent.criu.protocol import PagesImage
    from snapstore import FileWriter, SnapshotWriter

__all__ = ["HOST_RANK", "ImageStore", "PageStore"]

HOST_RANK: Final = "host"
"""Images of processes belong to no GPU."""

_IMAGE_MODE = 0o600
_READ_BYTES = 1 << 20
_SMALL_BYTES_MAX = 64 << 10
_KEPT_BYTES_MAX = 256 << 20
_KEPT = ("inventory.img", "pstree.img", "files.img", "cpuinfo.img", "core-", "mm-")
"""Beginnings of the names of images that tell what a restore will need."""


class ImageStore:
    """Takes the images other than pages, one thread for each.

    Attributes:
        kept: Images that tell what a restore will need, for whoever describes the snapshot.
        sizes: Of all images.
    """

    def __init__(self, writer: SnapshotWriter) -> None:
        self.kept: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self._writer = writer
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def store(self, name: str, pipe: ImagePipe) -> None:
        """Store one image, all of which comes out of a pipe.

        Raises:
            AgentError: Descriptive images are larger than any real ones.
        """
        buffer = memoryview(bytearray(_READ_BYTES))
        size = _fill(pipe, buffer[:_SMALL_BYTES_MAX])
        if size < _SMALL_BYTES_MAX:
            self.add(name, bytes(buffer[:size]))
            return
        keep = bytearray() if name.startswith(_KEPT) else None
        with self._writer.open_file(HOST_RANK, name, mode=_IMAGE_MODE) as file:
            while size:
                file.write(buffer[:size])
                if keep is not None:
                    keep += buffer[:size]
                    self._check_kept(len(keep))
                size = pipe.read_into(buffer)
        self._note(name, file.size_bytes, bytes(keep) if keep is not None else None)

    def add(self, name: str, data: bytes) -> None:
        """Store one image that is in memory."""
        self._writer.add_file(HOST_RANK, name, data, mode=_IMAGE_MODE)
        self._note(name, len(data), data if name.startswith((*_KEPT, "pagemap-")) else None)

    def require_whole(self) -> None:
        """Check that CRIU has given what every dump has; it writes the inventory last.

        Raises:
            AgentError: Something is missing.
        """
        for name in ("pstree.img", "inventory.img"):
            if name not in self.sizes:
                raise AgentError(f"CRIU's dump ended without {name}", next_step="capture again")

    def note_pages(self, name: str, size_bytes: int) -> None:
        """Take note of an image of pages that somebody else stored."""
        self._note(name, size_bytes, None)

    def _note(self, name: str, size_bytes: int, kept: bytes | None) -> None:
        with self._lock:
            self.sizes[name] = size_bytes
            if kept is not None:
                self.kept[name] = kept
                self._kept_bytes += len(kept)
        self._check_kept(0)

    def _check_kept(self, more: int) -> None:
        if self._kept_bytes + more > _KEPT_BYTES_MAX:
            raise AgentError(
                f"the images that describe the processes are larger than {_KEPT_BYTES_MAX} bytes"
            )


class PageStore:
    """Takes the pages of a dump, as CRIU sends them: one image after the other.

    Used by one thread.
    """

    def __init__(self, writer: SnapshotWriter, images: ImageStore) -> None:
        self.size_bytes = 0
        self._writer = writer
        self._images = images
        self._image: PagesImage | None = None
        self._file: FileWriter | None = None
        self._entries = _Entries()

    def begin(self, image: PagesImage) -> None:
        """Begin the pages of a task or of shared memory."""
        assert self._file is None, "one image ends before the next begins"
        self._image = image
        self._entries = _Entries()
        self._file = self._writer.open_file(
            HOST_RANK, image.pages_name, data_class="pages", mode=_IMAGE_MODE
        )

    def buffer(self) -> memoryview:
        """Room for the next bytes of pages; waits while the store is slower than CRIU."""
        assert self._file is not None, "begun"
        return self._file.buffer()

    def advance(self, count_bytes: int) -> None:
        """Take bytes that were put into the buffer."""
        assert self._file is not None, "begun"
        self._file.advance(count_bytes)

    def entry(self, vaddr: int, nr_pages: int, flags: int) -> None:
        """Take note of where the pages that come next, if any, belong."""
        self._entries.add(vaddr, nr_pages, flags)

    def end(self) -> None:
        """End the image: its pagemap is known now."""
        assert self._file is not None, "begun"
        assert self._image is not None, "begun"
        self._file.close()
        self._images.note_pages(self._image.pages_name, self._file.size_bytes)
        self.size_bytes += self._file.size_bytes
        self._file = None
        pagemap = build_pagemap(self._image.pages_id, self._entries.rows())
        self._images.add(self._image.pagemap_name, pagemap)


class _Entries:
    """Entries of a pagemap: a terabyte has a million, so 24 bytes each."""

    def __init__(self) -> None:
        self._columns = (array.array("Q"), array.array("Q"), array.array("Q"))

    def add(self, *row: int) -> None:
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def rows(self) -> zip[tuple[int, int, int]]:
        return zip(*self._columns, strict=True)


def _fill(pipe: ImagePipe, buffer: memoryview) -> int:
    """Read until the buffer is full or the image ends; return how much there is."""
    done = 0
    while done < len(buffer):
        count = pipe.read_into(buffer[done:])
        if not count:
            break
        done += count
    return done
