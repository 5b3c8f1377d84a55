"""The driver's checkpoint: what a process has in the driver goes into its own host memory and back.

Invariants:

1. All processes of a tree are locked before the first is checkpointed: they may wait for one
   another.
2. Whatever fails before the tree is captured, Ctrl-C included: those that were locked or
   checkpointed go on.
3. All are checkpointed at once, and restored at once; in a new tree none runs before all can.

A process that maps memory of another one is checkpointed without a word and cannot be restored
(measured on driver 580), so external memory has to be released before; the broker sees to that.
"""

from __future__ import annotations

import ctypes
import enum
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeVar

from snapagent.errors import AgentError, GpuFailed, GpuOutOfMemory, GpuUnavailable
from snapagent.gpu.driver import Driver, load_driver, parse_uuid
from snapagent.linux import processes
from snapagent.workload import libcuda
from snapstore.joining import wait_for_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_Thing = TypeVar("_Thing")
_Done = TypeVar("_Done")

__all__ = [
    "SHARED_MEMORY_STEP",
    "CheckpointedTree",
    "CudaState",
    "cuda_processes",
    "require_checkpoints",
    "restore_cuda",
    "uses_cuda",
]

SHARED_MEMORY_STEP: Final = (
    "if it shares GPU memory with other processes (NCCL with peer access, CUDA IPC), let it "
    "destroy its communicators and close that memory before a capture"
)
_AT_ONCE_MAX: Final = 32
_LOCK_MS_MAX: Final = 10_000
"""How long work that was begun on a GPU may take to end."""
_NO_CUDA: Final = frozenset({"CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_INVALID_VALUE"})
"""What drivers say of a process that loaded the library and never initialised it."""


class CudaState(enum.IntEnum):
    """Of a process, in the driver (`CUprocessState`)."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


def uses_cuda(pid: int) -> bool:
    """Tell whether a process has loaded the driver; costs no call of it."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any("/libcuda" in line and ".so" in line for line in maps.splitlines())


def cuda_processes(pids: Iterable[int]) -> list[int]:
    """Return those that have something in the driver.

    Raises:
        GpuUnavailable: They have, and there is no driver here.
        GpuFailed: The driver does not tell.
    """
    loaded = [pid for pid in pids if uses_cuda(pid)]
    if not loaded:
        return []
    driver = load_driver()
    return [pid for pid in loaded if read_cuda_state(driver, pid) is not None]


def read_cuda_state(driver: Driver, pid: int) -> CudaState | None:
    """Return the state of a process in the driver; none if it has nothing there, or has ended.

    Raises:
        GpuFailed: The driver does not tell.
    """
    state = ctypes.c_int()
    try:
        driver.call("cuCheckpointProcessGetState", pid, ctypes.byref(state), of=f"process {pid}")
    except GpuFailed as error:
        if error.error_name in _NO_CUDA or processes.read_state(pid) is None:
            return None
        raise
    return CudaState(state.value)


@dataclass(frozen=True, slots=True)
class _Held:
    """A process, by its number and when it began."""

    pid: int
    started_ticks: int

    def lives(self) -> bool:
        state = processes.read_state(self.pid)
        return state is not None and state.started_ticks == self.started_ticks and not state.ended


class CheckpointedTree:
    """Processes whose driver state is in their host memory. A context manager.

    Leaving it gives those that still live their GPUs back.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        """Prepare; nothing is begun before it is entered."""
        self._pids = list(pids)
        self._locked: list[_Held] = []
        self._driver: Driver | None = None

    def __enter__(self) -> Self:
        """Lock and checkpoint all of them.

        Raises:
            GpuUnavailable: There is no driver, or it is too old for that.
            GpuFailed: One of them cannot be; all go on.
        """
        if not self._pids:
            return self
        self._driver = load_driver()
        try:
            for pid in self._pids:
                self._lock(self._driver, pid)
            driver = self._driver
            _at_once(
                lambda held: _act(driver, "Checkpoint", held.pid, next_step=SHARED_MEMORY_STEP),
                self._locked,
            )
        except BaseException as error:
            for failure in self._undo():
                error.add_note(str(failure))
            raise
        return self

    def _lock(self, driver: Driver, pid: int) -> None:
        state = processes.read_state(pid)
        if state is None:
            return
        arguments = libcuda.CheckpointLockArguments(timeout_ms=_LOCK_MS_MAX)
        held = _Held(pid, state.started_ticks)
        # Before it is: a Ctrl-C of meanwhile is raised as soon as the driver returns.
        self._locked.append(held)
        try:
            driver.call(
                "cuCheckpointProcessLock", pid, ctypes.byref(arguments), of=f"process {pid}"
            )
        except GpuFailed as error:
            self._locked.remove(held)
            error.next_step = (
                "let the workload come to rest before the capture: no kernel and no copy may be "
                "under way for longer than 10 s"
            )
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        failures = self._undo()
        if error is not None:
            for failure in failures:
                error.add_note(str(failure))
        elif failures:
            raise failures[0]

    def _undo(self) -> list[GpuFailed]:
        """Give those that live their GPUs back; returns what failed."""
        locked, self._locked = self._locked, []
        driver = self._driver
        if driver is None:
            return []
        failures = _at_once(lambda held: _give_back(driver, held), locked)
        return [failure for failure in failures if failure is not None]


def _give_back(driver: Driver, held: _Held) -> GpuFailed | None:
    """Let a process go on that was locked or checkpointed; returns why it cannot."""
    if not held.lives():
        return None
    try:
        state = read_cuda_state(driver, held.pid)
        if state is CudaState.CHECKPOINTED:
            _act(driver, "Restore", held.pid)
        if state not in {None, CudaState.RUNNING}:
            _act(driver, "Unlock", held.pid)
    except GpuFailed as error:
        if not held.lives():
            return None
        error.next_step = f"process {held.pid} is stuck in its next call: end it"
        if error.function == "cuCheckpointProcessRestore":
            error.next_step += f"; {SHARED_MEMORY_STEP}"
        return error
    return None


def _at_once(act: Callable[[_Thing], _Done], things: Sequence[_Thing]) -> list[_Done]:
    """Act on all of them at once, since each is the work of its own process and GPU.

    Returns, or raises the first error, when all have ended. Ctrl-C waits for that, too, and comes
    between no two steps: so it is done by threads even if there is but one.
    """
    if not things:
        return []
    count = min(len(things), _AT_ONCE_MAX)
    futures: list[Future[_Done]] = []
    with ThreadPoolExecutor(count, thread_name_prefix="snapagent-cuda") as executor:
        try:
            futures.extend(executor.submit(act, one) for one in things)
        finally:
            # Also after Ctrl-C: what is undone while it is still done would be done in the end.
            wait_for_all(futures)
    return [future.result() for future in futures]


def restore_cuda(pids: Iterable[int], devices: Mapping[str, str]) -> int:
    """Give restored processes what they had in the driver, and let them go on.

    Args:
        pids: Of the whole tree, as this process sees them.
        devices: Which GPU takes the place of which, by UUID: all that the snapshot knows, or none
            if all of them are the same.

    Returns:
        How many had something.

    Raises:
        GpuFailed: One of them cannot be restored; none can be used.
        AgentError: One of them is in no state to be restored.
    """
    found = cuda_processes(pids)
    if not found:
        return 0
    driver = load_driver()
    for pid in found:
        state = read_cuda_state(driver, pid)
        if state is not CudaState.CHECKPOINTED:
            name = state.name.lower() if state is not None else "gone"
            raise AgentError(
                f"process {pid} was restored, and the driver says that it is {name}",
                next_step="capture the workload anew with this agent",
            )
    _at_once(lambda pid: _act(driver, "Restore", pid, devices, next_step=SHARED_MEMORY_STEP), found)
    # None goes on before all can: they may wait for one another.
    _at_once(lambda pid: _act(driver, "Unlock", pid), found)
    return len(found)


def require_checkpoints(driver: Driver) -> None:
    """Check that the driver can checkpoint processes.

    Raises:
        GpuUnavailable: It is too old.
    """
    if not driver.library.has("cuCheckpointProcessCheckpoint"):
        raise GpuUnavailable(
            "this CUDA driver cannot checkpoint processes",
            next_step="install a driver of the branch 570 or newer",
        )


def _act(
    driver: Driver,
    what: str,
    pid: int,
    devices: Mapping[str, str] | None = None,
    *,
    next_step: str = "",
) -> None:
    arguments = libcuda.CheckpointRestoreArguments()
    pairs = [
        libcuda.CheckpointGpuPair(_bytes(old), _bytes(new)) for old, new in (devices or {}).items()
    ]
    array = (libcuda.CheckpointGpuPair * max(1, len(pairs)))(*pairs)
    if pairs:
        arguments.pairs = array
        arguments.pairs_count = len(pairs)
    try:
        driver.call(f"cuCheckpointProcess{what}", pid, ctypes.byref(arguments), of=f"process {pid}")
    except GpuFailed as error:
        if not isinstance(error, GpuOutOfMemory):
            error.next_step = next_step
        raise


def _bytes(uuid: str) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * 16)(*parse_uuid(uuid))
