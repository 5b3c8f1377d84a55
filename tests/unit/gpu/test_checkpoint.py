"""The driver's checkpoint of other processes, on the emulated driver."""

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from snapagent.errors import AgentError, GpuFailed
from snapagent.gpu.checkpoint import (
    CheckpointedTree,
    CudaState,
    cuda_processes,
    read_cuda_state,
    restore_cuda,
    uses_cuda,
)
from snapagent.gpu.driver import Driver
from tests.support.gpu import emulated_driver, emulated_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
WAIT_S = 30
SILENCE_S = 0.3
"""For how long what must not happen is waited for."""
_seeds = itertools.count((os.getpid() << 8) + 64)


class Worker:
    """A process that uses a GPU when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin(self) -> None:
        self.tell("go")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def has_answered(self, timeout_s: float) -> bool:
        return bool(select.select([self.process.stdout], [], [], timeout_s)[0])


@contextlib.contextmanager
def worker(seed: int) -> Iterator[Worker]:
    with program("gpu_worker", seed) as one:
        assert one.hear() == "ready"
        yield one


@contextlib.contextmanager
def program(name: str, seed: int, *arguments: str) -> Iterator[Worker]:
    variables = emulated_environment(seed=seed, devices=2)
    with subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-m", f"tests.support.programs.{name}", *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


@pytest.fixture
def seed() -> int:
    return next(_seeds) & 0x7FFFFFFF


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, seed: int) -> Driver:
    return emulated_driver(monkeypatch, f"libcuda-{seed}", seed=seed, devices=2)


def test_calls_wait_until_the_process_has_its_gpus_back(driver: Driver, seed: int) -> None:
    with worker(seed) as one:
        assert cuda_processes([one.pid, 1]) == [one.pid]
        with CheckpointedTree([one.pid]):
            assert read_cuda_state(driver, one.pid) is CudaState.CHECKPOINTED
            one.begin()
            assert not one.has_answered(0.1)
        assert one.hear() == "done"
        assert read_cuda_state(driver, one.pid) is CudaState.RUNNING


def test_a_process_without_cuda_has_no_state(driver: Driver) -> None:
    with subprocess.Popen(["/bin/sleep", "100"]) as process:
        try:
            assert not uses_cuda(process.pid)
            assert read_cuda_state(driver, process.pid) is None
            assert restore_cuda([process.pid], {}) == 0
        finally:
            process.kill()


def test_what_fails_lets_all_of_them_go_on(driver: Driver, seed: int) -> None:
    """The second is locked by somebody else already."""
    with worker(seed) as one, worker(seed) as other:
        driver.call("cuCheckpointProcessLock", other.pid, None)
        with (
            pytest.raises(GpuFailed, match=f"ILLEGAL_STATE.*process {other.pid}"),
            CheckpointedTree([one.pid, other.pid]),
        ):
            pass
        one.begin()
        assert one.hear() == "done"


def test_one_that_ends_meanwhile_is_left_alone(driver: Driver, seed: int) -> None:
    with worker(seed) as one, worker(seed) as other:
        with CheckpointedTree([one.pid, other.pid]):
            one.process.kill()
            one.process.wait()
        other.begin()
        assert other.hear() == "done"


def test_gpus_take_the_place_of_others(
    driver: Driver, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a process goes on with GPUs of other UUIDs, and with none that are not there.

    Method: checkpoint it with one driver, and restore it with one that has other devices.
    """
    with worker(seed) as one:
        for what in ("Lock", "Checkpoint"):
            driver.call(f"cuCheckpointProcess{what}", one.pid, None)
        monkeypatch.undo()
        there = seed + (1 << 30)
        other = emulated_driver(monkeypatch, f"libcuda-{there}", seed=there, devices=2)
        with pytest.raises(GpuFailed, match="INVALID_VALUE"):
            restore_cuda([one.pid], {})
        pairs = zip(driver.devices, other.devices, strict=True)
        devices = {old.uuid: new.uuid for old, new in pairs}
        assert restore_cuda([one.pid], devices) == 1
        one.begin()
        assert one.hear() == "done"
        with pytest.raises(AgentError, match="says that it is running"):
            restore_cuda([one.pid], devices)


def test_many_are_checkpointed_and_restored_at_once(driver: Driver, seed: int) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(worker(seed)) for _ in range(5)]
        pids = [one.pid for one in workers]
        with CheckpointedTree(pids):
            assert {read_cuda_state(driver, pid) for pid in pids} == {CudaState.CHECKPOINTED}
        for pid in pids:
            for what in ("Lock", "Checkpoint"):
                driver.call(f"cuCheckpointProcess{what}", pid, None)
        assert restore_cuda(pids, {}) == 5
        for one in workers:
            assert one.ask("go") == "done"


def test_what_is_shared_is_lost_and_the_error_says_why(driver: Driver, seed: int) -> None:
    """Goal: a driver that cannot restore what it checkpointed is told of as what it mostly is.

    Method: one process has memory of another one open (CUDA IPC), which drivers notice too late.
    That from which it is goes on; it does not.
    """
    with program("gpu_sharer", seed) as owner:
        with program("gpu_sharer", seed, owner.hear()) as user:
            user.hear()
            tree = CheckpointedTree([owner.pid, user.pid])
            with (
                pytest.raises(GpuFailed, match=f"INVALID_VALUE.*process {user.pid}") as caught,
                tree,
            ):
                pass
            assert "end it; if it shares GPU memory" in caught.value.next_step
            assert "destroy its communicators" in caught.value.next_step
            assert read_cuda_state(driver, user.pid) is CudaState.CHECKPOINTED
        assert owner.ask("go") == "done"


def test_what_was_shared_and_closed_is_kept(driver: Driver, seed: int) -> None:
    with program("gpu_sharer", seed) as owner, program("gpu_sharer", seed, owner.hear()) as user:
        user.hear()
        assert user.ask("close") == "done"
        with CheckpointedTree([owner.pid, user.pid]):
            pass
        assert user.ask("go") == owner.ask("go") == "done"


def test_ctrl_c_while_one_is_locked_lets_it_go_on(
    driver: Driver, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: as Python does, the exception comes right after the driver's function returned."""
    call = Driver.call

    def interrupted(self: Driver, function: str, *arguments: Any, of: str = "") -> None:
        call(self, function, *arguments, of=of)
        if function == "cuCheckpointProcessLock":
            raise KeyboardInterrupt

    with worker(seed) as one, worker(seed) as other:
        with monkeypatch.context() as patched:
            patched.setattr(Driver, "call", interrupted)
            with pytest.raises(KeyboardInterrupt), CheckpointedTree([one.pid, other.pid]):
                pass
        for each in (one, other):
            assert read_cuda_state(driver, each.pid) is CudaState.RUNNING
            assert each.ask("go") == "done"


@contextlib.contextmanager
def one_interrupt() -> Iterator[Callable[[], None]]:
    """Lend what interrupts the main thread once, from any thread, and returns when it knows."""
    taken = threading.Event()
    main = threading.get_ident()

    def handle(_number: int, _frame: FrameType | None) -> None:
        if not taken.is_set():
            taken.set()
            raise KeyboardInterrupt

    def send() -> None:
        # One that comes right before the main thread begins to wait would wait with it.
        while not taken.wait(0.05):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield send
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_what_is_under_way(
    driver: Driver, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: nothing is undone while it is still done.

    Method: threads that checkpoint interrupt the main thread, and then give it time to go ahead.
    """
    call = Driver.call
    undone = threading.Event()
    began = threading.Barrier(2)
    too_soon: list[bool] = []
    with worker(seed) as one, worker(seed) as other, one_interrupt() as interrupt:

        def slow(self: Driver, function: str, *arguments: Any, of: str = "") -> None:
            if function == "cuCheckpointProcessGetState":
                undone.set()
            if function == "cuCheckpointProcessCheckpoint":
                began.wait(WAIT_S)
                interrupt()
                too_soon.append(undone.wait(SILENCE_S))
            call(self, function, *arguments, of=of)

        with monkeypatch.context() as patched:
            patched.setattr(Driver, "call", slow)
            with pytest.raises(KeyboardInterrupt), CheckpointedTree([one.pid, other.pid]):
                pass
        assert too_soon == [False, False]
        for each in (one, other):
            assert read_cuda_state(driver, each.pid) is CudaState.RUNNING
            assert each.ask("go") == "done"


def test_ctrl_c_while_one_gets_its_gpus_back_waits_for_that(
    driver: Driver, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: whoever is told twice to stop leaves nobody locked, also where there is but one."""
    call = Driver.call
    with worker(seed) as one, one_interrupt() as interrupt:

        def interrupted(self: Driver, function: str, *arguments: Any, of: str = "") -> None:
            call(self, function, *arguments, of=of)
            if function == "cuCheckpointProcessRestore":
                interrupt()

        with monkeypatch.context() as patched:
            patched.setattr(Driver, "call", interrupted)
            with pytest.raises(KeyboardInterrupt), CheckpointedTree([one.pid]):
                pass
        assert read_cuda_state(driver, one.pid) is CudaState.RUNNING
        assert one.ask("go") == "done"
