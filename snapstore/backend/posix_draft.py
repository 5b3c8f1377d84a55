"""An object that is written part by part before it has a name: a file in `tmp/` until then.

Who holds all bytes of an object uses `put_new`. A draft is for who does not: it gets the bytes one
after the other, and learns the object's name, which is their digest, only at the end. `publish`
promises what `put_new` does (`posix_publish`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from snapstore.backend import layout
from snapstore.backend.base import CONTENT_NAMED, ObjectKind
from snapstore.backend.direct import PlacedWriter
from snapstore.backend.layout import object_text
from snapstore.backend.posix_publish import (
    Temporary,
    create_temporary,
    finish_temporary,
    new_temporary_key,
    open_temporary,
    publish,
    translate_write_error,
)
from snapstore.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapstore.backend.posix_tree import Tree

__all__ = ["PosixDraft"]


class PosixDraft:
    """A `Draft` in a directory. Makes its file with the first byte."""

    def __init__(self, tree: Tree, published: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            tree: The store's directory.
            published: Told the key of an object after it got its name and before that is durable.
        """
        self._tree = tree
        self._published = published
        self._key = ""
        self._writer: PlacedWriter | None = None
        """While the file is open."""
        self._written: Temporary | None = None
        """Once it is durable."""
        self._is_made = False
        self._is_lost = False
        self._size_bytes = 0

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """See `Draft.write`."""
        try:
            self._opened().write(offset, pieces)
        except OSError as error:
            raise translate_write_error(error, "write an object that has no name yet") from error
        end = offset + sum(piece.nbytes for piece in pieces)
        self._size_bytes = max(self._size_bytes, end)
        self._written = None

    def publish(self, kind: ObjectKind, name: str) -> None:
        """See `Draft.publish`."""
        assert kind in CONTENT_NAMED, kind
        key = layout.key_of(kind, name)
        try:
            if self._written is None:
                self._written = self._finish()
            publish(self._tree, kind, key, self._written)
            self._published(key)
            self._tree.settle(key)
        except OSError as error:
            raise translate_write_error(error, f"write {object_text(kind, name)}") from error

    def discard(self) -> None:
        """See `Draft.discard`."""
        if self._writer is not None:
            self._tree.close_quietly(self._writer.fd)
            self._writer = None
        if self._is_made:
            self._is_made = False
            # A name that cannot be removed is garbage for a sweep; it changes nothing else.
            with contextlib.suppress(OSError):
                self._tree.files.unlink(self._tree.path(self._key))

    def _opened(self) -> PlacedWriter:
        if self._is_lost:
            raise BackendError(
                "bytes that were written could not be made durable, and are lost",
                next_step="see what the storage's own log says, then start over",
            )
        if self._writer is None:
            if self._is_made:
                fd = open_temporary(self._tree, self._key)
            else:
                # A new name each time: a creation that failed may have happened.
                self._key = new_temporary_key()
                fd = create_temporary(self._tree, self._key)
                self._is_made = True
            self._writer = PlacedWriter(self._tree.files, fd)
        return self._writer

    def _finish(self) -> Temporary:
        """Make the file durable; if that fails nothing brings back what was in it."""
        fd = self._opened().fd
        self._writer = None
        try:
            found = finish_temporary(self._tree, fd, self._size_bytes)
        except BaseException:
            self._is_lost = True
            raise
        return Temporary(self._key, found, [])
