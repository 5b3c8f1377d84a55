"""The NFS double has the quirks that it claims, so that surviving it means something."""

from __future__ import annotations

import errno
import os
import random

import pytest

from snapstore.testing.clock import ManualClock
from snapstore.testing.nfs import NfsClient, NfsFault, NfsFaults, NfsServer

READ = os.O_RDONLY
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
FOLDER = os.O_RDONLY | os.O_DIRECTORY


class World:
    """A server with two clients whose caches last a minute."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.server = NfsServer(self.clock)
        self.a = self.client()
        self.b = self.client()
        self.a.mkdir("/d")

    def client(self, *planned: tuple[int, NfsFault]) -> NfsClient:
        return NfsClient(self.server, self.clock, faults=NfsFaults(planned))


@pytest.fixture
def world() -> World:
    return World()


def write(client: NfsClient, path: str, data: bytes = b"data") -> None:
    fd = client.open(path, CREATE)
    client.writev(fd, [memoryview(data)])
    client.fsync(fd)
    client.close(fd)


def read(client: NfsClient, path: str) -> bytes:
    fd = client.open(path, READ)
    try:
        into = bytearray(100)
        return bytes(into[: client.pread(fd, memoryview(into), 0)])
    finally:
        client.close(fd)


def failing(number: int) -> pytest.RaisesExc[OSError]:
    return pytest.raises(OSError, check=lambda error: error.errno == number)


def test_files_work(world: World) -> None:
    write(world.a, "/d/x")
    world.a.link("/d/x", "/d/y")
    assert sorted(world.a.listdir("/d")) == ["x", "y"]
    assert world.a.lstat("/d/x") == world.a.lstat("/d/y")
    assert world.a.lstat("/d").is_directory
    world.a.unlink("/d/x")
    assert read(world.b, "/d/y") == b"data"
    with failing(errno.ENOENT):
        world.a.open("/d/x", READ)
    with failing(errno.EEXIST):
        world.a.open("/d/y", CREATE)
    with failing(errno.ENOTDIR):
        world.a.open("/d/y", FOLDER)
    with failing(errno.ENOTDIR):
        world.a.lstat("/d/y/z")
    with failing(errno.EEXIST):
        world.a.mkdir("/d")
    with failing(errno.EISDIR):
        world.a.unlink("/d")
    with failing(errno.EBADF):
        world.a.fstat(3)
    assert world.a.open_count == 0


def test_an_absent_name_is_believed_until_the_folder_is_opened(world: World) -> None:
    with failing(errno.ENOENT):
        world.b.open("/d/x", READ)
    write(world.a, "/d/x")
    for _ in range(2):
        with failing(errno.ENOENT):
            world.b.open("/d/x", READ)
        with failing(errno.ENOENT):
            world.b.unlink("/d/x")
    world.b.close(world.b.open("/d", FOLDER))
    assert read(world.b, "/d/x") == b"data"


def test_an_absent_name_is_believed_only_for_so_long(world: World) -> None:
    with failing(errno.ENOENT):
        world.b.lstat("/d/x")
    write(world.a, "/d/x")
    world.clock.advance_s(60)
    assert world.b.lstat("/d/x").size_bytes == 4


def test_own_changes_do_not_refresh_what_is_believed(world: World) -> None:
    with failing(errno.ENOENT):
        world.b.lstat("/d/x")
    write(world.b, "/d/other")
    write(world.a, "/d/x")
    with failing(errno.ENOENT):
        world.b.lstat("/d/x")
    # This reply tells that somebody else has changed the folder before.
    write(world.b, "/d/third")
    assert world.b.lstat("/d/x").size_bytes == 4


def test_attributes_outlive_the_file(world: World) -> None:
    write(world.a, "/d/x")
    assert world.b.lstat("/d/x").size_bytes == 4
    world.a.unlink("/d/x")
    assert world.b.lstat("/d/x").size_bytes == 4
    with failing(errno.EEXIST):
        world.b.link("/d/x", "/d/x")
    with failing(errno.ESTALE):
        world.b.open("/d/x", READ)
    world.b.close(world.b.open("/d", FOLDER))
    with failing(errno.ENOENT):
        world.b.lstat("/d/x")


def test_a_listing_may_be_old_even_after_its_folder_was_opened(world: World) -> None:
    assert world.b.listdir("/d") == []
    write(world.a, "/d/x")
    world.b.close(world.b.open("/d", FOLDER))
    assert world.b.listdir("/d") == []
    world.clock.advance_s(60)
    assert world.b.listdir("/d") == ["x"]


def test_an_open_file_that_another_client_removes_is_stale(world: World) -> None:
    write(world.a, "/d/x")
    fd = world.b.open("/d/x", READ)
    world.a.unlink("/d/x")
    with failing(errno.ESTALE):
        world.b.pread(fd, memoryview(bytearray(4)), 0)
    world.b.close(fd)


def test_cached_bytes_are_served_until_attributes_expire(world: World) -> None:
    write(world.a, "/d/x")
    fd = world.b.open("/d/x", READ)
    into = memoryview(bytearray(4))
    assert world.b.pread(fd, into, 0) == 4
    world.a.unlink("/d/x")
    assert world.b.pread(fd, into, 0) == 4
    world.clock.advance_s(60)
    with failing(errno.ESTALE):
        world.b.pread(fd, into, 0)


def test_a_file_that_is_unlinked_while_open_lives_on_under_another_name(world: World) -> None:
    write(world.a, "/d/x")
    fd = world.a.open("/d/x", READ)
    world.a.unlink("/d/x")
    assert [name[:4] for name in world.client().listdir("/d")] == [".nfs"]
    assert world.a.pread(fd, memoryview(bytearray(9)), 0) == 4
    world.a.close(fd)
    assert world.client().listdir("/d") == []


def test_written_bytes_are_elsewhere_only_after_a_sync(world: World) -> None:
    fd = world.a.open("/d/x", CREATE)
    assert world.a.writev(fd, [memoryview(b"da"), memoryview(b"ta")]) == 4
    assert world.a.fstat(fd).size_bytes == 4
    assert read(world.client(), "/d/x") == b""
    world.a.fsync(fd)
    assert read(world.client(), "/d/x") == b"data"
    world.a.close(fd)


def test_a_power_loss_takes_what_was_not_synced(world: World) -> None:
    fd = world.a.open("/d/x", CREATE)
    world.a.writev(fd, [memoryview(b"data")])
    world.a.die()
    assert read(world.b, "/d/x") == b""


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failed_sync_loses_the_bytes_and_the_next_one_succeeds(world: World, number: int) -> None:
    client = world.client((0, NfsFault("fsync", number)))
    fd = client.open("/d/x", CREATE)
    client.writev(fd, [memoryview(b"data")])
    with failing(number):
        client.fsync(fd)
    client.fsync(fd)
    client.close(fd)
    assert read(world.b, "/d/x") == b""


def test_a_failed_close_loses_the_bytes_and_the_descriptor(world: World) -> None:
    client = world.client((0, NfsFault("close", errno.EDQUOT)))
    fd = client.open("/d/x", CREATE)
    client.writev(fd, [memoryview(b"data")])
    with failing(errno.EDQUOT):
        client.close(fd)
    with failing(errno.EBADF):
        client.close(fd)
    assert read(world.b, "/d/x") == b""


def test_a_full_server_says_so_late(world: World) -> None:
    world.server.capacity_bytes = 6
    write(world.a, "/d/x")
    fd = world.a.open("/d/y", CREATE)
    world.a.writev(fd, [memoryview(b"data")])
    with failing(errno.ENOSPC):
        world.a.fsync(fd)
    world.a.close(fd)
    assert world.server.used_bytes() == 4


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO])
def test_a_lost_reply_to_link_is_an_error_though_it_happened(world: World, number: int) -> None:
    client = world.client((0, NfsFault("link", number, done=True)))
    write(client, "/d/x")
    with failing(errno.ENOENT):
        client.lstat("/d/y")
    with failing(number):
        client.link("/d/x", "/d/y")
    # The client that did it is the last to see it.
    with failing(errno.ENOENT):
        client.lstat("/d/y")
    assert world.client().lstat("/d/y") == world.client().lstat("/d/x")


def test_a_link_that_fails_did_not_happen(world: World) -> None:
    client = world.client((0, NfsFault("link", errno.EIO)))
    write(client, "/d/x")
    with failing(errno.EIO):
        client.link("/d/x", "/d/y")
    assert world.client().listdir("/d") == ["x"]


def test_transfers_may_be_short(world: World) -> None:
    client = world.client((0, NfsFault("writev", 0)), (1, NfsFault("pread", 0)))
    fd = client.open("/d/x", CREATE)
    assert client.writev(fd, [memoryview(b"data")]) == 2
    client.close(fd)
    assert read(client, "/d/x") == b"da"
    assert read(client, "/d/x") == b"d"


def test_times_are_those_of_the_server() -> None:
    ours, theirs = ManualClock(), ManualClock(start_ns=5_000_000_000)
    client = NfsClient(NfsServer(theirs), ours)
    write(client, "/x")
    assert client.lstat("/x").modified_ns == 5_000_000_000


def test_chance_is_seeded() -> None:
    def storm(seed: int) -> list[NfsFault | None]:
        faults = NfsFaults(rng=random.Random(seed), chance=0.3)
        return [faults.draw("link") for _ in range(100)]

    assert storm(1) == storm(1) != storm(2)
    assert 10 < sum(fault is not None for fault in storm(1)) < 60
    assert NfsFaults(rng=random.Random(1), chance=1.0).draw("fstat") is None
