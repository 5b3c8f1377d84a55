"""What is said of a snapshot before its restore, beside what CRIU then does with it."""

import contextlib
import dataclasses
import os
import resource
import shutil
import socket
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import snapstore
from snapagent.errors import PreflightFailed
from snapagent.preflight import (
    Images,
    Obstacle,
    RestoreConditions,
    add_machine,
    check_images,
    check_snapshot,
    read_images,
    require,
)
from snapagent.preflight.cpu import cpu_facts
from snapagent.preflight.elf import read_build_id
from snapagent.supervision import Place
from snapstore.criu import InetSocket, RegularFile, UnixSocket
from tests.support.obstructed import process_that
from tools.live_process import Criu, CriuFailedError

# Each needs a real dump.
pytestmark = pytest.mark.slow

BODY = """
import mmap
libs = []
for name in sorted(n for n in os.listdir('.') if n.startswith('lib')):
    with open(name, 'rb') as file:
        libs.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
keep = [open('data', 'rb'), open('log', 'ab'), socket.create_server(('127.0.0.1', 0))]
"""
ANY = "0.0.0.0"  # noqa: S104 - on a port that nobody knows, for a moment
SOURCE = "int answer(void) { return 42; }\n"


@dataclasses.dataclass(frozen=True)
class Dumped:
    """A dump of a process that is gone, whose id is free."""

    home: Path
    folder: Path
    images: Images
    requirements: dict[str, object]
    port: int


def build_library(path: Path, build_id: str) -> None:
    source = path.with_suffix(".c")
    source.write_text(SOURCE)
    subprocess.run(  # noqa: S603 - a compiler, and names made here
        ["cc", "-shared", "-fPIC", f"-Wl,--build-id=0x{build_id}", "-o", path, source],  # noqa: S607
        check=True,
    )
    source.unlink()


@contextlib.contextmanager
def dumped_process(criu: Criu, folder: Path) -> Iterator[Dumped]:
    """Dump a process that maps two libraries of its own and has some files open."""
    home, images = folder / "home", folder / "images"
    home.mkdir(parents=True)
    images.mkdir()
    build_library(home / "libone.so", "11" * 20)
    build_library(home / "libtwo.so", "22" * 20)
    (home / "data").write_bytes(b"0123456789")
    with process_that(BODY, home) as process:
        criu.dump(process.pid, images)
        process.wait()
        found = read_images(read_from(images))
        (listener,) = [one for one in found.files.inet if one.is_listening]
        yield Dumped(home, images, found, add_machine({}, criu.program), listener.source_port)


def read_from(folder: Path) -> Callable[[str], bytes | None]:
    def read(name: str) -> bytes | None:
        path = folder / name
        return path.read_bytes() if path.exists() else None

    return read


@pytest.fixture(scope="module")
def dumped(criu: Criu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dumped]:
    with dumped_process(criu, tmp_path_factory.mktemp("dumped")) as found:
        yield found


@pytest.fixture
def conditions(criu: Criu) -> RestoreConditions:
    return RestoreConditions(criu=criu.program)


def blocking(found: list[Obstacle]) -> set[str]:
    return {one.code for one in found if one.blocking}


def restores(criu: Criu, dumped: Dumped) -> bool:
    """Whether CRIU restores it; what it restored is ended at once."""
    pid = dumped.images.processes[0].pid
    try:
        criu.restore(dumped.folder)
    except CriuFailedError:
        return False
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return True


# -- as it was captured -----------------------------------------------------------------------


def test_what_can_be_restored_has_no_obstacle(
    criu: Criu, dumped: Dumped, conditions: RestoreConditions
):
    found = check_images(dumped.images, dumped.requirements, conditions=conditions)
    assert blocking(found) == set()
    require(found)
    assert restores(criu, dumped)


def test_through_a_store_it_is_the_same(
    criu: Criu, dumped: Dumped, conditions: RestoreConditions, tmp_path: Path
):
    with snapstore.init_store(f"file://{tmp_path}/store") as store:
        store.push(dumped.folder, "a:b")
        snapshot = store.snapshot("a:b")
        assert blocking(check_snapshot(snapshot, conditions=conditions)) == set()
        started = time.perf_counter()
        check_snapshot(snapshot, conditions=conditions)
        # It takes thirty milliseconds; the limit is for a machine with other work.
        assert time.perf_counter() - started < 1


def test_images_tell_how_much_memory_there_is(dumped: Dumped, conditions: RestoreConditions):
    pages = sum(path.stat().st_size for path in dumped.folder.glob("pages-*.img"))
    assert dumped.images.private_bytes + dumped.images.shared_bytes == pages
    huge = dataclasses.replace(dumped.images, private_bytes=1 << 50)
    assert blocking(check_images(huge, {}, conditions=conditions)) == {"memory"}


def test_a_snapshot_of_something_else(tmp_path: Path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_bytes(b"content")
    with snapstore.init_store(f"file://{tmp_path}/store") as store:
        store.push(tmp_path / "tree", "a:b")
        with pytest.raises(PreflightFailed, match="no dump of CRIU's"):
            check_snapshot(store.snapshot("a:b"))


# -- files ------------------------------------------------------------------------------------


def other_build(home: Path) -> None:
    size = (home / "libone.so").stat().st_size
    build_library(home / "libone.so", "33" * 20)
    assert (home / "libone.so").stat().st_size == size


def longer(home: Path) -> None:
    with (home / "libone.so").open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    ("change", "codes", "name"),
    [
        (other_build, {"mapped-file-differs"}, "libone.so"),
        (longer, {"mapped-file-differs"}, "libone.so"),
        (lambda home: (home / "libtwo.so").unlink(), {"mapped-file-missing"}, "libtwo.so"),
        (lambda home: (home / "data").unlink(), {"open-file-missing"}, "data"),
        (lambda home: (home / "data").write_bytes(b"x"), {"open-file-differs"}, "data"),
        (lambda home: (home / "data").chmod(0o600), {"open-file-differs"}, "data"),
        (lambda home: (home / "log").unlink(), {"open-file-missing"}, "log"),
    ],
    ids=["build", "size", "gone", "open-gone", "open-size", "open-mode", "log-gone"],
)
def test_a_changed_file_is_named_before_criu_starts(
    criu: Criu,
    conditions: RestoreConditions,
    tmp_path: Path,
    change: Callable[[Path], None],
    codes: set[str],
    name: str,
):
    """Goal: each file that CRIU would stop at is named, with exit code 7, and no other.

    Method: change one file between the dump and the check, then let CRIU try for real.
    """
    with dumped_process(criu, tmp_path) as dumped:
        change(dumped.home)
        found = check_images(dumped.images, dumped.requirements, conditions=conditions)
        assert blocking(found) == codes
        with pytest.raises(PreflightFailed, match=name) as caught:
            require(found, of="snapshot a:b", done="restored")
        assert caught.value.exit_code == 7
        assert not restores(criu, dumped)


def test_a_longer_log_is_no_obstacle(criu: Criu, conditions: RestoreConditions, tmp_path: Path):
    with dumped_process(criu, tmp_path) as dumped:
        (dumped.home / "log").write_bytes(b"another line\n")
        found = check_images(dumped.images, dumped.requirements, conditions=conditions)
        assert blocking(found) == set()
        assert restores(criu, dumped)


def test_files_are_looked_up_in_the_root_of_the_place(
    dumped: Dumped, conditions: RestoreConditions, tmp_path: Path
):
    """Goal: with a placeholder, its root counts, absolute symbolic links in it included.

    Method: a placeholder in a changed root that has one library behind such a link and no more.
    """
    root = tmp_path / "root"
    inner = root / dumped.home.relative_to("/")
    inner.parent.mkdir(parents=True)
    (root / "elsewhere").mkdir()
    shutil.copy2(dumped.home / "libone.so", root / "elsewhere")
    inner.symlink_to("/elsewhere")
    body = f"os.chroot({str(root)!r})"
    home = tmp_path / "home"
    home.mkdir()
    with process_that(body, home) as placeholder:
        place = Place(join_pid=placeholder.pid)
        found = check_images(dumped.images, {}, place, conditions)
    missing = {one.subject for one in found if one.code == "mapped-file-missing"}
    assert any("libtwo.so" in subject for subject in missing)
    assert not any("libone.so" in subject for subject in missing)


def test_a_placeholder_that_is_gone(dumped: Dumped, conditions: RestoreConditions, tmp_path: Path):
    with process_that("", tmp_path) as placeholder:
        pass
    found = check_images(dumped.images, {}, Place(join_pid=placeholder.pid), conditions)
    assert blocking(found) == {"place-gone"}


@pytest.mark.parametrize("name", ["/tmp/\\xff", "/tmp/\\\\xff", "/nowhere/at all"])  # noqa: S108
def test_odd_names_do_no_harm(dumped: Dumped, conditions: RestoreConditions, name: str):
    files = dataclasses.replace(
        dumped.images.files, regular={1 << 40: RegularFile(name, 5, None, stat.S_IFREG | 0o644)}
    )
    images = dataclasses.replace(dumped.images, files=files)
    found = check_images(images, {}, conditions=conditions)
    assert blocking(found) == {"open-file-missing"}


# -- process ids ------------------------------------------------------------------------------


def test_ids_that_are_taken_are_named(criu: Criu, conditions: RestoreConditions, tmp_path: Path):
    home, folder = tmp_path / "home", tmp_path / "images"
    home.mkdir()
    folder.mkdir()
    with process_that("", home) as process:
        criu.dump(process.pid, folder, leave_running=True)
        images = read_images(read_from(folder))
        found = check_images(images, {}, conditions=conditions)
        assert blocking(found) == {"pids-taken"}
        assert f"{process.pid} (python" in found[0].subject
        fresh = check_images(images, {}, Place(pids="fresh"), conditions)
        assert blocking(fresh) == set()
        joined = check_images(images, {}, Place(join_pid=process.pid), conditions)
        assert blocking(joined) == {"pids-taken"}
        own = dataclasses.replace(images, own_namespaces=frozenset({"pid"}))
        assert blocking(check_images(own, {}, conditions=conditions)) == set()


def test_ids_above_the_kernels_limit(dumped: Dumped, conditions: RestoreConditions):
    (process,) = dumped.images.processes
    large = dataclasses.replace(process, pid=1 << 30, threads=(1 << 30,))
    images = dataclasses.replace(dumped.images, processes=(large,))
    assert blocking(check_images(images, {}, conditions=conditions)) == {"pid-max"}


# -- the network ------------------------------------------------------------------------------


def with_sockets(dumped: Dumped, *sockets: InetSocket) -> Images:
    files = dataclasses.replace(dumped.images.files, inet=sockets)
    return dataclasses.replace(dumped.images, files=files)


def tcp(source: tuple[str, int], peer: tuple[str, int] = ("", 0), *, state: int = 10) -> InetSocket:
    family = socket.AF_INET6 if ":" in source[0] else socket.AF_INET
    return InetSocket(1, 2, family, socket.SOCK_STREAM, 6, state, *source, *peer, 1)


@pytest.mark.parametrize(
    ("taken", "captured", "is_blocked"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", ANY, True),
        (ANY, "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("::1", "::1", True),
        ("127.0.0.1", "::1", False),
    ],
)
def test_a_port_that_is_taken(
    dumped: Dumped, conditions: RestoreConditions, taken: str, captured: str, *, is_blocked: bool
):
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    with socket.create_server((taken, 0), family=family) as server:
        port = server.getsockname()[1]
        images = with_sockets(dumped, tcp((captured, port)))
        found = check_images(images, {}, conditions=conditions)
        assert blocking(found) == ({"port-taken"} if is_blocked else set())
        assert blocking(check_images(images, {}, Place(network="fresh"), conditions)) == set()


def test_a_port_is_free_where_a_placeholder_has_a_network_of_its_own(
    dumped: Dumped, conditions: RestoreConditions, tmp_path: Path
):
    body = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.unshare(0x40000000): raise OSError(ctypes.get_errno(), 'unshare')"
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        process_that(body, tmp_path) as placeholder,
    ):
        images = with_sockets(dumped, tcp(("127.0.0.1", server.getsockname()[1])))
        place = Place(join_pid=placeholder.pid)
        found = check_images(images, {}, place, conditions)
        # Nobody has set up its loopback device, so that it has no addresses yet.
        assert "port-taken" not in blocking(found)
        here = check_images(images, {}, conditions=conditions)
        assert "port-taken" in blocking(here)


def test_an_address_that_is_not_here(dumped: Dumped, conditions: RestoreConditions):
    images = with_sockets(dumped, tcp(("192.0.2.7", 80)))
    assert blocking(check_images(images, {}, conditions=conditions)) == {"address-missing"}
    fresh = Place(network="fresh")
    assert blocking(check_images(images, {}, fresh, conditions)) == {"address-missing"}
    given_it = Place(network="fresh", addresses=("192.0.2.7/32",))
    assert blocking(check_images(images, {}, given_it, conditions)) == set()


def test_connections(dumped: Dumped, conditions: RestoreConditions):
    """Goal: a connection that exists here forbids a second one; one to the outside is told of."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0],
    ):
        ends = (ours.getsockname(), server.getsockname())
        images = with_sockets(dumped, tcp(*ends, state=1))
        found = check_images(images, {}, conditions=conditions)
        assert blocking(found) == {"connection-taken"}
        assert "tcp-outside" in {one.code for one in found}
        fresh = check_images(images, {}, Place(network="fresh"), conditions)
        assert blocking(fresh) == set()
        closed = dataclasses.replace(conditions, tcp="close")
        assert blocking(check_images(images, {}, conditions=closed)) == set()
    both = with_sockets(
        dumped,
        tcp(("127.0.0.1", 5), ("127.0.0.1", 6), state=1),
        tcp(("127.0.0.1", 6), ("127.0.0.1", 5), state=1),
    )
    codes = {one.code for one in check_images(both, {}, conditions=conditions)}
    assert "tcp-outside" not in codes


def test_an_abstract_name_that_is_taken(dumped: Dumped, conditions: RestoreConditions):
    name = f"\0preflight-{os.getpid()}".encode()
    files = dataclasses.replace(
        dumped.images.files,
        unix=(UnixSocket(1, 2, socket.SOCK_STREAM, 10, 0, name, is_external=False),),
    )
    images = dataclasses.replace(dumped.images, files=files)
    assert blocking(check_images(images, {}, conditions=conditions)) == set()
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(name)
        assert blocking(check_images(images, {}, conditions=conditions)) == {"name-taken"}


# -- the machine ------------------------------------------------------------------------------


def test_requirements_say_what_machine_it_was(criu: Criu):
    found = add_machine({"kernel": "1.2.3", "criu": {"image_version": 2}}, criu.program)
    assert found["kernel"] == "1.2.3"
    assert found["machine"] == os.uname().machine
    assert found["page_bytes"] == resource.getpagesize()
    assert found["criu"] == {"image_version": 2, "version": criu.version()}
    assert found["cpu"] == cpu_facts()
    assert cpu_facts()["flags"]


@pytest.mark.parametrize(
    ("key", "value", "expected", "blocks"),
    [
        ("machine", "s390x", "machine", True),
        ("page_bytes", 65536, "page-size", True),
        ("kernel", "99.9.9-future", "kernel-differs", False),
        ("kernel", "5.4.0", "kernel-differs", False),
        ("criu", {"version": "99.1"}, "criu-older", False),
        ("cpu", {"flags": ["avx99", "amx_future"], "vendor": "here"}, "cpu-features", True),
        ("cpu", {"flags": [], "vendor": "SomebodyElse"}, "cpu-vendor", False),
    ],
)
def test_another_machine(
    dumped: Dumped,
    conditions: RestoreConditions,
    key: str,
    value: object,
    expected: str,
    *,
    blocks: bool,
):
    found = check_images(dumped.images, {key: value}, conditions=conditions)
    assert any(one.code == expected and one.blocking == blocks for one in found)


def test_flags_of_the_kernel_do_not_matter(dumped: Dumped, conditions: RestoreConditions):
    cpu = {"flags": ["pti", "ibrs", "hypervisor", "arch_perfmon"], "vendor": cpu_facts()["vendor"]}
    found = check_images(dumped.images, {"cpu": cpu}, conditions=conditions)
    assert blocking(found) == set()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from(["machine", "kernel", "criu", "cpu", "page_bytes"]),
        JSON | st.fixed_dictionaries({"version": JSON, "flags": JSON, "vendor": JSON}),
    )
)
def test_requirements_of_anybody_do_no_harm(
    dumped: Dumped, conditions: RestoreConditions, requirements: dict[str, object]
):
    for one in check_images(dumped.images, requirements, conditions=conditions):
        assert len(str(one)) < 3000


def test_the_work_directory(dumped: Dumped, conditions: RestoreConditions, tmp_path: Path):
    for changed in (
        dataclasses.replace(conditions, work_directory=tmp_path / "nowhere"),
        dataclasses.replace(conditions, work_directory=tmp_path, work_bytes=1 << 60),
    ):
        found = check_images(dumped.images, {}, conditions=changed)
        assert blocking(found) == {"work-directory"}


# -- build ids --------------------------------------------------------------------------------


def test_build_ids_are_those_that_criu_reads(dumped: Dumped):
    known = [file for file in dumped.images.files.regular.values() if file.build_id is not None]
    assert {"11" * 20, "22" * 20} <= {file.build_id for file in known}
    assert len(known) > 3
    for file in known:
        with Path(file.name).open("rb") as opened:
            assert read_build_id(opened.fileno()) == file.build_id, file.name


def elf32(order: str, note: bytes) -> bytes:
    """Build a file of 32 bits with one segment of notes."""
    ident = b"\x7fELF\x01" + (b"\x02" if order == ">" else b"\x01") + bytes(10)
    header = struct.pack(order + "HHIIIIIHHHHHH", 3, 8, 1, 0, 52, 0, 0, 52, 32, 1, 0, 0, 0)
    segment = struct.pack(order + "IIIIIIII", 4, 84, 0, 0, len(note), len(note), 4, 4)
    return ident + header + segment + note


@pytest.mark.parametrize("order", ["<", ">"])
def test_files_of_other_machines_have_build_ids_too(tmp_path: Path, order: str):
    other = struct.pack(order + "III", 4, 2, 1) + b"GNU\0" + b"ab\0\0"
    note = other + struct.pack(order + "III", 4, 3, 3) + b"GNU\0" + b"\x01\x02\x03\0"
    (tmp_path / "elf").write_bytes(elf32(order, note))
    with (tmp_path / "elf").open("rb") as file:
        assert read_build_id(file.fileno()) == "010203"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_file_does_more_than_have_no_build_id(tmp_path: Path, data: st.DataObject):
    good = elf32("<", struct.pack("<III", 4, 4, 3) + b"GNU\0abcd")
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "elf").write_bytes(damaged[: data.draw(st.integers(0, len(good)))])
    with (tmp_path / "elf").open("rb") as file, contextlib.suppress(OSError):
        read_build_id(file.fileno())
