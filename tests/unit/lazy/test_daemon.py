"""The daemon with real userfaultfds of a real process that stands for a restored one."""

import hashlib
import random
import socket
import struct
import threading
from pathlib import Path

import pytest

from snapagent.errors import AgentError, ProtocolError
from snapagent.lazy.daemon import LazyPages
from snapagent.lazy.memory import TaskMemory
from snapagent.precedence import Precedence
from snapstore import FileRange, PageRun
from tests.support.lazy_pages import (
    ADDRESS,
    PAGE,
    WAIT_S,
    Columns,
    Gate,
    Peer,
    Stage,
    random_image,
    whole_map,
)
from tests.support.processes import open_fds
from tests.support.waiting import is_held_up

pytestmark = pytest.mark.slow

PAGES = 600
ZERO = bytes(PAGE)
SILENCE_S = 0.3
"""For how long somebody who waits for good is watched."""


def filled(daemon: LazyPages, stage: Stage) -> None:
    """Wait for the end as an owner does."""
    assert daemon.wait_filled(WAIT_S)
    stage.release()
    daemon.close()
    assert not stage.errors


def held_up(stage: Stage, *, pages: int = PAGES) -> tuple[LazyPages, Peer, Gate]:
    """Start, and return when all threads of the background wait for the store."""
    image = random_image(PAGES)
    image.before_read = gate = Gate()
    daemon, peer = stage.start(image, whole_map(PAGES), pages)
    gate.wait()
    return daemon, peer, gate


def test_fills_all_memory(stage: Stage) -> None:
    daemon, peer = stage.start(random_image(1000), [(3, 500, 6, 0), (600, 500, 6, 500)], 1200)
    assert daemon.wait_restored(WAIT_S)
    filled(daemon, stage)
    peer.check()
    stats = daemon.stats
    assert stats.fill_bytes == 1000 * PAGE
    assert stats.restored_s is not None
    assert stats.filled_s is not None
    assert stats.restored_s <= stats.filled_s
    assert stats.tasks == 1


def test_serves_faults_alone(stage: Stage) -> None:
    """Before the background begins, threads that touch memory at once each get theirs."""
    image = random_image(PAGES)
    daemon, peer = stage.start(image, whole_map(PAGES), PAGES + 100, fill=False, record=True)
    peer.check(how="read_by_threads")
    stats = daemon.stats
    assert stats.fault_bytes == PAGES * PAGE
    assert stats.fill_bytes == 0
    assert stats.zero_faults > 0
    assert stats.first_fault_s is not None
    recorded = {
        page
        for run in daemon.recorded_order
        for page in range(run.first_page, run.first_page + run.page_count)
    }
    assert recorded == set(range(PAGES))
    assert not daemon.wait_filled(0)
    daemon.start_fill()
    filled(daemon, stage)


def test_who_waits_comes_first(stage: Stage) -> None:
    """A fault is served while all threads of the background wait for the store."""
    daemon, peer, gate = held_up(stage)
    peer.check(10, 1)
    peer.check(500, 1)
    gate.open()
    filled(daemon, stage)
    peer.check()


def test_records_the_order_of_first_touch(stage: Stage) -> None:
    daemon, peer = stage.start(
        random_image(PAGES), whole_map(PAGES), PAGES, fill=False, record=True
    )
    for page in (200, 17, 33, 400):
        peer.check(page, 1)
    assert daemon.recorded_order == [
        PageRun("pages-1.img", 192, 16),
        PageRun("pages-1.img", 16, 32),
        PageRun("pages-1.img", 400, 16),
    ]


def test_fills_in_the_order_of_the_hint(stage: Stage) -> None:
    image = random_image(PAGES)
    hint = [("pages-1.img", 300, 1), ("other.img", 0, 9), ("pages-1.img", 10**9, 10**9)]
    hint += [("pages-1.img", 100, 60)]
    daemon, _ = stage.start(image, whole_map(PAGES), PAGES, threads=1, order=hint)
    filled(daemon, stage)
    firsts = [offset // PAGE for offset, _, streaming in image.reads if streaming]
    step = 64 * 2 // 3
    assert firsts[:3] == [300 // step * step, 100 // step * step, 159 // step * step]
    assert sorted(firsts) == list(range(0, PAGES, step))


def test_zeros_are_not_read(stage: Stage) -> None:
    """Parts that are known to be zeros cost nothing, and read as zeros before and after."""
    ranges = [
        FileRange(0, 64 * PAGE, is_zeros=False, order=1),
        FileRange(64 * PAGE, 400 * PAGE, is_zeros=True, order=-1),
        FileRange(464 * PAGE, 136 * PAGE, is_zeros=False, order=0),
    ]
    image = random_image(PAGES, ranges=ranges)
    image.data = image.data[: 64 * PAGE] + bytes(400 * PAGE) + image.data[464 * PAGE :]
    image.before_read = gate = Gate()
    daemon, peer = stage.start(image, whole_map(PAGES), PAGES, threads=1)
    gate.wait(1)
    peer.check(100, 300)
    gate.open()
    filled(daemon, stage)
    peer.check()
    assert daemon.stats.zero_bytes == 400 * PAGE
    # The one that is earlier in the store comes first, in pieces that fit.
    assert [offset // PAGE for offset, _, _ in image.reads] == [464, 528, 592, 0]


def test_ranges_that_leave_something_out_do_not_matter(stage: Stage) -> None:
    ranges = [FileRange(64 * PAGE, 100 * PAGE, is_zeros=False, order=1)]
    daemon, peer = stage.start(random_image(PAGES, ranges=ranges), whole_map(PAGES), PAGES)
    filled(daemon, stage)
    peer.check()


def test_what_is_discarded_stays_so(stage: Stage) -> None:
    """Data that were read before memory was discarded, but not copied yet, are not copied."""
    daemon, peer, gate = held_up(stage)
    peer.ask("discard", 3, 70)
    peer.pages[3:73] = [ZERO] * 70
    peer.ask("write", 20, "mine")
    peer.pages[20] = b"mine" + bytes(PAGE - 4)
    gate.open()
    filled(daemon, stage)
    peer.check()
    assert daemon.stats.events == 1


def test_moved_memory_is_filled_where_it_is(stage: Stage) -> None:
    daemon, peer, gate = held_up(stage, pages=2 * PAGES)
    peer.ask("move", 10, 300, PAGES + 5)
    peer.pages[PAGES + 5 : PAGES + 305] = peer.pages[10:310]
    peer.ask("move", PAGES + 100, 20, 400)  # which replaces what is missing there
    peer.pages[400:420] = peer.pages[PAGES + 100 : PAGES + 120]
    peer.check(PAGES + 290, 3)
    gate.open()
    filled(daemon, stage)
    for page, count in (
        (0, 10), (310, 290), (PAGES + 5, 95), (PAGES + 120, 185), (PAGES + 305, 50)
    ):  # fmt: skip
        peer.check(page, count)


def test_moves_lose_nothing_that_comes_page_by_page(stage: Stage) -> None:
    """Goal: a copy of one page that finds its mapping gone, since it moves just then, is not lost.

    Method: every other page is missing, so that all copies are of one page. The task moves all of
    them to and fro while they are filled, as fast as it can.
    """
    count = 3000
    rows = [(2 * number, 1, 6, number) for number in range(count)]
    daemon, peer = stage.start(random_image(count), rows, 5 * count, fill=False)
    daemon.start_fill()
    for _ in range(30):
        peer.ask("move", 0, 2 * count, 2 * count)
        peer.ask("move", 2 * count, 2 * count, 0)
    filled(daemon, stage)
    assert daemon.stats.dropped_bytes == 0
    peer.check(0, 2 * count)


def test_divided_mappings_are_filled(stage: Stage) -> None:
    """No copy may cross mappings, and a task may divide them without telling anybody."""
    daemon, peer, gate = held_up(stage)
    for page in (1, 30, 31, 100, 550):
        peer.ask("protect", page, 7)
    gate.open()
    filled(daemon, stage)
    peer.check()
    assert daemon.stats.dropped_bytes == 0


def test_unmapped_memory_is_not_missed(stage: Stage) -> None:
    daemon, peer, gate = held_up(stage)
    peer.ask("unmap", 0, 10)
    peer.ask("unmap", 300, 100)
    gate.open()
    filled(daemon, stage)
    peer.check(10, 290)
    peer.check(400, 200)


def test_children_have_what_their_parents_miss(stage: Stage) -> None:
    """Children and theirs, forked while parts are read, each with changes of its own."""
    daemon, peer, gate = held_up(stage)
    peer.check(40, 2)
    child = peer.fork()
    peer.ask("discard", 50, 10)
    peer.pages[50:60] = [ZERO] * 10
    child.ask("discard", 0, 5)
    child.pages[0:5] = [ZERO] * 5
    grandchild = child.fork()
    child.ask("write", 500, "child")
    child.pages[500] = b"child" + child.pages[500][5:]
    grandchild.check(495, 20)
    gate.open()
    filled(daemon, stage)
    for each in (peer, child, grandchild):
        each.check()
    assert daemon.stats.tasks == 3
    assert len(stage.held) == 0


def test_children_need_not_have_all_that_their_parents_have(stage: Stage) -> None:
    """Nothing tells that a child lacks a mapping: what belongs there is left out, and no more."""
    daemon, peer, gate = held_up(stage)
    peer.ask("keep_from_children", 33, 100)
    child = peer.fork()
    gate.open()
    filled(daemon, stage)
    peer.check()
    child.check(0, 33)
    child.check(133, PAGES - 133)
    assert daemon.stats.dropped_bytes == 100 * PAGE


def test_children_that_are_dead_are_forgotten(stage: Stage) -> None:
    daemon, peer, gate = held_up(stage)
    child = peer.fork()
    child.close()
    peer.ask("reap", -1)
    gate.open()
    filled(daemon, stage)
    peer.check()


def test_descriptors_of_dead_children_are_closed_in_time(stage: Stage) -> None:
    """A shell forks a thousand times while nothing is filled: that must not use up descriptors."""
    daemon, peer = stage.start(random_image(PAGES), whole_map(PAGES), PAGES, fill=False)
    peer.check(5, 1)
    before = open_fds()
    for _ in range(20):
        peer.ask("fork_briefly", 10)
        stage.release()
    assert daemon.stats.tasks == 201
    assert open_fds() < before + 140
    peer.check(3, 70)


def test_forks_while_memory_is_filled(stage: Stage) -> None:
    """The same without a gate: wherever the fill is at that moment, nothing is missed."""
    daemon, peer = stage.start(
        random_image(4000), whole_map(4000), 4000, buffer_bytes=8 * PAGE, threads=3
    )
    family = [peer]
    for number in range(8):
        family.append(family[number // 2].fork())
        family[-1].ask("discard", number * 400, 3)
        family[-1].pages[number * 400 : number * 400 + 3] = [ZERO] * 3
    filled(daemon, stage)
    for each in family:
        each.check()


class Life:
    """Does at random to the memory of a family what programs do, and knows what must be there."""

    def __init__(self, peer: Peer, rng: random.Random) -> None:
        self.family = [peer]
        self._rng = rng
        # Of mappings that any of them has: what crosses one cannot be moved at once.
        self._borders: set[int] = set()

    def step(self) -> None:
        peer = self._rng.choice(self.family)
        page, to = (self._rng.randrange(len(peer.pages) - 80) for _ in range(2))
        count = self._rng.randrange(1, 80)
        match self._rng.choice(["check", "discard", "write", "move", "move", "unmap", "fork"]):
            case "check":
                peer.check(page, count)
            case "discard":
                peer.ask("discard", page, count)
                peer.pages[page : page + count] = [ZERO] * count
            case "write":
                peer.ask("write", page, "mine")
                peer.pages[page] = b"mine" + peer.pages[page][4:]
            case "move" if abs(page - to) >= count and self._is_whole(page, count):
                self._borders |= {page, page + count, to, to + count}
                peer.pages[to : to + count] = peer.pages[page : page + count]
                peer.pages[page : page + count] = [ZERO] * count
                peer.ask("move", page, count, to)
                peer.ask("map", page, count)
            case "unmap":
                self._borders |= {page, page + count}
                peer.ask("unmap", page, count)
                peer.ask("map", page, count)
                peer.pages[page : page + count] = [ZERO] * count
            case "fork" if len(self.family) < 4:
                self.family.append(peer.fork())
            case _:
                pass

    def _is_whole(self, page: int, count: int) -> bool:
        return not any(page < border < page + count for border in self._borders)


def test_random_lives_while_memory_is_filled(stage: Stage, rng: random.Random) -> None:
    """Whatever happens at whatever moment, everybody has exactly their own memory in the end."""
    image = random_image(8000)
    rows = [(7, 3000, 6, 0), (3100, 2000, 6, 3500), (5100, 2000, 6, 6000)]
    daemon, peer = stage.start(image, rows, 7300, buffer_bytes=6 * PAGE, threads=3)
    life = Life(peer, rng)
    steps = 0
    while not daemon.wait_filled(0) and steps < 400:
        life.step()
        steps += 1
    filled(daemon, stage)
    for each in life.family:
        each.check()


def test_missing_data_stop_everything(stage: Stage) -> None:
    """Who touches missing memory waits, as long as somebody has the userfaultfd."""
    image = random_image(PAGES)
    daemon, peer = stage.start(image, whole_map(PAGES), PAGES, fill=False)
    peer.check(0, 10)

    def fail(*_: object) -> None:
        raise AgentError("the store is gone")

    image.before_read = fail
    daemon.start_fill()
    with pytest.raises(AgentError, match="the store is gone"):
        daemon.wait_filled(WAIT_S)
    assert stage.failed.wait(WAIT_S)
    assert len(stage.errors) == 1
    peer.send("read", 100, 1)
    assert peer.is_silent(SILENCE_S)
    daemon.close()
    assert peer.is_silent(SILENCE_S)
    assert len(stage.errors) == 1


def test_missing_data_for_a_fault_stop_everything(stage: Stage) -> None:
    image = random_image(PAGES)

    def fail(*_: object) -> None:
        raise AgentError("the store is gone")

    image.before_read = fail
    daemon, peer = stage.start(image, whole_map(PAGES), PAGES, fill=False)
    peer.send("read", 100, 1)
    assert stage.failed.wait(WAIT_S)
    assert isinstance(daemon.error, AgentError)
    assert peer.is_silent(SILENCE_S)


def test_a_daemon_closed_early_leaves_no_zeros(stage: Stage) -> None:
    """While a duplicate is open its tasks wait; only when the last one is closed they see zeros."""
    daemon, peer = stage.start(random_image(PAGES), whole_map(PAGES), PAGES, fill=False)
    assert daemon.wait_restored(WAIT_S)
    daemon.close()
    peer.send("read", 100, 1)
    assert peer.is_silent(SILENCE_S)
    stage.release()
    assert peer.answer() == hashlib.sha256(ZERO).hexdigest()


def test_what_is_not_watched_waits_for_nobody(stage: Stage) -> None:
    """Goal: memory that is whole and not watched is ordinary memory, whoever has descriptors open.

    Method: close the daemon but not the duplicates, so that nobody serves the task; it touches
    pages that it never used, and discards, moves and forks: with watched memory each would wait.
    """
    daemon, peer = stage.start(random_image(PAGES), whole_map(PAGES), 2 * PAGES)
    assert daemon.wait_filled(WAIT_S)
    daemon.unwatch()
    daemon.close()
    assert stage.held
    peer.check()
    peer.ask("discard", 3, 70)
    peer.pages[3:73] = [ZERO] * 70
    peer.ask("move", 100, 50, PAGES + 100)
    peer.pages[PAGES + 100 : PAGES + 150] = peer.pages[100:150]
    child = peer.fork()
    for one in (peer, child):
        one.check(0, 100)
        one.check(150, 2 * PAGES - 150)


def test_what_is_missing_stays_watched(stage: Stage) -> None:
    daemon, peer = stage.start(random_image(PAGES), whole_map(PAGES), PAGES, fill=False)
    assert daemon.wait_restored(WAIT_S)
    daemon.unwatch()
    peer.check(7, 1)
    daemon.close()
    daemon.unwatch()
    peer.send("read", 100, 1)
    assert peer.is_silent(SILENCE_S)


def test_it_has_precedence_while_it_fills(stage: Stage) -> None:
    precedence = Precedence()
    image = random_image(PAGES)
    image.before_read = gate = Gate()
    daemon, _ = stage.start(image, whole_map(PAGES), PAGES, precedence=precedence)
    gate.wait()
    assert is_held_up(precedence)
    gate.open()
    filled(daemon, stage)
    assert not is_held_up(precedence)


def one_memory() -> TaskMemory:
    columns = Columns.of([(ADDRESS, 4, 6, 0)])
    return TaskMemory(7, columns, [], "pages-1.img", random_image(4))


def daemon_of(stage: Stage, memory: TaskMemory) -> LazyPages:
    """Make one for a single task, which nobody has restored yet."""
    return LazyPages(
        stage.folder,
        {7: memory},
        threads=1,
        buffer_bytes=PAGE,
        hold=stage.hold,
        on_error=stage.on_error,
    )


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "closed the connection"),
        (struct.pack("=i", -3), "closed the connection"),
        (b"\1\2", "closed the connection"),
        (struct.pack("=i", 7), "0 bytes with 0 descriptors"),
        (struct.pack("=i", 7) + b"\0", "1 bytes with 0 descriptors"),
        (struct.pack("=i", 0), "process id 0"),
    ],
)
def test_other_peers_are_refused(stage: Stage, sent: bytes, message: str) -> None:
    daemon = daemon_of(stage, one_memory())
    with daemon:
        daemon.start()
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(stage.folder / "lazy-pages.socket"))
            peer.sendall(sent)
        with pytest.raises(ProtocolError, match=message):
            daemon.wait_restored(WAIT_S)
    assert len(stage.errors) == 1


@pytest.mark.parametrize("is_started", [False, True])
def test_it_can_be_closed_before_anybody_came(stage: Stage, *, is_started: bool) -> None:
    before = open_fds()
    daemon = daemon_of(stage, one_memory())
    if is_started:
        daemon.start()
    daemon.close()
    daemon.close()
    assert not daemon.wait_filled(WAIT_S)
    assert not stage.errors
    assert open_fds() == before


def test_only_a_userfaultfd_is_taken(stage: Stage) -> None:
    before = open_fds()
    daemon = daemon_of(stage, one_memory())
    with daemon:
        daemon.start()
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(stage.folder / "lazy-pages.socket"))
            peer.sendall(struct.pack("=i", 7))
            with Path("/dev/null").open("rb") as null:
                socket.send_fds(peer, [b"\0"], [null.fileno(), null.fileno()])
            with pytest.raises(ProtocolError, match="2 descriptors"):
                daemon.wait_restored(WAIT_S)
    assert open_fds() == before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((ADDRESS, 4, 2, 0), "does not have all memory"),
        ((ADDRESS, 5, 6, 0), "more than the 16384 bytes"),
        ((ADDRESS + 1, 1, 6, 0), "middle of a page"),
        ((1 << 60, 1, 6, 0), "an address that no process"),
        ((ADDRESS, 1 << 50, 6, 0), "an address that no process"),
        ((ADDRESS, 1, 6, (1 << 64) - 2), "an offset that no file"),
    ],
)
def test_pagemaps_that_cannot_be_are_refused(
    stage: Stage, row: tuple[int, int, int, int], message: str
) -> None:
    memory = TaskMemory(7, Columns.of([row]), [], "pages-1.img", random_image(4))
    with pytest.raises(AgentError, match=message):
        daemon_of(stage, memory)


def test_nothing_stays_open() -> None:
    """Thirty restores, ended in different ways, leave no descriptor and no thread."""

    def one(number: int) -> None:
        stage = Stage()
        try:
            daemon, peer = stage.start(random_image(100), whole_map(100), 100, fill=number % 3 == 0)
            if number % 3 == 0:
                peer.fork()
                filled(daemon, stage)
                peer.check()
            elif number % 3 == 1:
                peer.check(3, 5)
        finally:
            stage.close()

    one(0)
    files, threads = open_fds(), threading.active_count()
    for number in range(30):
        one(number)
    assert open_fds() == files
    assert threading.active_count() == threads
