"""External memory into a store and out of it, without CRIU: what is stored, filled, refused."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import snapstore
from snapagent.errors import AgentError
from snapagent.memory.broker import MemoryBroker
from snapagent.memory.filling import RegionFill, read_places
from snapagent.memory.placement import RegionPlace, SessionPlace, placement_of
from snapagent.memory.storing import RegionStreams
from snapagent.workload import HostMemory
from tests.support.waiting import wait_until

MIB = 1 << 20
NAME = "test/external:v1"
RANK = 3


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    with (
        tempfile.TemporaryDirectory(prefix="broker-") as folder,
        MemoryBroker(Path(folder) / "memory.sock") as running,
    ):
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Iterator[snapstore.Store]:
    with snapstore.init_store(str(tmp_path / "store")) as opened:
        yield opened


def memory_of(broker: MemoryBroker) -> HostMemory:
    return HostMemory(str(broker.path), region_bytes=4 * MIB, reserve_bytes=256 * MIB, rank=RANK)


def store_all(broker: MemoryBroker, store: snapstore.Store) -> None:
    frozen = broker.freeze(os.getpid())
    errors: list[BaseException] = []
    with store.begin(NAME) as writer:
        with RegionStreams(writer, frozen, threads=2, on_error=errors.append) as streams:
            streams.wait()
            assert not errors
            placements = streams.placements()
        writer.commit(placements=placements)


@pytest.mark.slow
def test_memory_comes_back_with_its_holes(broker: MemoryBroker, store: snapstore.Store) -> None:
    """Goal: files are the regions, and what was never touched takes no memory when it comes back.

    Method: store memory most of which is a hole; fill it into what the broker makes for another
    process, and compare files in memory.
    """
    with memory_of(broker) as memory:
        large = memory.allocate(64 * MIB).numpy("uint8", 64 * MIB)
        large[10 * MIB : 13 * MIB] = np.arange(3 * MIB).astype(np.uint8)
        large[-1] = 7
        small = memory.allocate(1000).numpy("uint8", 1000)
        small[:] = 5
        expected = large.tobytes()
        memory.release()
        store_all(broker, store)
        memory.resume(10)
        assert large.tobytes() == expected
    snapshot = store.snapshot(NAME)
    assert {entry.name for entry in snapshot.walk()} >= {"external/0-1.mem", "external/0-2.mem"}
    places = read_places(snapshot)
    assert [rank for rank, _ in places] == [RANK]
    admissions = broker.admit(places, os.getpid())
    (session,) = admissions.sessions
    fds = [os.dup(region.fd) for region in session.regions]
    with RegionFill(snapshot, admissions, threads=2, on_error=pytest.fail) as filling:
        wait_until(lambda: filling.wait_filled(0), "it is filled")
        assert filling.total_bytes == 68 * MIB
        assert filling.done_bytes < 8 * MIB
    assert os.pread(fds[0], 64 * MIB, 0) == expected
    assert os.fstat(fds[0]).st_blocks * 512 < 8 * MIB
    assert os.pread(fds[1], 1000, 0) == b"\5" * 1000
    assert [one.state for one in broker.status()] == ["filled"]
    admissions.abort()
    for fd in fds:
        os.close(fd)


def test_a_fill_that_is_given_up_leaves_nothing(
    broker: MemoryBroker, store: snapstore.Store
) -> None:
    with memory_of(broker) as memory:
        array = memory.allocate(8 * MIB).numpy("uint8", 8 * MIB)
        array[:] = 3
        memory.release()
        store_all(broker, store)
    snapshot = store.snapshot(NAME)
    # The source's go on a thread of the broker, which may take its time.
    wait_until(lambda: not open_files(), "the source's memory is closed")
    admissions = broker.admit(read_places(snapshot), os.getpid())
    with RegionFill(snapshot, admissions, threads=2, on_error=pytest.fail):
        pass
    admissions.abort()
    assert not broker.status()
    wait_until(lambda: not open_files(), "all regions are closed")


def open_files() -> list[str]:
    """Return the memory files that this process has open."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    return sorted(link for link in links if "snapagent-memory" in link)


def test_a_process_without_any_memory_finds_its_session_again(
    broker: MemoryBroker, store: snapstore.Store
) -> None:
    with memory_of(broker) as memory:
        memory.release()
        store_all(broker, store)
    ((rank, place),) = read_places(store.snapshot(NAME))
    assert (rank, place.regions) == (RANK, ())
    admissions = broker.admit([(rank, place)], os.getpid())
    with RegionFill(store.snapshot(NAME), admissions, threads=2, on_error=pytest.fail) as filling:
        wait_until(lambda: filling.wait_filled(0), "there is nothing to fill")
    assert [one.state for one in broker.status()] == ["filled"]
    admissions.abort()


SESSION = SessionPlace(
    session="a" * 64,
    regions=(
        RegionPlace(
            region=1, order=0, address=1 << 32, length=4096, huge=False, file="external/0-1.mem"
        ),
    ),
)


@pytest.mark.parametrize("what", ["gone", "shorter", "longer", "twice"])
def test_a_snapshot_that_lies_is_refused(store: snapstore.Store, what: str) -> None:
    """Before anything is made: a file that is not the region, and one process in two ranks."""
    placement = placement_of([SESSION])
    ranks: list[int | Literal["host"]] = [RANK, "host"] if what == "twice" else ["host"]
    sizes = {"gone": 0, "shorter": 4095, "longer": 4097, "twice": 4096}
    with store.begin(NAME) as writer:
        for rank in ranks:
            writer.add_file(rank, f"file-{rank}", b"x")
        if sizes[what]:
            writer.add_file("host", "external/0-1.mem", bytes(sizes[what]))
        writer.commit(placements=dict.fromkeys(ranks, placement))
    with pytest.raises((AgentError, snapstore.SnapError)):
        read_places(store.snapshot(NAME))


def test_what_a_manifest_says_is_what_was_committed(store: snapstore.Store) -> None:
    with store.begin(NAME) as writer:
        writer.add_file("host", "external/0-1.mem", bytes(4096))
        writer.commit(placements={"host": placement_of([SESSION])})
    assert read_places(store.snapshot(NAME)) == [("host", SESSION)]
