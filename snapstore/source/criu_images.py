"""Read what a snapshot needs to know out of CRIU's images.

Pure: bytes in, values out; the images are hostile until proven otherwise. Only what is used is
read: the process tree, and what a restore will ask of its machine; memory and open files have
modules of their own. Unknown fields are skipped, so that images of newer CRIUs still parse.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING

from snapstore.errors import LimitExceeded
from snapstore.source.criu_reader import ImageReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "Core",
    "CpuInfo",
    "DumpLog",
    "DumpStats",
    "Inventory",
    "Process",
    "RestoreStats",
    "TaskIds",
    "TaskState",
    "own_namespaces",
    "parse_core",
    "parse_cpuinfo",
    "parse_dump_log",
    "parse_dump_stats",
    "parse_ids",
    "parse_inventory",
    "parse_pstree",
    "parse_restore_stats",
]

MAGIC_INVENTORY = 0x58313116
MAGIC_PSTREE = 0x50273030
MAGIC_CORE = 0x55053847
MAGIC_CPUINFO = 0x61404013
MAGIC_IDS = 0x54432030
MAGIC_STATS = 0x57093306

# Far above what a machine runs, and low enough for the memory of the reader.
PROCESSES_MAX = 1 << 18
THREADS_MAX = 1 << 20
CPUS_MAX = 4096
CPU_WORDS_MAX = 64
PLUGINS_MAX = 64

WORD_BYTES_MAX = 256


_NAMESPACES = {
    5: "pid",
    6: "net",
    7: "ipc",
    8: "uts",
    9: "mnt",
    10: "user",
    11: "cgroup",
    12: "time",
}
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

_RUN_ID_BYTES_MAX = 64


class _InventoryField:
    IMAGE_VERSION = 1
    ROOT_IDS = 3
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
    STATE, COMM = 1, 6


class _IdsField:
    MEMORY, FILES, FS, SIGNALS = 1, 2, 3, 4


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
    run_id: str
    """Names the dump, and the table of its network lock, since CRIU 4.1; empty before."""
    has_uprobes: bool
    namespaces: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    """Of CRIU when it dumped, by kind: numbers that mean something within this dump only."""


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One process of `pstree.img`."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    threads: tuple[int, ...]


class TaskState:
    """What a process was doing when it was dumped."""

    ALIVE = 1
    DEAD = 2
    """It had ended, and nobody had waited for it: it has no memory."""
    STOPPED = 3
    ZOMBIE = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Core:
    """What `core-<pid>.img` says of a process's main thread."""

    machine: str
    name: str
    state: int = TaskState.ALIVE
    """One of `TaskState`."""

    @property
    def is_dead(self) -> bool:
        """Whether it had ended, so that it has no memory."""
        return self.state in (TaskState.DEAD, TaskState.ZOMBIE)


@dataclasses.dataclass(frozen=True, slots=True)
class TaskIds:
    """What `ids-<pid>.img` says: which things processes share. Equal numbers are one thing.

    Attributes:
        memory_id: The address space.
        files_id: The table of descriptors, which `fdinfo-<files_id>.img` lists.
        fs_id: Root, working directory and umask.
        namespaces: By kind, such as `net`.
    """

    memory_id: int
    files_id: int
    fs_id: int
    namespaces: Mapping[str, int] = dataclasses.field(hash=False)


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
class DumpStats:
    """What CRIU says in `stats-dump` of how long a dump took."""

    freezing_us: int
    frozen_us: int
    memory_dump_us: int
    memory_write_us: int
    pages_scanned: int
    pages_written: int
    pages_lazy: int


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreStats:
    """What CRIU says in `stats-restore` of how long a restore took."""

    forking_us: int
    restore_us: int
    pages_restored: int


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
    namespaces: dict[str, int] = {}
    run_id = ""
    for field in reader.fields(start, end):
        if field.number == _InventoryField.ROOT_IDS and field.is_bytes:
            namespaces = _namespaces(_numbers(reader, *reader.span(field)))
        elif field.number == _InventoryField.RUN_ID:
            run_id = reader.text(field, size_bytes_max=_RUN_ID_BYTES_MAX)
        elif field.number == _InventoryField.PLUGINS:
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
        run_id=run_id,
        has_uprobes=numbers.get(_InventoryField.ALLOW_UPROBES, 0) != 0,
        namespaces=namespaces,
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
    """Read the architecture, the state and the process name of a `core-<pid>.img`.

    Raises:
        FormatError: It is no core image, or cut short.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_CORE)
    start, end = reader.only_entry()
    machine, comm, state = None, "", TaskState.ALIVE
    for field in reader.fields(start, end):
        if field.number == _CoreField.MACHINE:
            machine = reader.number(field)
        elif field.number == _CoreField.TASK:
            for inner in reader.fields(*reader.span(field)):
                if inner.number == _TaskField.COMM:
                    comm = reader.text(inner, size_bytes_max=WORD_BYTES_MAX)
                elif inner.number == _TaskField.STATE:
                    state = reader.number(inner)
    if machine is None:
        reader.fail(start, "a core without an architecture")
    return Core(machine=_MACHINES.get(machine, f"machine-{machine}"), name=comm, state=state)


def parse_ids(data: bytes, name: str = "ids.img") -> TaskIds:
    """Read an `ids-<pid>.img`.

    Raises:
        FormatError: It is no such image, or cut short.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_IDS)
    start, end = reader.only_entry()
    numbers = _numbers(reader, start, end)
    if not {_IdsField.MEMORY, _IdsField.FILES, _IdsField.FS} <= numbers.keys():
        reader.fail(start, "a process without the ids of memory, files or working directory")
    return TaskIds(
        memory_id=numbers[_IdsField.MEMORY],
        files_id=numbers[_IdsField.FILES],
        fs_id=numbers[_IdsField.FS],
        namespaces=_namespaces(numbers),
    )


def own_namespaces(inventory: Inventory, ids: TaskIds) -> frozenset[str]:
    """Tell which namespaces, by kind, the image brings itself: a restore creates them anew.

    The others were CRIU's own at the dump; a restore takes those that it runs in.
    """
    outside = inventory.namespaces
    return frozenset(
        kind for kind, number in ids.namespaces.items() if number != outside.get(kind, number)
    )


def _numbers(reader: ImageReader, start: int, end: int) -> dict[int, int]:
    """Read all numbers of a message by field; of repeated ones the last counts."""
    return {f.number: f.value for f in reader.fields(start, end) if not f.is_bytes}


def _namespaces(numbers: Mapping[int, int]) -> dict[str, int]:
    return {word: numbers[field] for field, word in _NAMESPACES.items() if field in numbers}


def parse_dump_stats(data: bytes, name: str = "stats-dump") -> DumpStats:
    """Read `stats-dump`.

    Raises:
        FormatError: It is no such file, or cut short.
    """
    numbers = _stats(data, name, part=1)
    return DumpStats(
        freezing_us=numbers.get(1, 0),
        frozen_us=numbers.get(2, 0),
        memory_dump_us=numbers.get(3, 0),
        memory_write_us=numbers.get(4, 0),
        pages_scanned=numbers.get(5, 0) + numbers.get(12, 0),
        pages_written=numbers.get(7, 0) + numbers.get(14, 0),
        pages_lazy=numbers.get(9, 0),
    )


def parse_restore_stats(data: bytes, name: str = "stats-restore") -> RestoreStats:
    """Read `stats-restore`.

    Raises:
        FormatError: It is no such file, or cut short.
    """
    numbers = _stats(data, name, part=2)
    return RestoreStats(
        forking_us=numbers.get(3, 0),
        restore_us=numbers.get(4, 0),
        pages_restored=numbers.get(5, 0),
    )


def _stats(data: bytes, name: str, *, part: int) -> dict[int, int]:
    reader = ImageReader(data, name)
    reader.expect(MAGIC_STATS)
    start, end = reader.only_entry()
    for field in reader.fields(start, end):
        if field.number == part:
            return _numbers(reader, *reader.span(field))
    return reader.fail(start, "statistics of something else")


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
