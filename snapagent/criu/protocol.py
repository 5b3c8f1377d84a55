"""CRIU's protocols as bytes: page server headers, image streamer messages. Pure: no socket here.

The page server protocol is the one of CRIU 4.2 and later: every message begins with a header of
32 bytes, a C structure of little-endian numbers with four bytes of padding. Earlier versions have
headers of 24 bytes and must be refused before a session begins: nothing in the bytes tells them
apart.

What peers send is checked here as far as one message can be: commands, addresses, counts, names.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from snapagent.errors import ProtocolError
from snapstore.units import PAGE_BYTES

__all__ = [
    "HEADER_BYTES",
    "IMAGES_MAX",
    "LENGTH_BYTES",
    "REQUEST_BYTES_MAX",
    "Command",
    "ImageKind",
    "PageFlag",
    "PageHeader",
    "PagesImage",
    "check_image_name",
    "decode_header",
    "decode_image_id",
    "decode_request",
    "decode_request_length",
    "encode_header",
    "encode_image_id",
    "encode_reply",
    "encode_request",
    "encode_status",
]

IMAGES_MAX = 1 << 18
"""Images of one session. CRIU writes some ten for each task, so this is enough for 20,000 tasks."""

NAME_BYTES_MAX = 127
"""Of an image's name. CRIU's own names stay far below; below 128, lengths fit in one byte."""

_HEADER = struct.Struct("<I4xQQQ")
_STATUS = struct.Struct("<i")
_LENGTH = struct.Struct("<I")
_NAME_TAG = 0x0A  # field 1, length-delimited
_EXISTS_TAG = 0x08  # field 1, varint

HEADER_BYTES = _HEADER.size
LENGTH_BYTES = _LENGTH.size
REQUEST_BYTES_MAX = 2 + NAME_BYTES_MAX
"""Of the message in a request: the tag, the length, the name."""

_COMMAND_BITS = 16
_KIND_BITS = 8
_ADDRESS_END = 1 << 64
_TASK_ID_END = 1 << 31


class Command(enum.IntEnum):
    """What the header of a page server message asks for."""

    ADD = 1
    HOLE = 2
    OPEN = 3
    OPEN2 = 4
    PARENT = 5
    ADD_F = 6
    GET = 7
    CLOSE = 0x1023
    FORCE_CLOSE = 0x1024


class PageFlag:
    """Bits of a pagemap entry's flags."""

    PARENT = 1
    """The data is in the images of an earlier dump."""
    LAZY = 2
    """Private anonymous memory, which a userfaultfd may fill after the restore."""
    PRESENT = 4
    """The data follows, or is in this pages image."""
    KNOWN = 7


class ImageKind(enum.IntEnum):
    """Whose memory a pagemap describes."""

    TASK = 1
    SHMEM = 2


class PagesImage(NamedTuple):
    """One pagemap and its pages, as a dump to a page server opens them.

    Attributes:
        kind: Whether it is the memory of a task or a shared memory segment.
        id: The task's process id in its own namespace, or the segment's id.
        pages_id: Number of the pages image, unique in the snapshot.
    """

    kind: ImageKind
    id: int
    pages_id: int

    @property
    def pagemap_name(self) -> str:
        """Name of the image that lists the entries, as a dump to a directory calls it."""
        middle = "shmem-" if self.kind == ImageKind.SHMEM else ""
        return f"pagemap-{middle}{self.id}.img"

    @property
    def pages_name(self) -> str:
        """Name of the image that holds the data."""
        return f"pages-{self.pages_id}.img"


class PageHeader(NamedTuple):
    """The header of every page server message.

    Attributes:
        command: What is asked for, or for an answer `ADD_F`.
        flags: Bits of `PageFlag`; of `ADD_F` alone.
        nr_pages: How many pages follow, or are wanted.
        vaddr: The address of the first.
        target: Which image: `encode_image_id` of it, or for `GET` the process id alone.
    """

    command: Command
    flags: int = 0
    nr_pages: int = 0
    vaddr: int = 0
    target: int = 0


def encode_header(header: PageHeader) -> bytes:
    """Write a header as CRIU 4.2 and later send and expect it."""
    word = header.flags << _COMMAND_BITS | header.command
    return _HEADER.pack(word, header.nr_pages, header.vaddr, header.target)


def decode_header(data: bytes | bytearray | memoryview) -> PageHeader:
    """Read a header; those of commands that carry pages name at least one, at an address that is.

    Raises:
        ProtocolError: The command does not exist, or the pages cannot.
    """
    word, nr_pages, vaddr, target = _HEADER.unpack(data)
    number, flags = word & (1 << _COMMAND_BITS) - 1, word >> _COMMAND_BITS
    try:
        command = Command(number)
    except ValueError:
        raise ProtocolError(
            f"page server: unknown command {number:#x} (header {bytes(data).hex()})",
            next_step="use CRIU 4.2 or later; its headers have 32 bytes",
        ) from None
    header = PageHeader(command, flags, nr_pages, vaddr, target)
    if command in (Command.ADD, Command.ADD_F, Command.HOLE, Command.GET):
        _check_pages(header)
    return header


def _check_pages(header: PageHeader) -> None:
    """Refuse a run of pages that no address space has."""
    vaddr, nr_pages = header.vaddr, header.nr_pages
    if vaddr % PAGE_BYTES or not 1 <= nr_pages <= (_ADDRESS_END - vaddr) // PAGE_BYTES:
        raise ProtocolError(
            f"page server: {header.command.name} of {nr_pages} pages from address {vaddr:#x} on"
        )
    if header.flags & ~PageFlag.KNOWN:
        raise ProtocolError(
            f"page server: {header.command.name} with unknown flags {header.flags:#x}"
        )


def encode_image_id(kind: ImageKind, number: int) -> int:
    """Write which image is meant, the way headers of a dump name it."""
    return number << _KIND_BITS | kind


def decode_image_id(target: int) -> tuple[ImageKind, int]:
    """Read which image a header of a dump means.

    Raises:
        ProtocolError: It is of another kind, or the id of a task that no task can have.
    """
    number, low = target >> _KIND_BITS, target & (1 << _KIND_BITS) - 1
    if low == ImageKind.SHMEM:
        return ImageKind.SHMEM, number
    if low == ImageKind.TASK and 0 < number < _TASK_ID_END:
        return ImageKind.TASK, number
    raise ProtocolError(f"page server: no image of kind {low} with id {number} exists")


def encode_status(status: int) -> bytes:
    """Write the number that answers `PARENT` and `CLOSE`."""
    return _STATUS.pack(status)


# -- image streamer -------------------------------------------------------------------------------


def check_image_name(name: str) -> str:
    """Return an image's name if it is one: printable ASCII, no separator, of bounded length.

    Raises:
        ProtocolError: It is something else; a sink may rely on that and make a path of it.
    """
    is_plain = name.isascii() and name.isprintable() and "/" not in name and " " not in name
    if not is_plain or not 0 < len(name) <= NAME_BYTES_MAX or name in (".", ".."):
        raise ProtocolError(f"image streamer: {name[:NAME_BYTES_MAX]!r} cannot be an image's name")
    return name


def encode_request(name: str) -> bytes:
    """Write a request for an image as CRIU sends it, its length included."""
    message = bytes((_NAME_TAG, len(name))) + name.encode("ascii")
    return _LENGTH.pack(len(message)) + message


def decode_request_length(data: bytes | bytearray | memoryview) -> int:
    """Read the length of the message that follows.

    Raises:
        ProtocolError: No request is so long, or so short.
    """
    (length,) = _LENGTH.unpack(data)
    if not 2 < length <= REQUEST_BYTES_MAX:
        raise ProtocolError(f"image streamer: a request of {length} bytes")
    return int(length)


def decode_request(message: bytes | bytearray | memoryview) -> str:
    """Read the name of the image that a request is for.

    Raises:
        ProtocolError: It is no such message, or the name cannot be one.
    """
    data = bytes(message)
    if len(data) < 3 or data[0] != _NAME_TAG or data[1] != len(data) - 2:
        raise ProtocolError(
            f"image streamer: no request for an image: {data[:REQUEST_BYTES_MAX].hex()}"
        )
    return check_image_name(data[2:].decode("latin-1"))


def encode_reply(*, exists: bool) -> bytes:
    """Write the answer to a request during a restore, its length included."""
    message = bytes((_EXISTS_TAG, exists))
    return _LENGTH.pack(len(message)) + message
