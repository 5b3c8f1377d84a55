"""Processes that read for restores: the same bytes and errors as without, whatever befalls them."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import snapstore
from snapagent.lazy import readers as lazy_readers
from snapagent.lazy.fill import BUFFER_BYTES, LocalReader, Part, PartReader
from snapagent.lazy.reader import Source
from snapagent.lazy.readers import ImageReaders, ReaderPool
from snapagent.linux.processes import wait_for_ends
from snapstore import Integrity, SnapshotFile, Store, StoreOptions
from snapstore.clock import SystemClock
from snapstore.errors import DigestMismatch
from snapstore.units import KIB, MIB
from tests.support.damage import REPOSITORY, flip
from tests.support.processes import open_files, stop_process
from tools.bench.gen import PAGE, pages

pytestmark = pytest.mark.slow

IMAGE = "pages-1.img"
PATH = "dump/pages-1.img"
WAIT_S = 30.0
NO_FILES = 3
"""A limit below all descriptors that are free: whoever opens something gets EMFILE."""


@dataclass(frozen=True)
class Stored:
    """An image in a store."""

    folder: Path
    data: bytes
    store: Store

    @property
    def source(self) -> Source:
        snapshot = self.store.snapshot("a/model")
        node_cache = self.store.options.node_cache
        return Source(
            self.store.url,
            f"a/model@b3:{snapshot.id.hex}",
            self.store.options.integrity.value,
            str(node_cache or ""),
        )

    def file(self) -> SnapshotFile:
        return self.store.snapshot("a/model").open(PATH)

    @contextlib.contextmanager
    def flipped(self) -> Iterator[None]:
        """Flip a bit in the middle of the largest pack."""
        pack = max((self.folder / "store" / "packs").rglob("*"), key=lambda p: p.stat().st_size)
        flip(pack)
        yield
        flip(pack)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp("readers")
    data = pages(np.random.default_rng(3), 40 * MIB // PAGE).tobytes()
    (folder / "tree" / "dump").mkdir(parents=True)
    (folder / "tree" / PATH).write_bytes(data)
    with snapstore.init_store(f"file://{folder}/store") as store:
        store.push(folder / "tree", "a/model")
        yield Stored(folder, data, store)


@pytest.fixture(scope="module")
def pool() -> Iterator[ReaderPool]:
    """Two of them; whoever ends one leaves another in its place."""
    with ReaderPool(2) as both:
        yield both


def readers_of(pool: ReaderPool, stored: Stored, source: Source | None = None) -> ImageReaders:
    return ImageReaders(pool, source or stored.source, {IMAGE: PATH}, {IMAGE: stored.file()})


def in_parts(stored: Stored, about_bytes: int = 5 * MIB) -> list[Part]:
    return [
        Part(IMAGE, part.offset, part.length, is_zeros=False)
        for part in stored.file().ranges(about_bytes=about_bytes)
    ]


def check(reader: PartReader, part: Part, stored: Stored) -> None:
    reader.read(part)
    assert reader.view[: part.length] == stored.data[part.offset : part.offset + part.length]


def read_all(reader: PartReader, parts: list[Part]) -> None:
    for part in parts:
        reader.read(part)


def end(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert wait_for_ends([pidfd], WAIT_S) == []
    os.close(pidfd)


def test_reads_what_the_agent_would(pool: ReaderPool, stored: Stored) -> None:
    readers = readers_of(pool, stored)
    reader = readers.reader(threading.Event())
    assert not isinstance(reader, LocalReader)
    for part in in_parts(stored):
        check(reader, part, stored)
    reader.close()
    readers.close()
    # It opens again what it was told to forget.
    again = readers.reader(threading.Event())
    check(again, Part(IMAGE, 4 * KIB, 8 * KIB, is_zeros=False), stored)
    again.close()
    assert len(pool.pids) == 2
    # Where memory is short they go first.
    scores = [Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii") for pid in pool.pids]
    assert scores == ["1000\n", "1000\n"]


def test_reads_with_no_process_free(pool: ReaderPool, stored: Stored) -> None:
    readers = readers_of(pool, stored)
    taken = [readers.reader(threading.Event()) for _ in range(3)]
    assert [isinstance(one, LocalReader) for one in taken] == [False, False, True]
    for reader, part in zip(taken, in_parts(stored), strict=False):
        check(reader, part, stored)
        reader.close()


def test_damage_is_the_agents_error(pool: ReaderPool, stored: Stored) -> None:
    reader = readers_of(pool, stored).reader(threading.Event())
    with stored.flipped(), pytest.raises(DigestMismatch, match="pack"):
        read_all(reader, in_parts(stored))
    reader.close()
    assert len(pool.pids) == 2
    assert readable(pool, stored)


def readable(pool: ReaderPool, stored: Stored) -> bool:
    """Both processes read, as far as that can be told: what they cannot is read elsewhere."""
    readers, stop = readers_of(pool, stored), threading.Event()
    part = in_parts(stored)[0]
    processes = [pool.take(), pool.take()]
    try:
        return all(one is not None and readers.read(one, part, stop) for one in processes)
    finally:
        for one in processes:
            if one is not None:
                pool.give(one)


def test_one_is_killed(pool: ReaderPool, stored: Stored) -> None:
    """Goal: who used it reads on alone, and the next one gets another."""
    readers = readers_of(pool, stored)
    before = set(pool.pids)
    reader = readers.reader(threading.Event())
    (victim,) = before - set(pool.pids)
    first, second, *_ = in_parts(stored)
    check(reader, first, stored)
    end(victim)
    check(reader, second, stored)
    reader.close()
    assert readable(pool, stored)
    assert victim not in pool.pids
    assert len(pool.pids) == 2


def test_one_is_killed_while_it_reads(pool: ReaderPool, stored: Stored) -> None:
    readers = readers_of(pool, stored)
    before = set(pool.pids)
    reader = readers.reader(threading.Event())
    (victim,) = before - set(pool.pids)
    stop_process(victim)
    killer = threading.Timer(0.2, os.kill, (victim, signal.SIGKILL))
    killer.start()
    check(reader, in_parts(stored)[1], stored)
    killer.join()
    reader.close()
    assert readable(pool, stored)


def test_stopping_does_not_wait_for_one(pool: ReaderPool, stored: Stored) -> None:
    """Goal: one that hangs is ended when nobody wants its answer any more."""
    before = set(pool.pids)
    stop = threading.Event()
    reader = readers_of(pool, stored).reader(stop)
    (victim,) = before - set(pool.pids)
    pidfd = os.pidfd_open(victim)
    stop_process(victim)
    stopper = threading.Timer(0.2, stop.set)
    stopper.start()
    reader.read(in_parts(stored)[0])
    stopper.join()
    assert wait_for_ends([pidfd], WAIT_S) == []
    os.close(pidfd)
    reader.close()
    assert readable(pool, stored)


def test_one_that_hangs_is_not_waited_for(
    pool: ReaderPool, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the agent reads the part itself when one takes too long, though nobody stops it."""
    monkeypatch.setattr(lazy_readers, "ANSWER_S_MAX", 0.2)
    before = set(pool.pids)
    reader = readers_of(pool, stored).reader(threading.Event())
    (victim,) = before - set(pool.pids)
    stop_process(victim)
    check(reader, in_parts(stored)[1], stored)
    reader.close()
    monkeypatch.undo()
    assert readable(pool, stored)
    assert victim not in pool.pids


def test_those_that_could_not_be_started_are_later(stored: Stored) -> None:
    """Goal: a moment without processes to be had costs no reader for ever.

    Method: start the pool, and use one that has died, where there is no descriptor left.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    pool = ReaderPool(2)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (NO_FILES, limits[1]))
        pool.start()
        assert pool.pids == []
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        readers = readers_of(pool, stored)
        reader = readers.reader(threading.Event())
        assert not isinstance(reader, LocalReader)
        reader.close()
        assert readable(pool, stored)
        end(pool.pids[-1])
        readers = readers_of(pool, stored)
        resource.setrlimit(resource.RLIMIT_NOFILE, (NO_FILES, limits[1]))
        reader = readers.reader(threading.Event())
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert isinstance(reader, LocalReader)
        reader.close()
        assert readable(pool, stored)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        pool.close()


def test_a_process_in_use_forgets_what_others_had_it_open(stored: Stored) -> None:
    """Goal: restores that overlap leave nothing open in the processes."""
    stop, part = threading.Event(), in_parts(stored)[0]
    with ReaderPool(1) as pool:
        (pid,) = pool.pids
        readers = readers_of(pool, stored)
        reader = readers.reader(stop)
        check(reader, part, stored)
        reader.close()
        with_none = 0
        for count in range(8):
            # The process is told to open this one's, and reads for another when that is over.
            other = stored.source._replace(url=f"file://{stored.folder}/{'./' * count}store")
            first = readers_of(pool, stored, other)
            second = readers_of(pool, stored)
            reader = second.reader(stop)
            check(reader, part, stored)
            first.close()
            # It does what it was told in order.
            check(reader, part, stored)
            with_none = with_none or len(open_files(pid))
            reader.close()
        assert len(open_files(pid)) <= with_none


def test_what_was_read_stays_until_the_next_part(stored: Stored) -> None:
    """Goal: a restore that begins changes nothing that another one is about to copy.

    Method: tell a process in use to open an image that begins with another byte than the part.
    """
    part = next(part for part in in_parts(stored) if stored.data[part.offset] != stored.data[0])
    with ReaderPool(1) as pool:
        process = pool.take()
        assert process is not None
        readers, stop = readers_of(pool, stored), threading.Event()
        assert readers.read(process, part, stop)
        process.tell("open", {**stored.source._asdict(), "path": PATH})
        # It does what it was told in order, and this it cannot do.
        nowhere = part._replace(offset=len(stored.data))
        assert not readers.read(process, nowhere, stop)
        with process.view[: part.length] as found:
            assert found == stored.data[part.offset : part.offset + part.length]
        pool.give(process)


def test_many_images_are_opened_at_once(stored: Stored) -> None:
    """Goal: a dump of many processes does not wait until those that read have started."""
    with ReaderPool(1) as pool:
        (pid,) = pool.pids
        stop_process(pid)
        paths = {f"pages-{number}.img": f"dump/pages-{number}.img" for number in range(1000)}
        ImageReaders(pool, stored.source, paths, {})
        assert pool.pids == [pid]


def test_closing_waits_once_for_all_that_hang() -> None:
    clock = SystemClock()
    with ReaderPool(4) as pool:
        pids = pool.pids
        for pid in pids:
            stop_process(pid)
        pidfds = [os.pidfd_open(pid) for pid in pids]
        began_s = clock.monotonic_s()
    assert clock.monotonic_s() - began_s < 3
    assert wait_for_ends(pidfds, 0) == []
    for pidfd in pidfds:
        os.close(pidfd)


def test_paths_may_be_relative(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: they mean the same to the processes as to the agent, such as a node's cache."""
    monkeypatch.chdir(tmp_path)
    options = StoreOptions(node_cache=Path("cache"))
    with snapstore.open_store(stored.store.url, options) as store, ReaderPool(1) as pool:
        readers = readers_of(pool, Stored(stored.folder, stored.data, store))
        process = pool.take()
        assert process is not None
        assert readers.read(process, in_parts(stored)[0], threading.Event())
        pool.give(process)
        assert store.cache is not None
        assert store.cache.stats().packs.used_bytes > MIB


def test_paths_may_be_any_bytes(stored: Stored, tmp_path: Path) -> None:
    """Goal: an image in a directory whose name is no text, as of a dump that was pushed."""
    path = os.fsdecode(b"tree/d\xff\xc3(mp/" + IMAGE.encode())
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(stored.data[: 2 * MIB])
    path = path.removeprefix("tree/")
    stored.store.push(tmp_path / "tree", "b/odd")
    snapshot = stored.store.snapshot("b/odd")
    source = stored.source._replace(name=f"b/odd@b3:{snapshot.id.hex}")
    file = snapshot.open(os.fsencode(path))
    part = Part(IMAGE, MIB, MIB, is_zeros=False)
    with ReaderPool(1) as pool:
        readers = ImageReaders(pool, source, {IMAGE: path}, {IMAGE: file})
        process = pool.take()
        assert process is not None
        assert readers.read(process, part, threading.Event())
        with process.view[:MIB] as found:
            assert found == stored.data[MIB : 2 * MIB]
        pool.give(process)


def test_a_store_that_only_the_agent_can_open(pool: ReaderPool, stored: Stored) -> None:
    """Goal: it reads by itself."""
    other = stored.source._replace(url=f"file://{stored.folder}/moved")
    readers = readers_of(pool, stored, other)
    reader = readers.reader(threading.Event())
    for part in in_parts(stored):
        check(reader, part, stored)
    reader.close()


def test_reads_through_the_nodes_cache(stored: Stored, tmp_path: Path) -> None:
    """Goal: what they read is in the cache afterwards, for all."""
    options = StoreOptions(node_cache=tmp_path / "cache", integrity=Integrity.STRONG)
    with snapstore.open_store(stored.store.url, options) as store, ReaderPool(1) as pool:
        assert store.cache is not None
        through = Stored(stored.folder, stored.data, store)
        readers, stop = readers_of(pool, through), threading.Event()
        process = pool.take()
        assert process is not None
        assert all(readers.read(process, part, stop) for part in in_parts(stored))
        pool.give(process)
        assert store.cache.stats().packs.used_bytes > 10 * MIB


def test_closing_ends_them(stored: Stored) -> None:
    pool = ReaderPool(2)
    pool.start()
    readers = readers_of(pool, stored)
    reader = readers.reader(threading.Event())
    free = pool.pids
    pidfds = [os.pidfd_open(pid) for pid in free]
    pool.close()
    assert wait_for_ends(pidfds, WAIT_S) == []
    for pidfd in pidfds:
        os.close(pidfd)
    check(reader, in_parts(stored)[0], stored)
    reader.close()
    readers.close()
    assert pool.pids == []
    assert isinstance(readers.reader(threading.Event()), LocalReader)


def test_they_end_with_the_agent() -> None:
    program = (
        "import sys, time\n"
        "from snapagent.lazy.readers import ReaderPool\n"
        "pool = ReaderPool(2)\n"
        "pool.start()\n"
        "print(*pool.pids, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as agent:  # noqa: S603
        assert agent.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in agent.stdout.readline().split()]
        agent.kill()
    assert len(pidfds) == 2
    assert wait_for_ends(pidfds, WAIT_S) == []
    for pidfd in pidfds:
        os.close(pidfd)


def test_a_buffer_is_as_large_as_parts_get(stored: Stored) -> None:
    assert all(part.length <= BUFFER_BYTES for part in in_parts(stored, BUFFER_BYTES * 2 // 3))
