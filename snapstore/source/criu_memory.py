"""Read CRIU's memory images: which mappings a process has, and what each of them is of.

Pure: bytes in, values out; the images are hostile until proven otherwise. A process may have a
million mappings, so they are decoded all at once where they have the usual shape.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from snapstore.errors import LimitExceeded
from snapstore.source.criu_columns import decode_columns
from snapstore.source.criu_reader import UINT32_END, UINT64_END, ImageReader
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from snapstore.source.criu_columns import Column

__all__ = ["Memory", "VmaStatus", "Vmas", "parse_mm"]

MAGIC_MM = 0x57492820

VMAS_MAX = 1 << 21
"""The kernel allows 65,530 unless it is told otherwise; a million has been seen."""


class _MemoryField:
    EXE_FILE_ID, VMAS = 12, 14


class _VmaField:
    START, END, OFFSET, OBJECT_ID, PROTECTION, FLAGS, STATUS = 1, 2, 3, 4, 5, 6, 7
    FD, ADVICE, FILE_FLAGS = 8, 9, 10


_VMA_FIELDS = range(_VmaField.START, _VmaField.FILE_FLAGS + 1)
_KEPT = range(_VmaField.START, _VmaField.STATUS + 1)
_NEEDED = (_VmaField.START, _VmaField.END, _VmaField.STATUS)
_NARROW = (_VmaField.PROTECTION, _VmaField.FLAGS, _VmaField.STATUS)


class VmaStatus:
    """Bits of what CRIU says a mapping is; several hold at once."""

    REGULAR = 1 << 0
    """Memory of the process's own, in contrast to what the kernel puts there."""
    STACK = 1 << 1
    VSYSCALL = 1 << 2
    VDSO = 1 << 3
    HEAP = 1 << 5
    FILE_PRIVATE = 1 << 6
    FILE_SHARED = 1 << 7
    ANON_SHARED = 1 << 8
    ANON_PRIVATE = 1 << 9
    SYSV_IPC = 1 << 10
    SOCKET = 1 << 11
    VVAR = 1 << 12
    AIO_RING = 1 << 13
    MEMFD = 1 << 14
    SHADOW_STACK = 1 << 15
    GUARD = 1 << 16
    """A guard range inside other mappings, not one of its own. These are last in the image."""
    UPROBES = 1 << 17
    FILE = FILE_PRIVATE | FILE_SHARED


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Vmas:
    """Mappings, in columns of one row each.

    Attributes:
        starts: Address of the first byte.
        ends: Address behind the last byte.
        offsets: Where in the mapped object the mapping begins.
        object_ids: Of a file mapping the id in `files.img`, of shared memory the one that
            `pagemap-shmem-<id>.img` has in its name.
        protections: As `mmap` takes them.
        flags: As `mmap` takes them.
        statuses: Bits of `VmaStatus`.
    """

    starts: Column
    ends: Column
    offsets: Column
    object_ids: Column
    protections: Column
    flags: Column
    statuses: Column

    def __len__(self) -> int:
        return len(self.starts)

    def having(self, status: int) -> Vmas:
        """Take the rows that have any of these bits of `VmaStatus`."""
        return self._rows((self.statuses & np.uint64(status)) != 0)

    def mapped(self) -> Vmas:
        """Take the rows that are mappings of their own: ascending, none overlaps another."""
        return self._rows((self.statuses & np.uint64(VmaStatus.GUARD)) == 0)

    def size_bytes(self) -> int:
        """Return how much address space they span; with guard ranges, these count twice."""
        return sum((self.ends - self.starts).tolist())

    def _rows(self, which: NDArray[np.bool_]) -> Vmas:
        columns = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Vmas(*(column[which] for column in columns))


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """What one `mm-<pid>.img` says."""

    exe_file_id: int
    """The executable, by its id in `files.img`."""
    vmas: Vmas

    @cached_property
    def file_ids(self) -> frozenset[int]:
        """The ids in `files.img` of what is mapped, the executable only if it is mapped too."""
        return frozenset(self.vmas.having(VmaStatus.FILE).object_ids.tolist())


def parse_mm(data: bytes, name: str = "mm.img") -> Memory:
    """Read an `mm-<pid>.img`.

    Raises:
        Malformed: It is no such image, or cut short, or has mappings that cannot be.
        LimitExceeded: It has more mappings than any real process.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_MM)
    start, end = reader.only_entry()
    exe_file_id = None
    spans: list[tuple[int, int]] = []
    for field in reader.fields(start, end):
        if field.number == _MemoryField.EXE_FILE_ID:
            exe_file_id = reader.number(field)
        elif field.number == _MemoryField.VMAS:
            spans.append(reader.span(field))
            if len(spans) > VMAS_MAX:
                raise LimitExceeded(f"{name}: more than {VMAS_MAX} mappings")
    if exe_file_id is None:
        reader.fail(start, "a memory image without an executable")
    return Memory(exe_file_id=exe_file_id, vmas=_vmas(reader, spans))


def _vmas(reader: ImageReader, spans: Sequence[tuple[int, int]]) -> Vmas:
    bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
    columns = _decode_usual(reader, bounds)
    if columns is None:
        columns = _decode_any(reader, spans)
    return _checked(reader, bounds[:, 0], Vmas(*columns))


def _decode_usual(reader: ImageReader, bounds: NDArray[np.int64]) -> list[Column] | None:
    found = decode_columns(reader.data, bounds[:, 0].copy(), bounds[:, 1], _VMA_FIELDS)
    if found is None or not all(found[number].present.all() for number in _NEEDED):
        return None
    return [found[number].values for number in _KEPT]


def _decode_any(reader: ImageReader, spans: Sequence[tuple[int, int]]) -> list[Column]:
    """Decode mappings one by one, as protobuf allows them to be."""
    columns = np.zeros((len(_KEPT), len(spans)), dtype=np.uint64)
    for row, (start, end) in enumerate(spans):
        numbers: dict[int, int] = {}
        for field in reader.fields(start, end):
            if field.number in _VMA_FIELDS:
                numbers[field.number] = reader.number(field, below=UINT64_END)
        if not all(number in numbers for number in _NEEDED):
            reader.fail(start, "a mapping without start, end or status")
        columns[:, row] = [numbers.get(number, 0) for number in _KEPT]
    return list(columns)


def _checked(reader: ImageReader, at: NDArray[np.int64], vmas: Vmas) -> Vmas:
    """Refuse what cannot be."""
    page = np.uint64(PAGE_BYTES)
    is_bad = (vmas.starts % page != 0) | (vmas.ends % page != 0) | (vmas.starts >= vmas.ends)
    for number in _NARROW:
        column = getattr(vmas, dataclasses.fields(vmas)[number - _VmaField.START].name)
        is_bad |= column >= np.uint64(UINT32_END)
    is_mapping = np.flatnonzero((vmas.statuses & np.uint64(VmaStatus.GUARD)) == 0)
    if len(is_mapping) > 1:
        is_bad[is_mapping[1:]] |= vmas.starts[is_mapping[1:]] < vmas.ends[is_mapping[:-1]]
    if is_bad.any():
        row = int(is_bad.argmax())
        where = f"{int(vmas.starts[row]):#x}-{int(vmas.ends[row]):#x}"
        reader.fail(int(at[row]), f"a mapping {where} that cannot be where it is")
    return vmas
