"""Build CRIU images by hand, byte by byte, and write trees from a table."""

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from snapstore.source.criu_files import MAGIC_FILES
from snapstore.source.criu_images import (
    MAGIC_CORE,
    MAGIC_CPUINFO,
    MAGIC_INVENTORY,
    MAGIC_PSTREE,
)
from snapstore.source.criu_memory import MAGIC_MM, VmaStatus
from snapstore.source.criu_pagemap import MAGIC_PAGEMAP, PageFlag
from snapstore.source.criu_reader import MAGIC_COMMON
from snapstore.units import PAGE_BYTES

Value = int | bytes


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def message(*fields: tuple[int, Value]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def image(magic: int, *messages: bytes, common: bool = True) -> bytes:
    head = struct.pack("<II", MAGIC_COMMON, magic) if common else struct.pack("<I", magic)
    return head + b"".join(struct.pack("<I", len(m)) + m for m in messages)


def pagemap(pages_id: int, *runs: tuple[int, int, int], old: bool = False) -> bytes:
    """Build a pagemap of (address, pages, flags), as CRIU 4.2 or as older ones write it."""
    entries = []
    for vaddr, count, flags in runs:
        if old:
            entries.append(message((1, vaddr), (2, count), (4, flags)))
        else:
            entries.append(message((1, vaddr), (2, 0), (4, flags), (5, count)))
    return image(MAGIC_PAGEMAP, message((1, pages_id)), *entries)


def inventory(*extra: tuple[int, Value]) -> bytes:
    fields = ((1, 2), (2, 1), (6, 0), *extra)
    return image(MAGIC_INVENTORY, message(*fields), common=False)


def pstree(*processes: tuple[int, int, Sequence[int]]) -> bytes:
    return image(
        MAGIC_PSTREE,
        *(
            message((1, pid), (2, ppid), (3, pid), (4, pid), *((5, thread) for thread in threads))
            for pid, ppid, threads in processes
        ),
    )


def core(name: str, machine: int = 1) -> bytes:
    task = message((1, 1), (2, 0), (6, name.encode()))
    return image(MAGIC_CORE, message((1, machine), (2, b"registers"), (3, task)))


def vma(start: int, end: int, status: int, object_id: int = 0, *extra: tuple[int, Value]) -> bytes:
    """Build a mapping as CRIU writes it, its fields in ascending order."""
    fields = ((1, start), (2, end), (3, 0), (4, object_id), (5, 3), (6, 2), (7, status), (8, 1))
    return message(*fields, *extra)


def mm(exe: int, *file_ids: int, vmas: Sequence[bytes] | None = None) -> bytes:
    """Build a memory image that maps some files, or what else is given."""
    if vmas is None:
        vmas = [
            vma(0x10000 + row * 0x1000, 0x11000 + row * 0x1000, VmaStatus.FILE_PRIVATE, file_id)
            for row, file_id in enumerate(file_ids)
        ]
        vmas.append(vma(1 << 40, 2 << 40, VmaStatus.REGULAR | VmaStatus.ANON_PRIVATE))
    return image(MAGIC_MM, message((1, 0x400000), (12, exe), *((14, one) for one in vmas)))


def files(*table: tuple[int, str, int | None, str | None]) -> bytes:
    """Build files.img of (id, name, size, build id in hexadecimal)."""
    entries = []
    for file_id, name, size, build_id in table:
        fields: list[tuple[int, Value]] = [(1, file_id), (2, 0), (3, 0), (6, name.encode())]
        if size is not None:
            fields.append((8, size))
        raw = bytes.fromhex(build_id or "")
        fields.extend((11, word) for (word,) in struct.iter_unpack("<I", raw))
        entries.append(message((1, 1), (2, file_id), (3, message(*fields))))
    return image(MAGIC_FILES, *entries)


def cpuinfo() -> bytes:
    cpu = message((1, 1), (2, 6), (3, 143), (4, 8), (5, 2), (6, 0xABCD), (6, 7), (7, b"Xeon"))
    return image(MAGIC_CPUINFO, message((1, cpu), (1, cpu)))


def dump(pid: int = 42, pages: int = 3) -> dict[str, bytes]:
    """Build all images that matter of the dump of one process, by name."""
    runs = ((0x10000, pages, PageFlag.PRESENT | PageFlag.LAZY), (0x90000, 8, PageFlag.LAZY))
    return {
        "inventory.img": inventory(),
        "pstree.img": pstree((pid, 0, (pid, pid + 1))),
        f"core-{pid}.img": core("python"),
        f"mm-{pid}.img": mm(1, 1, 2),
        "files.img": files((1, "/usr/bin/python3", 6000, "aabbccdd"), (2, "/lib/libc.so", 9, None)),
        f"pagemap-{pid}.img": pagemap(1, *runs),
        "pages-1.img": bytes(range(256)) * (pages * PAGE_BYTES // 256),
        f"fs-{pid}.img": image(0x51403912, message((1, 1))),
        "stats-dump": image(0x57093306, message((1, 1))),
    }


def write_tree(root: Path, table: Mapping[str, bytes]) -> Path:
    """Write files, with the directories above them; a name that ends in `/` is a directory."""
    for name, data in table.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return root


def make_sparse(path: Path, size_bytes: int, *runs: tuple[int, bytes]) -> None:
    with path.open("wb") as file:
        file.truncate(size_bytes)
        for offset, data in runs:
            os.pwrite(file.fileno(), data, offset)


def inet_socket(
    family: int, kind: int, state: int, source: tuple[bytes, int], peer: tuple[bytes, int]
) -> bytes:
    """Build an entry of files.img; addresses are as on the wire, in packed words."""

    def words(address: bytes) -> bytes:
        return b"".join(varint(word) for (word,) in struct.iter_unpack("<I", address))

    numbers = (7, 77, family, kind, 6, state, source[1], peer[1], 2, 5)
    socket_entry = message(
        *enumerate(numbers, 1), (11, words(source[0])), (12, words(peer[0])), (13, b""), (18, 9)
    )
    return message((1, 4), (2, 7), (4, socket_entry))


def unix_socket(name: bytes, peer: int, *, external: bool = False) -> bytes:
    numbers = enumerate((8, 88, 1, 1, 2, int(external), 0, peer), 1)
    return message((1, 5), (2, 8), (16, message(*numbers, (11, name))))
