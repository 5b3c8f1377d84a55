"""Waiting for files: those that are there, come, come with their directory, or with another one."""

import os
import queue
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typing_extensions import override

from snapagent.linux.inotify import APPEARED, Inotify
from snapagent.workload.watch import FileWatch, Stopped

WAIT_S_MAX = 10
QUEUE_MAX = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


class SteppedWatch(FileWatch):
    """Tells each time when it has looked in vain and is about to sleep."""

    def __init__(self, directory: Path, *names: str) -> None:
        super().__init__(str(directory), names)
        self.asleep: queue.Queue[None] = queue.Queue()

    @override
    def _await_change(self, end: float | None, bell: int | None) -> None:
        self.asleep.put(None)
        super()._await_change(end, bell)


@contextmanager
def waiting(watch: FileWatch) -> Iterator[Callable[[], str]]:
    """Wait on a thread; the body gets what joins it and returns what was found."""
    found: list[str] = []
    bell = os.eventfd(0)

    def wait() -> None:
        try:
            found.append(watch.wait(WAIT_S_MAX, bell))
        except Stopped:
            return

    def joined() -> str:
        thread.join(WAIT_S_MAX)
        return found[0]

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield joined
    finally:
        os.eventfd_write(bell, 1)
        thread.join()
        os.close(bell)


def put(path: Path) -> None:
    """Let a file appear as agents do."""
    temporary = path.with_name(".temporary")
    temporary.write_text("done\n")
    temporary.rename(path)


def test_a_file_that_is_there_is_found_at_once(tmp_path: Path) -> None:
    put(tmp_path / "b")
    assert FileWatch(str(tmp_path), ["a", "b"]).wait(0) == "b"
    put(tmp_path / "a")
    assert FileWatch(str(tmp_path), ["a", "b"]).wait(0) == "a"


@pytest.mark.parametrize("appear", [put, Path.touch])
def test_a_file_that_comes_is_found(tmp_path: Path, appear: Callable[[Path], None]) -> None:
    watch = SteppedWatch(tmp_path, "a", "b")
    with waiting(watch) as found:
        watch.asleep.get(timeout=WAIT_S_MAX)
        appear(tmp_path / "b")
        assert found() == "b"


def test_other_files_do_not_even_wake_it(tmp_path: Path) -> None:
    watch = SteppedWatch(tmp_path, "a")
    with waiting(watch) as found:
        watch.asleep.get(timeout=WAIT_S_MAX)
        for number in range(100):
            put(tmp_path / f"other-{number}")
        put(tmp_path / "a")
        assert found() == "a"
    assert watch.asleep.empty()


def test_a_directory_may_come_later_piece_by_piece(tmp_path: Path) -> None:
    directory = tmp_path / "one" / "two" / "three"
    watch = SteppedWatch(directory, "a")
    with waiting(watch) as found:
        for made in (directory.parent.parent, directory.parent, directory):
            watch.asleep.get(timeout=WAIT_S_MAX)
            made.mkdir()
        watch.asleep.get(timeout=WAIT_S_MAX)
        put(directory / "a")
        assert found() == "a"


def test_a_directory_may_come_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "made" / "deep").mkdir(parents=True)
    put(tmp_path / "made" / "deep" / "a")
    watch = SteppedWatch(tmp_path / "wanted" / "deep", "a")
    with waiting(watch) as found:
        watch.asleep.get(timeout=WAIT_S_MAX)
        (tmp_path / "made").rename(tmp_path / "wanted")
        assert found() == "a"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_directory_may_be_replaced(tmp_path: Path, depth: int) -> None:
    """Also one above it, of which the directory itself knows nothing."""
    directory = tmp_path / "above" / "control"
    directory.mkdir(parents=True)
    replaced = [directory, directory.parent][depth]
    watch = SteppedWatch(directory, "a")
    with waiting(watch) as found:
        watch.asleep.get(timeout=WAIT_S_MAX)
        replaced.rename(tmp_path / "old")
        if depth == 0:  # It was told of its own move.
            watch.asleep.get(timeout=WAIT_S_MAX)
        directory.mkdir(parents=True)
        watch.asleep.get(timeout=WAIT_S_MAX)
        put(directory / "a")
        assert found() == "a"


def test_a_link_to_the_directory_may_be_turned(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("first")
    watch = SteppedWatch(tmp_path / "link", "a")
    with waiting(watch) as found:
        watch.asleep.get(timeout=WAIT_S_MAX)
        (tmp_path / "new-link").symlink_to("second")
        (tmp_path / "new-link").rename(tmp_path / "link")
        watch.asleep.get(timeout=WAIT_S_MAX)
        put(tmp_path / "second" / "a")
        assert found() == "a"


def test_where_a_link_leads_may_come_later(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    watch = SteppedWatch(tmp_path / "link", "a")
    with waiting(watch) as found:
        watch.asleep.get(timeout=WAIT_S_MAX)
        (tmp_path / "there").mkdir()
        watch.asleep.get(timeout=WAIT_S_MAX)
        put(tmp_path / "there" / "a")
        assert found() == "a"


def test_only_regular_files_count(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    put(tmp_path / "file")
    (tmp_path / "b").symlink_to("file")
    os.mkfifo(tmp_path / "c")
    with pytest.raises(TimeoutError):
        FileWatch(str(tmp_path), ["a", "b", "c"]).wait(0)


def test_nothing_stays_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - only the names
    with pytest.raises(TimeoutError):
        FileWatch(str(tmp_path), ["a"]).wait(0.01)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


@pytest.mark.slow
def test_a_queue_that_overflows_loses_no_file(tmp_path: Path) -> None:
    """Goal: whatever events are lost, the file is found.

    Method: overflow the queue while nobody reads it, with the wanted name among what is lost.
    """
    names = [tmp_path / "x", tmp_path / "y"]

    def overflow() -> None:
        for number in range(QUEUE_MAX + 2):
            # Two names in turn: the kernel unites equal events that follow each other.
            names[number % 2].touch()
            names[number % 2].unlink()
        put(tmp_path / "a")

    class Late(FileWatch):
        @override
        def _await_change(self, end: float | None, bell: int | None) -> None:
            overflow()
            super()._await_change(end, bell)

    with Inotify() as other:
        other.add(str(tmp_path), APPEARED)
        assert Late(str(tmp_path), ["a"]).wait(WAIT_S_MAX) == "a"
        seen = []
        while events := other.read():
            seen += events
        assert seen[-1].watch == -1
        assert b"a" not in [event.name for event in seen]


def test_too_many_descriptors_are_told(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            FileWatch(str(tmp_path), ["a"]).wait(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
