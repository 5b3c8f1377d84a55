"""What `tools.fuzz` runs: every parser that reads bytes nobody vouches for, by name.

Binary objects are checked by digest before anything of them is believed, so a fuzzer that changes
their bytes would never come past that. Their targets therefore take sections, each after its
length, and put them together under right digests.
"""

from __future__ import annotations

import dataclasses
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from snapagent.criu import protocol
from snapagent.gpu.facts import CudaFacts, GpuFacts, cuda_placement, read_cuda_facts
from snapagent.memory.placement import RegionPlace, SessionPlace, from_placement, placement_of
from snapstore import compression
from snapstore.errors import SnapError
from snapstore.format import (
    canonical,
    config,
    envelope,
    index,
    layout,
    lease,
    limits,
    mark,
    pack,
    page_order,
    rank,
    ref,
    snapshot,
)
from snapstore.format.tables import as_rows
from snapstore.format.tree import decode_tree
from snapstore.ids import Digest, parse_snapshot_ref
from snapstore.options import Compression
from snapstore.source import (
    criu_files,
    criu_images,
    criu_memory,
    criu_pagemap,
    criu_reader,
    nvidia,
    safe_yaml,
)
from snapstore.source.scan import scan_tree
from snapstore.source.tree_index import TreeIndex, WarningList

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TARGETS", "Target"]

_LENGTH = struct.Struct("<I")
_SECTIONS = {
    "index": (envelope.INDEX_MAGIC, (b"PACK", b"FRAM", b"CHNK", b"FANO", b"SUPR")),
    "rank": (envelope.RANK_MAGIC, (b"META", b"TREE", b"STRM", b"XTNT")),
    "layout": (envelope.LAYOUT_MAGIC, (b"META", b"PACK", b"FRAM", b"STRM", b"SEGM")),
    "pack-footer": (envelope.PACK_MAGIC, (b"FRAM", b"CHNK", b"SALT")),
}
_FOOTER_OFFSET = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One parser.

    Attributes:
        run: Gives it an input.
        vectors: The kind of vectors to start from, if there are any.
        from_vector: Makes an input of a vector, or None where that cannot be done.
        seeds: More inputs to start from.
    """

    run: Callable[[bytes], object]
    vectors: str = ""
    from_vector: Callable[[bytes], bytes | None] = lambda data: data
    seeds: tuple[bytes, ...] = ()

    def run_caught(self, data: bytes) -> None:
        """Run it; an error of the library is an answer, anything else is a bug."""
        try:
            self.run(data)
        except SnapError:
            return


# -- objects of the format ------------------------------------------------------------------------


def _join(sections: list[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(one)) + one for one in sections)


def _split(data: bytes, count: int) -> list[bytes]:
    sections = []
    at = 0
    for _ in range(count):
        (length,) = _LENGTH.unpack(data[at : at + 4].ljust(4, b"\0"))
        sections.append(data[at + 4 : at + 4 + length])
        at = min(at + 4 + length, len(data))
    return sections


def _sealed(kind: str, parse: Callable[[bytes], object]) -> Target:
    magic, tags = _SECTIONS[kind]

    def run(data: bytes) -> None:
        parts = zip(tags, _split(data, len(tags)), strict=True)
        # A section that is not there in the input is not there in the object.
        sections = [envelope.Section(tag, raw) for tag, raw in parts if raw]
        if sections:
            parse(envelope.build(magic, sections).to_bytes())

    def from_vector(data: bytes) -> bytes | None:
        try:
            whole = envelope.parse_whole(data, magic=magic)
            return _join(
                [
                    bytes(envelope.read_section(whole, data, tag, limit_bytes=1 << 20))
                    if whole.find(tag)
                    else b""
                    for tag in tags
                ]
            )
        except SnapError:
            return None  # Damaged as a whole, which the target `envelope` is for.

    return Target(run=run, vectors=kind, from_vector=from_vector)


def _shape(data: bytes) -> None:
    """What is known of an index of which only the header was read."""
    whole = envelope.parse_header(data, magic=envelope.INDEX_MAGIC, object_length=len(data))
    index.parse_shape(whole)


def _bucket(data: bytes) -> None:
    rows = as_rows(data, index.CHUNK_DTYPE, what="bucket", rows_max=1 << 16)
    index.check_bucket(rows, bucket=0, bits=1, frame_count=4)
    index.check_places(rows, np.full(len(rows), 1 << 20, np.uint64))


def _envelope(data: bytes) -> None:
    whole = envelope.parse_whole(data, magic=_magic(data))
    for info in whole.sections:
        envelope.read_section(whole, data, info.tag, limit_bytes=1 << 20)


def _header(data: bytes) -> None:
    """An object whose header and directory are read before the rest."""
    (length,) = struct.unpack("<Q", data[16:24].ljust(8, b"\0"))
    # As long as it says, whatever follows; its directory's digest is put right.
    count = int.from_bytes(data[10:12], "little") % (limits.SECTIONS_MAX + 1)
    end = limits.ENVELOPE_HEADER_BYTES + count * limits.DIRECTORY_ENTRY_BYTES
    head, directory = data[:32].ljust(32, b"\0"), data[64:end].ljust(end - 64, b"\0")
    sealed = head + Digest.of(head + directory).raw + directory
    envelope.parse_header(sealed, magic=_magic(data), object_length=length)


def _magic(data: bytes) -> bytes:
    """The magic that an object has, if there is one such."""
    magics = {magic for magic, _ in _SECTIONS.values()}
    return data[:8] if data[:8] in magics else envelope.RANK_MAGIC


def _section(data: bytes) -> None:
    """A compressed section: what it claims to decode to is in the first four bytes."""
    (length,) = _LENGTH.unpack(data[:4].ljust(4, b"\0"))
    stored = data[4:]
    digest = Digest.of(stored)
    for encoding in (envelope.ENCODING_PLAIN, envelope.ENCODING_ZSTD):
        info = envelope.SectionInfo(b"TEST", encoding, 0, len(stored), length, digest.raw)
        try:
            envelope.decode_section(info, stored, limit_bytes=1 << 22)
        except SnapError:
            continue


def _trailer(data: bytes) -> None:
    """A trailer and the length of its pack, which is mostly what the trailer makes it."""
    offset, length, extra = struct.unpack("<QQh", (data[:16] + data[32:34]).ljust(18, b"\0"))
    total = offset + length + limits.PACK_TRAILER_BYTES + extra
    pack.parse_trailer(data[:32], pack_length=max(total, 0))


# -- frames ---------------------------------------------------------------------------------------


def _frame(data: bytes) -> None:
    """The codec, the decoded length, and the stored bytes."""
    codec, length = struct.unpack("<BI", data[:5].ljust(5, b"\0"))
    out = bytearray(length % (4 * 1024 * 1024 + 1))
    compression.decode_frame(codec % 4, memoryview(data)[5:], memoryview(out))


def _frame_seeds() -> tuple[bytes, ...]:
    rng = np.random.default_rng(1)
    numbers = rng.normal(0, 0.02, 2048).astype("<f4").view(np.uint8)
    found = []
    for texture, phase in ((0b1111, 0), (0b1010, 0), (0b0101, 1), (0b1000, 0), (0b0100, 3)):
        for effort in (Compression.AUTO, Compression.MAX):
            plain = np.ascontiguousarray(numbers[phase:])
            made = compression.encode_frame(plain, texture, phase, effort)
            head = struct.pack("<BI", made.codec, len(plain))
            found.append(head + b"".join(bytes(piece) for piece in made.pieces))
    return tuple(found)


# -- sources --------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _message(*fields: tuple[int, int | bytes]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value)
        else:
            out += _varint(number << 3 | 2) + _varint(len(value)) + value
    return out


def _image(magic: int, *messages: bytes) -> bytes:
    head = struct.pack("<II", criu_reader.MAGIC_COMMON, magic)
    return head + b"".join(_LENGTH.pack(len(one)) + one for one in messages)


def _pagemap(data: bytes) -> None:
    found = criu_pagemap.parse_pagemap(data)
    for _, entry in zip(range(1000), found.entries(), strict=False):
        assert entry is not None


def _memory(data: bytes) -> None:
    found = criu_memory.parse_mm(data)
    mapped = found.vmas.mapped()
    assert (mapped.starts[1:] >= mapped.ends[:-1]).all()
    assert len(found.file_ids) <= len(found.vmas)


def _nvidia(data: bytes) -> None:
    """A tree whose manifests, in YAML and in lines, are the input."""
    with tempfile.TemporaryDirectory(prefix="snapstore-fuzz-") as name:
        folder = Path(name)
        (folder / "manifest.yaml").write_bytes(data)
        (folder / "manifest.txt").write_bytes(data)
        (folder / "device-0000.bin").write_bytes(b"")
        tree_index = TreeIndex(scan_tree(folder), WarningList())
        for read in (
            lambda: nvidia.read_snapshot_manifest(tree_index, b""),
            lambda: nvidia.find_gpu_layout(tree_index),
        ):
            try:
                read()
            except SnapError:
                continue


# -- placements: what a rank manifest says for the agent alone ------------------------------------


def _placement(read: Callable[[dict[str, object]], object]) -> Callable[[bytes], object]:
    """Read it as the agent gets it: out of a document that is canonical JSON."""

    def run(data: bytes) -> object:
        return read(canonical.decode(data, dict[str, object]))

    return run


_UUID = "GPU-00000007-0000-0000-0000-00000000000"
_CUDA = CudaFacts(
    cuda=13000,
    driver="580.159.04",
    gpus=tuple(GpuFacts(uuid=f"{_UUID}{n}", name="H200", total_bytes=n << 37) for n in (1, 2)),
    processes=(7, 9),
)


def _external(*devices: str) -> bytes:
    """Memory of a process, a region on each of these."""
    regions = tuple(
        RegionPlace(
            region=number + 5,
            order=number,
            address=(number + 1) << 21,
            length=1 << 21,
            huge=False,
            file=f"external/0-{number}.mem",
            device=device,
        )
        for number, device in enumerate(devices)
    )
    return canonical.encode(placement_of([SessionPlace(session="a" * 64, regions=regions)]))


_MANIFEST = b"""\
checkpointId: a
source: {node: n, gpuUUIDs: [GPU-1, 'MIG-2'], pid: 12}
criu: {version: "4.2", args: [a, b]}
cudaRestore: {pids: [1, 2], storageMode: custom}
"""
_ROW = bytes(36) + _LENGTH.pack(0) + _LENGTH.pack(4096)
_VMA = _message((1, 0x1000), (2, 0x2000), (4, 1), (5, 1), (6, 2), (7, 64))
_REGULAR = _message((1, 1), (2, 0), (6, b"/lib/a"), (8, 9), (11, 7))
_INET = _message(*((n, 2) for n in range(1, 11)), (11, 1), (12, b"\x01\0\0\x02"), (18, 1))
_UNIX = _message(*((n, 1) for n in range(1, 9)), (11, b"\0name"))
_CPU = _message((1, 1), (2, 6), (3, 143), (4, 8), (5, 2), (6, 0xABCD), (6, 7), (7, b"Xeon"))
_TASK = _message((1, 1), (2, 0), (6, b"python"))

TARGETS: dict[str, Target] = {
    "config": Target(run=config.decode_config, vectors="config"),
    "snapshot": Target(run=snapshot.decode_snapshot, vectors="snapshot"),
    "rank-meta": Target(run=rank.parse_meta, vectors="rank-meta"),
    "layout-meta": Target(run=layout.parse_meta, vectors="layout-meta"),
    "ref": Target(run=ref.decode_ref, vectors="ref"),
    "lease": Target(run=lease.decode_lease, vectors="lease"),
    "page-order": Target(run=page_order.decode_page_order, vectors="page-order"),
    "mark": Target(run=mark.decode_mark, vectors="mark"),
    "tree": Target(run=decode_tree, vectors="tree"),
    "envelope": Target(run=_envelope, vectors="envelope"),
    "envelope-header": Target(run=_header, vectors="envelope"),
    "envelope-section": Target(run=_section, seeds=(b"\x05\0\0\0hello",)),
    "pack-trailer": Target(run=_trailer, vectors="pack-trailer"),
    "pack-footer": _sealed(
        "pack-footer", lambda data: pack.parse_footer(data, footer_offset=_FOOTER_OFFSET)
    ),
    "index": _sealed("index", index.parse_index),
    "index-shape": _sealed("index", _shape),
    "index-bucket": Target(run=_bucket, seeds=(b"", _ROW, _ROW + bytes(31) + b"\1" + _ROW[32:])),
    "rank": _sealed("rank", rank.parse_rank),
    "layout": _sealed("layout", layout.parse_layout),
    "name": Target(
        run=lambda data: parse_snapshot_ref(data.decode("utf-8", "replace")),
        seeds=(b"team/a:v1", b"a@b3:" + b"0" * 64),
    ),
    "frame": Target(run=_frame, seeds=_frame_seeds()),
    "criu-inventory": Target(
        run=criu_images.parse_inventory,
        seeds=(
            _LENGTH.pack(criu_images.MAGIC_INVENTORY)
            + _LENGTH.pack(6)
            + _message((1, 2), (2, 1), (6, 0)),
        ),
    ),
    "criu-pstree": Target(
        run=criu_images.parse_pstree,
        seeds=(
            _image(criu_images.MAGIC_PSTREE, _message((1, 42), (2, 0), (3, 42), (4, 42), (5, 43))),
        ),
    ),
    "criu-core": Target(
        run=criu_images.parse_core,
        seeds=(_image(criu_images.MAGIC_CORE, _message((1, 1), (2, b"x"), (3, _TASK))),),
    ),
    "criu-mm": Target(
        run=_memory,
        seeds=(
            _image(criu_memory.MAGIC_MM, _message((1, 1), (12, 1), (14, _VMA))),
            _image(criu_memory.MAGIC_MM, _message((1, 1), (12, 1), (14, _VMA + b"\x78\x01"))),
        ),
    ),
    "criu-files": Target(
        run=criu_files.parse_files,
        seeds=(_image(criu_files.MAGIC_FILES, _message((1, 1), (2, 1), (3, _REGULAR))),),
    ),
    "criu-open-files": Target(
        run=criu_files.parse_open_files,
        seeds=(
            _image(
                criu_files.MAGIC_FILES,
                _message((1, 1), (2, 1), (3, _REGULAR)),
                _message((1, 4), (2, 2), (4, _INET)),
                _message((1, 5), (2, 3), (16, _UNIX)),
                _message((1, 18), (2, 4), (20, _message((1, 4), (5, 1)))),
            ),
        ),
    ),
    "criu-fdinfo": Target(
        run=criu_files.parse_fdinfo,
        seeds=(_image(criu_files.MAGIC_FDINFO, _message((1, 1), (2, 0), (3, 1), (4, 0))),),
    ),
    "criu-fs": Target(
        run=criu_files.parse_fs,
        seeds=(_image(criu_files.MAGIC_FS, _message((1, 1), (2, 2), (3, 18))),),
    ),
    "criu-remaps": Target(
        run=criu_files.parse_remaps,
        seeds=(_image(criu_files.MAGIC_REMAPS, _message((1, 1), (2, 2), (3, 1))),),
    ),
    "criu-memfd": Target(
        run=criu_files.parse_memfd,
        seeds=(_image(criu_files.MAGIC_MEMFD, _message((1, b"shm"), (4, 4096), (5, 7), (7, 1))),),
    ),
    "criu-tty-info": Target(
        run=criu_files.parse_tty_info,
        seeds=(
            _image(
                criu_files.MAGIC_TTY_INFO,
                _message((1, 1), (2, 1), (8, 0x8803), (12, _message((1, 3)))),
            ),
        ),
    ),
    "criu-ghost-file": Target(
        run=criu_files.parse_ghost_file,
        seeds=(_image(criu_files.MAGIC_GHOST_FILE, _message((3, 0o100600), (10, 5))),),
    ),
    "criu-ids": Target(
        run=criu_images.parse_ids,
        seeds=(_image(criu_images.MAGIC_IDS, _message(*((n, n) for n in range(1, 13)))),),
    ),
    "criu-stats": Target(
        run=criu_images.parse_dump_stats,
        seeds=(_image(criu_images.MAGIC_STATS, _message((1, _message((1, 5), (2, 6))))),),
    ),
    "criu-restore-stats": Target(
        run=criu_images.parse_restore_stats,
        seeds=(_image(criu_images.MAGIC_STATS, _message((2, _message((3, 5), (4, 6))))),),
    ),
    "criu-cpuinfo": Target(
        run=criu_images.parse_cpuinfo,
        seeds=(_image(criu_images.MAGIC_CPUINFO, _message((1, _CPU), (1, _CPU))),),
    ),
    "criu-pagemap": Target(
        run=_pagemap,
        seeds=(
            _image(
                criu_pagemap.MAGIC_PAGEMAP,
                _message((1, 1)),
                _message((1, 0x10000), (2, 0), (4, 4), (5, 3)),
                _message((1, 0x90000), (2, 8), (4, 2)),
            ),
        ),
    ),
    "cuda-placement": Target(
        run=_placement(lambda found: read_cuda_facts(found, of="a snapshot")),
        seeds=(
            canonical.encode(cuda_placement(_CUDA)),
            canonical.encode(cuda_placement(CudaFacts(cuda=0, driver="", gpus=(), processes=()))),
        ),
    ),
    "external-placement": Target(
        run=_placement(lambda found: from_placement(found, of="a rank")),
        seeds=(_external("host", "host"), _external(f"{_UUID}1", "host", f"{_UUID}2")),
    ),
    "page-header": Target(
        run=lambda data: protocol.decode_header(data[: protocol.HEADER_BYTES].ljust(32, b"\0")),
        seeds=tuple(
            protocol.encode_header(protocol.PageHeader(command, 4, 256, 0x7F0000001000, 1025))
            for command in protocol.Command
        ),
    ),
    "image-request": Target(
        run=protocol.decode_request, seeds=(protocol.encode_request("core-1.img")[4:],)
    ),
    "criu-log": Target(
        run=criu_images.parse_dump_log,
        seeds=(b"(00.000000) Version: 4.2 (gitid 0)\n(00.1) Running on n Linux 6.1 #1 x86_64\n",),
    ),
    "yaml": Target(
        run=lambda data: safe_yaml.parse_yaml(data, "fuzzed"),
        seeds=(_MANIFEST, b"- 1\n- {a: [b, ~]}\n", b"a: &x 1\nb: *x\n"),
    ),
    "nvidia": Target(
        run=_nvidia,
        seeds=(_MANIFEST, b"version 1\ndevice 0 GPU-1 4096 device-0000.bin\n"),
    ),
}
