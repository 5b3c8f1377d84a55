"""Ctrl-C at any time: exit 130, nothing half-made under a final name, and going on is cheap."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snapstore
from snapstore.format.lease import LeaseState, decode_lease
from snapstore.units import MIB
from tests.support.samples import bf16, random_bytes, text
from tests.support.schemas import check_store
from tests.support.trees import same_trees
from tests.unit.cli.program import ENVIRONMENT, command_line, one_object, run, start, wait_until

pytestmark = pytest.mark.slow

WINDOW_BYTES = 8 * MIB
WEIGHTS_BYTES = 128 * MIB
SPARSE_BYTES = 768 * MIB
TEXT_BYTES = 12 * MIB
LEAST_MEMORY = ("--memory", "192MiB")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a tree that takes seconds to push and little space.

    First numbers, of which every few megabytes fill a pack; then a sparse file with one page of
    data per window, all of which has to be read.
    """
    root = tmp_path_factory.mktemp("interrupt") / "tree"
    root.mkdir()
    block = bf16(WINDOW_BYTES // 2, 1).view("<u2")
    with (root / "a-weights.bin").open("wb") as file:
        file.writelines(
            (block ^ np.uint16(number)).tobytes() for number in range(WEIGHTS_BYTES // WINDOW_BYTES)
        )
    with (root / "b-sparse.img").open("wb") as file:
        file.truncate(SPARSE_BYTES)
        for number in range(SPARSE_BYTES // WINDOW_BYTES):
            file.seek(number * WINDOW_BYTES + 4096 * number)
            file.write(random_bytes(4096, number).tobytes())
    (root / "c-text").write_bytes(text(TEXT_BYTES, 1).tobytes())
    yield root
    shutil.rmtree(root.parent)


@pytest.fixture(scope="module")
def store(tree: Path) -> Path:
    """Return a store that holds the tree as `big:v1`."""
    path = tree.parent / "store"
    with snapstore.init_store(f"file://{path}") as opened:
        opened.push(tree, "big:v1")
    return path


def stop(process: subprocess.Popen[str], number: int) -> tuple[str, str]:
    """Send a signal, wait for the end, and give the two outputs."""
    process.send_signal(number)
    return process.communicate()


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_push_leaves_no_name_and_is_simply_run_again(
    tree: Path, tmp_path: Path, number: int
) -> None:
    """Goal: nothing has the name, the lease is given back, and what was sent is not sent again.

    Method: interrupt as soon as the first pack of many is in the store. Look at everything there;
    push again and compare what both say. Proves: I3.
    """
    path = tmp_path / "store"
    snapstore.init_store(f"file://{path}").close()
    with start("push", tree, "big:v1", "--threads", "2", *LEAST_MEMORY, store=path) as process:
        wait_until(lambda: bool(files_below(path / "packs")), process)
        out, err = stop(process, number)
    assert process.returncode == 130
    assert out == ""
    assert "error: interrupted" in err
    assert "next: run the same command again to go on" in err
    assert "Traceback" not in err
    for kind in ("refs", "snapshots", "ranks", "layouts", "tmp"):
        assert files_below(path / kind) == [], kind
    lease = max(files_below(path / "leases"))
    assert decode_lease(lease.read_bytes()).state is LeaseState.RELEASED
    assert run("ls", "--json", store=path).out == ""
    counts = check_store(path)
    # Every pack that was finished is listed in an index.
    assert counts["indexes"] == counts["packs"] >= 1

    again = one_object(run("push", tree, "big:v1", "--json", *LEAST_MEMORY, store=path))
    assert again["known_bytes"] >= 16 * MIB
    assert again["new_bytes"] + again["known_bytes"] + again["zero_bytes"] == (
        WEIGHTS_BYTES + SPARSE_BYTES + TEXT_BYTES
    )
    assert again["new_bytes"] <= WEIGHTS_BYTES + TEXT_BYTES - 15 * MIB


def interrupted_pull(store: Path, target: Path) -> str:
    """Start a pull and interrupt it once some data are written; gives what it said.

    A pull may be done before the signal comes: then it is started again.
    """
    for _ in range(5):
        with start("pull", "big:v1", target, "--threads", "1", store=store) as process:
            wait_until(lambda: target.exists() or bool(written_so_far(target)), process)
            _, err = stop(process, signal.SIGINT)
        if process.returncode != 0:
            assert process.returncode == 130
            return err
        shutil.rmtree(target)
    raise AssertionError("every pull was faster than its interruption")


def partial_directories(target: Path) -> list[Path]:
    return [
        path
        for path in target.parent.glob(f".{target.name}.snapstore-partial-*")
        if path.suffix != ".journal"
    ]


def written_so_far(target: Path) -> int:
    return sum(
        path.stat().st_blocks for folder in partial_directories(target) for path in folder.iterdir()
    )


def test_an_interrupted_pull_is_resumed(tree: Path, store: Path, tmp_path: Path) -> None:
    """Goal: nothing has the final name, what was written stays, and --resume does only the rest.

    Method: interrupt a pull when its first data are on disk. A pull without --resume must refuse,
    one with it must finish, and the tree must be the pushed one. Proves: I8.
    """
    target = tmp_path / "out"
    err = interrupted_pull(store, target)
    assert "error: interrupted" in err
    assert "Traceback" not in err
    assert not target.exists()
    (partial,) = partial_directories(target)
    step = f"next: what was pulled so far stays in '{partial}', and --resume goes on from there"
    assert step in err
    refused = run("pull", "big:v1", target, store=store)
    assert refused.code == 1
    assert str(partial) in refused.err
    assert "--resume" in refused.err

    result = one_object(run("pull", "big:v1", target, "--resume", "--json", store=store))
    assert 0 < result["resumed_bytes"] < result["data_bytes"]
    assert result["read_bytes"] < 0.75 * WEIGHTS_BYTES
    same_trees(tree, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_another_snapshot_is_never_mixed_with_what_is_left(store: Path, tmp_path: Path) -> None:
    """Goal: work on one snapshot is not resumed for another one of the same name."""
    target = tmp_path / "out"
    interrupted_pull(store, target)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "file").write_bytes(b"tiny")
    with snapstore.open_store(f"file://{store}") as opened:
        opened.push(tmp_path / "tiny", "tiny:v1")
    result = one_object(run("pull", "tiny:v1", target, "--resume", "--json", store=store))
    assert result["resumed_bytes"] == 0
    same_trees(tmp_path / "tiny", target)
    # What was left of the other one is still there for whoever wants it.
    assert len(partial_directories(target)) == 1


MEASURE = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss * 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_bytes(*arguments: str | Path) -> int:
    """Run the program and ask the system how much memory it had at most.

    A process in between starts it, since the system counts the memory of whoever starts a process
    as that process's own, and a test run may have more than the program may.
    """
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", MEASURE, *command_line(arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize(("threads", "effort"), [("2", "auto"), ("64", "auto"), ("64", "max")])
def test_memory_stays_within_the_least_budget(
    tree: Path, store: Path, tmp_path: Path, threads: str, effort: str
) -> None:
    """Goal: the budget holds for the whole process, whatever the snapshot and the threads.

    Method: push to a new store and pull with the smallest budget, and ask the system afterwards.
    """
    options: Any = ("--quiet", "--threads", threads, *LEAST_MEMORY)
    snapstore.init_store(f"file://{tmp_path / 'store'}").close()
    name = "big:v1"
    pushed = peak_bytes(
        "push", tree, name, "--compression", effort, *options, "--store", tmp_path / "store"
    )
    assert pushed <= 192 * MIB
    pulled = peak_bytes("pull", name, tmp_path / "out", *options, "--store", store)
    assert pulled <= 192 * MIB
