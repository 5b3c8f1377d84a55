"""Put together what a checkpoint tells of where it can run, as the root manifest keeps it.

Plain JSON values, bounded in number and size whatever the sources say.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from snapstore.source.tree_index import path_text
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from snapstore.source.image_directory import ImageFacts
    from snapstore.source.nvidia import Device, SnapshotManifest
    from snapstore.source.ranks import RankKey
    from snapstore.source.tree_index import WarningList

__all__ = ["JsonValue", "build_requirements"]

JsonValue = None | bool | int | str | list["JsonValue"] | dict[str, "JsonValue"]

REQUIREMENTS_BYTES_MAX = 4 * MIB
"""A quarter of what the root manifest may have."""
ITEMS_MAX = 16_384


def build_requirements(
    images: Iterable[ImageFacts],
    manifests: Iterable[SnapshotManifest],
    devices: Iterable[Device],
    ranks: Mapping[bytes, RankKey],
    warnings: WarningList,
) -> dict[str, JsonValue]:
    """Merge what all parts of the tree say; of single values, the first one said counts.

    Keys, each only where something is known: `criu` (version, version_min, image_version, lsm,
    plugins, and of the options of the dump), `kernel`, `machine`, `cpus`, `processes`,
    `mapped_files`, `gpu_uuids`, `cuda_pids`, `cuda_storage_mode`, `devices`, `source`.
    """
    builder = _Builder(warnings)
    for facts in images:
        builder.add_images(facts)
    for manifest in manifests:
        builder.add_manifest(manifest)
    for device in devices:
        builder.add_device(device, ranks[device.path])
    return builder.result()


class _Builder:
    def __init__(self, warnings: WarningList) -> None:
        self._warnings = warnings
        self._criu: dict[str, JsonValue] = {}
        self._single: dict[str, JsonValue] = {}
        # Dictionaries as ordered sets: a file mapped by many processes is listed once.
        self._lists: dict[str, dict[str, JsonValue]] = {}
        self._full: set[str] = set()

    def add_images(self, facts: ImageFacts) -> None:
        """Take what one directory of CRIU images says."""
        if facts.log is not None:
            _set(self._criu, "version", facts.log.criu_version)
            _set(self._single, "kernel", facts.log.kernel)
        _set(self._criu, "version_min", facts.version_min)
        if facts.inventory is not None:
            _set(self._criu, "image_version", facts.inventory.image_version)
            _set(self._criu, "lsm", facts.inventory.lsm)
            _set(self._criu, "plugins", list(facts.inventory.plugins) or None)
            _set(self._criu, "tcp_close", facts.inventory.tcp_close or None)
        for process in facts.processes:
            core = facts.cores.get(process.pid)
            item: dict[str, JsonValue] = {
                "images": path_text(facts.directory),
                "pid": process.pid,
                "ppid": process.ppid,
                "threads": len(process.threads),
            }
            if core is not None:
                item["name"] = core.name
                _set(self._single, "machine", core.machine)
            self._append("processes", item)
        for file in facts.mapped_files:
            item = {"path": file.name}
            _set(item, "size_bytes", file.size_bytes)
            _set(item, "build_id", file.build_id)
            self._append("mapped_files", item)
        for cpu in facts.cpus:
            self._append(
                "cpus",
                {
                    "vendor": cpu.vendor,
                    "family": cpu.family,
                    "model": cpu.model,
                    "stepping": cpu.stepping,
                    "model_name": cpu.model_name,
                    "capability": list(cpu.capability),
                },
            )

    def add_manifest(self, manifest: SnapshotManifest) -> None:
        """Take what one `manifest.yaml` says."""
        self._append("source", dict(manifest.source))
        for key, value in manifest.criu.items():
            _set(self._criu, key, value)
        for pid in manifest.cuda_pids:
            self._append("cuda_pids", pid)
        for uuid in manifest.gpu_uuids:
            self._append("gpu_uuids", uuid)
        _set(self._single, "cuda_storage_mode", manifest.cuda_storage_mode)

    def add_device(self, device: Device, rank: RankKey) -> None:
        """Take what custom storage says of one GPU."""
        item: dict[str, JsonValue] = {"rank": rank, "path": path_text(device.path)}
        _set(item, "gpu_uuid", device.gpu_uuid)
        _set(item, "size_bytes", device.size_bytes)
        self._append("devices", item)
        if device.gpu_uuid is not None:
            self._append("gpu_uuids", device.gpu_uuid)

    def result(self) -> dict[str, JsonValue]:
        """Return all of it, less the longest lists if it is too much for a root manifest."""
        result: dict[str, JsonValue] = {"criu": self._criu} if self._criu else {}
        result |= self._single
        result |= {key: list(items.values()) for key, items in self._lists.items()}
        sizes = {key: len(json.dumps(value)) for key, value in result.items()}
        while sum(sizes.values()) > REQUIREMENTS_BYTES_MAX:
            longest = max(sizes, key=sizes.__getitem__)
            del result[longest], sizes[longest]
            self._warnings.add(f"the requirements lack {longest}: it is too long")
        return result

    def _append(self, key: str, item: JsonValue) -> None:
        items = self._lists.setdefault(key, {})
        if len(items) < ITEMS_MAX:
            items.setdefault(json.dumps(item, sort_keys=True), item)
        elif key not in self._full:
            self._full.add(key)
            self._warnings.add(f"the requirements list only the first {ITEMS_MAX} {key}")


def _set(into: dict[str, JsonValue], key: str, value: JsonValue) -> None:
    if value is not None:
        into.setdefault(key, value)
