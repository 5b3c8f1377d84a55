"""Recognise what NVIDIA Snapshot and the GPU Memory Service (GMS) leave behind.

- `manifest.yaml` beside CRIU images, wherever the directory is: `versions/<version>/` in older
  releases, `containers/<container>/` in newer ones.
- Custom storage: one directory for each CUDA process, with `manifest.txt` and a
  `device-NNNN.bin`, possibly in parts, for each GPU that the process uses.
- GMS: one directory `device-<n>` for each GPU, with `manifest.json`, `gms_metadata.json` and
  `shards/shard_NNNN.bin`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from snapstore.errors import Malformed
from snapstore.format import limits
from snapstore.fstree import show_path
from snapstore.source.classes import FileRole
from snapstore.source.tree_index import TreeIndex, join_path, path_text
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapstore.source.safe_yaml import YamlValue

__all__ = ["Device", "GpuLayout", "SnapshotManifest", "find_gpu_layout", "read_snapshot_manifest"]

MANIFEST_BYTES_MAX = 1 * MIB
DEVICE_MANIFEST_BYTES_MAX = 1 * MIB
GPUS_MAX = 1024
PIDS_MAX = 65_536
TEXT_CHARS_MAX = 1024
OPTIONS_MAX = 1024

_GMS_DIRECTORY = re.compile(rb"device-([0-9]{1,5})")
_DEVICE_FILE = re.compile(rb"device-([0-9]{4,5})\.bin(?:\.part-[0-9]{1,5})?")
_GPU_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,120}")
_DEVICE_LINE = re.compile(rb"device ([0-9]{1,5}) (\S{1,128}) ([0-9]{1,18}) (device-\S{1,64})")
_STAGING = re.compile(rb"(?:.*/)?(?:\.tmp|versions/tmp)", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotManifest:
    """What `manifest.yaml` says of the checkpoint in its directory."""

    directory: bytes
    source: dict[str, YamlValue]
    criu: dict[str, YamlValue]
    cuda_pids: tuple[int, ...]
    gpu_uuids: tuple[str, ...]
    cuda_storage_mode: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """One GPU of one CUDA process in custom storage: what is restored in parallel."""

    path: bytes
    """Of the file, or the first part of it."""
    rank: int
    gpu_uuid: str | None
    size_bytes: int | None


@dataclasses.dataclass(slots=True)
class GpuLayout:
    """Where GPU memory lies in files of its own.

    Attributes:
        roles: Of these files and their manifests, by path.
        rank_directories: Directories all of which belongs to one rank.
        rank_files: Files of a rank that are not below such a directory.
        devices: What custom storage says of each device file.
    """

    roles: dict[bytes, FileRole] = dataclasses.field(default_factory=dict)
    rank_directories: dict[bytes, int] = dataclasses.field(default_factory=dict)
    rank_files: dict[bytes, int] = dataclasses.field(default_factory=dict)
    devices: list[Device] = dataclasses.field(default_factory=list)


def read_snapshot_manifest(index: TreeIndex, directory: bytes) -> SnapshotManifest | None:
    """Read the `manifest.yaml` of a directory; none if there is none or it is another kind.

    Raises:
        SourceError: It cannot be read or changed since the scan.
    """
    document = index.read(
        join_path(directory, b"manifest.yaml"), _parse_yaml, size_bytes_max=MANIFEST_BYTES_MAX
    )
    checkpoint_id = _text(_get(document, "checkpointId"))
    if not checkpoint_id:
        return None
    components = [path_text(name) for name in directory.split(b"/")]
    source: dict[str, YamlValue] = {
        "directory": path_text(directory),
        "checkpoint_id": checkpoint_id,
        "created_at": _text(_get(document, "createdAt")),
        "node": _text(_get(document, "k8s", "sourceNode")),
        "pod": _text(_get(document, "k8s", "podName")),
        "namespace": _text(_get(document, "k8s", "podNamespace")),
        "container_id": _text(_get(document, "k8s", "containerId")),
        "pid": _number(_get(document, "k8s", "pid")),
        "container": _after(components, "containers"),
        "version": _after(components, "versions"),
    }
    criu: dict[str, YamlValue] = {
        "options": _scalars(_get(document, "criuDump", "criu")),
        "external_mounts": _scalars(_get(document, "criuDump", "extMnt")),
        "external": list(_texts(_get(document, "criuDump", "external"), OPTIONS_MAX)),
        "skipped_mounts": list(_texts(_get(document, "criuDump", "skipMnt"), OPTIONS_MAX)),
    }
    uuids = _texts(_get(document, "cudaRestore", "sourceGpuUuids"), GPUS_MAX)
    pids = _get(document, "cudaRestore", "pids")
    return SnapshotManifest(
        directory=directory,
        source={key: value for key, value in source.items() if value is not None},
        criu={key: value for key, value in criu.items() if value},
        cuda_pids=tuple(
            number
            for number in map(_number, pids[:PIDS_MAX] if isinstance(pids, list) else ())
            if number is not None
        ),
        gpu_uuids=tuple(uuid for uuid in uuids if _GPU_UUID.fullmatch(uuid)),
        cuda_storage_mode=_text(_get(document, "cudaRestore", "storageMode")),
    )


def _parse_yaml(data: bytes, name: str) -> YamlValue:
    # Few trees have a manifest, and the parser takes ten milliseconds to load.
    from snapstore.source.safe_yaml import parse_yaml

    return parse_yaml(data, name)


def find_gpu_layout(index: TreeIndex) -> GpuLayout:
    """Find GPU memory in files of its own anywhere in the tree.

    A GMS directory has the number of its GPU for rank. Device files of custom storage are
    numbered through in path order, since every CUDA process counts its GPUs from 0: with one
    process the rank is the GPU's number, with one GPU each it is the process's.

    Raises:
        SourceError: A manifest cannot be read or changed since the scan.
    """
    layout = GpuLayout()
    for directory in index.directories():
        names = index.names(directory)
        if b"manifest.txt" in names and any(map(_DEVICE_FILE.fullmatch, names)):
            _add_custom_storage(index, layout, directory, names)
        match = _GMS_DIRECTORY.fullmatch(directory.rpartition(b"/")[2])
        if match and b"shards" in names and {b"manifest.json", b"gms_metadata.json"} & {*names}:
            _add_gms(index, layout, directory, int(match[1]))
    return layout


def staging_directories(index: TreeIndex) -> Iterator[bytes]:
    """Yield directories in which NVIDIA Snapshot keeps captures that it has not finished."""
    for directory in index.directories():
        if _STAGING.fullmatch(directory) and index.names(directory):
            yield directory


def _add_custom_storage(
    index: TreeIndex, layout: GpuLayout, directory: bytes, names: list[bytes]
) -> None:
    manifest_path = join_path(directory, b"manifest.txt")
    described = index.read(
        manifest_path, _parse_device_manifest, size_bytes_max=DEVICE_MANIFEST_BYTES_MAX
    )
    layout.roles[manifest_path] = FileRole.OTHER if described is None else FileRole.MANIFEST
    ranks: dict[int, int] = {}
    for name in names:
        match = _DEVICE_FILE.fullmatch(name)
        path = join_path(directory, name)
        if match is None or index.file(path) is None:
            continue
        number = int(match[1])
        if number not in ranks:
            rank = len(layout.devices)
            if rank > limits.RANK_NUMBER_MAX:
                index.warnings.add(f"too many devices: {show_path(path)} is on the host's side")
                return
            ranks[number] = rank
            uuid, size_bytes = (described or {}).get(number, (None, None))
            layout.devices.append(Device(path, rank, uuid, size_bytes))
        layout.roles[path] = FileRole.GPU_DEVICE
        layout.rank_files[path] = ranks[number]


def _add_gms(index: TreeIndex, layout: GpuLayout, directory: bytes, number: int) -> None:
    if number > limits.RANK_NUMBER_MAX:
        index.warnings.add(f"{show_path(directory)} is on the host's side: too large a number")
        return
    layout.rank_directories[directory] = number
    for name in (b"manifest.json", b"gms_metadata.json"):
        layout.roles[join_path(directory, name)] = FileRole.MANIFEST
    shards = join_path(directory, b"shards")
    for name in index.names(shards):
        if name.endswith(b".bin"):
            layout.roles[join_path(shards, name)] = FileRole.GPU_SHARD


def _parse_device_manifest(data: bytes, name: str) -> dict[int, tuple[str | None, int | None]]:
    """Read `manifest.txt`: GPU UUID and size for each device number."""
    lines = data.split(b"\n")
    if not lines[0].startswith(b"version "):
        raise Malformed(f"{name}: no version in the first line")
    devices: dict[int, tuple[str | None, int | None]] = {}
    for line in lines[1 : GPUS_MAX + 2]:
        match = _DEVICE_LINE.fullmatch(line)
        if match is None:
            continue
        uuid = match[2].decode("ascii", "backslashreplace")
        if not uuid.startswith(("GPU-", "MIG-")):
            uuid = f"GPU-{uuid}"
        devices[int(match[1])] = (uuid if _GPU_UUID.fullmatch(uuid) else None, int(match[3]))
    return devices


def _get(document: YamlValue, *keys: str) -> YamlValue:
    """Walk into nested mappings; anything unexpected on the way gives none."""
    for key in keys:
        if not isinstance(document, dict):
            return None
        document = document.get(key)
    return document


def _text(value: YamlValue) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)[:TEXT_CHARS_MAX]


def _number(value: YamlValue) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 1 << 32 else None


def _texts(value: YamlValue, count_max: int) -> Iterator[str]:
    for item in value[:count_max] if isinstance(value, list) else ():
        text = _text(item)
        if text is not None:
            yield text


def _scalars(value: YamlValue) -> dict[str, YamlValue]:
    """Keep the plain values of a mapping: options are no more than that."""
    pairs = list(value.items())[:OPTIONS_MAX] if isinstance(value, dict) else []
    return {
        key[:TEXT_CHARS_MAX]: item[:TEXT_CHARS_MAX] if isinstance(item, str) else item
        for key, item in pairs
        if isinstance(item, str | int)
    }


def _after(components: list[str], word: str) -> str | None:
    """Return the path component behind the one that is `word`."""
    position = components.index(word) + 1 if word in components else len(components)
    return components[position] if position < len(components) else None
