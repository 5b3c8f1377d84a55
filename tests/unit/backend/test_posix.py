"""`PosixBackend` beyond the contract: errors, hostile directories, leftovers of the dead."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from snapstore.backend.base import ObjectKind
from snapstore.backend.descriptors import DESCRIPTOR_AGE_S_MAX
from snapstore.backend.files import OsFileCalls
from snapstore.backend.layout import TEMPORARIES
from snapstore.backend.posix import PosixBackend
from snapstore.backend.posix_tree import TRIES_MAX
from snapstore.errors import (
    AccessDenied,
    BackendError,
    CapabilityMissing,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    SnapError,
    TransientBackendError,
)
from snapstore.testing.clock import ManualClock
from snapstore.testing.contract_objects import read
from snapstore.testing.faults import KillableFiles, Killed
from snapstore.testing.nfs import NfsCall, NfsClient, NfsFault, NfsFaults, NfsServer
from tests.support.processes import open_fds

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

PACK = "5a" * 32
REF = "team/x/@v1/00000001"
ROOT = Path("/export/store")


class Mount:
    """A store on a double of NFS, with one healthy client beside the one that fails."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.server = NfsServer(self.clock)
        self.healthy = PosixBackend.create(ROOT, clock=self.clock, files=self.client())

    def client(self, *planned: tuple[int, NfsFault]) -> NfsClient:
        return NfsClient(self.server, self.clock, faults=NfsFaults(planned))

    def backend(self, *planned: tuple[int, NfsFault]) -> PosixBackend:
        return PosixBackend(ROOT, clock=self.clock, files=self.client(*planned))

    def temporaries(self) -> list[str]:
        return self.client().listdir(str(ROOT / TEMPORARIES))


@pytest.fixture
def mount() -> Mount:
    return Mount()


@pytest.fixture
def store(tmp_path: Path) -> PosixBackend:
    return PosixBackend.create(tmp_path / "store")


def is_there(mount: Mount, kind: ObjectKind = ObjectKind.REF, name: str = REF) -> bool:
    try:
        mount.backend().stat(kind, name)
    except ObjectNotFound:
        return False
    return True


class Refusing(OsFileCalls):
    """The real calls, except that `link` fails in one way."""

    def __init__(self, number: int) -> None:
        self.number = number

    @override
    def link(self, source: str, target: str) -> None:
        raise OSError(self.number, os.strerror(self.number))


# --- errors of writing ---


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [
        ("open", errno.ENOSPC, OutOfSpace),
        ("open", errno.EROFS, AccessDenied),
        ("open", errno.EACCES, AccessDenied),
        ("open", errno.EMFILE, TransientBackendError),
        ("writev", errno.ENOSPC, OutOfSpace),
        ("writev", errno.EIO, TransientBackendError),
        ("writev", errno.EFBIG, BackendError),
        ("fsync", errno.EIO, TransientBackendError),
        ("fsync", errno.ENOSPC, OutOfSpace),
        ("fsync", errno.EDQUOT, OutOfSpace),
        ("close", errno.EIO, TransientBackendError),
        ("close", errno.EDQUOT, OutOfSpace),
        ("mkdir", errno.ENOSPC, OutOfSpace),
        ("mkdir", errno.EACCES, AccessDenied),
        ("link", errno.ENOSPC, OutOfSpace),
        ("link", errno.EROFS, AccessDenied),
        ("link", errno.EIO, TransientBackendError),
        ("link", errno.ETIMEDOUT, TransientBackendError),
        ("link", errno.EINVAL, BackendError),
        ("link", errno.EPERM, CapabilityMissing),
        ("link", errno.EOPNOTSUPP, CapabilityMissing),
        ("link", errno.EXDEV, CapabilityMissing),
    ],
)
def test_a_failed_write_leaves_nothing(
    mount: Mount, call: NfsCall, number: int, error: type[SnapError]
) -> None:
    """Let the n-th call of its sort fail that belongs to the writing itself."""
    first = {"open": 1}.get(call, 0)
    backend = mount.backend((first, NfsFault(call, number)))
    with pytest.raises(error) as caught:
        backend.put_new(ObjectKind.REF, REF, [b"data"])
    assert type(caught.value) is error
    assert REF in str(caught.value)
    assert not is_there(mount)
    assert mount.temporaries() == []
    backend.put_new(ObjectKind.REF, REF, [b"data"])
    assert read(mount.backend(), ObjectKind.REF, REF) == b"data"


@pytest.mark.parametrize("kind", [ObjectKind.REF, ObjectKind.PACK])
@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_a_link_whose_reply_was_lost_succeeded(mount: Mount, number: int, kind: ObjectKind) -> None:
    name = REF if kind is ObjectKind.REF else PACK
    # The first link finds no folders, so the second is the one that happens.
    files = KillableFiles(mount.client((1, NfsFault("link", number, done=True))))
    PosixBackend(ROOT, clock=mount.clock, files=files).put_new(kind, name, [b"data"])
    assert read(mount.backend(), kind, name) == b"data"
    # It is recognised as our own file, without reading it.
    assert "pread" not in {call.call for call in files.calls}
    assert mount.temporaries() == []


def test_a_lost_race_with_a_lost_reply_is_lost(mount: Mount) -> None:
    mount.healthy.put_new(ObjectKind.REF, REF, [b"data"])
    backend = mount.backend((0, NfsFault("link", errno.EIO)))
    with pytest.raises(ObjectExists):
        backend.put_new(ObjectKind.REF, REF, [b"date"])


def test_a_name_that_another_client_freed_is_taken(mount: Mount) -> None:
    """Make the client believe a name to be there that is not, and write it."""
    files = mount.client()
    backend = PosixBackend(ROOT, clock=mount.clock, files=files)
    mount.healthy.put_new(ObjectKind.REF, REF, [b"old"])
    backend.stat(ObjectKind.REF, REF)
    mount.healthy.delete(ObjectKind.REF, REF)
    assert files.lstat(f"{ROOT}/refs/{REF}").size_bytes == 3
    backend.put_new(ObjectKind.REF, REF, [b"new"])
    assert read(mount.backend(), ObjectKind.REF, REF) == b"new"


def test_a_pack_that_another_client_removed_is_written_again(mount: Mount) -> None:
    """*Already present* must not be believed of a cache."""
    files = mount.client()
    backend = PosixBackend(ROOT, clock=mount.clock, files=files)
    backend.put_new(ObjectKind.PACK, PACK, [b"pack"])
    backend.stat(ObjectKind.PACK, PACK)
    mount.healthy.delete(ObjectKind.PACK, PACK)
    assert files.lstat(f"{ROOT}/packs/5a/{PACK}").size_bytes == 4
    backend.put_new(ObjectKind.PACK, PACK, [b"pack"])
    assert is_there(mount, ObjectKind.PACK, PACK)


def test_a_removed_object_is_gone_though_its_file_lives_on(mount: Mount) -> None:
    """Let the writer's temporary file stay: the server keeps the file, under that name only."""
    backend = mount.backend(*((at, NfsFault("unlink", errno.EIO)) for at in range(4)))
    for kind, name in ((ObjectKind.REF, REF), (ObjectKind.PACK, PACK)):
        backend.put_new(kind, name, [b"data"])
        backend.stat(kind, name)
        mount.healthy.delete(kind, name)
        backend.put_new(kind, name, [b"data"])
        assert is_there(mount, kind, name)
        mount.healthy.delete(kind, name)
        with pytest.raises(ObjectNotFound):
            backend.stat(kind, name)


def test_a_folder_whose_sync_failed_is_synced_by_the_retry(tmp_path: Path) -> None:
    """Let each directory sync fail in turn; the next try must sync that directory again."""
    root = tmp_path / "store"
    PosixBackend.create(root)

    class FailingSync(OsFileCalls):
        left = -1

        @override
        def fsync(self, fd: int) -> None:
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EIO, "injected")
            super().fsync(fd)

    for number in range(1, 6):
        inner = FailingSync()
        files = KillableFiles(inner)
        backend = PosixBackend(root, files=files)
        name = f"n{number}/@v/00000001"
        inner.left = number
        with pytest.raises(TransientBackendError):
            backend.put_new(ObjectKind.REF, name, [b"x"])
        failed = [call.path for call in files.calls if call.call == "fsync"][-1]
        files.calls.clear()
        backend.put_new(ObjectKind.REF, name, [b"x"])
        if not failed.startswith(f"{root}/{TEMPORARIES}/"):
            assert failed in {call.path for call in files.calls if call.call == "fsync"}
        assert [*(root / "tmp").iterdir()] == []


def test_bytes_that_a_file_system_swallows_are_missed(tmp_path: Path) -> None:
    PosixBackend.create(tmp_path / "s")

    class Swallowing(OsFileCalls):
        @override
        def writev(self, fd: int, pieces: Sequence[memoryview]) -> int:
            return super().writev(fd, [pieces[0][:-1]]) + 1

    backend = PosixBackend(tmp_path / "s", files=Swallowing())
    with pytest.raises(TransientBackendError, match="4 bytes stored of 5"):
        backend.put_new(ObjectKind.REF, REF, [b"bytes"])
    with pytest.raises(ObjectNotFound):
        backend.stat(ObjectKind.REF, REF)


def test_deleted_objects_are_not_held_open(tmp_path: Path) -> None:
    """Whoever deletes or rewrites an object gives its space back at once."""
    store = PosixBackend.create(tmp_path / "s")
    into = memoryview(bytearray(1))
    opened = open_fds()
    store.put_new(ObjectKind.PACK, PACK, [b"x"])
    store.get_range(ObjectKind.PACK, PACK, 0, into)
    store.delete(ObjectKind.PACK, PACK)
    assert open_fds() == opened
    store.put_new(ObjectKind.PACK, PACK, [b"x"])
    store.get_range(ObjectKind.PACK, PACK, 0, into)
    PosixBackend(tmp_path / "s").delete(ObjectKind.PACK, PACK)
    store.put_new(ObjectKind.PACK, PACK, [b"x"])
    assert open_fds() == opened


def test_no_descriptor_is_synced_twice(tmp_path: Path) -> None:
    files = KillableFiles(OsFileCalls())
    PosixBackend.create(tmp_path / "s")
    PosixBackend(tmp_path / "s", files=files).put_new(ObjectKind.PACK, PACK, [b"x"])
    synced = [call.path for call in files.calls if call.call == "fsync"]
    assert len(set(synced)) == len(synced)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_folders_that_cannot_be_synced_are_refused(mount: Mount, number: int) -> None:
    with pytest.raises(CapabilityMissing, match="durable"):
        mount.backend((1, NfsFault("fsync", number))).put_new(ObjectKind.REF, REF, [b"x"])


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV])
def test_a_file_system_without_links_is_refused(tmp_path: Path, number: int) -> None:
    PosixBackend.create(tmp_path / "s")
    backend = PosixBackend(tmp_path / "s", files=Refusing(number))
    with pytest.raises(CapabilityMissing, match="hard links") as caught:
        backend.put_new(ObjectKind.REF, REF, [b"x"])
    assert "S3" in caught.value.next_step
    assert [*(tmp_path / "s" / "tmp").iterdir()] == []


def test_a_link_that_never_works_is_given_up(tmp_path: Path) -> None:
    PosixBackend.create(tmp_path / "s")
    files = KillableFiles(Refusing(errno.EEXIST))
    with pytest.raises(TransientBackendError):
        PosixBackend(tmp_path / "s", files=files).put_new(ObjectKind.REF, REF, [b"x"])
    assert sum(call.call == "link" for call in files.calls) == TRIES_MAX


def test_a_store_that_goes_away_is_no_missing_object(store: PosixBackend, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(TransientBackendError, match="went away"):
        store.put_new(ObjectKind.REF, REF, [b"x"])


def test_a_swept_temporary_file_is_a_transient_error(tmp_path: Path) -> None:
    PosixBackend.create(tmp_path / "s")

    class Swept(OsFileCalls):
        @override
        def link(self, source: str, target: str) -> None:
            Path(source).unlink(missing_ok=True)
            super().link(source, target)

    with pytest.raises(TransientBackendError):
        PosixBackend(tmp_path / "s", files=Swept()).put_new(ObjectKind.REF, REF, [b"x"])


def test_short_writes_and_reads_are_completed(mount: Mount, rng: random.Random) -> None:
    data = rng.randbytes(1000)
    plan = [(number, NfsFault(call, 0)) for number in range(5) for call in ("writev", "pread")]
    backend = mount.backend(*plan)
    backend.put_new(ObjectKind.PACK, PACK, [data[:10], data[10:11], data[11:]])
    assert read(backend, ObjectKind.PACK, PACK) == data


# --- errors of reading ---


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [
        ("open", errno.ENOENT, ObjectNotFound),
        ("open", errno.ELOOP, ObjectNotFound),
        ("open", errno.ENXIO, ObjectNotFound),
        ("open", errno.EACCES, AccessDenied),
        ("open", errno.EIO, TransientBackendError),
        ("pread", errno.EIO, TransientBackendError),
        ("pread", errno.EISDIR, BackendError),
    ],
)
def test_a_failed_read_names_the_object(
    mount: Mount, call: NfsCall, number: int, error: type[SnapError]
) -> None:
    mount.healthy.put_new(ObjectKind.PACK, PACK, [b"data"])
    # Every call of the sort but the one that opens the store.
    plan = [(at, NfsFault(call, number)) for at in range(call == "open", 20)]
    with pytest.raises(error, match=PACK) as caught:
        mount.backend(*plan).get_range(ObjectKind.PACK, PACK, 0, memoryview(bytearray(4)))
    assert type(caught.value) is error


@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_stale_handle_is_opened_again_a_few_times(mount: Mount, call: NfsCall) -> None:
    mount.healthy.put_new(ObjectKind.PACK, PACK, [b"data"])
    first = call == "open"
    few = [(first + at, NfsFault(call, errno.ESTALE)) for at in range(TRIES_MAX - 1)]
    into = bytearray(4)
    mount.backend(*few).get_range(ObjectKind.PACK, PACK, 0, memoryview(into))
    assert into == b"data"
    assert mount.backend(*few).stat(ObjectKind.PACK, PACK).size_bytes == 4
    many = [*few, (first + TRIES_MAX - 1, NfsFault(call, errno.ESTALE))]
    with pytest.raises(TransientBackendError):
        mount.backend(*many).get_range(ObjectKind.PACK, PACK, 0, memoryview(into))


def test_a_removed_object_is_noticed_through_an_open_descriptor(mount: Mount) -> None:
    backend = mount.backend()
    into = memoryview(bytearray(4))
    mount.healthy.put_new(ObjectKind.PACK, PACK, [b"data"])
    backend.get_range(ObjectKind.PACK, PACK, 0, into)
    mount.healthy.delete(ObjectKind.PACK, PACK)
    mount.clock.advance_s(DESCRIPTOR_AGE_S_MAX + 1)
    with pytest.raises(ObjectNotFound):
        backend.get_range(ObjectKind.PACK, PACK, 0, into)


def test_a_repaired_object_is_noticed_when_it_grew(tmp_path: Path) -> None:
    PosixBackend.create(tmp_path / "s")
    reader, repairer = PosixBackend(tmp_path / "s"), PosixBackend(tmp_path / "s")
    repairer.put_new(ObjectKind.PACK, PACK, [b"tor"])
    into = bytearray(3)
    reader.get_range(ObjectKind.PACK, PACK, 0, memoryview(into))
    repairer.delete(ObjectKind.PACK, PACK)
    repairer.put_new(ObjectKind.PACK, PACK, [b"whole"])
    into = bytearray(5)
    reader.get_range(ObjectKind.PACK, PACK, 0, memoryview(into))
    assert into == b"whole"


def test_descriptors_are_bounded_and_closed(tmp_path: Path) -> None:
    PosixBackend.create(tmp_path / "s")
    opened = open_fds()
    store = PosixBackend(tmp_path / "s")
    names = [f"{number:064x}" for number in range(100)]
    for name in names:
        store.put_new(ObjectKind.PACK, name, [b"x"])
        store.get_range(ObjectKind.PACK, name, 0, memoryview(bytearray(1)))
    held = open_fds() - opened
    assert held == 64
    store.close()
    assert open_fds() == opened


def test_listings_pass_over_what_vanishes(mount: Mount) -> None:
    """Give the client an old listing of files and folders, some of which are gone."""
    backend = mount.backend()
    for number in range(1, 4):
        mount.healthy.put_new(ObjectKind.REF, f"a/@v/{number:08d}", [b"x"])
    assert len([*backend.list(ObjectKind.REF)]) == 3
    mount.healthy.delete(ObjectKind.REF, "a/@v/00000002")
    mount.clock.advance_s(30)
    # Attributes are fresh from here on, the listing is not.
    for name in ("a/@v/00000001", "a/@v/00000003"):
        backend.stat(ObjectKind.REF, name)
    backend.delete(ObjectKind.REF, "a/@v/00000002")
    assert sorted(info.name[-1] for info in backend.list(ObjectKind.REF, "a/@v/")) == ["1", "3"]


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [("listdir", errno.EIO, TransientBackendError), ("listdir", errno.EACCES, AccessDenied),
     ("lstat", errno.EIO, TransientBackendError)],
)  # fmt: skip
def test_a_listing_that_cannot_be_complete_fails(
    mount: Mount, call: NfsCall, number: int, error: type[SnapError]
) -> None:
    mount.healthy.put_new(ObjectKind.REF, REF, [b"x"])
    with pytest.raises(error):
        [*mount.backend((1, NfsFault(call, number))).list(ObjectKind.REF)]


# --- hostile directories ---


def litter(folder: Path, name: str) -> list[Path]:
    """Put one of everything that is no object into a folder."""
    made = [folder / f"{name}.{sort}" for sort in ("fifo", "socket", "link", "dir", "loop")]
    os.mkfifo(made[0])
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(made[1]))
    made[2].symlink_to("/etc/passwd")
    made[3].mkdir()
    made[4].symlink_to(made[4].name)
    return made


def test_only_objects_are_listed(store: PosixBackend, tmp_path: Path) -> None:
    root = tmp_path / "store"
    store.put_new(ObjectKind.PACK, PACK, [b"x"])
    store.put_new(ObjectKind.REF, REF, [b"x"])
    for folder in (root, root / "packs", root / "packs/5a", root / "refs/team/x/@v1"):
        for name in (".nfs000000000000000100000001", "lost+found", "x~", ".x.swp", "#x#"):
            (folder / name).mkdir() if name == "lost+found" else (folder / name).touch()
        (folder / os.fsdecode(b"\xff\xfe")).touch()
        litter(folder, "z")
    (root / "packs/5a" / ("5a" * 31 + "00")).mkdir()
    (root / "packs/5a" / ("5a" * 31 + "01")).symlink_to("/etc/passwd")
    (root / "packs/77").symlink_to(root / "packs/5a")
    (root / "packs/78").touch()
    assert [info.name for info in store.list(ObjectKind.PACK)] == [PACK]
    assert [info.name for info in store.list(ObjectKind.PACK, "78")] == []
    assert [info.name for info in store.list(ObjectKind.REF)] == [REF]
    for kind in set(ObjectKind) - {ObjectKind.PACK, ObjectKind.REF}:
        assert [*store.list(kind)] == []


@pytest.mark.parametrize("sort", range(5))
def test_what_is_no_file_is_neither_read_nor_overwritten(
    store: PosixBackend, tmp_path: Path, sort: int
) -> None:
    """Put a fifo, socket, symlink, directory or loop where an object would be."""
    folder = tmp_path / "store/refs/a/@v"
    folder.mkdir(parents=True)
    litter(folder, "z")[sort].rename(folder / "00000001")
    name = "a/@v/00000001"
    with pytest.raises(ObjectNotFound):
        store.stat(ObjectKind.REF, name)
    with pytest.raises(ObjectNotFound):
        store.get_range(ObjectKind.REF, name, 0, memoryview(bytearray(1)))
    with pytest.raises(ObjectExists):
        store.put_new(ObjectKind.REF, name, [b"x"])
    assert [*store.list(ObjectKind.REF)] == []
    assert [*(tmp_path / "store/tmp").iterdir()] == []


def test_a_file_where_a_folder_should_be_is_an_error_of_writers(
    store: PosixBackend, tmp_path: Path
) -> None:
    (tmp_path / "store/packs").touch()
    with pytest.raises(ObjectNotFound):
        store.stat(ObjectKind.PACK, PACK)
    assert [*store.list(ObjectKind.PACK)] == []
    store.delete(ObjectKind.PACK, PACK)
    with pytest.raises(BackendError):
        store.put_new(ObjectKind.PACK, PACK, [b"x"])


# --- temporary files ---


def leave_behind(root: Path, *, name: str, age_s: float) -> Path:
    path = root / "tmp" / name
    path.write_bytes(b"half")
    mtime = path.stat().st_mtime - age_s
    os.utime(path, (mtime, mtime))
    return path


def test_sweeping_removes_old_files_of_ours_only(store: PosixBackend, tmp_path: Path) -> None:
    root = tmp_path / "store"
    old = [leave_behind(root, name=f"put-{number:032x}", age_s=7200) for number in range(3)]
    kept = [
        leave_behind(root, name=f"put-{9:032x}", age_s=1800),
        leave_behind(root, name="put-notes.txt", age_s=7200),
        leave_behind(root, name=".nfs0001", age_s=7200),
    ]
    folder = root / "tmp" / f"put-{8:032x}"
    folder.mkdir()
    os.utime(folder, (0, 0))
    assert store.sweep_temporaries(3600) == len(old)
    assert sorted((root / "tmp").iterdir()) == sorted([*kept, folder])
    assert store.sweep_temporaries(3600) == 0


def test_sweeping_goes_by_the_clock_of_the_server() -> None:
    """Let the client's clock be a year ahead: a young file must stay."""
    theirs, ours = ManualClock(start_ns=10**18), ManualClock(start_ns=10**18 + 31_536_000 * 10**9)
    server = NfsServer(theirs)
    files = NfsClient(server, ours)
    backend = PosixBackend.create(ROOT, clock=ours, files=files)
    fd = files.open(str(ROOT / TEMPORARIES / f"put-{1:032x}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    assert backend.sweep_temporaries(60) == 0
    theirs.advance_s(61)
    assert backend.sweep_temporaries(60) == 1
    files.close(fd)


def test_readers_do_not_sweep(tmp_path: Path) -> None:
    PosixBackend.create(tmp_path / "s")
    with pytest.raises(AccessDenied):
        PosixBackend(tmp_path / "s", readonly=True).sweep_temporaries(0)


def test_a_store_without_its_folder_for_temporaries_gets_it_back(
    store: PosixBackend, tmp_path: Path
) -> None:
    (tmp_path / "store/tmp").rmdir()
    store.put_new(ObjectKind.REF, REF, [b"x"])
    assert read(store, ObjectKind.REF, REF) == b"x"


# --- the root ---


def test_creating_syncs_every_folder_it_makes(tmp_path: Path) -> None:
    files = KillableFiles(OsFileCalls())
    PosixBackend.create(tmp_path / "a/b/c", files=files)
    synced = {call.path for call in files.calls if call.call == "fsync"}
    assert synced == {str(tmp_path / path) for path in ("", "a", "a/b", "a/b/c")}
    PosixBackend.create(tmp_path / "a/b/c").put_new(ObjectKind.REF, REF, [b"x"])


def test_a_symlink_to_a_store_is_a_store(tmp_path: Path) -> None:
    PosixBackend.create(tmp_path / "s").put_new(ObjectKind.REF, REF, [b"x"])
    (tmp_path / "alias").symlink_to("s")
    assert read(PosixBackend(tmp_path / "alias"), ObjectKind.REF, REF) == b"x"
    PosixBackend.create(tmp_path / "alias")


def test_a_relative_root_is_fixed_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = PosixBackend.create(Path("s"))
    monkeypatch.chdir("/")
    store.put_new(ObjectKind.REF, REF, [b"x"])
    assert (tmp_path / "s/refs" / REF).read_bytes() == b"x"


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_root_that_cannot_be_opened_is_an_error(mount: Mount, number: int) -> None:
    with pytest.raises((TransientBackendError, AccessDenied)):
        mount.backend((0, NfsFault("open", number)))


# --- power loss ---


def test_a_power_loss_anywhere_leaves_all_or_nothing(mount: Mount, rng: random.Random) -> None:
    """Lose power before each file call in turn, and with it all that was not synced."""
    for calls in range(100):
        name, data = f"n{calls}/@v/00000001", rng.randbytes(100)
        client = mount.client()
        files = KillableFiles(client)
        backend = PosixBackend(ROOT, clock=mount.clock, files=files)
        files.arm(calls)
        died = dies(lambda: backend.put_new(ObjectKind.REF, name, [data]))  # noqa: B023
        client.die()
        assert died or is_there(mount, name=name)
        if is_there(mount, name=name):
            assert read(mount.backend(), ObjectKind.REF, name) == data
        mount.backend().put_new(ObjectKind.REF, name, [data])
        if not died:
            return
    pytest.fail("put_new never ends")


def dies(work: Callable[[], None]) -> bool:
    try:
        work()
    except Killed:
        return True
    return False


# --- storms ---


@pytest.mark.parametrize("run", range(20))
def test_a_storm_loses_nothing_that_was_promised(run: int, rng: random.Random) -> None:
    """Several clients write, read and delete while everything fails now and then.

    A write that returned must be readable with its bytes until it is deleted; one that failed may
    have left the whole object; nobody may ever read anything else. Clients are told of nothing
    but what they did themselves, and the clock moves on at random, so that caches age.
    """
    clock = ManualClock()
    server = NfsServer(clock)
    PosixBackend.create(ROOT, clock=clock, files=NfsClient(server, clock))
    clients = [NfsClient(server, clock, faults=NfsFaults(rng=rng, chance=0.05)) for _ in range(3)]
    backends = [opened(lambda: PosixBackend(ROOT, clock=clock, files=c)) for c in clients]  # noqa: B023
    names = [f"n{number % 3}/@v/{number + 1:08d}" for number in range(8)]
    promised: dict[str, bytes] = {}
    possible: dict[str, set[bytes]] = {name: set() for name in names}
    for step in range(200):
        clock.advance_s(rng.choice([0, 0, 1, 30, 100]))
        backend, name = rng.choice(backends), rng.choice(names)
        body = f"{step}".encode() * rng.randrange(1, 5)
        match rng.choice(["put", "put", "read", "delete", "list"]):
            case "put":
                possible[name].add(body)
                if name not in promised and succeeds(backend.put_new, ObjectKind.REF, name, [body]):
                    promised[name] = body
                    possible[name] = {body}
            case "delete":
                promised.pop(name, None)
                if succeeds(backend.delete, ObjectKind.REF, name):
                    possible[name] = set()
            case "list":
                succeeds(lambda b=backend: [*b.list(ObjectKind.REF)])
            case _:
                check_read(backend, name, promised, possible)
    calm = PosixBackend(ROOT, clock=clock, files=NfsClient(server, clock))
    for name in names:
        check_read(calm, name, promised, possible)
    assert all(client.open_count == 0 for client in clients), run


def opened(make: Callable[[], PosixBackend]) -> PosixBackend:
    while True:
        try:
            return make()
        except BackendError:
            continue


def succeeds(work: Callable[..., object], *arguments: object) -> bool:
    try:
        work(*arguments)
    except (TransientBackendError, OutOfSpace, ObjectExists, ObjectNotFound):
        return False
    return True


def check_read(
    backend: PosixBackend, name: str, promised: dict[str, bytes], possible: dict[str, set[bytes]]
) -> None:
    try:
        data = read(backend, ObjectKind.REF, name)
    except ObjectNotFound:
        assert name not in promised
    except TransientBackendError:
        pass
    else:
        assert data == promised.get(name, data)
        assert data in possible[name]
