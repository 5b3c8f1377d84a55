"""Files in memory are described as the same files in a directory are recognised."""

from pathlib import Path

import pytest

from snapstore.errors import UsageError
from snapstore.format.tree import EntryType
from snapstore.source.described import describe_images
from snapstore.source.image_directory import IMAGE_BYTES_MAX
from snapstore.source.made_tree import checked_path, with_directories_by_rank
from snapstore.source.recognise import recognise
from snapstore.source.scan import scan_tree
from tests.unit.source import builders
from tests.unit.source.builders import dump, write_tree

MANIFEST = (
    b"checkpointId: job-17\nk8s: {podName: pod}\ncudaRestore: {sourceGpuUuids: [GPU-aa-bb]}\n"
)
LOG = b"(00.000001) Version: 4.1 (gitid 0)\n(00.000002) Running on host Linux 6.1.0 #1 SMP x86_64\n"

TREES: dict[str, dict[str, bytes]] = {
    "nothing": {},
    "a dump": dump(),
    "with a log": dump() | {"dump.log": LOG * 2000, "cpuinfo.img": builders.cpuinfo()},
    "a damaged dump": dump() | {"mm-42.img": builders.core("x"), "pages-9.img": bytes(4096)},
    "pages cut short": dump() | {"pages-1.img": bytes(5)},
    "several": {f"{where}/{name}": data for where in "ab" for name, data in dump().items()},
    "a manifest": {f"versions/1/{name}": data for name, data in dump().items()}
    | {"versions/1/manifest.yaml": MANIFEST},
    "custom storage": {
        "cuda/manifest.txt": b"version 1\ndevice 0 GPU-1234 6 device-0000.bin\n",
        "cuda/device-0000.bin": b"memory",
    },
    "ranks": {"rank-0/weights.bin": b"a", "rank-3/deep/er/log": b"b", "config.json": b"{}"},
    "any bytes": {"\udcff\udc80/pages-x.img": b"?"},
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("with_pages", [True, False])
def test_memory_and_directory_are_described_alike(
    tmp_path: Path, name: str, *, with_pages: bool
) -> None:
    """With the bytes of all files, and with nothing but the sizes of those that hold memory."""
    table = TREES[name]
    seen = recognise(scan_tree(write_tree(tmp_path, table)))
    large = {} if with_pages else {path for path in table if "pages-" in path or ".bin" in path}
    what = describe_images(
        {path: data for path, data in table.items() if path not in large},
        {path: len(table[path]) for path in large},
    )
    assert (what.kind, what.requirements) == (seen.kind, seen.requirements)
    assert list(what.warnings) == seen.warnings
    files = {
        item.entry.path.decode("utf-8", "surrogateescape"): (
            rank,
            item.role.value,
            item.data_class.value,
        )
        for rank, items in seen.partition.items()
        for item in items
        if item.entry.type is EntryType.FILE
    }
    assert {
        path: (file.rank, file.role, file.data_class) for path, file in what.files.items()
    } == files


def test_the_beginning_of_a_log_is_enough() -> None:
    whole = describe_images(dump() | {"dump.log": LOG + bytes(200_000)})
    begun = describe_images(
        dump() | {"dump.log": (LOG + bytes(200_000))[: 64 << 10]}, {"dump.log": 200_000 + len(LOG)}
    )
    assert begun == whole
    assert whole.requirements["kernel"] == "6.1.0"


def test_images_too_large_to_read_are_plain_files() -> None:
    images = dump()
    del images["pagemap-42.img"]
    what = describe_images(images, {"pagemap-42.img": IMAGE_BYTES_MAX + 1})
    assert what.files["pagemap-42.img"].role == "other"
    assert any("is stored as a plain file" in text for text in what.warnings)


def test_bytes_that_tell_something_must_be_there() -> None:
    images = dump()
    size = len(images.pop("core-42.img"))
    with pytest.raises(UsageError, match=r"core-42\.img' only 0 of"):
        describe_images(images, {"core-42.img": size})
    with pytest.raises(UsageError, match="cannot have 3 bytes"):
        describe_images(images, {"files.img": 3})


@pytest.mark.parametrize("path", ["", "..", "/a", "a//b", b"a/\0", "x" * 5000])
def test_paths_that_cannot_be_are_refused(path: str | bytes) -> None:
    with pytest.raises(UsageError, match="no path of a file"):
        checked_path(path)


def test_a_file_cannot_be_a_directory_too() -> None:
    with pytest.raises(UsageError, match="both a file and a directory"):
        describe_images({"a": b"", "a/b": b""})


def test_the_host_has_all_directories_and_ranks_those_above_their_files(tmp_path: Path) -> None:
    """As `recognise` divides a directory."""
    tree = scan_tree(write_tree(tmp_path, TREES["ranks"]))
    parts = recognise(tree).partition
    files = {
        rank: [item.entry for item in items if item.entry.type is EntryType.FILE]
        for rank, items in parts.items()
    }
    made = with_directories_by_rank(files, tree.entries[0])
    assert {rank: [entry.path for entry in entries] for rank, entries in made.items()} == {
        rank: [item.entry.path for item in items] for rank, items in parts.items()
    }
