import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import SourceChanged, UsageError
from snapstore.format.tree import EntryType
from snapstore.source.classes import DataClass, FileRole, parse_class_override
from snapstore.source.criu_pagemap import PageFlag
from snapstore.source.ranks import HOST
from snapstore.source.recognise import Recognised, SourceEntry, recognise
from snapstore.source.scan import scan_tree
from snapstore.units import PAGE_BYTES
from tests.unit.source import builders
from tests.unit.source.builders import dump, write_tree

UUIDS = ["GPU-11111111-2222-3333-4444-555555555555", "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"]

MANIFEST = f"""
checkpointId: "sha256:abc123"
createdAt: 2026-08-21T11:50:22Z
criuDump:
  criu: {{logLevel: 4, shellJob: true, libDir: /usr/lib/criu, workDir: ""}}
  extMnt: {{/etc/hostname: /etc/hostname}}
  external: ["net[12345]:extNetNs"]
  skipMnt: [/proc/kcore]
k8s:
  containerId: ctr-abc
  pid: 42
  sourceNode: node-1
  podName: my-pod
  podNamespace: default
  podIP: 10.0.0.11
  stdioFDs: ["pipe:[111]"]
overlay: {{exclusions: {{exclusions: [/proc]}}, upperDir: /var/lib/upper}}
cudaRestore:
  pids: [42, 43]
  sourceGpuUuids: [{UUIDS[0]}, {UUIDS[1]}]
""".encode()


def look(root: Path, **options: object) -> Recognised:
    return recognise(scan_tree(root), **options)


def paths(result: Recognised, rank: int | str) -> list[bytes]:
    return [item.entry.path for item in result.partition[rank]]


def files_of(result: Recognised) -> dict[str, SourceEntry]:
    return {
        item.entry.path.decode(): item
        for part in result.partition.values()
        for item in part
        if item.entry.type is EntryType.FILE
    }


def roles(result: Recognised, *skip: FileRole) -> dict[str, FileRole]:
    items = files_of(result).items()
    return {path: item.role for path, item in items if item.role not in skip}


# -- CRIU -------------------------------------------------------------------------------------


def test_a_plain_dump_is_all_the_hosts(tmp_path: Path):
    write_tree(tmp_path, dump() | {"dump.log": b"Error: rlimit\n", "notes.txt": b"x"})
    result = look(tmp_path)
    assert (result.kind, list(result.partition), result.warnings) == ("criu", [HOST], [])
    files = files_of(result)
    pages = files["pages-1.img"]
    assert (pages.role, pages.data_class) == (FileRole.CRIU_PAGES, DataClass.PAGES)
    assert pages.pagemap == b"pagemap-42.img"
    for name in ("inventory.img", "pagemap-42.img", "fs-42.img", "stats-dump", "core-42.img"):
        assert (files[name].role, files[name].data_class) == (
            FileRole.CRIU_IMAGE,
            DataClass.GENERIC,
        )
    assert files["dump.log"].role is FileRole.OTHER
    assert files["notes.txt"].role is FileRole.OTHER


def test_a_dump_tells_its_requirements(tmp_path: Path):
    log = (
        b"(0) Version: 4.2.1 (gitid 0)\n(0) Running on n1 Linux 6.8.0 #1 SMP x86_64\n"
        + b"x" * 99999
    )
    write_tree(tmp_path, dump() | {"dump.log": log, "cpuinfo.img": builders.cpuinfo()})
    requirements = look(tmp_path).requirements
    assert requirements == {
        "criu": {"version": "4.2.1", "version_min": "4.2", "image_version": 2, "lsm": "none"},
        "kernel": "6.8.0",
        "machine": "x86_64",
        "cpus": [
            {
                "vendor": "intel",
                "family": 6,
                "model": 143,
                "stepping": 8,
                "model_name": "Xeon",
                "capability": [0xABCD, 7],
            }
        ],
        "processes": [{"images": "", "pid": 42, "ppid": 0, "threads": 2, "name": "python"}],
        "mapped_files": [
            {"path": "/lib/libc.so", "size_bytes": 9},
            {"path": "/usr/bin/python3", "size_bytes": 6000, "build_id": "aabbccdd"},
        ],
    }
    json.dumps(requirements)


def test_old_images_ask_for_no_new_criu(tmp_path: Path):
    images = dump()
    images["pagemap-42.img"] = builders.pagemap(1, (0x1000, 3, PageFlag.PRESENT), old=True)
    write_tree(tmp_path, images)
    assert "version_min" not in look(tmp_path).requirements["criu"]
    (tmp_path / "inventory.img").write_bytes(builders.inventory((13, b"run id")))
    assert look(tmp_path).requirements["criu"]["version_min"] == "4.1"


def test_pages_shorter_than_their_pagemap_are_plain_and_warned_of(tmp_path: Path):
    images = dump()
    images["pages-1.img"] = images["pages-1.img"][:-1]
    result = look(write_tree(tmp_path, images))
    pages = files_of(result)["pages-1.img"]
    assert (pages.role, pages.data_class, pages.pagemap) == (FileRole.OTHER, DataClass.PAGES, b"")
    assert len(result.warnings) == 1
    assert "without end" in result.warnings[0]


def test_pages_longer_than_their_pagemap_are_pages(tmp_path: Path):
    images = dump()
    images["pages-1.img"] += bytes(PAGE_BYTES)
    result = look(write_tree(tmp_path, images))
    assert files_of(result)["pages-1.img"].role is FileRole.CRIU_PAGES


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"pages-1.img": None}, "'pages-1.img' is missing"),
        ({"pages-7.img": b""}, "no pagemap describes 'pages-7.img'"),
        (
            {"pagemap-43.img": builders.pagemap(1, (0, 1, PageFlag.PRESENT))},
            "2 pagemaps describe 'pages-1.img'",
        ),
        (
            {"pagemap-43.img": builders.pagemap(2, (0, 1, PageFlag.PARENT))},
            "'pagemap-43.img' refers to pages of an earlier dump",
        ),
        ({"pagemap-42.img": b"junk"}, "'pagemap-42.img' is stored as a plain file"),
        ({"core-42.img": b""}, "'core-42.img' is stored as a plain file"),
        ({"mm-42.img": builders.core("x")}, "'mm-42.img' is stored as a plain file"),
        ({"files.img": b"junkjunk"}, "'files.img' is stored as a plain file"),
        ({"pstree.img": b"junkjunk"}, "'pstree.img' is stored as a plain file"),
        ({"cpuinfo.img": b"junkjunk"}, "'cpuinfo.img' is stored as a plain file"),
    ],
)
def test_what_does_not_fit_is_a_plain_file_with_a_warning(
    tmp_path: Path, change: dict[str, bytes | None], warning: str
):
    images = {k: v for k, v in (dump() | change).items() if v is not None}
    result = look(write_tree(tmp_path, images))
    assert result.kind == "criu"
    assert any(text.startswith(warning) for text in result.warnings), result.warnings
    for name, data in change.items():
        if data is not None and "plain file" in warning:
            assert files_of(result)[name].role is FileRole.OTHER


def test_a_parent_link_silences_the_warning_about_parents(tmp_path: Path):
    entries = {"pagemap-42.img": builders.pagemap(1, (0, 1, PageFlag.PARENT), (4096, 1, 4))}
    write_tree(tmp_path, {f"second/{k}": v for k, v in (dump() | entries).items()})
    (tmp_path / "second" / "parent").symlink_to("../first")
    assert look(tmp_path).warnings == []


def test_images_of_random_bytes_are_plain_files_with_one_warning(tmp_path: Path):
    """What a benchmark makes up: the names of CRIU's images and nothing of their content."""
    table = {name: os.urandom(100) for name in dump() if name.endswith(".img")}
    table |= {"rank0.bin": b"a" * 99, "rank1.bin": b"b" * 99, "meta.json": b"{}"}
    result = look(write_tree(tmp_path, table))
    assert (result.kind, len(result.warnings)) == ("directory", 1)
    assert set(roles(result).values()) == {FileRole.OTHER}
    assert files_of(result)["pages-1.img"].data_class is DataClass.PAGES
    assert files_of(result)["rank0.bin"].data_class is DataClass.TENSORS
    assert paths(result, 0) == [b"", b"rank0.bin"]
    assert paths(result, 1) == [b"", b"rank1.bin"]


def test_the_receiving_side_of_a_page_server_has_pages_only(tmp_path: Path):
    runs = builders.pagemap(65537, (0, 1, PageFlag.PRESENT))
    table = {"pagemap-42.img": runs, "pages-65537.img": bytes(PAGE_BYTES), "pages-9.img": b""}
    result = look(write_tree(tmp_path, table))
    assert (result.kind, result.warnings) == ("criu", [])
    assert roles(result, FileRole.OTHER) == {
        "pagemap-42.img": FileRole.CRIU_IMAGE,
        "pages-65537.img": FileRole.CRIU_PAGES,
    }


def test_shared_memory_has_a_pagemap_too(tmp_path: Path):
    images = dump() | {
        "pagemap-shmem-77.img": builders.pagemap(2, (0, 2, PageFlag.PRESENT)),
        "pages-2.img": bytes(2 * PAGE_BYTES),
    }
    result = look(write_tree(tmp_path, images))
    assert files_of(result)["pages-2.img"].pagemap == b"pagemap-shmem-77.img"


def test_images_too_large_to_read_are_plain_files(tmp_path: Path):
    write_tree(tmp_path, dump())
    builders.make_sparse(tmp_path / "pagemap-42.img", (64 << 20) + 1)
    result = look(tmp_path)
    assert "67108865 bytes" in result.warnings[0]
    assert files_of(result)["pages-1.img"].role is FileRole.OTHER


def test_dumps_in_several_directories_are_all_recognised(tmp_path: Path):
    table = {f"{d}/{name}": data for d in ("a", "b/c") for name, data in dump().items()}
    result = look(write_tree(tmp_path, table))
    assert [p["images"] for p in result.requirements["processes"]] == ["a", "b/c"]
    assert len(result.requirements["mapped_files"]) == 2


def test_images_that_are_hard_links_are_read_through_them(tmp_path: Path):
    write_tree(tmp_path, {f"b/{name}": data for name, data in dump().items()})
    (tmp_path / "a").mkdir()
    for name in dump():
        os.link(tmp_path / "b" / name, tmp_path / "a" / name)
    result = look(tmp_path)
    assert result.warnings == []
    assert files_of(result)["a/pages-1.img"].role is FileRole.CRIU_PAGES


# -- NVIDIA Snapshot --------------------------------------------------------------------------


def checkpoint_directory() -> dict[str, bytes]:
    return dump() | {
        "manifest.yaml": MANIFEST,
        "criu.conf": b"enable-external-masters\n",
        "dump.log": b"",
        "rootfs-diff.tar": bytes(10240),
        "deleted-files.json": b"[]",
        "cuda-checkpoint-job": b"job",
    }


@pytest.mark.parametrize(
    ("where", "extra"),
    [
        ("", {}),
        ("versions/1/", {"version": "1"}),
        ("artifacts/uid-1/containers/main/", {"container": "main"}),
        ("containers/main/", {"container": "main"}),
    ],
)
def test_a_checkpoint_directory_in_each_layout(tmp_path: Path, where: str, extra: dict[str, str]):
    table = {where + name: data for name, data in checkpoint_directory().items()}
    result = look(write_tree(tmp_path, table))
    assert (result.kind, list(result.partition), result.warnings) == ("nvidia-snapshot", [HOST], [])
    assert roles(result, FileRole.OTHER, FileRole.CRIU_IMAGE) == {
        where + "pages-1.img": FileRole.CRIU_PAGES,
        where + "manifest.yaml": FileRole.MANIFEST,
        where + "rootfs-diff.tar": FileRole.ROOTFS_DIFF,
    }
    requirements = result.requirements
    assert requirements["source"] == [
        {
            "directory": where.rstrip("/"),
            "checkpoint_id": "sha256:abc123",
            "created_at": "2026-08-21T11:50:22Z",
            "node": "node-1",
            "pod": "my-pod",
            "namespace": "default",
            "container_id": "ctr-abc",
            "pid": 42,
            **extra,
        }
    ]
    assert requirements["gpu_uuids"] == UUIDS
    assert requirements["cuda_pids"] == [42, 43]
    assert requirements["criu"] == {
        "version_min": "4.2",
        "image_version": 2,
        "lsm": "none",
        "options": {"logLevel": 4, "shellJob": True, "libDir": "/usr/lib/criu", "workDir": ""},
        "external_mounts": {"/etc/hostname": "/etc/hostname"},
        "external": ["net[12345]:extNetNs"],
        "skipped_mounts": ["/proc/kcore"],
    }


def test_a_manifest_without_an_inventory_is_an_unfinished_capture(tmp_path: Path):
    table = {"versions/1/" + name: data for name, data in checkpoint_directory().items()}
    del table["versions/1/inventory.img"]
    result = look(write_tree(tmp_path, table))
    assert any("was not finished" in text for text in result.warnings)
    assert result.kind == "nvidia-snapshot"


@pytest.mark.parametrize("staging", ["versions/tmp/uuid", ".tmp/uuid"])
def test_staging_directories_are_warned_of(tmp_path: Path, staging: str):
    table = {"versions/1/" + name: data for name, data in checkpoint_directory().items()}
    result = look(write_tree(tmp_path, {**table, f"{staging}/dump.log": b""}))
    assert result.warnings == [
        f"{os.path.dirname(staging)!r} holds captures that were not finished"  # noqa: PTH120
    ]


@pytest.mark.parametrize(
    "text",
    [
        b"a: &a [x, x]\nb: &b [*a, *a]\ncheckpointId: x\n",
        b"checkpointId: x\n" + b"a: [" * 100,
        b"\xff\xfe",
        b"[]: {}",
        b"checkpointId: x\n" * 2,
        b"#" * ((1 << 20) + 1),
    ],
)
def test_a_hostile_manifest_is_a_plain_file(tmp_path: Path, text: bytes):
    result = look(write_tree(tmp_path, dump() | {"manifest.yaml": text}))
    assert (result.kind, len(result.warnings)) == ("criu", 1)
    assert files_of(result)["manifest.yaml"].role is FileRole.OTHER


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"5",
        b"[checkpointId]",
        b"kind: Pod",
        b"checkpointId: ",
        b"checkpointId: {a: b}",
        b"checkpointId: true",
    ],
)
def test_another_kind_of_manifest_is_none_of_ours(tmp_path: Path, text: bytes):
    result = look(write_tree(tmp_path, {"manifest.yaml": text}))
    assert (result.kind, result.warnings, result.requirements) == ("directory", [], {})


def test_values_of_unexpected_types_are_left_out(tmp_path: Path):
    text = (
        b"checkpointId: 7\nk8s: [1]\ncriuDump: {criu: [x], extMnt: 5, external: {a: b}}\n"
        b"cudaRestore:\n  pids: [1, x, -1, true, 99999999999]\n"
        b"  sourceGpuUuids: [5, 'GPU-x', no uuid]\n"
    )
    result = look(write_tree(tmp_path, dump() | {"manifest.yaml": text}))
    assert result.requirements["source"] == [{"directory": "", "checkpoint_id": "7"}]
    assert result.requirements["cuda_pids"] == [1]
    assert result.requirements["gpu_uuids"] == ["GPU-x"]


# -- GPU memory in files of its own -----------------------------------------------------------


def custom_storage(*uuids: str) -> dict[str, bytes]:
    lines = [b"version 2", b"device_count %d" % len(uuids)]
    table = {}
    for number, uuid in enumerate(uuids):
        name = f"device-{number:04d}.bin"
        lines.append(b"device %d %s 4096 %s" % (number, uuid.encode(), name.encode()))
        table[name] = bytes(4096)
    return table | {"manifest.txt": b"\n".join(lines) + b"\n"}


def test_one_process_with_many_gpus_has_a_rank_for_each(tmp_path: Path):
    where = "cuda-custom-storage/process-0000/"
    table = checkpoint_directory()
    table |= {where + name: data for name, data in custom_storage(*UUIDS).items()}
    table[where + "device-0001.bin.part-0001"] = b"more"
    result = look(write_tree(tmp_path, table))
    assert result.kind == "nvidia-snapshot"
    assert list(result.partition) == [HOST, 0, 1]
    folders = [b"", b"cuda-custom-storage", where.rstrip("/").encode()]
    assert paths(result, 0) == [*folders, where.encode() + b"device-0000.bin"]
    assert paths(result, 1) == [
        *folders,
        where.encode() + b"device-0001.bin",
        where.encode() + b"device-0001.bin.part-0001",
    ]
    assert where.encode() + b"manifest.txt" in paths(result, HOST)
    assert roles(result)[where + "device-0001.bin.part-0001"] is FileRole.GPU_DEVICE
    assert roles(result)[where + "manifest.txt"] is FileRole.MANIFEST
    assert result.requirements["devices"] == [
        {"rank": n, "path": f"{where}device-000{n}.bin", "gpu_uuid": UUIDS[n], "size_bytes": 4096}
        for n in (0, 1)
    ]


def test_one_gpu_in_each_of_many_processes_is_numbered_through(tmp_path: Path):
    table = {
        f"process-{number:04d}/{name}": data
        for number in range(3)
        for name, data in custom_storage(UUIDS[0]).items()
    }
    result = look(write_tree(tmp_path, table))
    assert (result.kind, list(result.partition)) == ("cuda-custom-storage", [HOST, 0, 1, 2])
    assert paths(result, 2) == [b"", b"process-0002", b"process-0002/device-0000.bin"]
    assert result.requirements["gpu_uuids"] == [UUIDS[0]]


def test_a_broken_device_manifest_costs_only_what_it_would_have_told(tmp_path: Path):
    table = custom_storage(*UUIDS) | {"manifest.txt": b"\x00\xff" * 100}
    result = look(write_tree(tmp_path, table))
    assert list(result.partition) == [HOST, 0, 1]
    assert len(result.warnings) == 1
    assert result.requirements["devices"] == [
        {"rank": n, "path": f"device-000{n}.bin"} for n in (0, 1)
    ]
    assert roles(result)["manifest.txt"] is FileRole.OTHER


def gms_device() -> dict[str, bytes]:
    return {
        "manifest.json": b"{}",
        "gms_metadata.json": b"{}",
        "shards/shard_0000.bin": bytes(99),
        "shards/shard_0001.bin": bytes(99),
    }


def test_gpu_memory_service_has_a_rank_for_each_device(tmp_path: Path):
    root = "gms/0123abc/versions/1"
    table = {
        f"{root}/device-{number}/{name}": data
        for number in (0, 10)
        for name, data in gms_device().items()
    }
    result = look(write_tree(tmp_path, table))
    assert (result.kind, list(result.partition), result.warnings) == ("gms", [HOST, 0, 10], [])
    device = f"{root}/device-10".encode()
    assert paths(result, 10) == [
        b"",
        b"gms",
        b"gms/0123abc",
        b"gms/0123abc/versions",
        root.encode(),
        device,
        device + b"/gms_metadata.json",
        device + b"/manifest.json",
        device + b"/shards",
        device + b"/shards/shard_0000.bin",
        device + b"/shards/shard_0001.bin",
    ]
    found = files_of(result)[f"{root}/device-0/shards/shard_0000.bin"]
    assert (found.role, found.data_class) == (FileRole.GPU_SHARD, DataClass.TENSORS)
    assert roles(result)[f"{root}/device-0/manifest.json"] is FileRole.MANIFEST


@pytest.mark.parametrize("missing", ["shards/", "manifests"])
def test_a_directory_called_device_need_not_be_one(tmp_path: Path, missing: str):
    table = {
        f"device-0/{name}": data
        for name, data in gms_device().items()
        if not (name.startswith(missing) or (missing == "manifests" and name.endswith(".json")))
    }
    result = look(write_tree(tmp_path, table))
    assert (result.kind, list(result.partition)) == ("directory", [HOST])


# -- ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["rank-{}", "rank{}", "rank_{}", "job/rank-{}"])
def test_rank_folders(tmp_path: Path, form: str):
    table = {f"{form.format(n)}/sub/f": b"x" for n in (0, 3, 12)} | {"shared": b"y"}
    table[form.format(3) + "/empty/"] = b""
    result = look(write_tree(tmp_path, table))
    assert list(result.partition) == [HOST, 0, 3, 12]
    folder = form.format(3).encode()
    above = [b""] if b"/" not in folder else [b"", b"job"]
    own = [folder, folder + b"/empty", folder + b"/sub", folder + b"/sub/f"]
    assert paths(result, 3) == above + own
    host = paths(result, HOST)
    assert b"shared" in host
    assert folder + b"/sub" in host  # directories are the host's as well
    assert folder + b"/sub/f" not in host


def test_the_outermost_rank_counts(tmp_path: Path):
    table = {f"rank-1/{name}": data for name, data in custom_storage(*UUIDS).items()}
    table |= {f"rank-2/device-7/{name}": data for name, data in gms_device().items()}
    table |= {"rank-3/rank-4/f": b"x", "sub/rank5.bin": b"x"}
    result = look(write_tree(tmp_path, table))
    assert list(result.partition) == [HOST, 1, 2, 3]
    assert [device["rank"] for device in result.requirements["devices"]] == [1, 1]
    assert b"sub/rank5.bin" in paths(result, HOST)


def test_every_part_can_be_recreated_alone_and_all_together_are_the_tree(tmp_path: Path):
    table = {"rank-0/a/f": b"1", "rank-1/a/f": b"2", "host/x": b"3", "rank7.bin": b"4"}
    write_tree(tmp_path, table)
    (tmp_path / "rank-0" / "l").symlink_to("../rank-1")
    tree = scan_tree(tmp_path)
    result = recognise(tree)
    seen: dict[bytes, int] = {}
    for part in result.partition.values():
        own = [item.entry.path for item in part]
        assert own == sorted(own)
        assert own[0] == b""
        for path in own[1:]:
            assert path.rpartition(b"/")[0] in own
            seen[path] = seen.get(path, 0) + 1
    assert set(seen) == {entry.path for entry in tree.entries[1:]}
    for entry in tree.entries[1:]:
        assert entry.type is EntryType.DIRECTORY or seen[entry.path] == 1


def test_a_rank_number_beyond_the_format_is_the_hosts(tmp_path: Path):
    result = look(write_tree(tmp_path, {"rank-65536/f": b"", "rank-65535/f": b""}))
    assert list(result.partition) == [HOST, 65535]
    assert "65536" in result.warnings[0]


def test_hard_links_stay_with_their_first_name(tmp_path: Path):
    write_tree(tmp_path, {"rank-0/f": b"x", "rank-1/": b""})
    os.link(tmp_path / "rank-0" / "f", tmp_path / "rank-1" / "g")
    result = look(tmp_path)
    assert paths(result, 0) == [b"", b"rank-0", b"rank-0/f", b"rank-1", b"rank-1/g"]
    assert paths(result, 1) == [b"", b"rank-1"]
    assert result.warnings == [
        "'rank-1/g' is kept with its first name 'rank-0/f', in rank 0 and not in rank 1"
    ]


def test_a_rank_glob_overrides_everything(tmp_path: Path):
    table = {"rank-0/f": b"", "gpu-1/x/f": b"", "gpu-2/f": b"", "rank3.bin": b"", "gpu-x/f": b""}
    result = look(write_tree(tmp_path, table), rank_glob="gpu-{N}/")
    assert list(result.partition) == [HOST, 1, 2]
    assert paths(result, 1) == [b"", b"gpu-1", b"gpu-1/x", b"gpu-1/x/f"]
    assert {b"rank-0/f", b"rank3.bin", b"gpu-x/f"} < set(paths(result, HOST))


def test_a_rank_glob_for_files(tmp_path: Path):
    write_tree(tmp_path, {"tp4-rank07.weights": b"", "other": b""})
    result = look(tmp_path, rank_glob="tp4-rank{N}.weights")
    assert paths(result, 7) == [b"", b"tp4-rank07.weights"]


@pytest.mark.parametrize("glob", ["gpu-*/", "", "{N}{N}"])
def test_a_rank_glob_needs_one_number(tmp_path: Path, glob: str):
    with pytest.raises(UsageError):
        look(tmp_path, rank_glob=glob)


def test_class_overrides_reach_the_files(tmp_path: Path):
    write_tree(tmp_path, dump() | {"x.bin": b""})
    overrides = [parse_class_override("*.bin=generic"), parse_class_override("core-*=tensors")]
    files = files_of(look(tmp_path, class_overrides=overrides))
    assert files["x.bin"].data_class is DataClass.GENERIC
    assert files["core-42.img"].data_class is DataClass.TENSORS
    assert files["pages-1.img"].data_class is DataClass.PAGES


# -- bounds -----------------------------------------------------------------------------------


def test_warnings_are_limited(tmp_path: Path):
    table = dump() | {f"pagemap-{n}.img": b"junk" for n in range(100, 200)}
    warnings = look(write_tree(tmp_path, table)).warnings
    assert len(warnings) == 51
    assert warnings[-1] == "and 50 more warnings"


@pytest.mark.slow
def test_requirements_are_limited_in_number_and_size(tmp_path: Path):
    many = [(n, f"/lib/{n}", 1, None) for n in range(17_000)]
    images = dump() | {
        "files.img": builders.files(*many),
        "mm-42.img": builders.mm(1, *range(17_000)),
    }
    result = look(write_tree(tmp_path, images))
    assert len(result.requirements["mapped_files"]) == 16_384
    assert result.warnings == ["the requirements list only the first 16384 mapped_files"]
    images["files.img"] = builders.files(*((n, f"/{n}" + "x" * 2000, 1, None) for n in range(3000)))
    result = look(write_tree(tmp_path, images))
    assert "mapped_files" not in result.requirements
    assert "the requirements lack mapped_files: it is too long" in result.warnings


def test_a_change_since_the_scan_is_an_error_and_no_warning(tmp_path: Path):
    tree = scan_tree(write_tree(tmp_path, dump()))
    (tmp_path / "inventory.img").write_bytes(b"")
    with pytest.raises(SourceChanged):
        recognise(tree)


@pytest.mark.slow
@given(st.data())
def test_damaged_images_never_do_more_than_warn(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    """Damage one image of a whole dump: everything is still stored, under the same names."""
    images = checkpoint_directory()
    name = data.draw(st.sampled_from(sorted(images)))
    damaged = bytearray(images[name] or b"\0")
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    images[name] = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    root = tmp_path_factory.mktemp("damaged")
    result = look(write_tree(root, images))
    assert set(files_of(result)) == set(images)
    json.dumps(result.requirements)
