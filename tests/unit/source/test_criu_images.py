import contextlib
import struct
import time
from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import FormatError, LimitExceeded, Malformed
from snapstore.source import criu_files, criu_images, criu_memory
from snapstore.source.criu_files import (
    MAGIC_FILES,
    MAGIC_REG_FILES,
    Descriptor,
    GhostFile,
    InetSocket,
    MappedFile,
    MemfdInode,
    RegularFile,
    Remap,
    Terminal,
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
    parse_tty_info,
)
from snapstore.source.criu_images import (
    MAGIC_CPUINFO,
    MAGIC_INVENTORY,
    MAGIC_PSTREE,
    Core,
    CpuInfo,
    DumpLog,
    DumpStats,
    Process,
    RestoreStats,
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
from snapstore.source.criu_memory import parse_mm
from snapstore.source.criu_pagemap import parse_pagemap
from tests.unit.source import builders
from tests.unit.source.builders import image, message


def entry(raw: bytes) -> bytes:
    """Make what stands in an image after its magic, or after other entries."""
    return struct.pack("<I", len(raw)) + raw


SAMPLES: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "pagemap": (parse_pagemap, builders.pagemap(1, (0x1000, 3, 6), (0x9000, 1, 4))),
    "inventory": (parse_inventory, builders.inventory((13, b"run"), (12, message((12, b"p"))))),
    "pstree": (parse_pstree, builders.pstree((5, 0, (5, 6)), (7, 5, (7,)))),
    "core": (parse_core, builders.core("python")),
    "mm": (parse_mm, builders.mm(1, 1, 2, 3)),
    "files": (parse_files, builders.files((1, "/a", 5, "0011223344556677"), (2, "/b", None, None))),
    "cpuinfo": (parse_cpuinfo, builders.cpuinfo()),
    "open-files": (
        parse_open_files,
        builders.files((1, "/a", 5, "0011223344556677")) + entry(builders.unix_socket(b"/s", 3)),
    ),
    "fdinfo": (parse_fdinfo, image(criu_files.MAGIC_FDINFO, message((1, 5), (3, 1), (4, 0)))),
    "fs": (parse_fs, image(criu_files.MAGIC_FS, message((1, 5), (2, 6)))),
    "remaps": (parse_remaps, image(criu_files.MAGIC_REMAPS, message((1, 5), (2, 6), (3, 1)))),
    "memfd": (
        parse_memfd,
        image(criu_files.MAGIC_MEMFD, message((1, b"m"), (4, 4096), (5, 7), (7, 1))),
    ),
    "tty": (
        parse_tty_info,
        image(criu_files.MAGIC_TTY_INFO, message((1, 7), (2, 1), (8, 0x8803), (12, b"\x08\x03"))),
    ),
    "ghost": (parse_ghost_file, image(criu_files.MAGIC_GHOST_FILE, message((3, 33152), (10, 5)))),
    "ids": (parse_ids, image(criu_images.MAGIC_IDS, message(*((n, n) for n in range(1, 13))))),
    "stats": (parse_dump_stats, builders.image(criu_images.MAGIC_STATS, message((1, b"\x08\x05")))),
}
MAY_END_ANYWHERE = {"pagemap", "pstree", "files", "open-files", "fdinfo", "remaps", "memfd", "tty"}
SAME_IMAGE = {"files": "open-files", "open-files": "files"}
FOUR_FILES = builders.files(*[(n, "/a", None, None) for n in range(4)])


# -- what each image says ---------------------------------------------------------------------


def test_an_inventory_of_criu_4_2():
    data = builders.inventory((10, 1), (12, message((12, b"cuda_plugin"))), (13, b"uuid"), (14, 1))
    parsed = parse_inventory(data)
    assert (parsed.image_version, parsed.lsm, parsed.plugins) == (2, "none", ("cuda_plugin",))
    assert (parsed.tcp_close, parsed.run_id, parsed.has_uprobes) == (True, "uuid", True)


def test_an_inventory_of_an_older_criu_says_less():
    parsed = parse_inventory(image(MAGIC_INVENTORY, message((1, 1), (6, 2)), common=False))
    assert (parsed.image_version, parsed.lsm, parsed.plugins) == (1, "apparmor", ())
    assert (parsed.tcp_close, parsed.run_id, parsed.has_uprobes) == (False, "", False)


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
    memory = parse_mm(builders.mm(4, 1, 2, 2))
    assert (memory.exe_file_id, memory.file_ids) == (4, frozenset({1, 2}))


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
    memories = [parse_mm(builders.mm(1, 2, 77)), parse_mm(builders.mm(1, 4))]
    assert mapped_files(files, memories) == (
        MappedFile("/exe", 10, "aa"),
        MappedFile("/lib", 20, None),
    )


def test_sockets_tell_their_addresses():
    v4 = builders.inet_socket(2, 1, 1, (b"\x7f\0\0\1", 80), (b"\x0a\1\2\3", 555))
    v6 = builders.inet_socket(10, 1, 10, (bytes(15) + b"\1", 443), (b"", 0))
    found = parse_open_files(image(MAGIC_FILES, v4, v6, builders.unix_socket(b"\0abstract", 3)))
    assert found.inet == (
        InetSocket(7, 77, 2, 1, 6, 1, "127.0.0.1", 80, "10.1.2.3", 555, 9),
        InetSocket(7, 77, 10, 1, 6, 10, "::1", 443, "", 0, 9),
    )
    assert [(one.is_listening, one.is_connected) for one in found.inet] == [
        (False, True),
        (True, False),
    ]
    assert found.unix == (UnixSocket(8, 88, 1, 1, 3, b"\0abstract", is_external=False),)
    assert found.kinds == {"inet-socket": 2, "unix-socket": 1}


def test_open_files_are_counted_by_kind_even_if_the_kind_is_new():
    data = builders.files((1, "/a", None, None)) + entry(message((1, 99), (2, 3)))
    data += entry(message((1, 18), (2, 4), (20, message((1, 4), (2, 2), (5, 6)))))
    found = parse_open_files(data)
    assert found.regular == parse_files(builders.files((1, "/a", None, None)))
    assert found.kinds == {"file": 1, "kind-99": 1, "memfd": 1}
    assert found.memfds == {4: 6}


def test_a_file_tells_its_mode_and_whether_it_comes_from_outside():
    data = message((1, 1), (2, 0o2), (6, b"/a"), (9, 1), (10, 0o40755))
    found = parse_files(image(MAGIC_FILES, message((1, 1), (2, 1), (3, data))))
    assert found == {1: RegularFile("/a", None, None, 0o40755, 0o2, is_external=True)}


def test_removed_files_of_old_images_and_of_unknown_kinds() -> None:
    old_ghost, old_link = message((1, 1), (2, 1 << 31 | 2)), message((1, 3), (2, 4))
    unknown = message((1, 5), (2, 6), (3, 7))
    assert parse_remaps(image(criu_files.MAGIC_REMAPS, old_ghost, old_link, unknown)) == (
        Remap(1, 2, "ghost", old_ghost),
        Remap(3, 4, "linked", old_link),
        Remap(5, 6, "kind-7", unknown),
    )


@pytest.mark.parametrize(
    "entry",
    [message((1, 1)), message((2, 1)), message((1, 1), (2, b"1")), message((1, 1), (2, 1 << 32))],
)
def test_removed_files_that_are_none(entry: bytes) -> None:
    with pytest.raises(FormatError):
        parse_remaps(image(criu_files.MAGIC_REMAPS, entry))


def test_small_images_about_files():
    two = message((1, 6), (2, 0), (3, 4), (4, 7))
    assert parse_fdinfo(SAMPLES["fdinfo"][1] + entry(two)) == (
        Descriptor(fd=0, file_id=5, kind="file"),
        Descriptor(fd=7, file_id=6, kind="inet-socket"),
    )
    assert parse_fs(SAMPLES["fs"][1]) == WorkingDirectory(cwd_id=5, root_id=6)
    linked = message((1, 8), (2, 1), (3, 0), (99, b"new"))
    assert parse_remaps(SAMPLES["remaps"][1] + entry(linked)) == (
        Remap(5, 6, "ghost", message((1, 5), (2, 6), (3, 1))),
        Remap(8, 1, "linked", linked),
    )
    assert parse_memfd(SAMPLES["memfd"][1]) == (MemfdInode(1, "m", 4096, 7),)
    master = message((1, 8), (2, 1), (8, 0x502), (12, message((1, 3))))
    console = message((1, 9), (2, 2), (8, 0x501))
    assert parse_tty_info(SAMPLES["tty"][1] + entry(master) + entry(console)) == (
        Terminal(7, 3, is_master=False),
        Terminal(8, 3, is_master=True),
        Terminal(9, None, is_master=False),
    )
    # The content of the file follows the head, and may look like anything.
    content = b"\xff" * 9
    assert parse_ghost_file(SAMPLES["ghost"][1] + content) == GhostFile(33152, 5)


def test_namespaces_that_differ_from_those_of_criu_are_the_images_own():
    outside = message(*((n, n) for n in range(1, 13)))
    inventory = parse_inventory(builders.inventory((3, outside)))
    assert inventory.namespaces["net"] == 6
    same = parse_ids(SAMPLES["ids"][1])
    assert (same.files_id, own_namespaces(inventory, same)) == (2, frozenset())
    fields = [(n, n) for n in range(1, 13) if n not in (5, 9)] + [(5, 55), (9, 99)]
    own = parse_ids(image(criu_images.MAGIC_IDS, message(*fields)))
    assert own_namespaces(inventory, own) == {"pid", "mnt"}
    # Where the inventory does not say what was outside, nothing is known to be inside.
    assert own_namespaces(parse_inventory(builders.inventory()), own) == frozenset()


def test_a_process_that_had_ended_has_no_memory():
    dead = message((1, TaskState.DEAD), (6, b"x"))
    assert parse_core(image(criu_images.MAGIC_CORE, message((1, 1), (3, dead)))).is_dead
    assert not parse_core(builders.core("x")).is_dead


def test_statistics_of_a_dump_and_of_a_restore():
    dump = message(*((n, n) for n in range(1, 15)))
    magics = struct.pack("<II", 0x55105940, criu_images.MAGIC_STATS)
    assert parse_dump_stats(magics + entry(message((1, dump)))) == DumpStats(
        1, 2, 3, 4, 5 + 12, 7 + 14, 9
    )
    restore = magics + entry(message((2, message((3, 30), (4, 40), (5, 50)))))
    assert parse_restore_stats(restore) == RestoreStats(30, 40, 50)
    with pytest.raises(Malformed, match="something else"):
        parse_dump_stats(restore)


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
        if other not in (name, SAME_IMAGE.get(name)):
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
        assert name in MAY_END_ANYWHERE  # after any whole entry


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
    ("module", "limit", "parse", "data"),
    [
        (criu_images, "PROCESSES_MAX", parse_pstree, builders.pstree(*[(5, 0, ())] * 4)),
        (criu_images, "THREADS_MAX", parse_pstree, builders.pstree((5, 0, (1, 2, 3, 4)))),
        (criu_images, "THREADS_MAX", parse_pstree, builders.pstree((5, 0, (1, 2)), (6, 0, (1, 2)))),
        (
            criu_files,
            "FILES_MAX",
            parse_files,
            builders.files(*[(n, "/a", None, None) for n in range(4)]),
        ),
        (criu_memory, "VMAS_MAX", parse_mm, builders.mm(1, 1, 2, 3)),
    ],
)
def test_large_limits_hold(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    limit: str,
    parse: Callable[[bytes], object],
    data: bytes,
):
    monkeypatch.setattr(module, limit, 3)
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
