"""Read CRIU's images of what processes have open: files, sockets, directories, removed files.

Pure: bytes in, values out; the images are hostile until proven otherwise. Only what decides
where a restore can run is read. Unknown fields and kinds are skipped, so that images of newer
CRIUs still parse.
"""

from __future__ import annotations

import dataclasses
import itertools
import socket
from typing import TYPE_CHECKING

from snapstore.errors import LimitExceeded
from snapstore.source.criu_reader import ImageReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from snapstore.source.criu_memory import Memory

__all__ = [
    "Descriptor",
    "GhostFile",
    "InetSocket",
    "MappedFile",
    "MemfdInode",
    "OpenFiles",
    "RegularFile",
    "Remap",
    "TcpState",
    "Terminal",
    "UnixSocket",
    "WorkingDirectory",
    "mapped_files",
    "parse_fdinfo",
    "parse_files",
    "parse_fs",
    "parse_ghost_file",
    "parse_memfd",
    "parse_open_files",
    "parse_remaps",
    "parse_tty_info",
]

MAGIC_FILES = 0x56303138
MAGIC_REG_FILES = 0x50363636
MAGIC_FDINFO = 0x56213732
MAGIC_FS = 0x51403912
MAGIC_REMAPS = 0x59133954
MAGIC_GHOST_FILE = 0x52583605
MAGIC_MEMFD = 0x48453499
MAGIC_TTY_INFO = 0x59453036

# Far above what a machine has open, and low enough for the memory of the reader.
FILES_MAX = 1 << 20
BUILD_ID_WORDS_MAX = 128  # CRIU itself takes at most 512 bytes
ADDRESS_WORDS_MAX = 4

NAME_BYTES_MAX = 4096

_FILE_BYTES_END = 1 << 63

_KINDS = {
    1: "file",
    2: "pipe",
    3: "fifo",
    4: "inet-socket",
    5: "unix-socket",
    6: "eventfd",
    7: "epoll",
    8: "inotify",
    9: "signalfd",
    10: "packet-socket",
    11: "tty",
    12: "fanotify",
    13: "netlink-socket",
    14: "namespace",
    15: "tun",
    16: "external",
    17: "timerfd",
    18: "memfd",
    19: "bpf-map",
    20: "pidfd",
}
_REMAPS = {0: "linked", 1: "ghost", 2: "procfs"}
_LINKED, _GHOST = 0, 1
_OLD_GHOST_BIT = 1 << 31
_USK_EXTERN = 1
_TTY_PTY = 1
_PTMX = (5, 2)


class _FileField:
    TYPE, REGULAR, INET, UNIX, MEMFD = 1, 3, 4, 16, 20


class _RegularField:
    ID, FLAGS, NAME, SIZE, EXTERNAL, MODE, BUILD_ID = 1, 2, 6, 8, 9, 10, 11


class _InetField:
    ID, INODE, FAMILY, TYPE, PROTOCOL, STATE = 1, 2, 3, 4, 5, 6
    SOURCE_PORT, PEER_PORT, SOURCE_ADDRESS, PEER_ADDRESS, NAMESPACE = 7, 8, 11, 12, 18


class _UnixField:
    ID, INODE, TYPE, STATE, OWN_FLAGS, PEER, NAME = 1, 2, 3, 4, 6, 8, 11


class _MemfdFileField:
    ID, INODE_ID = 1, 5


class _MemfdField:
    NAME, SIZE, SHMID, INODE_ID = 1, 4, 5, 7


class _DescriptorField:
    ID, TYPE, FD = 1, 3, 4


class _FsField:
    CWD_ID, ROOT_ID = 1, 2


class _RemapField:
    ORIGINAL_ID, TARGET_ID, TYPE = 1, 2, 3


class _TerminalField:
    ID, TYPE, DEVICE, PTY = 1, 2, 8, 12


class _GhostField:
    MODE, SIZE = 3, 10


class TcpState:
    """States of inet sockets, as the kernel numbers them; other protocols use them too."""

    ESTABLISHED = 1
    CLOSE = 7
    LISTEN = 10


@dataclasses.dataclass(frozen=True, slots=True)
class RegularFile:
    """A regular file or directory of `files.img`: the restore opens it again by name.

    Attributes:
        name: The path, from the root of the process on.
        size_bytes: What it had at the dump; CRIU refuses to restore with another one.
        build_id: Of an executable or library, in hexadecimal.
        mode: Type and permissions as `stat` gives them.
        flags: What it was opened with.
        is_external: It comes from outside of the image; the one who restores provides it.
    """

    name: str
    size_bytes: int | None
    build_id: str | None
    mode: int | None = None
    flags: int = 0
    is_external: bool = False


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class MappedFile:
    """A file that must be there, with this size and build id, when the process is restored."""

    name: str
    size_bytes: int | None
    build_id: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class InetSocket:
    """A socket of the internet families; `family`, `type`, `protocol` as `socket` takes them.

    Attributes:
        state: One of `TcpState`, or another number of the kernel's.
        source_address: What it is bound to, in the usual notation; empty if there is none.
        peer_address: What it is connected to, likewise.
        network_id: The network namespace, by the number that `ids-<pid>.img` has for it.
    """

    file_id: int
    inode: int
    family: int
    type: int
    protocol: int
    state: int
    source_address: str
    source_port: int
    peer_address: str
    peer_port: int
    network_id: int | None

    @property
    def is_listening(self) -> bool:
        """Whether it is a stream socket that accepts connections."""
        return self.type == socket.SOCK_STREAM and self.state == TcpState.LISTEN

    @property
    def is_connected(self) -> bool:
        """Whether it is a stream socket with a connection."""
        return self.type == socket.SOCK_STREAM and self.state not in (
            TcpState.LISTEN,
            TcpState.CLOSE,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class UnixSocket:
    """A unix socket.

    Attributes:
        peer: Inode of the socket it is connected to; 0 if there is none.
        name: What it is bound to; an abstract name begins with a zero byte.
        is_external: Its peer was not dumped.
    """

    file_id: int
    inode: int
    type: int
    state: int
    peer: int
    name: bytes
    is_external: bool


@dataclasses.dataclass(frozen=True, slots=True)
class OpenFiles:
    """What `files.img` says.

    Attributes:
        regular: Files and directories by their id.
        inet: Sockets of the internet families.
        unix: Unix sockets.
        memfds: Which entry of `memfd.img` an id stands for.
        kinds: How many there are of each kind, by its word; `kind-<number>` if it is unknown.
    """

    regular: dict[int, RegularFile]
    inet: tuple[InetSocket, ...]
    unix: tuple[UnixSocket, ...]
    memfds: dict[int, int]
    kinds: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptor:
    """One open descriptor of `fdinfo-<id>.img`."""

    fd: int
    file_id: int
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class WorkingDirectory:
    """What `fs-<pid>.img` says: ids in `files.img` of the working directory and the root."""

    cwd_id: int
    root_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Remap:
    """One entry of `remap-fpath.img`: a file that had no name of its own any more.

    Attributes:
        file_id: Which file of `files.img`.
        target_id: What stands for it; of a ghost the number `ghost-file-<hexadecimal>.img` has.
        kind: `ghost` (an image has the content), `linked` (another name was made), or `procfs`
            (an entry of a process that is gone); `kind-<number>` if it is unknown.
        message: The entry as it is in the image.
    """

    file_id: int
    target_id: int
    kind: str
    message: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class MemfdInode:
    """One entry of `memfd.img`; its pages are those of the shared memory `shmid`."""

    inode_id: int
    name: str
    size_bytes: int
    shmid: int


@dataclasses.dataclass(frozen=True, slots=True)
class GhostFile:
    """A file that had no name any more: the image has its content and recreates it."""

    mode: int
    size_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Terminal:
    """One entry of `tty-info.img`: one end of a terminal that some process has open.

    Attributes:
        pty: The number of the pseudo terminal; none if it is a terminal of another kind.
        is_master: Whether it is the end that feeds the pseudo terminal.
    """

    terminal_id: int
    pty: int | None
    is_master: bool


def parse_files(data: bytes, name: str = "files.img") -> dict[int, RegularFile]:
    """Read the regular files of `files.img`, or of `reg-files.img` of CRIU before 3.5, by id.

    Raises:
        FormatError: It is no such image, or cut short, or larger than any real one.
    """
    reader = ImageReader(data, name)
    is_old = reader.magic == MAGIC_REG_FILES
    reader.expect(MAGIC_REG_FILES if is_old else MAGIC_FILES)
    files: dict[int, RegularFile] = {}
    for start, end in reader.entries():
        fields = () if is_old else reader.fields(start, end)
        spans = [reader.span(field) for field in fields if field.number == _FileField.REGULAR]
        for span in [(start, end)] if is_old else spans:
            file_id, file = _regular_file(reader, *span)
            files[file_id] = file
        if len(files) > FILES_MAX:
            raise LimitExceeded(f"{name}: more than {FILES_MAX} files")
    return files


def parse_open_files(data: bytes, name: str = "files.img") -> OpenFiles:
    """Read `files.img`: the files, the sockets, and how many there are of each kind.

    Raises:
        FormatError: It is no such image, or cut short, or larger than any real one.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_FILES)
    regular: dict[int, RegularFile] = {}
    inet: list[InetSocket] = []
    unix: list[UnixSocket] = []
    memfds: dict[int, int] = {}
    kinds: dict[str, int] = {}
    for count, (start, end) in enumerate(reader.entries()):
        if count == FILES_MAX:
            raise LimitExceeded(f"{name}: more than {FILES_MAX} files")
        kind = 0
        for field in reader.fields(start, end):
            if field.number == _FileField.TYPE:
                kind = reader.number(field)
            elif field.number == _FileField.REGULAR:
                file_id, file = _regular_file(reader, *reader.span(field))
                regular[file_id] = file
            elif field.number == _FileField.INET:
                inet.append(_inet_socket(reader, *reader.span(field)))
            elif field.number == _FileField.UNIX:
                unix.append(_unix_socket(reader, *reader.span(field)))
            elif field.number == _FileField.MEMFD:
                numbers = _numbers(reader, *reader.span(field))
                _need(reader, start, numbers, _MemfdFileField.ID, _MemfdFileField.INODE_ID)
                memfds[numbers[_MemfdFileField.ID]] = numbers[_MemfdFileField.INODE_ID]
        word = _kind(kind)
        kinds[word] = kinds.get(word, 0) + 1
    return OpenFiles(regular, tuple(inet), tuple(unix), memfds, kinds)


def _kind(number: int) -> str:
    return _KINDS.get(number, f"kind-{number}")


def _numbers(reader: ImageReader, start: int, end: int) -> dict[int, int]:
    """Read all numbers of a message by field; of repeated ones the last counts."""
    return {f.number: f.value for f in reader.fields(start, end) if not f.is_bytes}


def _need(reader: ImageReader, start: int, numbers: Mapping[int, int], *fields: int) -> None:
    for field in fields:
        if field not in numbers:
            reader.fail(start, f"a message without field {field}")


def _regular_file(reader: ImageReader, start: int, end: int) -> tuple[int, RegularFile]:
    file_name = None
    numbers: dict[int, int] = {}
    words: list[int] = []
    for field in reader.fields(start, end):
        if field.number == _RegularField.NAME:
            file_name = reader.text(field, size_bytes_max=NAME_BYTES_MAX)
        elif field.number == _RegularField.BUILD_ID:
            words.extend(itertools.islice(reader.repeated(field), BUILD_ID_WORDS_MAX + 1))
            if len(words) > BUILD_ID_WORDS_MAX:
                raise LimitExceeded(f"{reader.name}: a build id too long, at byte {start}")
        elif field.number == _RegularField.SIZE:
            numbers[field.number] = reader.number(field, below=_FILE_BYTES_END)
        elif field.number in _REGULAR_NUMBERS:
            numbers[field.number] = reader.number(field)
    if _RegularField.ID not in numbers or file_name is None:
        reader.fail(start, "a file without id or name")
    build_id = b"".join(word.to_bytes(4, "little") for word in words).hex() or None
    return numbers[_RegularField.ID], RegularFile(
        name=file_name,
        size_bytes=numbers.get(_RegularField.SIZE),
        build_id=build_id,
        mode=numbers.get(_RegularField.MODE),
        flags=numbers.get(_RegularField.FLAGS, 0),
        is_external=numbers.get(_RegularField.EXTERNAL, 0) != 0,
    )


_REGULAR_NUMBERS = frozenset(
    {_RegularField.ID, _RegularField.FLAGS, _RegularField.EXTERNAL, _RegularField.MODE}
)


def _inet_socket(reader: ImageReader, start: int, end: int) -> InetSocket:
    numbers: dict[int, int] = {}
    words: dict[int, list[int]] = {_InetField.SOURCE_ADDRESS: [], _InetField.PEER_ADDRESS: []}
    for field in reader.fields(start, end):
        if field.number in words:
            address = words[field.number]
            address.extend(itertools.islice(reader.repeated(field), ADDRESS_WORDS_MAX + 1))
            if len(address) > ADDRESS_WORDS_MAX:
                raise LimitExceeded(f"{reader.name}: an address too long, at byte {start}")
        elif field.number <= _InetField.PEER_PORT or field.number == _InetField.NAMESPACE:
            numbers[field.number] = reader.number(field)
    _need(reader, start, numbers, *range(_InetField.ID, _InetField.PEER_PORT + 1))
    family = numbers[_InetField.FAMILY]
    return InetSocket(
        file_id=numbers[_InetField.ID],
        inode=numbers[_InetField.INODE],
        family=family,
        type=numbers[_InetField.TYPE],
        protocol=numbers[_InetField.PROTOCOL],
        state=numbers[_InetField.STATE],
        source_address=_address(family, words[_InetField.SOURCE_ADDRESS]),
        source_port=numbers[_InetField.SOURCE_PORT],
        peer_address=_address(family, words[_InetField.PEER_ADDRESS]),
        peer_port=numbers[_InetField.PEER_PORT],
        network_id=numbers.get(_InetField.NAMESPACE),
    )


def _address(family: int, words: list[int]) -> str:
    """Write an address as people do; CRIU keeps it in words of the order on the wire."""
    raw = b"".join(word.to_bytes(4, "little") for word in words)
    if family == socket.AF_INET and len(raw) >= 4:
        return socket.inet_ntop(socket.AF_INET, raw[:4])
    if family == socket.AF_INET6 and len(raw) == 16:
        return socket.inet_ntop(socket.AF_INET6, raw)
    return ""


def _unix_socket(reader: ImageReader, start: int, end: int) -> UnixSocket:
    numbers: dict[int, int] = {}
    socket_name = b""
    for field in reader.fields(start, end):
        if field.number == _UnixField.NAME:
            socket_name = reader.raw(field, size_bytes_max=NAME_BYTES_MAX)
        elif field.number <= _UnixField.PEER:
            numbers[field.number] = reader.number(field)
    _need(reader, start, numbers, _UnixField.ID, _UnixField.INODE, _UnixField.TYPE)
    _need(reader, start, numbers, _UnixField.STATE, _UnixField.OWN_FLAGS, _UnixField.PEER)
    return UnixSocket(
        file_id=numbers[_UnixField.ID],
        inode=numbers[_UnixField.INODE],
        type=numbers[_UnixField.TYPE],
        state=numbers[_UnixField.STATE],
        peer=numbers[_UnixField.PEER],
        name=socket_name,
        is_external=bool(numbers[_UnixField.OWN_FLAGS] & _USK_EXTERN),
    )


def mapped_files(
    files: Mapping[int, RegularFile], memories: Iterable[Memory]
) -> tuple[MappedFile, ...]:
    """Return the files that processes map or execute, without repetition, sorted by name.

    Ids that are not among the regular files are left out: those are memfds, devices and the like.
    """
    wanted: set[int] = set()
    for memory in memories:
        wanted.add(memory.exe_file_id)
        wanted |= memory.file_ids
    found = {files[file_id] for file_id in wanted if file_id in files}
    # Files that were opened in different ways are one and the same here.
    mapped = {MappedFile(file.name, file.size_bytes, file.build_id) for file in found}
    return tuple(
        sorted(mapped, key=lambda file: (file.name, file.size_bytes or 0, file.build_id or ""))
    )


def parse_fdinfo(data: bytes, name: str = "fdinfo.img") -> tuple[Descriptor, ...]:
    """Read the open descriptors of an `fdinfo-<id>.img`; the id is that of `ids-<pid>.img`.

    Raises:
        FormatError: It is no such image, or cut short, or larger than any real one.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_FDINFO)
    found: list[Descriptor] = []
    for start, end in reader.entries():
        numbers = _numbers(reader, start, end)
        _need(
            reader, start, numbers, _DescriptorField.ID, _DescriptorField.TYPE, _DescriptorField.FD
        )
        if len(found) == FILES_MAX:
            raise LimitExceeded(f"{name}: more than {FILES_MAX} descriptors")
        found.append(
            Descriptor(
                fd=numbers[_DescriptorField.FD],
                file_id=numbers[_DescriptorField.ID],
                kind=_kind(numbers[_DescriptorField.TYPE]),
            )
        )
    return tuple(found)


def parse_fs(data: bytes, name: str = "fs.img") -> WorkingDirectory:
    """Read an `fs-<pid>.img`.

    Raises:
        FormatError: It is no such image, or cut short.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_FS)
    start, end = reader.only_entry()
    numbers = _numbers(reader, start, end)
    _need(reader, start, numbers, _FsField.CWD_ID, _FsField.ROOT_ID)
    return WorkingDirectory(numbers[_FsField.CWD_ID], numbers[_FsField.ROOT_ID])


def parse_remaps(data: bytes, name: str = "remap-fpath.img") -> tuple[Remap, ...]:
    """Read which files of `files.img` have no name of their own any more.

    Raises:
        FormatError: It is no such image, or cut short, or larger than any real one.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_REMAPS)
    found: list[Remap] = []
    for start, end in reader.entries():
        numbers = {
            field.number: reader.number(field)
            for field in reader.fields(start, end)
            if field.number in _REMAP_NUMBERS
        }
        _need(reader, start, numbers, _RemapField.ORIGINAL_ID, _RemapField.TARGET_ID)
        if len(found) == FILES_MAX:
            raise LimitExceeded(f"{name}: more than {FILES_MAX} files")
        target_id, kind = numbers[_RemapField.TARGET_ID], numbers.get(_RemapField.TYPE)
        if kind is None:
            # Images of old say it by a bit of the id.
            kind = _GHOST if target_id & _OLD_GHOST_BIT else _LINKED
            target_id &= ~_OLD_GHOST_BIT
        found.append(
            Remap(
                file_id=numbers[_RemapField.ORIGINAL_ID],
                target_id=target_id,
                kind=_REMAPS.get(kind, f"kind-{kind}"),
                message=data[start:end],
            )
        )
    return tuple(found)


_REMAP_NUMBERS = frozenset({_RemapField.ORIGINAL_ID, _RemapField.TARGET_ID, _RemapField.TYPE})


def parse_memfd(data: bytes, name: str = "memfd.img") -> tuple[MemfdInode, ...]:
    """Read `memfd.img`.

    Raises:
        FormatError: It is no such image, or cut short, or larger than any real one.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_MEMFD)
    found: list[MemfdInode] = []
    for start, end in reader.entries():
        memfd_name, numbers = "", _numbers(reader, start, end)
        for field in reader.fields(start, end):
            if field.number == _MemfdField.NAME:
                memfd_name = reader.text(field, size_bytes_max=NAME_BYTES_MAX)
        _need(reader, start, numbers, _MemfdField.SIZE, _MemfdField.SHMID, _MemfdField.INODE_ID)
        if len(found) == FILES_MAX:
            raise LimitExceeded(f"{name}: more than {FILES_MAX} files")
        found.append(
            MemfdInode(
                inode_id=numbers[_MemfdField.INODE_ID],
                name=memfd_name,
                size_bytes=numbers[_MemfdField.SIZE],
                shmid=numbers[_MemfdField.SHMID],
            )
        )
    return tuple(found)


def parse_ghost_file(data: bytes, name: str = "ghost-file.img") -> GhostFile:
    """Read the head of a `ghost-file-<id>.img`; the content follows it.

    Raises:
        FormatError: It is no such image, or cut short.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_GHOST_FILE)
    start, end = reader.only_entry()
    numbers = _numbers(reader, start, end)
    _need(reader, start, numbers, _GhostField.MODE)
    return GhostFile(numbers[_GhostField.MODE], numbers.get(_GhostField.SIZE))


def parse_tty_info(data: bytes, name: str = "tty-info.img") -> tuple[Terminal, ...]:
    """Read `tty-info.img`.

    Raises:
        FormatError: It is no such image, or cut short, or larger than any real one.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_TTY_INFO)
    found: list[Terminal] = []
    for start, end in reader.entries():
        numbers, pty = _numbers(reader, start, end), None
        _need(reader, start, numbers, _TerminalField.ID, _TerminalField.TYPE, _TerminalField.DEVICE)
        for field in reader.fields(start, end):
            if field.number == _TerminalField.PTY and numbers[_TerminalField.TYPE] == _TTY_PTY:
                pty = _numbers(reader, *reader.span(field)).get(1)
        if len(found) == FILES_MAX:
            raise LimitExceeded(f"{name}: more than {FILES_MAX} terminals")
        device = numbers[_TerminalField.DEVICE]
        # As the kernel packs the two numbers of a device into 32 bits.
        number = (device >> 8 & 0xFFF, device & 0xFF | device >> 12 & 0xFFF00)
        found.append(Terminal(numbers[_TerminalField.ID], pty, number == _PTMX))
    return tuple(found)
