"""What `snapstore.criu` exports: documented, complete, and enough to read a real dump with."""

import inspect
from pathlib import Path

import pytest

from snapstore import criu
from snapstore.criu import VmaStatus
from snapstore.units import PAGE_BYTES
from tests.support.criu import RealDumps


@pytest.mark.parametrize("name", criu.__all__)
def test_everything_is_documented(name: str):
    thing = getattr(criu, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert (inspect.getdoc(thing) or "").splitlines()[0].endswith("."), name


def test_nothing_is_public_by_accident():
    public = {name for name in vars(criu) if not name.startswith("_")} - {"annotations"}
    assert public == set(criu.__all__)


def read(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


def test_a_real_dump_reads_whole(real_dumps: RealDumps):
    """Goal: what real CRIU writes passes every check, and the parts fit each other.

    Method: parse all images of a dump, and follow ids from one image to the next.
    """
    folder = real_dumps.first
    (process,) = criu.parse_pstree(read(folder, "pstree.img"))
    inventory = criu.parse_inventory(read(folder, "inventory.img"))
    ids = criu.parse_ids(read(folder, f"ids-{process.pid}.img"))
    assert criu.own_namespaces(inventory, ids) == frozenset()
    assert {"net", "mnt", "pid"} <= ids.namespaces.keys()

    files = criu.parse_open_files(read(folder, "files.img"))
    assert files.regular == criu.parse_files(read(folder, "files.img"))
    descriptors = criu.parse_fdinfo(read(folder, f"fdinfo-{ids.files_id}.img"))
    assert {0, 1, 2} <= {one.fd for one in descriptors}
    assert {one.file_id for one in descriptors if one.kind == "file"} <= files.regular.keys()
    place = criu.parse_fs(read(folder, f"fs-{process.pid}.img"))
    assert files.regular[place.root_id].name == "/"
    assert Path(files.regular[place.cwd_id].name) == folder.parent / "home"

    memory = criu.parse_mm(read(folder, f"mm-{process.pid}.img"))
    assert memory.file_ids <= files.regular.keys()
    assert "python" in files.regular[memory.exe_file_id].name
    mapped = memory.vmas.mapped()
    assert len(mapped.having(VmaStatus.VDSO)) == 1

    pagemap = criu.parse_pagemap(read(folder, f"pagemap-{process.pid}.img"))
    last = mapped.ends.searchsorted(pagemap.vaddrs, side="right")
    assert (mapped.starts[last] <= pagemap.vaddrs).all()
    assert (pagemap.vaddrs + pagemap.counts * PAGE_BYTES <= mapped.ends[-1]).all()
    stats = criu.parse_dump_stats(read(folder, "stats-dump"))
    assert stats.pages_written * PAGE_BYTES == pagemap.present_bytes
    assert 0 < stats.frozen_us < 60_000_000
    assert not criu.parse_core(read(folder, f"core-{process.pid}.img")).is_dead
