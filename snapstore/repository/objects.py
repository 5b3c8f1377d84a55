"""Reading whole objects and single sections of a backend, with the checks in one place."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from snapstore.cache.cached_backend import CachedBackend
from snapstore.errors import FormatError, IntegrityError, LimitExceeded
from snapstore.format.envelope import (
    HEADER_BYTES_MAX,
    Envelope,
    SectionInfo,
    decode_section,
    parse_header,
)
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapstore.backend.base import Backend, ObjectKind

__all__ = ["EnvelopeReader", "about", "forget_cached", "read_object"]

_READ_BYTES = 8 * MIB


@contextlib.contextmanager
def about(what: str, *, next_step: str = "") -> Iterator[None]:
    """Let what is found to be wrong meanwhile say which object it is about, and what to do."""
    try:
        yield
    except (FormatError, IntegrityError) as error:
        step = error.next_step or next_step
        raise type(error)(f"{what}: {error}", next_step=step) from error


def forget_cached(backend: Backend, kind: ObjectKind, name: str) -> bool:
    """Have an object fetched anew that turned out to be wrong, if it came through a cache.

    Returns:
        Whether it is worth reading it again.
    """
    if not isinstance(backend, CachedBackend):
        return False
    backend.forget(kind, name, 0, backend.stat(kind, name).size_bytes)
    return True


def read_object(backend: Backend, kind: ObjectKind, name: str, *, limit_bytes: int) -> bytearray:
    """Read a whole object that is known to be small.

    Raises:
        ObjectNotFound: There is none of that name.
        LimitExceeded: It is longer than `limit_bytes`; it was not read.
    """
    size = backend.stat(kind, name).size_bytes
    if size > limit_bytes:
        raise LimitExceeded(
            f"{kind.value} {name}: {size} bytes, more than the limit of {limit_bytes}"
        )
    data = _allocate(size, what=f"{kind.value} {name}")
    if size:
        backend.get_range(kind, name, 0, memoryview(data))
    return data


def _allocate(size_bytes: int, *, what: str) -> bytearray:
    """Make room for an object within its limit, which may still be more than there is."""
    try:
        return bytearray(size_bytes)
    except MemoryError as error:
        raise LimitExceeded(f"{what}: {size_bytes} bytes do not fit into memory") from error


class EnvelopeReader:
    """Fetches an object's header once and then only the sections that are asked for.

    Thread-safe; holds no more than the header.
    """

    def __init__(self, backend: Backend, kind: ObjectKind, name: str, *, magic: bytes) -> None:
        """Read and check the header.

        Raises:
            ObjectNotFound: There is no such object.
            FormatError: Its header is not valid.
        """
        self._backend = backend
        self._kind = kind
        self._name = name
        length = backend.stat(kind, name).size_bytes
        head = bytearray(min(length, HEADER_BYTES_MAX))
        if head:
            backend.get_range(kind, name, 0, memoryview(head))
        with about(self._what):
            try:
                envelope = parse_header(head, magic=magic, object_length=length)
            except (FormatError, IntegrityError):
                if not forget_cached(backend, kind, name):
                    raise
                backend.get_range(kind, name, 0, memoryview(head))
                envelope = parse_header(head, magic=magic, object_length=length)
        self.envelope: Envelope = envelope

    def section(self, tag: bytes, *, limit_bytes: int) -> memoryview:
        """Fetch, check and decode one section into memory.

        Raises:
            Malformed: There is no such section.
            LimitExceeded: It is larger than `limit_bytes`.
            DigestMismatch: Its bytes are damaged.
        """
        info = self.envelope.require(tag)
        self._check_limit(info, limit_bytes)
        stored = _allocate(info.stored_length, what=self._what)
        self._read(info, memoryview(stored))
        try:
            return decode_section(info, stored, limit_bytes=limit_bytes, what=self._what)
        except (FormatError, IntegrityError):
            if not forget_cached(self._backend, self._kind, self._name):
                raise
        self._read(info, memoryview(stored))
        return decode_section(info, stored, limit_bytes=limit_bytes, what=self._what)

    def _read(self, info: SectionInfo, view: memoryview) -> None:
        for offset in range(0, len(view), _READ_BYTES):
            piece = view[offset : offset + _READ_BYTES]
            self._backend.get_range(self._kind, self._name, info.offset + offset, piece)

    def stream(self, info: SectionInfo, sink: Callable[[int, memoryview], None]) -> None:
        """Hand a section's stored bytes, unchecked, piece by piece to `sink`."""
        buffer = memoryview(bytearray(min(info.stored_length, _READ_BYTES)))
        for offset in range(0, info.stored_length, _READ_BYTES):
            piece = buffer[: min(_READ_BYTES, info.stored_length - offset)]
            self._backend.get_range(self._kind, self._name, info.offset + offset, piece)
            sink(offset, piece)

    @property
    def _what(self) -> str:
        return f"{self._kind.value} {self._name[:12]}"

    def _check_limit(self, info: SectionInfo, limit_bytes: int) -> None:
        for length in (info.stored_length, info.plain_length):
            if length > limit_bytes:
                raise LimitExceeded(
                    f"{self._what}: section {info.tag.decode()} has {length} bytes, more than "
                    f"the limit of {limit_bytes}"
                )
