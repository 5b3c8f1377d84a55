"""The real program, killed for real while it works, again and again, and then let finish."""

import contextlib
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.repository.store import init_store
from snapstore.units import MIB
from tests.support.damage import REPOSITORY, Lab, age, leftovers, program, temporaries, tree_state
from tests.support.schemas import check_store

pytestmark = pytest.mark.slow

KILLS = 5
PACK_BYTES = 4 * MIB
TREE_BYTES = 96 * MIB
LOOK_AGAIN_S = 0.001


@pytest.fixture
def big(work_dir: Path) -> Lab:
    """Return an empty store and a tree of two dozen packs."""
    tree = work_dir / "tree"
    tree.mkdir()
    rng = random.Random(7)
    (tree / "weights.bin").write_bytes(rng.randbytes(TREE_BYTES - 3 * MIB))
    for number in range(30):
        (tree / f"small-{number}").write_bytes(rng.randbytes(100_000))
    age(tree)
    lab = Lab(work_dir / "store", tree)
    init_store(str(lab.root)).close()
    return lab


@contextlib.contextmanager
def started(*arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the real program with packs of 4 MiB."""
    command = program(*arguments)
    command[2] = (
        "import dataclasses\n"
        "from snapstore.repository.memory import MemoryPlan\n"
        "of = MemoryPlan.of\n"
        f"MemoryPlan.of = lambda o: dataclasses.replace(of(o), pack_bytes={PACK_BYTES})\n"
        f"{command[2]}"
    )
    with subprocess.Popen(  # noqa: S603
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def kill_when(process: subprocess.Popen[bytes], is_time: Callable[[], bool]) -> None:
    """Kill the program as soon as a condition holds; it must not have ended by then."""
    while not is_time():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_AGAIN_S)
            raise AssertionError(process.communicate()[0].decode())
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def packs_of(lab: Lab) -> list[Path]:
    return [path for path in (lab.root / "packs").rglob("*") if path.is_file()]


def test_pushes_are_killed(big: Lab, work_dir: Path) -> None:
    """Five kills cost at most five times two packs. Proves: I1, I2, I3.

    Method: each time the program is killed as soon as one or two more packs are there than before.
    What was sent is everything that ever got a name or was left in `tmp/`.
    """
    rng = random.Random(20261130)
    command = ("push", big.tree, big.name, "--store", big.root, "--quiet")
    for _ in range(KILLS):
        enough = len(packs_of(big)) + rng.choice((1, 2))
        with started(*command) as process:
            kill_when(process, lambda enough=enough: len(packs_of(big)) >= enough)  # type: ignore[misc]
        assert big.names(ObjectKind.REF) == []
    check_store(big.root)
    with started(*command) as process:
        output, _ = process.communicate()
        assert process.returncode == 0, output.decode()
    sent = sum(path.stat().st_size for path in packs_of(big) + temporaries(big.root))
    whole = Lab(work_dir / "whole", big.tree)
    init_store(str(whole.root)).close()
    with started("push", big.tree, big.name, "--store", whole.root, "--quiet") as process:
        process.communicate()
    total = sum(path.stat().st_size for path in packs_of(whole))
    assert total <= sent <= total + KILLS * 2 * max(path.stat().st_size for path in packs_of(whole))
    big.pull(work_dir / "out")
    assert tree_state(work_dir / "out") == tree_state(big.tree)


def test_pulls_are_killed(big: Lab, work_dir: Path) -> None:
    """A pull that is killed again and again gets on each time, and leaves nothing in the end.

    Method: kill when the journal has so many more bytes than when the program was started.
    Proves: I8.
    """
    big.push()
    out = work_dir / "out"
    rng = random.Random(20261201)
    command = ("pull", big.name, out, "--store", big.root, "--quiet", "--resume", "--threads", "1")

    def journal_bytes() -> int:
        names = [name for name in leftovers(out) if name.endswith(".journal")]
        return sum((work_dir / name).stat().st_size for name in names)

    before = 0
    for _ in range(3):
        enough = before + rng.randrange(300, 500)
        with started(*command) as process:
            kill_when(process, lambda enough=enough: journal_bytes() >= enough)  # type: ignore[misc]
        assert not out.exists()
        assert len(leftovers(out)) == 2
        before = journal_bytes()
    with started(*command) as process:
        output, _ = process.communicate()
        assert process.returncode == 0, output.decode()
    assert tree_state(out) == tree_state(big.tree)
    assert leftovers(out) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_push_is_interrupted(big: Lab, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM end it with 130 and let it clean up: nothing is left in `tmp/`.

    Proves: I2, I3, R4.
    """
    command = ("push", big.tree, big.name, "--store", big.root, "--quiet")
    with started(*command) as process:
        while len(packs_of(big)) < 2:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_AGAIN_S)
                raise AssertionError(process.communicate()[0].decode())
        process.send_signal(number)
        output, _ = process.communicate()
    assert process.returncode == 130, output.decode()
    assert b"Traceback" not in output
    assert b"next: run the same command again" in output
    assert temporaries(big.root) == []
    assert big.names(ObjectKind.REF) == []
    (lease,) = {name.partition("/")[0] for name in big.names(ObjectKind.LEASE)}
    last = big.path(ObjectKind.LEASE, big.names(ObjectKind.LEASE, f"{lease}/")[-1])
    assert b'"released"' in last.read_bytes()
    check_store(big.root)
