"""Read the images of a CRIU dump, wherever they come from.

Each function takes the bytes of one file and gives a value; nothing is opened. The bytes may be
anybody's: counts and lengths are bounded, and what is no such image is refused with a
`FormatError` that names the file and the byte. Fields that are unknown here are skipped. Everything
may be used from any thread.
"""

from __future__ import annotations

from snapstore.source.criu_columns import Column
from snapstore.source.criu_files import (
    Descriptor,
    GhostFile,
    InetSocket,
    MappedFile,
    MemfdInode,
    OpenFiles,
    RegularFile,
    TcpState,
    UnixSocket,
    WorkingDirectory,
    mapped_files,
    parse_fdinfo,
    parse_files,
    parse_fs,
    parse_ghost_file,
    parse_memfd,
    parse_open_files,
    parse_remaps,
)
from snapstore.source.criu_images import (
    Core,
    CpuInfo,
    DumpLog,
    DumpStats,
    Inventory,
    Process,
    RestoreStats,
    TaskIds,
    TaskState,
    own_namespaces,
    parse_core,
    parse_cpuinfo,
    parse_dump_log,
    parse_dump_stats,
    parse_ids,
    parse_inventory,
    parse_pstree,
    parse_restore_stats,
)
from snapstore.source.criu_memory import Memory, Vmas, VmaStatus, parse_mm
from snapstore.source.criu_pagemap import PageFlag, Pagemap, PagemapEntry, parse_pagemap

__all__ = [
    "Column",
    "Core",
    "CpuInfo",
    "Descriptor",
    "DumpLog",
    "DumpStats",
    "GhostFile",
    "InetSocket",
    "Inventory",
    "MappedFile",
    "MemfdInode",
    "Memory",
    "OpenFiles",
    "PageFlag",
    "Pagemap",
    "PagemapEntry",
    "Process",
    "RegularFile",
    "RestoreStats",
    "TaskIds",
    "TaskState",
    "TcpState",
    "UnixSocket",
    "VmaStatus",
    "Vmas",
    "WorkingDirectory",
    "mapped_files",
    "own_namespaces",
    "parse_core",
    "parse_cpuinfo",
    "parse_dump_log",
    "parse_dump_stats",
    "parse_fdinfo",
    "parse_files",
    "parse_fs",
    "parse_ghost_file",
    "parse_ids",
    "parse_inventory",
    "parse_memfd",
    "parse_mm",
    "parse_open_files",
    "parse_pagemap",
    "parse_pstree",
    "parse_remaps",
    "parse_restore_stats",
]
