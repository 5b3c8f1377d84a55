"""The record of captures and restores: what it keeps, and that nothing can spoil it."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapagent.errors import CriuFailed, JobExists
from snapagent.history import BYTES_MAX, History, Outcome, read_history

WRITER = """
import sys
from pathlib import Path
from snapagent.history import History, Outcome
history = History(Path(sys.argv[1]), entries_max=40)
while True:
    entry = history.begin("restore", "team/job:v1")
    history.end(entry, Outcome(phases={"criu": 0.5}))
    print(entry, flush=True)
"""

SHORT_OF_SPACE = """
import resource, sys
from pathlib import Path
from snapagent.history import History
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
history = History(Path(sys.argv[1]), warn=print)
for _ in range(30):
    history.begin("capture", "a:b")
"""


def test_what_is_told_is_kept(tmp_path: Path):
    path = tmp_path / "state" / "history.jsonl"
    history = History(path)
    outcome = Outcome(
        snapshot="b3:00",
        phases={"setup": 0.01, "criu": 0.2},
        first_answer_s=0.4,
        source_bytes={"store": 5000, "zeros": 4096},
        faults=12,
        bottleneck="store",
    )
    first = history.begin("capture", "a:b")
    history.end(first, outcome)
    second = history.begin("restore", "a:b", snapshot="b3:11")
    failed = Outcome().failed(CriuFailed("CRIU said no"))
    history.end(second, failed)
    newest, oldest = read_history(path)
    assert (oldest.id, oldest.kind, oldest.name, oldest.result) == (first, "capture", "a:b", "ok")
    assert oldest.outcome == outcome
    assert oldest.duration_s is not None
    assert (newest.result, newest.outcome.error) == ("error", "CriuFailed")
    assert newest.outcome.message == "CRIU said no"
    assert newest.outcome.snapshot == "b3:11"
    assert oldest.started.endswith("Z")
    assert read_history(path, limit=1) == [newest]
    assert read_history(path, kind="capture") == [oldest]
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_file_there_is_no_entry(tmp_path: Path):
    assert read_history(tmp_path / "none") == []


def test_an_entry_is_running_as_long_as_its_process(tmp_path: Path):
    path = tmp_path / "history.jsonl"
    history = History(path)
    entry = history.begin("capture", "a:b")
    assert read_history(path)[0].result == "running"
    # As if the process that began it had been another one with the same number.
    path.write_bytes(path.read_bytes().replace(b'"life":"', b'"life":"x'))
    assert read_history(path)[0].result == "interrupted"
    history.note(entry, "the agent was killed")
    found = read_history(path)[0]
    assert (found.result, found.reason) == ("interrupted", "the agent was killed")
    assert found.duration_s is None


@pytest.mark.slow
def test_the_newest_entries_are_kept(tmp_path: Path):
    path = tmp_path / "history.jsonl"
    history = History(path, entries_max=20)
    made = []
    for number in range(200):
        made.append(history.begin("restore", f"job:{number}"))
        history.end(made[-1], Outcome())
        found = [entry.id for entry in read_history(path)]
        assert found[:20] == made[:-21:-1]
        assert len(found) <= 26
    assert {one.name for one in tmp_path.iterdir()} == {"history.jsonl", "history.jsonl.lock"}


@pytest.mark.slow
def test_the_file_is_bounded_whatever_is_told(tmp_path: Path):
    path = tmp_path / "history.jsonl"
    history = History(path, bytes_max=64 * 1024)
    for _ in range(60):
        entry = history.begin("restore", "n" * 100_000)
        history.end(
            entry,
            Outcome(message="m" * 100_000, phases={f"{n}" * 50: 0.5 for n in range(1000)}),
        )
        assert path.stat().st_size <= 64 * 1024
    assert read_history(path)[0].id == entry


@pytest.mark.parametrize(
    "torn",
    [
        b'{"event":"begin","id":"00","kind":"resto',
        b"\xff\xfe\x00",
        b"[1, 2]\nnull\n",
        b'{"event":"end","id":"nobody"}\n',
        b'{"event":"begin"}\n{"event":"begin","kind":[]}\n',
        b"[" * 100_000 + b"\n",
        b'{"event":"begin","id":7,"kind":"capture","pid":true,"phases":{"a":NaN},"faults":1e999}\n',
    ],
)
def test_what_makes_no_sense_is_left_out(tmp_path: Path, torn: bytes):
    path = tmp_path / "history.jsonl"
    history = History(path)
    first = history.begin("capture", "a:b")
    with path.open("ab") as file:
        file.write(torn)
    history.end(first, Outcome())
    assert [entry.id for entry in read_history(path)][-1] == first
    assert read_history(path)[-1].result == "ok"


@pytest.mark.slow
@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_damage_leaves_the_file_readable(data: bytes, at: int):
    folder = Path("/dev/shm")  # noqa: S108 - a file of one process's own
    path = folder / f"history-test-{os.getpid()}"
    try:
        history = History(path, entries_max=2)
        history.end(history.begin("capture", "a:b"), Outcome())
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + data + whole[at + len(data) :])
        read_history(path)
        last = history.begin("restore", "c:d")
        assert read_history(path)[0].id == last
    finally:
        for name in folder.glob(f"{path.name}*"):
            name.unlink()


def test_many_writers_at_once_lose_nothing(tmp_path: Path):
    path = tmp_path / "history.jsonl"
    made: list[str] = []

    def write() -> None:
        history = History(path)
        for _ in range(25):
            entry = history.begin("restore", "a:b")
            history.end(entry, Outcome())
            made.append(entry)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_history(path)
    assert {entry.id for entry in found} == set(made)
    assert {entry.result for entry in found} == {"ok"}


@pytest.mark.slow
def test_killed_at_any_moment_it_keeps_what_was_told(tmp_path: Path, rng: random.Random):
    """Goal: SIGKILL in the middle of an append or a cut costs at most the line being written.

    Method: programs write and say aloud what they have written; each is killed at a random moment.
    Entries that were said to be written, the newest of them, must be there and whole.
    """
    path = tmp_path / "history.jsonl"
    said: list[str] = []
    for _ in range(12):
        with subprocess.Popen(  # noqa: S603 - the program above
            [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            said += [writer.stdout.readline().strip() for _ in range(rng.randrange(1, 120))]
            writer.send_signal(signal.SIGKILL)
            said += [line.strip() for line in writer.stdout if line.endswith("\n")]
        found = {entry.id: entry.result for entry in read_history(path)}
        # At most one that was written was not said, in each round.
        for entry in said[-20:]:
            assert found[entry] == "ok"
    results = [entry.result for entry in read_history(path)]
    assert set(results) <= {"ok", "interrupted"}
    assert len(results) <= 50 + 12


# -- where it cannot be written ---------------------------------------------------------------


@pytest.mark.slow
def test_a_full_disk_costs_one_warning_and_no_entry(tmp_path: Path):
    """Goal: what does not fit is not there, and what was there stays whole.

    Method: a program that may only make files of 4 KiB, which fails in the middle of a write.
    """
    path = tmp_path / "history.jsonl"
    printed = subprocess.run(  # noqa: S603 - the program above
        [sys.executable, "-c", SHORT_OF_SPACE, path], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    assert len(printed) == 1
    assert str(path) in printed[0]
    found = read_history(path)
    assert 3 < len(found) < 30
    assert path.read_bytes().endswith(b"}\n")
    History(path).begin("capture", "after")
    assert len(read_history(path)) == len(found) + 1


def test_an_unusable_directory_costs_one_warning(tmp_path: Path):
    (tmp_path / "file").write_text("no directory")
    warnings: list[str] = []
    history = History(tmp_path / "file" / "history.jsonl", warn=warnings.append)
    history.note(history.begin("capture", "a:b"), "reason")
    assert len(warnings) == 1
    assert str(tmp_path / "file") in warnings[0]


@pytest.mark.slow
def test_a_stopped_writer_stops_nobody_else(tmp_path: Path):
    """Goal: a writer that hangs while it holds the lock delays the work a little, and no more."""

    path = tmp_path / "history.jsonl"
    warnings: list[str] = []
    with (tmp_path / "history.jsonl.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        History(path, warn=warnings.append).begin("capture", "a:b")
    assert len(warnings) == 1
    assert read_history(path) == []


def test_lines_are_plain_json(tmp_path: Path):
    path = tmp_path / "history.jsonl"
    history = History(path)
    history.end(history.begin("capture", 'a"\n:b'), Outcome())
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["event"] for event in events] == ["begin", "end"]
    assert len(path.read_bytes()) < BYTES_MAX


def test_an_entry_is_not_hidden_by_another(tmp_path: Path):
    history = History(tmp_path / "history.jsonl")
    history.end(history.begin("restore", "a:b", entry_id="0" * 16), Outcome())
    with pytest.raises(JobExists, match="0000"):
        history.begin("restore", "c:d", entry_id="0" * 16)
    (entry,) = read_history(tmp_path / "history.jsonl")
    assert entry.name == "a:b"
