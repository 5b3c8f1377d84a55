"""Read what a snapshot needs to know out of CRIU's images.

Pure: bytes in, values out; the images are hostile until proven otherwise. Only what is used is
read: the process tree, and what a restore will ask of its
machine. Unknown fields are skipped, so that images of newer CRIUs still parse.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING

from snapstore.errors import LimitExceeded
from snapstore.source.criu_reader import UINT64_END, ImageReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "Core",
    "CpuInfo",
    "DumpLog",
    "Inventory",
    "MappedFile",
    "Memory",
    "Process",
    "RegularFile",
    "mapped_files",
    "parse_core",
    "parse_cpuinfo",
    "parse_dump_log",
    "parse_files",
    "parse_inventory",
    "parse_mm",
    "parse_pstree",
]

MAGIC_INVENTORY = 0x58313116
MAGIC_PSTREE = 0x50273030
MAGIC_MM = 0x57492820
MAGIC_CORE = 0x55053847
MAGIC_FILES = 0x56303138
MAGIC_REG_FILES = 0x50363636
MAGIC_CPUINFO = 0x61404013

# Far above what a machine runs, and low enough for the memory of the reader.
PROCESSES_MAX = 1 << 18
THREADS_MAX = 1 << 20
FILES_MAX = 1 << 20
CPUS_MAX = 4096
CPU_WORDS_MAX = 64
PLUGINS_MAX = 64
BUILD_ID_WORDS_MAX = 128  # CRIU itself takes at most 512 bytes

NAME_BYTES_MAX = 4096
WORD_BYTES_MAX = 256

_FILE_BYTES_END = 1 << 63
_VMA_FILE_MAPPING = (1 << 6) | (1 << 7)  # VMA_FILE_PRIVATE, VMA_FILE_SHARED

_LSM_NAMES = {0: "none", 1: "selinux", 2: "apparmor"}
_CPU_VENDORS = {1: "intel", 2: "amd"}
_MACHINES = {
    1: "x86_64",
    2: "arm",
    3: "aarch64",
    4: "ppc64",
    5: "s390x",
    6: "mips",
    7: "loongarch64",
    8: "riscv64",
}

_LOG_VERSION = re.compile(rb"Version: ([0-9][0-9A-Za-z.~+_-]{0,63}) \(gitid")
_LOG_RUNNING_ON = re.compile(
    rb"Running on [^\s]{1,255} Linux ([0-9][^\s]{0,127}) [^\n]{0,255} ([a-z0-9_]{1,32})$",
    re.MULTILINE,
)


class _InventoryField:
    IMAGE_VERSION = 1
    LSM_TYPE = 6
    TCP_CLOSE = 10
    PLUGINS = 12
    RUN_ID = 13
    ALLOW_UPROBES = 14


class _PluginsField:
    PLUGINS = 12


class _ProcessField:
    PID, PPID, PGID, SID, THREADS = 1, 2, 3, 4, 5


class _CoreField:
    MACHINE, TASK = 1, 3


class _TaskField:
    COMM = 6


class _MemoryField:
    EXE_FILE_ID, VMAS = 12, 14


class _VmaField:
    SHMID, STATUS = 4, 7


class _FileField:
    REGULAR = 3


class _RegularField:
    ID, NAME, SIZE, BUILD_ID = 1, 6, 8, 11


class _CpuinfoField:
    X86 = 1


class _X86Field:
    VENDOR, FAMILY, MODEL, STEPPING, CAPABILITY, MODEL_NAME = 1, 2, 3, 4, 6, 7


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """What `inventory.img` says of the dump as a whole. CRIU writes it last."""

    image_version: int
    lsm: str
    plugins: tuple[str, ...]
    tcp_close: bool
    has_run_id: bool
    """Written since CRIU 4.1."""
    has_uprobes: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One process of `pstree.img`."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    threads: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Core:
    """What `core-<pid>.img` says of a process's main thread."""

    machine: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Which files `mm-<pid>.img` maps, by their id in `files.img`."""

    exe_file_id: int
    file_ids: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class RegularFile:
    """A regular file of `files.img`: the restore opens it again by name."""

    name: str
    size_bytes: int | None
    build_id: str | None


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class MappedFile:
    """A file that must be there, with this size and build id, when the process is restored."""

    name: str
    size_bytes: int | None
    build_id: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class CpuInfo:
    """One entry of `cpuinfo.img`, which only some dumps have."""

    vendor: str
    family: int
    model: int
    stepping: int
    model_name: str
    capability: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DumpLog:
    """What CRIU said of itself in `dump.log`, if it was told to log that much."""

    criu_version: str | None = None
    kernel: str | None = None
    machine: str | None = None


def parse_inventory(data: bytes, name: str = "inventory.img") -> Inventory:
    """Read `inventory.img`.

    Raises:
        FormatError: It is no inventory, or cut short.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_INVENTORY)
    start, end = reader.only_entry()
    numbers: dict[int, int] = {}
    plugins: list[str] = []
    for field in reader.fields(start, end):
        if field.number == _InventoryField.PLUGINS:
            plugins.extend(_plugins(reader, *reader.span(field)))
        elif field.number <= _InventoryField.ALLOW_UPROBES:
            numbers[field.number] = 1 if field.is_bytes else field.value
    if _InventoryField.IMAGE_VERSION not in numbers:
        reader.fail(start, "an inventory without a version")
    if len(plugins) > PLUGINS_MAX:
        raise LimitExceeded(f"{name}: {len(plugins)} plugins")
    lsm = numbers.get(_InventoryField.LSM_TYPE, 0)
    return Inventory(
        image_version=numbers[_InventoryField.IMAGE_VERSION],
        lsm=_LSM_NAMES.get(lsm, f"lsm-{lsm}"),
        plugins=tuple(plugins),
        tcp_close=numbers.get(_InventoryField.TCP_CLOSE, 0) != 0,
        has_run_id=_InventoryField.RUN_ID in numbers,
        has_uprobes=numbers.get(_InventoryField.ALLOW_UPROBES, 0) != 0,
    )


def _plugins(reader: ImageReader, start: int, end: int) -> Iterator[str]:
    for field in reader.fields(start, end):
        if field.number == _PluginsField.PLUGINS:
            yield reader.text(field, size_bytes_max=WORD_BYTES_MAX)


def parse_pstree(data: bytes, name: str = "pstree.img") -> tuple[Process, ...]:
    """Read `pstree.img`; the root of the tree is first.

    Raises:
        FormatError: It is no process tree, or cut short, or larger than any real one.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_PSTREE)
    processes: list[Process] = []
    thread_count = 0
    for start, end in reader.entries():
        process = _process(reader, start, end)
        thread_count += len(process.threads)
        if len(processes) == PROCESSES_MAX or thread_count > THREADS_MAX:
            raise LimitExceeded(f"{name}: too many processes or threads")
        processes.append(process)
    if not processes:
        reader.fail(len(data), "no process")
    return tuple(processes)


def _process(reader: ImageReader, start: int, end: int) -> Process:
    numbers: dict[int, int] = {}
    threads: list[int] = []
    for field in reader.fields(start, end):
        if field.number == _ProcessField.THREADS:
            threads.extend(itertools.islice(reader.repeated(field), THREADS_MAX + 1))
            if len(threads) > THREADS_MAX:
                raise LimitExceeded(f"{reader.name}: a process of too many threads, byte {start}")
        elif field.number < _ProcessField.THREADS:
            numbers[field.number] = reader.number(field)
    if len(numbers) != _ProcessField.SID:
        reader.fail(start, "a process without pid, parent, group or session")
    return Process(
        pid=numbers[_ProcessField.PID],
        ppid=numbers[_ProcessField.PPID],
        pgid=numbers[_ProcessField.PGID],
        sid=numbers[_ProcessField.SID],
        threads=tuple(threads),
    )


def parse_core(data: bytes, name: str = "core.img") -> Core:
    """Read the architecture and the process name of a `core-<pid>.img`.

    Raises:
        FormatError: It is no core image, or cut short.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_CORE)
    start, end = reader.only_entry()
    machine, comm = None, ""
    for field in reader.fields(start, end):
        if field.number == _CoreField.MACHINE:
            machine = reader.number(field)
        elif field.number == _CoreField.TASK:
            for inner in reader.fields(*reader.span(field)):
                if inner.number == _TaskField.COMM:
                    comm = reader.text(inner, size_bytes_max=WORD_BYTES_MAX)
    if machine is None:
        reader.fail(start, "a core without an architecture")
    return Core(machine=_MACHINES.get(machine, f"machine-{machine}"), name=comm)


def parse_mm(data: bytes, name: str = "mm.img") -> Memory:
    """Read which files an `mm-<pid>.img` maps.

    Raises:
        FormatError: It is no such image, or cut short.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_MM)
    start, end = reader.only_entry()
    exe_file_id = None
    file_ids: set[int] = set()
    for field in reader.fields(start, end):
        if field.number == _MemoryField.EXE_FILE_ID:
            exe_file_id = reader.number(field)
        elif field.number == _MemoryField.VMAS:
            file_id = _vma_file_id(reader, *reader.span(field))
            if file_id is not None:
                file_ids.add(file_id)
            if len(file_ids) > FILES_MAX:
                raise LimitExceeded(f"{name}: more than {FILES_MAX} mapped files")
    if exe_file_id is None:
        reader.fail(start, "a memory image without an executable")
    return Memory(exe_file_id=exe_file_id, file_ids=frozenset(file_ids))


def _vma_file_id(reader: ImageReader, start: int, end: int) -> int | None:
    """Return the id of the file that a mapping is of; CRIU keeps it in the field `shmid`."""
    shmid = status = 0
    for field in reader.fields(start, end):
        if field.number == _VmaField.SHMID:
            shmid = reader.number(field, below=UINT64_END)
        elif field.number == _VmaField.STATUS:
            status = reader.number(field)
    return shmid if status & _VMA_FILE_MAPPING else None


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


def _regular_file(reader: ImageReader, start: int, end: int) -> tuple[int, RegularFile]:
    file_id = file_name = size_bytes = None
    words: list[int] = []
    for field in reader.fields(start, end):
        if field.number == _RegularField.ID:
            file_id = reader.number(field)
        elif field.number == _RegularField.NAME:
            file_name = reader.text(field, size_bytes_max=NAME_BYTES_MAX)
        elif field.number == _RegularField.SIZE:
            size_bytes = reader.number(field, below=_FILE_BYTES_END)
        elif field.number == _RegularField.BUILD_ID:
            words.extend(itertools.islice(reader.repeated(field), BUILD_ID_WORDS_MAX + 1))
            if len(words) > BUILD_ID_WORDS_MAX:
                raise LimitExceeded(f"{reader.name}: a build id too long, at byte {start}")
    if file_id is None or file_name is None:
        reader.fail(start, "a file without id or name")
    build_id = b"".join(word.to_bytes(4, "little") for word in words).hex() or None
    return file_id, RegularFile(name=file_name, size_bytes=size_bytes, build_id=build_id)


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
    return tuple(
        sorted(
            (MappedFile(file.name, file.size_bytes, file.build_id) for file in found),
            key=lambda file: (file.name, file.size_bytes or 0, file.build_id or ""),
        )
    )


def parse_cpuinfo(data: bytes, name: str = "cpuinfo.img") -> tuple[CpuInfo, ...]:
    """Read the x86 processors of `cpuinfo.img`, without repetition; other kinds are left out.

    Raises:
        FormatError: It is no such image, or cut short, or larger than any real one.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_CPUINFO)
    cpus: dict[CpuInfo, None] = {}
    for count, field in enumerate(reader.fields(*reader.only_entry())):
        if count == CPUS_MAX:
            raise LimitExceeded(f"{name}: more than {CPUS_MAX} processors")
        if field.number == _CpuinfoField.X86:
            cpus[_x86_cpu(reader, *reader.span(field))] = None
    return tuple(cpus)


def _x86_cpu(reader: ImageReader, start: int, end: int) -> CpuInfo:
    numbers: dict[int, int] = {}
    words: list[int] = []
    model_name = ""
    for field in reader.fields(start, end):
        if field.number <= _X86Field.STEPPING:
            numbers[field.number] = reader.number(field)
        elif field.number == _X86Field.CAPABILITY:
            words.extend(itertools.islice(reader.repeated(field), CPU_WORDS_MAX + 1))
            if len(words) > CPU_WORDS_MAX:
                raise LimitExceeded(f"{reader.name}: too many processor features, byte {start}")
        elif field.number == _X86Field.MODEL_NAME:
            model_name = reader.text(field, size_bytes_max=WORD_BYTES_MAX)
    if len(numbers) != _X86Field.STEPPING:
        reader.fail(start, "a processor without vendor, family, model or stepping")
    return CpuInfo(
        vendor=_CPU_VENDORS.get(numbers[_X86Field.VENDOR], "unknown"),
        family=numbers[_X86Field.FAMILY],
        model=numbers[_X86Field.MODEL],
        stepping=numbers[_X86Field.STEPPING],
        model_name=model_name,
        capability=tuple(words),
    )


def parse_dump_log(data: bytes) -> DumpLog:
    """Look for the versions that CRIU logs at `-v3` and above; images hold none. Never fails."""
    version = _LOG_VERSION.search(data)
    running_on = _LOG_RUNNING_ON.search(data)
    return DumpLog(
        criu_version=version[1].decode("ascii") if version else None,
        kernel=running_on[1].decode("utf-8", "backslashreplace") if running_on else None,
        machine=running_on[2].decode("ascii") if running_on else None,
    )
