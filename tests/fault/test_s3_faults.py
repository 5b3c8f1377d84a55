"""A real S3 server behind something that loses, delays and spoils what passes: push and pull hold.

Every trouble is tried at every request of a small push and of a pull. What may be repeated is, on a
clock that does not wait; what may not ends with an error that says what to do. Afterwards the same
command finishes, and nothing partial was ever visible.
"""

import dataclasses
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapstore.backend.http_pool import HttpPool, Timeouts
from snapstore.clock import SystemClock
from snapstore.errors import (
    AccessDenied,
    IntegrityError,
    LookupFailed,
    OutOfSpace,
    RefNotFound,
    SnapError,
    TransientBackendError,
)
from snapstore.repository.store import Store, init_store, open_store
from snapstore.testing.clock import ManualClock
from snapstore.units import MIB
from tests.support.damage import REPOSITORY, age, tree_state
from tests.support.s3_proxy import Plan, Proxy, Request, Trouble
from tools.seaweed import S3Server

pytestmark = [pytest.mark.s3, pytest.mark.slow]

NAME = "team/model:v1"
SHORT = Timeouts(connect_s=2.0, silence_s=0.5)
USUAL = Timeouts

SMALL_PACKS = (
    "import dataclasses\n"
    "from snapstore.repository.memory import MemoryPlan\n"
    "of = MemoryPlan.of\n"
    f"MemoryPlan.of = lambda o: dataclasses.replace(of(o), pack_bytes={2 * MIB})\n"
    "from snapstore.cli.main import run; run()"
)
"""The real program with packs of 2 MiB."""

KILLED_PUSH_PACKS = 40
"""More than ten killed pushes can store: two packs each, and a third that was on its way already.
The last one has to find enough left to be killed at its third."""

PASSING: list[Trouble] = ["refused", "reply-lost", "slow-down", "internal-error"]
"""What a client gets over by trying again."""

PASSING_READS: list[Trouble] = ["truncated", "stalled-body", "wrong-range"]
LASTING: dict[Trouble, type[SnapError]] = {
    "denied": AccessDenied,
    "expired": AccessDenied,
    "full": OutOfSpace,
    # Answers to HEAD have no body, so whether the object or all of its bucket is gone is not said.
    "no-bucket": LookupFailed,
}


@dataclasses.dataclass(frozen=True)
class Bench:
    """A server, the proxy before it, a bucket, and a tree."""

    proxy: Proxy
    bucket: str
    tree: Path
    serial: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def url(self) -> str:
        """A new place for a store in the bucket."""
        return f"s3://{self.bucket}/s{next(self.serial)}?endpoint={self.proxy.endpoint}"


@pytest.fixture(scope="session")
def small_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tree of three packs; nobody changes it."""
    tree = tmp_path_factory.mktemp("s3") / "tree"
    (tree / "folder").mkdir(parents=True)
    rng = random.Random(3)
    (tree / "weights.bin").write_bytes(rng.randbytes(300_000))
    (tree / "folder/zeros").write_bytes(bytes(100_000))
    (tree / "folder/note").write_text("a note")
    age(tree)
    return tree


@pytest.fixture
def bench(s3: S3Server, s3_bucket: str, small_tree: Path) -> Iterator[Bench]:
    """Return a server behind a proxy."""
    with Proxy(s3.endpoint).running() as proxy:
        yield Bench(proxy, s3_bucket, small_tree)


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a silent server up after half a second, on the wall's clock.

    On a clock whose pauses take no time, the pause of one thread would make requests of all others
    look as if they had taken that long.
    """
    monkeypatch.setattr("snapstore.backend.s3.Timeouts", lambda: SHORT)
    monkeypatch.setattr(
        "snapstore.backend.s3.HttpPool",
        lambda _, **settings: HttpPool(SystemClock(), **settings),
    )


def opened(url: str) -> Store:
    """Open a store on a clock whose pauses take no time."""
    return open_store(url, clock=ManualClock())


def once(number: int, trouble: Trouble) -> Plan:
    return lambda request: trouble if request.number == number else None


def after(number: int, trouble: Trouble) -> Plan:
    return lambda request: trouble if request.number >= number else None


def counted(bench: Bench, url: str, act: object) -> int:
    """How many requests an operation makes once the store is open."""
    assert callable(act)
    with opened(url) as store:
        bench.proxy.seen.clear()
        act(store)
    return len(bench.proxy.seen)


def check_pulled(bench: Bench, store: Store, to: Path) -> None:
    bench.proxy.plan = lambda _: None
    store.pull(NAME, to)
    assert tree_state(to) == tree_state(bench.tree)
    shutil.rmtree(to)


def new_store(bench: Bench) -> str:
    bench.proxy.plan = lambda _: None
    url = bench.url()
    with pytest.MonkeyPatch.context() as patch:
        # A machine that is busy may need longer than half a second, and nobody asks again here.
        patch.setattr("snapstore.backend.s3.Timeouts", USUAL)
        init_store(url).close()
    return url


@pytest.mark.parametrize("part", range(len(PASSING)))
def test_a_push_gets_over_trouble_at_every_request(bench: Bench, tmp_path: Path, part: int) -> None:
    """Each request of a push meets a trouble, in another part another. Proves: S3, S4, I3."""
    total = counted(bench, new_store(bench), lambda store: store.push(bench.tree, NAME))
    assert total > 15
    for number in range(part % 2, total, 2):
        with opened(new_store(bench)) as store:
            bench.proxy.seen.clear()
            bench.proxy.plan = once(number, PASSING[(number // 2 + part) % len(PASSING)])
            assert store.push(bench.tree, NAME).generation == 1
            check_pulled(bench, store, tmp_path / "out")


def test_a_pull_gets_over_trouble_at_every_request(bench: Bench, tmp_path: Path) -> None:
    """Proves: S5, I6."""
    url = new_store(bench)
    with opened(url) as store:
        store.push(bench.tree, NAME)
    total = counted(bench, url, lambda store: store.pull(NAME, tmp_path / "first"))
    troubles = itertools.cycle([*PASSING, *PASSING_READS])
    for _ in range(3):
        for number in range(total):
            with opened(url) as store:
                bench.proxy.seen.clear()
                bench.proxy.plan = once(number, next(troubles))
                store.pull(NAME, tmp_path / "out")
            assert tree_state(tmp_path / "out") == tree_state(bench.tree)
            shutil.rmtree(tmp_path / "out")
        next(troubles)  # so that the next round meets every request with another trouble


@pytest.mark.parametrize("trouble", LASTING)
def test_a_push_ends_with_what_is_wrong(bench: Bench, tmp_path: Path, trouble: Trouble) -> None:
    """From any request on: the right error, nothing under the name, and the next push succeeds."""
    total = counted(bench, new_store(bench), lambda store: store.push(bench.tree, NAME))
    for number in range(0, total - 1, 4):
        with opened(new_store(bench)) as store:
            bench.proxy.seen.clear()
            bench.proxy.plan = after(number, trouble)
            with pytest.raises(LASTING[trouble]) as caught:
                store.push(bench.tree, NAME)
            assert caught.value.next_step
            bench.proxy.plan = lambda _: None
            with pytest.raises(RefNotFound):
                store.snapshot(NAME)
            store.push(bench.tree, NAME)
            check_pulled(bench, store, tmp_path / "out")


@pytest.mark.parametrize("trouble", LASTING)
def test_a_pull_ends_with_what_is_wrong(bench: Bench, tmp_path: Path, trouble: Trouble) -> None:
    url = new_store(bench)
    with opened(url) as store:
        store.push(bench.tree, NAME)
    total = counted(bench, url, lambda store: store.pull(NAME, tmp_path / "first"))
    for number in range(total):
        with opened(url) as store:
            bench.proxy.seen.clear()
            bench.proxy.plan = after(number, trouble)
            # A snapshot without its bucket may also look like one of which a part is gone.
            also = (IntegrityError,) if trouble == "no-bucket" else ()
            with pytest.raises((LASTING[trouble], *also)):
                store.pull(NAME, tmp_path / "out")
            assert not (tmp_path / "out").exists()
            bench.proxy.plan = lambda _: None
            store.pull(NAME, tmp_path / "out", resume=True)
        assert tree_state(tmp_path / "out") == tree_state(bench.tree)
        shutil.rmtree(tmp_path / "out")


def test_wrong_bytes_are_never_restored(bench: Bench, tmp_path: Path) -> None:
    """A bit that flips on the way to any object ends the pull, and nothing has the name."""
    url = new_store(bench)
    with opened(url) as store:
        store.push(bench.tree, NAME)
    total = counted(bench, url, lambda store: store.pull(NAME, tmp_path / "first"))
    spoiled = 0
    for number in range(total):
        bench.proxy.seen.clear()
        bench.proxy.plan = once(number, "wrong-bytes")
        try:
            with opened(url) as store:
                store.pull(NAME, tmp_path / "out")
        except SnapError as error:
            assert not (tmp_path / "out").exists()
            spoiled += isinstance(error, IntegrityError)
            bench.proxy.plan = lambda _: None
            with opened(url) as store:
                store.pull(NAME, tmp_path / "out", resume=True)
        assert tree_state(tmp_path / "out") == tree_state(bench.tree)
        shutil.rmtree(tmp_path / "out")
    assert spoiled > 2


def test_a_storm_of_503_slows_everybody_down(bench: Bench, tmp_path: Path) -> None:
    """Two of three requests are answered *slow down*: it takes long, on its clock, and succeeds."""
    clock = ManualClock()
    url = new_store(bench)
    rng = random.Random(5)
    bench.proxy.plan = lambda _: "slow-down" if rng.random() < 0.6 else None
    with open_store(url, clock=clock) as store:
        store.push(bench.tree, NAME)
        store.pull(NAME, tmp_path / "out")
    assert tree_state(tmp_path / "out") == tree_state(bench.tree)
    assert clock.monotonic_s() > 1


def test_a_server_that_is_silent_is_given_up(bench: Bench) -> None:
    """The last error is that nobody answered; it did not take longer than a try each."""
    url = new_store(bench)
    bench.proxy.plan = after(0, "stalled")
    with pytest.raises(TransientBackendError, match="tim"), opened(url) as store:
        store.push(bench.tree, NAME)


def test_renewed_credentials_are_used(bench: Bench, tmp_path: Path) -> None:
    """A signed address whose session has ended is signed anew, once."""
    url = new_store(bench)
    with opened(url) as store:
        store.push(bench.tree, NAME)
    for number in range(counted(bench, url, lambda store: store.pull(NAME, tmp_path / "first"))):
        bench.proxy.seen.clear()
        bench.proxy.plan = once(number, "expired")
        try:
            with opened(url) as store:
                store.pull(NAME, tmp_path / "out")
        except AccessDenied:
            # A call of boto3, which renews what it has by itself.
            request = bench.proxy.seen[number]
            assert request.method == "HEAD" or "list-type" in request.path
            continue
        assert tree_state(tmp_path / "out") == tree_state(bench.tree)
        shutil.rmtree(tmp_path / "out")


def test_the_process_is_killed_at_every_request_of_a_push(bench: Bench, tmp_path: Path) -> None:
    """Goal: wherever a push over S3 dies, nothing has the name, and the next one goes on.

    Method: the real program, killed by SIGKILL when its n-th request arrives. Proves: I1, I2, I3.
    """
    total = counted(bench, new_store(bench), lambda store: store.push(bench.tree, NAME))
    url = new_store(bench)
    program = [sys.executable, "-c", "from snapstore.cli.main import run; run()"]
    command = [*program, "push", str(bench.tree), NAME, "--store", url, "--quiet"]
    for number in range(1, total, 4):
        bench.proxy.seen.clear()
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as process:  # noqa: S603

            def plan(request: Request, number: int = number, pid: int = process.pid) -> None:
                if request.number == number:
                    os.kill(pid, signal.SIGKILL)

            bench.proxy.plan = plan  # type: ignore[assignment]
            process.wait()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        bench.proxy.plan = lambda _: None
    bench.proxy.plan = lambda _: None
    done = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True)  # noqa: S603
    assert done.returncode == 0, done.stderr
    with opened(url) as store:
        check_pulled(bench, store, tmp_path / "out")


def test_a_push_is_killed_ten_times(bench: Bench, work_dir: Path) -> None:
    """Ten kills at random moments cost at most ten times two packs. Proves: I1, I2, I3.

    Method: the real program with packs of 2 MiB, killed when one of the next few packs arrives, at
    once or a moment later. What was sent is what arrived at the server's door, also in part.
    """
    total = KILLED_PUSH_PACKS * 2 * MIB
    tree = work_dir / "tree"
    tree.mkdir()
    (tree / "weights.bin").write_bytes(random.Random(7).randbytes(total))
    age(tree)
    rng = random.Random(20261130)
    url = new_store(bench)
    command = [sys.executable, "-c", SMALL_PACKS, "push", str(tree), NAME, "--store", url, "-q"]
    bench.proxy.bytes_put = 0
    for _ in range(10):
        bench.proxy.seen.clear()
        packs = itertools.count()
        with subprocess.Popen(command, cwd=REPOSITORY) as process:  # noqa: S603

            def plan(
                request: Request,
                packs: Iterator[int] = packs,
                fatal: int = rng.randrange(1, 3),
                pid: int = process.pid,
            ) -> Trouble | None:
                if request.method == "PUT" and request.is_data and next(packs) == fatal:
                    os.kill(pid, signal.SIGKILL)
                return None

            bench.proxy.plan = plan
            process.wait()
        assert process.returncode == -signal.SIGKILL
    bench.proxy.plan = lambda _: None
    done = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True)  # noqa: S603
    assert done.returncode == 0, done.stderr
    packs_lost = (bench.proxy.bytes_put - total) / (2 * MIB)
    print(f"{bench.proxy.bytes_put} bytes sent for {total}: {packs_lost:.1f} packs more")  # noqa: T201
    # Manifests, indexes and leases are some kilobytes each time.
    assert total <= bench.proxy.bytes_put <= total + 10 * 2 * 2 * MIB + MIB
    with opened(url) as store:
        store.pull(NAME, work_dir / "out")
    assert tree_state(work_dir / "out") == tree_state(tree)


def test_a_push_is_interrupted_while_the_service_is_away(bench: Bench, tmp_path: Path) -> None:
    """Ctrl-C ends it soon, with 130, although nobody answers any more. Proves: R4."""
    url = new_store(bench)
    program = [sys.executable, "-c", SMALL_PACKS]
    command = [*program, "push", str(bench.tree), NAME, "--store", url, "-q"]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE) as process:  # noqa: S603

        def plan(request: Request) -> Trouble | None:
            if not request.is_data:
                return None
            bench.proxy.plan = after(0, "refused")
            process.send_signal(signal.SIGINT)
            return "refused"

        bench.proxy.plan = plan
        _, errors = process.communicate(timeout=40)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    bench.proxy.plan = lambda _: None
    with opened(url) as store:
        with pytest.raises(RefNotFound):
            store.snapshot(NAME)
        store.push(bench.tree, NAME)
        check_pulled(bench, store, tmp_path / "out")
