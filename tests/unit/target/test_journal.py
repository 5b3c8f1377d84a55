import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import TargetError
from snapstore.target import journal as journal_module
from snapstore.target.journal import Journal, JournalHeldError
from tests.support.users import NOBODY

NAME = b"j"
MIB = 1 << 20


@pytest.fixture
def parent_fd(tmp_path: Path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def reopen(parent_fd: int, identity: str = "snapshot") -> tuple[Journal, bool]:
    journal = Journal.open(parent_fd, NAME, identity)
    is_known = journal.load()
    if not is_known:
        journal.start()
    return journal, is_known


def new_boot(monkeypatch: pytest.MonkeyPatch, boot: str | None = "another") -> None:
    monkeypatch.setattr(journal_module, "_boot_id", lambda: boot)


def test_ranges_are_merged_and_survive_the_process(parent_fd: int):
    journal, is_known = reopen(parent_fd)
    assert (is_known, journal.is_empty) == (False, True)
    journal.mark_done(b"a/\xff\n", 0, 10)
    journal.mark_done(b"a/\xff\n", 20, 10)
    journal.mark_done(b"a/\xff\n", 10, 10)
    journal.mark_done(b"b", 5, 1)
    journal.close()
    journal, is_known = reopen(parent_fd)
    assert (is_known, journal.is_empty) == (True, False)
    assert journal.done_ranges(b"a/\xff\n") == [(0, 30)]
    assert journal.done_ranges(b"b") == [(5, 1)]
    assert journal.done_ranges(b"c") == []
    assert journal.is_done(b"a/\xff\n", 3, 27)
    assert not journal.is_done(b"a/\xff\n", 3, 28)
    assert not journal.is_done(b"b", 4, 2)
    assert not journal.is_done(b"c", 0, 1)
    journal.close()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=30))
def test_merged_ranges_hold_what_a_set_of_bytes_holds(ranges: list[tuple[int, int]]):
    journal = Journal(None, "x")
    model: set[int] = set()
    for start, size in ranges:
        journal.mark_done(b"f", start, size)
        model |= set(range(start, start + size))
    merged = journal.done_ranges(b"f")
    assert {byte for start, size in merged for byte in range(start, start + size)} == model
    gaps = [after[0] - (before[0] + before[1]) for before, after in itertools.pairwise(merged)]
    assert all(gap > 0 for gap in gaps)
    for start, size in ranges:
        assert journal.is_done(b"f", start, size)
    for start in range(0, 80, 7):
        assert journal.is_done(b"f", start, 3) == ({start, start + 1, start + 2} <= model)


def test_what_was_not_synced_does_not_outlive_the_machine(
    parent_fd: int, monkeypatch: pytest.MonkeyPatch
):
    journal, _ = reopen(parent_fd)
    journal.mark_done(b"synced", 0, 10)
    journal.mark_durable(b"synced")
    journal.mark_done(b"synced", 10, 10)
    journal.mark_done(b"lost", 0, 10)
    journal.close()
    new_boot(monkeypatch)
    journal, is_known = reopen(parent_fd)
    assert is_known
    assert journal.done_ranges(b"synced") == [(0, 10)]
    assert journal.done_ranges(b"lost") == []
    journal.mark_done(b"lost", 5, 5)
    journal.close()
    journal, _ = reopen(parent_fd)
    assert journal.done_ranges(b"lost") == [(5, 5)]
    assert journal.done_ranges(b"synced") == [(0, 10)]
    journal.close()


def test_where_boots_cannot_be_told_apart_only_synced_data_counts(
    parent_fd: int, monkeypatch: pytest.MonkeyPatch
):
    new_boot(monkeypatch, None)
    journal, _ = reopen(parent_fd)
    journal.mark_done(b"a", 0, 10)
    journal.mark_durable(b"a")
    journal.mark_done(b"b", 0, 10)
    journal.close()
    journal, _ = reopen(parent_fd)
    assert (journal.done_ranges(b"a"), journal.done_ranges(b"b")) == ([(0, 10)], [])
    journal.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_line_is_cut_off(parent_fd: int, tmp_path: Path, cut: int):
    journal, _ = reopen(parent_fd)
    journal.mark_done(b"a", 0, 10)
    journal.mark_done(b"a", 10, 10)
    journal.close()
    path = tmp_path / "j"
    path.write_bytes(path.read_bytes()[:-cut])
    journal, is_known = reopen(parent_fd)
    assert is_known
    assert journal.done_ranges(b"a") == [(0, 10)]
    journal.mark_done(b"a", 50, 1)
    journal.close()
    journal, _ = reopen(parent_fd)
    assert journal.done_ranges(b"a") == [(0, 10), (50, 1)]
    journal.close()


def test_another_identity_is_not_known(parent_fd: int):
    journal, _ = reopen(parent_fd)
    journal.mark_done(b"a", 0, 10)
    journal.close()
    journal, is_known = reopen(parent_fd, "another")
    assert (is_known, journal.is_empty) == (False, True)
    journal.close()


def test_starting_forgets_what_was_loaded(parent_fd: int):
    journal, _ = reopen(parent_fd)
    journal.mark_done(b"a", 0, 10)
    journal.start()
    assert journal.is_empty
    journal.close()


@pytest.mark.slow
@given(st.one_of(st.binary(max_size=200), st.lists(st.from_regex(rb"\{.*\}"), max_size=5)))
def test_arbitrary_content_is_never_more_than_unknown(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | list[bytes]
):
    root = tmp_path_factory.mktemp("journal")
    head = b'{"format": "snapstore/partial", "identity": "snapshot"}\n'
    data = content if isinstance(content, bytes) else head + b"\n".join(content)
    (root / "j").write_bytes(data)
    fd = os.open(root, os.O_RDONLY)
    try:
        journal, _ = reopen(fd)
        journal.close()
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "line",
    [
        b'{"done": "\\ud800", "at": 0, "size": 1}',
        b'{"done": 5, "at": 0, "size": 1}',
        b'{"done": "a", "at": "0", "size": 1}',
        b'{"durable": "never done"}',
        b"[1]",
        b"[" * 100_000,
    ],
)
def test_odd_records_are_ignored(parent_fd: int, tmp_path: Path, line: bytes):
    journal, _ = reopen(parent_fd)
    journal.close()
    with (tmp_path / "j").open("ab") as file:
        file.write(line + b"\n")
    journal, is_known = reopen(parent_fd)
    assert is_known
    assert journal.done_ranges(b"a") == []
    journal.close()


def test_one_holder_at_a_time(parent_fd: int):
    first, _ = reopen(parent_fd)
    with pytest.raises(JournalHeldError):
        Journal.open(parent_fd, NAME, "snapshot")
    first.close()
    second, _ = reopen(parent_fd)
    second.close()


def test_a_journal_removed_while_waiting_for_it_is_not_used(
    parent_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its last holder finishes and removes it between our open and our lock."""
    real, removed = journal_module._lock, []

    def remove_then_lock(fd: int, name: bytes) -> None:
        if not removed:
            removed.append((tmp_path / "j").unlink())
        real(fd, name)

    monkeypatch.setattr(journal_module, "_lock", remove_then_lock)
    journal = Journal.open(parent_fd, NAME, "snapshot")
    assert os.path.samestat(os.fstat(journal._fd), (tmp_path / "j").stat())
    journal.close()


def test_a_symlink_is_not_followed(parent_fd: int, tmp_path: Path):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "j").symlink_to("victim")
    with pytest.raises(OSError, match="symbolic links"):
        Journal.open(parent_fd, NAME, "snapshot")
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_the_journal_of_another_user_is_refused(parent_fd: int, tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    (tmp_path / "j").touch()
    os.chown(tmp_path / "j", NOBODY, NOBODY)
    with pytest.raises(TargetError, match="another user"):
        Journal.open(parent_fd, NAME, "snapshot")


def test_without_a_file_it_works_in_memory():
    journal = Journal(None, "x")
    assert journal.load() is False
    journal.start()
    journal.mark_done(b"a", 0, MIB)
    journal.mark_durable(b"a")
    assert journal.is_done(b"a", 0, MIB)
    journal.close()
