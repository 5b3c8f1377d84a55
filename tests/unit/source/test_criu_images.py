import contextlib
import struct
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import FormatError, LimitExceeded, Malformed
from snapstore.source import criu_images
from snapstore.source.criu_images import (
    MAGIC_CPUINFO,
    MAGIC_FILES,
    MAGIC_INVENTORY,
    MAGIC_PSTREE,
    MAGIC_REG_FILES,
    Core,
    CpuInfo,
    DumpLog,
    MappedFile,
    Memory,
    Process,
    RegularFile,
    mapped_files,
    parse_core,
    parse_cpuinfo,
    parse_dump_log,
    parse_files,
    parse_inventory,
    parse_mm,
    parse_pstree,
)
from snapstore.source.criu_pagemap import parse_pagemap
from tests.unit.source import builders
from tests.unit.source.builders import image, message

SAMPLES: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "pagemap": (parse_pagemap, builders.pagemap(1, (0x1000, 3, 6), (0x9000, 1, 4))),
    "inventory": (parse_inventory, builders.inventory((13, b"run"), (12, message((12, b"p"))))),
    "pstree": (parse_pstree, builders.pstree((5, 0, (5, 6)), (7, 5, (7,)))),
    "core": (parse_core, builders.core("python")),
    "mm": (parse_mm, builders.mm(1, 1, 2, 3)),
    "files": (parse_files, builders.files((1, "/a", 5, "0011223344556677"), (2, "/b", None, None))),
    "cpuinfo": (parse_cpuinfo, builders.cpuinfo()),
}


# -- what each image says ---------------------------------------------------------------------


def test_an_inventory_of_criu_4_2():
    data = builders.inventory((10, 1), (12, message((12, b"cuda_plugin"))), (13, b"uuid"), (14, 1))
    parsed = parse_inventory(data)
    assert (parsed.image_version, parsed.lsm, parsed.plugins) == (2, "none", ("cuda_plugin",))
    assert (parsed.tcp_close, parsed.has_run_id, parsed.has_uprobes) == (True, True, True)


def test_an_inventory_of_an_older_criu_says_less():
    parsed = parse_inventory(image(MAGIC_INVENTORY, message((1, 1), (6, 2)), common=False))
    assert (parsed.image_version, parsed.lsm, parsed.plugins) == (1, "apparmor", ())
    assert (parsed.tcp_close, parsed.has_run_id, parsed.has_uprobes) == (False, False, False)


def test_a_process_tree_with_threads_in_both_encodings():
    packed = message((1, 9), (2, 5), (3, 9), (4, 5), (5, b"\x09\x8a\x01"))
    data = builders.pstree((5, 0, (5, 6)))
    data += struct.pack("<I", len(packed)) + packed
    assert parse_pstree(data) == (
        Process(pid=5, ppid=0, pgid=5, sid=5, threads=(5, 6)),
        Process(pid=9, ppid=5, pgid=9, sid=5, threads=(9, 138)),
    )


def test_a_core_tells_architecture_and_name():
    assert parse_core(builders.core("python", 3)) == Core(machine="aarch64", name="python")
    assert parse_core(builders.core("x", 99)).machine == "machine-99"
    # A thread other than the main one has no task part.
    assert parse_core(image(criu_images.MAGIC_CORE, message((1, 1)))).name == ""


def test_a_memory_image_tells_which_files_are_mapped():
    assert parse_mm(builders.mm(4, 1, 2, 2)) == Memory(exe_file_id=4, file_ids=frozenset({1, 2}))


def test_regular_files_by_id():
    data = builders.files((1, "/a", 5, "00112233aabbccdd"), (2, "/\u00e9", None, None))
    other = message((1, 5), (2, 9), (7, b"some socket"))
    data += struct.pack("<I", len(other)) + other
    assert parse_files(data) == {
        1: RegularFile(name="/a", size_bytes=5, build_id="00112233aabbccdd"),
        2: RegularFile(name="/\u00e9", size_bytes=None, build_id=None),
    }


def test_files_of_a_very_old_criu_are_an_image_of_their_own():
    data = image(MAGIC_REG_FILES, message((1, 3), (2, 0), (6, b"/\xff")))
    assert parse_files(data) == {3: RegularFile(name="/\\xff", size_bytes=None, build_id=None)}


def test_mapped_files_are_those_that_some_process_maps_or_executes():
    files = {
        1: RegularFile("/exe", 10, "aa"),
        2: RegularFile("/lib", 20, None),
        3: RegularFile("/log", None, None),
        4: RegularFile("/lib", 20, None),
    }
    memories = [Memory(1, frozenset({2, 77})), Memory(1, frozenset({4}))]
    assert mapped_files(files, memories) == (
        MappedFile("/exe", 10, "aa"),
        MappedFile("/lib", 20, None),
    )


def test_processors_are_listed_once():
    cpu = CpuInfo("intel", 6, 143, 8, "Xeon", (0xABCD, 7))
    assert parse_cpuinfo(builders.cpuinfo()) == (cpu,)


def test_the_log_tells_versions_if_it_was_detailed_enough():
    log = (
        b"(00.000000) Version: 4.2.1 (gitid v4.2-5-gdeadbee)\n"
        b"(00.000012) Running on node-7 Linux 6.8.0-100-generic #100 SMP x y 2026 x86_64\n"
        b"(00.000020) more\n"
    )
    assert parse_dump_log(log) == DumpLog("4.2.1", "6.8.0-100-generic", "x86_64")
    assert parse_dump_log(b"Error (criu/util.c:1534): rlimit\n") == DumpLog()


# -- hostile images ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_every_image_parses_whole_and_only_as_itself(name: str):
    parse, data = SAMPLES[name]
    assert parse(data)
    for other, (parse_other, _) in SAMPLES.items():
        if other != name:
            with pytest.raises(Malformed, match="magic"):
                parse_other(data)


@pytest.mark.parametrize("name", SAMPLES)
def test_cut_short_anywhere_it_is_refused_or_has_fewer_entries(name: str):
    parse, data = SAMPLES[name]
    for length in range(len(data)):
        try:
            parse(data[:length])
        except FormatError:
            continue
        assert name in {"pagemap", "pstree", "files"}  # which end after any whole entry


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_flipped_bits_never_do_more_than_refuse(name: str, data: st.DataObject):
    parse, sample = SAMPLES[name]
    damaged = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(FormatError):
        parse(bytes(damaged))


@given(st.sampled_from(sorted(SAMPLES)), st.lists(st.binary(max_size=60), max_size=5))
def test_arbitrary_messages_never_do_more_than_refuse(name: str, messages: list[bytes]):
    parse, sample = SAMPLES[name]
    head = sample[:4] if name == "inventory" else sample[:8]
    entries = b"".join(struct.pack("<I", len(m)) + m for m in messages)
    with contextlib.suppress(FormatError):
        parse(head + entries)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_do_more_than_refuse(data: bytes):
    for parse, _ in SAMPLES.values():
        with pytest.raises(FormatError):
            parse(data)
    parse_dump_log(data)


@pytest.mark.parametrize(
    ("parse", "data"),
    [
        pytest.param(
            parse_inventory,
            builders.inventory((12, message(*[(12, b"p")] * 65))),
            id="plugins",
        ),
        pytest.param(parse_core, builders.core("n" * 257), id="name"),
        pytest.param(parse_files, builders.files((1, "/" + "n" * 4096, None, None)), id="path"),
        pytest.param(parse_files, builders.files((1, "/a", None, "00" * 4 * 129)), id="build id"),
        pytest.param(
            parse_cpuinfo,
            image(MAGIC_CPUINFO, message(*[(2, b"")] * 4097)),
            id="processors",
        ),
    ],
)
def test_counts_and_lengths_are_limited(parse: Callable[[bytes], object], data: bytes):
    with pytest.raises(LimitExceeded):
        parse(data)


@pytest.mark.parametrize(
    ("limit", "parse", "data"),
    [
        ("PROCESSES_MAX", parse_pstree, builders.pstree(*[(5, 0, ())] * 4)),
        ("THREADS_MAX", parse_pstree, builders.pstree((5, 0, (1, 2, 3, 4)))),
        ("THREADS_MAX", parse_pstree, builders.pstree((5, 0, (1, 2)), (6, 0, (1, 2)))),
        ("FILES_MAX", parse_files, builders.files(*[(n, "/a", None, None) for n in range(4)])),
        ("FILES_MAX", parse_mm, builders.mm(1, 1, 2, 3, 4)),
    ],
)
def test_large_limits_hold(
    monkeypatch: pytest.MonkeyPatch, limit: str, parse: Callable[[bytes], object], data: bytes
):
    monkeypatch.setattr(criu_images, limit, 3)
    with pytest.raises(LimitExceeded):
        parse(data)


@pytest.mark.parametrize(
    "data",
    [
        image(MAGIC_PSTREE),
        image(MAGIC_PSTREE, message((1, 5), (2, 0), (3, 5))),
        image(MAGIC_PSTREE, message((1, 2**32), (2, 0), (3, 5), (4, 5))),
        image(MAGIC_PSTREE, message((1, b"x"), (2, 0), (3, 5), (4, 5))),
    ],
)
def test_incomplete_processes_are_refused(data: bytes):
    with pytest.raises(Malformed):
        parse_pstree(data)


def test_a_file_without_a_name_is_refused():
    with pytest.raises(Malformed, match="without id or name"):
        parse_files(image(MAGIC_FILES, message((1, 1), (2, 1), (3, message((1, 1))))))


@pytest.mark.slow
def test_a_megabyte_of_nothing_but_fields_takes_linear_time():
    """Give each parser one entry full of the smallest fields: some seconds at the very most."""
    filler = message((1, 1), (2, 2)) + b"\x78\x01" * (1 << 18)
    for parse, sample in SAMPLES.values():
        start = time.perf_counter()
        head = sample[:4] if parse is parse_inventory else sample[:8]
        with contextlib.suppress(FormatError):
            parse(head + struct.pack("<I", len(filler)) + filler)
        assert time.perf_counter() - start < 20
