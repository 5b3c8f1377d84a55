"""Capturing a living process tree straight into a store.

Invariants, and the order of steps that follows from them:

1. The source goes on, whatever fails, unless the caller wanted it stopped *and* the snapshot is
   durable: the commit happens while CRIU waits in its `post-dump` script, and a script that fails
   makes CRIU let the processes go on.
2. Nothing has the name before everything is stored.
3. No copy of the data is on this machine: pages and images go from CRIU's sockets into windows of
   the store's writer, whose budget holds CRIU back when the store is slower.
4. CRIU is never killed in the middle of a dump, for its parasite code is in the source then: what
   ends a capture early closes the sockets, and CRIU gives up by itself.

5. External memory is stored beside CRIU's images, all at once; nobody can map it until it is read
   and CRIU has ended.
6. What processes have in the CUDA driver is in their own memory while CRIU dumps them; those that
   live afterwards get it back, whatever has failed.

Order: external memory frozen, preflight, writer, driver checkpoint, sockets, external memory and
CRIU at once, images and pages until CRIU is at `post-dump`, commit, answer, CRIU's end, memory
thawed, driver restore.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from typing import TYPE_CHECKING, Self

import snapstore
from snapagent.capture_sinks import ImageStore, PageStore
from snapagent.capture_total import ExpectedTotal, resident_bytes
from snapagent.control import Control
from snapagent.criu import program
from snapagent.criu.hooks import ScriptHooks
from snapagent.criu.image_streamer import CaptureStreamer
from snapagent.criu.page_receiver import PageReceiver, page_sockets
from snapagent.errors import AgentError, CriuFailed, PreflightFailed, ProtocolError
from snapagent.gpu.checkpoint import (
    CheckpointedTree,
    cuda_processes,
    require_checkpoints,
    uses_cuda,
)
from snapagent.gpu.driver import load_driver
from snapagent.gpu.facts import cuda_facts, cuda_placement
from snapagent.linux import namespaces, processes
from snapagent.linux.memfds import has_open
from snapagent.linux.network_locks import (
    find_network_lock,
    network_lock_names,
    remove_network_lock,
)
from snapagent.memory.storing import RegionStreams
from snapagent.preflight import (
    CaptureConditions,
    Obstacles,
    add_machine,
    check_cuda,
    check_external,
    check_process,
    require,
)
from snapagent.supervision import Place, Supervisor, criu_command
from snapagent.workdir import WorkDirectory, work_directory
from snapstore import criu
from snapstore.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from snapagent.config import AgentConfig
    from snapagent.gpu.facts import CudaFacts
    from snapagent.memory.broker import MemoryBroker
    from snapagent.memory.lent import FrozenSession
    from snapagent.memory.placement import Rank
    from snapagent.preflight import Obstacle
    from snapstore import ProgressCallback, PushResult, SnapshotWriter, Store

__all__ = ["CaptureRequest", "CaptureResult", "capture", "find_obstacles"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """What to capture, and how.

    Attributes:
        pid: Root of the tree.
        name: Which name the snapshot gets.
        labels: Kept with the snapshot.
        stop: End the tree when the snapshot is durable; else it goes on.
        freeze_fast: Store raw frames, which shortens the time that the tree stands still.
        broker: Who has external memory of the tree, which must be released; see
            `docs/external-memory.md`. Without one, a tree that has some is refused.
    """

    pid: int
    name: str
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stop: bool = False
    freeze_fast: bool = False
    broker: MemoryBroker | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CaptureResult:
    """What a capture did; times in seconds.

    Attributes:
        pushed: The snapshot and what it cost.
        frozen_s: How long the tree stood still, as CRIU counts it.
        setup_s: From the call until CRIU ran.
        dump_s: From there until CRIU had given all images and pages.
        commit_s: From there until the snapshot was durable and had its name.
        total_s: All of it.
        page_bytes: Bytes of memory that came from CRIU.
        external_bytes: Bytes of external memory, which CRIU did not see.
        cuda_checkpoint_s: How long the driver took to put GPU state into host memory; none without
            any.
        stopped: Whether the tree was ended.
        network_lock: Table of nftables that drops the packets of its connections until a restore
            in the same network; none if the tree goes on or had no connections, or CRIU has left
            none.
    """

    pushed: PushResult
    frozen_s: float
    setup_s: float
    dump_s: float
    commit_s: float
    total_s: float
    page_bytes: int
    external_bytes: int
    cuda_checkpoint_s: float | None
    stopped: bool
    network_lock: str | None

    def document(self) -> dict[str, object]:
        """Everything as plain values, for JSON."""
        pushed = self.pushed
        return {
            "name": str(pushed.name),
            "snapshot": pushed.snapshot.hex,
            "generation": pushed.generation,
            "stopped": self.stopped,
            "network_lock": self.network_lock,
            "frozen_s": self.frozen_s,
            "agent_setup_s": self.setup_s,
            "criu_dump_s": self.dump_s,
            "commit_s": self.commit_s,
            "total_s": self.total_s,
            "page_bytes": self.page_bytes,
            "external_bytes": self.external_bytes,
            "cuda_checkpoint_s": self.cuda_checkpoint_s,
            "ingest": dataclasses.asdict(pushed.ingest),
            "stored_bytes": pushed.stored_bytes,
            "warnings": list(pushed.warnings),
        }


def capture(
    store: Store,
    request: CaptureRequest,
    config: AgentConfig,
    progress: ProgressCallback | None = None,
    *,
    control: Control | None = None,
) -> CaptureResult:
    """Store a living process tree as a snapshot. Returns when it is durable and CRIU has ended.

    Several captures of different trees may run at once.

    Args:
        store: Where the snapshot goes; must stay open.
        request: What to capture.
        config: Settings of the agent.
        progress: Told how far it is.
        control: Told of the states `preflight`, `dumping` and `committing`, in which the tree
            stands still; and cancels it. A commit that is under way then may still succeed.

    Raises:
        PreflightFailed: CRIU could not capture this process here.
        NoSuchProcess: There is none.
        CaptureRunning: Another capture of it is under way.
        CriuFailed: CRIU could not; the source goes on.
        GpuFailed: The CUDA driver could not. The source goes on, unless the message says that it
            could not get its GPU state back.
        BackendError: The storage failed; the source goes on.
        Interrupted: It was cancelled; the source goes on.
    """
    control = control or Control()
    clock = SystemClock()
    started_s = clock.monotonic_s()
    with contextlib.ExitStack() as stack:
        # The work directory tells others that this process is being captured.
        work = stack.enter_context(work_directory(config, "capture", only_of=request.pid))
        frozen = _freeze(request, stack)
        control.enter("preflight")
        obstacles = _obstacles(request.pid, config, stop=request.stop)
        if request.broker is None:
            # Else it is frozen by now, which was refused if it could not be.
            obstacles += check_external(request.pid, None, config.broker_path)
        require(obstacles, of=f"process {request.pid}", done="captured")
        told = None if progress is None else ExpectedTotal(progress)
        _expect(told, request.pid, frozen)
        writer = stack.enter_context(_begin(store, request, told))
        cuda = _checkpoint_cuda(request.pid, stack)
        if cuda is not None:
            _expect(told, request.pid, frozen)
        dump = _Dump(writer, work, request, config, control)
        dump.cuda = cuda
        external = RegionStreams(
            writer, frozen, threads=store.options.threads_effective, on_error=dump.fail
        )
        stack.enter_context(dump)
        stack.enter_context(external)
        dump.external = external
        dump.frozen = frozen
        setup_s = clock.monotonic_s() - started_s
        control.enter("dumping")
        with control.ends_with(dump.fail):
            dump.run()
    return dump.result(started_s=started_s, setup_s=setup_s, ended_s=clock.monotonic_s())


def find_obstacles(
    pid: int, config: AgentConfig, *, stop: bool = False, broker: MemoryBroker | None = None
) -> list[Obstacle]:
    """Tell what stands in the way of a capture, and what deserves a word; nothing is changed.

    Raises:
        NoSuchProcess: There is none.
    """
    found = _obstacles(pid, config, stop=stop)
    found += check_external(pid, broker, config.broker_path)
    return sorted(found, key=lambda one: not one.blocking)


def _begin(
    store: Store, request: CaptureRequest, progress: ProgressCallback | None
) -> AbstractContextManager[SnapshotWriter]:
    return store.begin(
        request.name,
        labels=request.labels,
        compression=snapstore.Compression.NONE if request.freeze_fast else None,
        progress=progress,
    )


def _expect(told: ExpectedTotal | None, pid: int, frozen: Sequence[FrozenSession]) -> None:
    """Estimate how much there is to store, of what is in the tree's memory now."""
    if told is not None:
        external = sum(region.length for session in frozen for region in session.regions)
        told.expect(resident_bytes(_tree(pid)) + external)


def _obstacles(pid: int, config: AgentConfig, *, stop: bool) -> list[Obstacle]:
    tree = _tree(pid)
    has_gpus = any(map(uses_cuda, tree))
    conditions = CaptureConditions(
        criu=config.criu,
        criu_cache=config.criu_cache,
        stop=stop,
        shell_job=True,
        ghost_bytes_max=program.GHOST_BYTES_MAX,
        # The driver's checkpoint closes them before CRIU looks.
        devices=("/dev/nvidia",) if has_gpus else (),
    )
    found = Obstacles()
    found.extend(check_process(pid, conditions))
    if has_gpus:
        check_cuda(found, tree)
    return found.result()


def _tree(pid: int) -> list[int]:
    return [pid, *processes.descendants(pid)]


@dataclasses.dataclass(frozen=True, slots=True)
class _CudaState:
    """What the tree had in the CUDA driver, and how long it took to take it out."""

    facts: CudaFacts
    seconds: float


def _checkpoint_cuda(pid: int, stack: contextlib.ExitStack) -> _CudaState | None:
    """Take GPU state into host memory until the stack unwinds."""
    found = cuda_processes(_tree(pid))
    if not found:
        return None
    for one in found:
        if has_open(one):
            raise PreflightFailed(
                f"process {one} has external memory mapped, which the CUDA driver would checkpoint "
                "and could not restore",
                next_step="let the workload call release, and wait for it",
            )
    driver = load_driver()
    require_checkpoints(driver)
    inner = [number for one in found if (number := processes.inner_pid(one)) is not None]
    clock = SystemClock()
    began_s = clock.monotonic_s()
    stack.enter_context(CheckpointedTree(found))
    return _CudaState(cuda_facts(driver, inner), clock.monotonic_s() - began_s)


def _freeze(request: CaptureRequest, stack: contextlib.ExitStack) -> list[FrozenSession]:
    """Keep external memory as it is until the stack unwinds."""
    if request.broker is None:
        return []
    frozen = request.broker.freeze(request.pid)
    for session in frozen:
        stack.callback(session.thaw)
    return frozen


class _Dump:
    """One dump under way: CRIU at one end of its sockets, a snapshot writer at the other."""

    def __init__(
        self,
        writer: SnapshotWriter,
        work: WorkDirectory,
        request: CaptureRequest,
        config: AgentConfig,
        control: Control,
    ) -> None:
        self.pushed: PushResult | None = None
        self.frozen_s = 0.0
        self.commit_began_s = self.commit_ended_s = 0.0
        self.external: RegionStreams | None = None
        self.cuda: _CudaState | None = None
        self.frozen: Sequence[FrozenSession] = ()
        self.network_lock: str | None = None
        """What stays of it on purpose, known at the end."""
        self._images = ImageStore(writer)
        self.pages = PageStore(writer, self._images)
        self._clock = SystemClock()
        self._writer = writer
        self._work = work
        self._request = request
        self._config = config
        self._network_fd = -1
        self._run_id = ""
        self._control = control
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._decided = threading.Event()
        """Set once the snapshot is durable, or something has failed."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Listen to CRIU from now on."""
        with contextlib.ExitStack() as stack:
            self._ours, self._theirs = page_sockets()
            stack.callback(self._ours.close)
            stack.callback(self._theirs.close)
            self._page_receiver = PageReceiver(self._ours, self.pages)
            self._committer = threading.Thread(target=self._make_durable, name="snapagent-commit")
            self._receiver = threading.Thread(target=self._receive_pages, name="snapagent-pages")
            self._streamer = stack.enter_context(
                CaptureStreamer(self._work.path, self._images, self.fail)
            )
            actions = {"pre-dump": self._note_run, "post-dump": self._commit}
            stack.enter_context(ScriptHooks(self._work.path, actions, self.fail))
            # Before the processes are gone, whose network it is.
            self._network_fd = _open_network(self._request.pid)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        try:
            self._stack.close()
            # CRIU has ended, one way or another.
            self._settle_network_lock(error)
        finally:
            os.close(self._network_fd)
            if self._committer.ident is not None:
                self._committer.join()

    def run(self) -> None:
        """Run CRIU to its end.

        Raises:
            CriuFailed: It could not.
            SnapError: Something else failed, which made it give up.
        """
        try:
            self._check_status(self._run_criu())
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._hang_up()
            self._receiver.join()
        if self._failure is not None:
            if self.pushed is not None:
                self._failure.add_note(f"the snapshot was stored, as {self._request.name}")
            raise self._failure
        stats = criu.parse_dump_stats((self._work.path / "stats-dump").read_bytes())
        self.frozen_s = stats.frozen_us / 1e6

    def result(self, *, started_s: float, setup_s: float, ended_s: float) -> CaptureResult:
        """Put together what there is to tell after a good end."""
        assert self.pushed is not None, "CRIU ended well, so its post-dump script did"
        assert self.external is not None, "given before the run"
        return CaptureResult(
            pushed=self.pushed,
            frozen_s=self.frozen_s,
            setup_s=setup_s,
            dump_s=self.commit_began_s - started_s - setup_s,
            commit_s=self.commit_ended_s - self.commit_began_s,
            total_s=ended_s - started_s,
            page_bytes=self.pages.size_bytes,
            external_bytes=self.external.size_bytes,
            cuda_checkpoint_s=self.cuda.seconds if self.cuda is not None else None,
            stopped=self._request.stop,
            network_lock=self.network_lock,
        )

    def _run_criu(self) -> int:
        """Start everything, CRIU last, and wait for CRIU."""
        self._receiver.start()
        argv, home = criu_command(self._config.criu)
        pid = self._request.pid
        inner_pid = processes.inner_pid(pid)
        if inner_pid is None:
            raise AgentError(f"process {pid} has ended")
        place = Place(join_pid=pid if _is_elsewhere(pid) else None)
        supervisor = Supervisor.start(
            place,
            self._work.path,
            task="capture",
            directories={"criu": home},
            on_death=lambda reason: self.fail(AgentError(f"the capture was ended: {reason}")),
        )
        # The directory stays locked for as long as anybody may still need it.
        supervisor.hold(self._work.lock)
        self._stack.callback(supervisor.kill, "the capture is over")
        argv += program.dump_arguments(
            pid=inner_pid,
            directory="{work}",
            page_socket="{fd0}",
            leave_running=not self._request.stop,
            # It is no session of its own: it hangs from whoever started it.
            shell_job=os.getsid(pid) != pid,
        )
        with self._theirs:
            ran = supervisor.run(argv, pass_fds=[self._theirs.fileno()])
        if ran.message:
            raise AgentError(f"CRIU cannot be started: {ran.message}")
        return ran.status

    def _check_status(self, status: int) -> None:
        """Raise what CRIU failed of, unless it only gave up because we had failed."""
        if status == 0 or not isinstance(self._failure, ProtocolError | None):
            return
        failed = program.criu_failed("dump", status, self._work.path / "dump.log")
        if status < 0:
            failed.next_step = (
                "look at the source: CRIU could undo nothing, so that a connection of it may hang"
            )
        early = [pid for session in self.frozen for pid in session.connected()]
        if early and program.says_outside(failed):
            failed = _resumed_early(early[0], failed)
        if self.pushed is not None:
            failed.add_note(f"the snapshot was stored all the same, as {self._request.name}")
        # That its sockets broke is only how it looks from here: its log knows why.
        raise failed from self._failure

    def _note_run(self) -> bool:
        """Learn how CRIU will name its network lock, before it makes one; on the hook's thread."""
        self._run_id = program.read_run_id(self._work.path / "dump.log")
        return True

    def _settle_network_lock(self, failure: BaseException | None) -> None:
        """Remove what CRIU has left in the network of the processes, unless it is of use there.

        It is as long as the processes are gone and had connections. That it cannot be removed is
        no reason to fail: whoever called is told that it may be there.
        """
        if not self._run_id:
            return
        is_of_use = failure is None and self._request.stop and self._has_connections()
        try:
            if not is_of_use:
                remove_network_lock(self._network_fd, self._run_id)
            name = find_network_lock(self._network_fd, self._run_id) if is_of_use else None
        except AgentError as error:
            name = network_lock_names(self._run_id)[0]
            if failure is not None:
                failure.add_note(f"{error}; {error.next_step}")
        self.network_lock = f"inet {name}" if name else None

    def _has_connections(self) -> bool:
        files = criu.parse_open_files(self._images.kept["files.img"])
        return any(socket.is_connected for socket in files.inet)

    def _receive_pages(self) -> None:
        try:
            self._page_receiver.run()
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits for CRIU
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Keep the first error and end everything: CRIU finds its sockets closed and gives up."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
        self._decided.set()
        self._writer.abort()
        self._hang_up()
        # On another thread: it waits for those of the images, one of which this may be.
        threading.Thread(target=self._streamer.close, name="snapagent-close").start()

    def _hang_up(self) -> None:
        """End the sessions with CRIU, which gives up then if it has not ended."""
        self._page_receiver.close()

    def _commit(self) -> bool:
        """Make the snapshot durable while CRIU waits; on the hook's thread.

        Answers as soon as anything fails: the processes are not to stand still until a store that
        does not answer is given up.
        """
        self._committer.start()
        self._decided.wait()
        return self.pushed is not None and self._failure is None

    def _placements(self, external: RegionStreams) -> Mapping[Rank, Mapping[str, object]]:
        placements = dict(external.placements())
        if self.cuda is not None:
            placements["host"] = {
                **placements.get("host", {}),
                **cuda_placement(self.cuda.facts),
            }
        return placements

    def _make_durable(self) -> None:
        self.commit_began_s = self._clock.monotonic_s()
        try:
            external = self.external
            assert external is not None, "begun before CRIU"
            self._receiver.join()
            self._streamer.settle()
            external.wait()
            if self._failure is not None:
                return
            self._images.require_whole()
            self._control.enter("committing")
            described = snapstore.describe_images(self._images.kept, self._images.sizes)
            config = self._config
            requirements = add_machine(described.requirements, config.criu, config.criu_cache)
            self.pushed = self._writer.commit(
                kind=described.kind,
                requirements=requirements,
                placements=self._placements(external),
            )
            self._control.settle()
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits for CRIU
            self.fail(error)
        finally:
            self.commit_ended_s = self._clock.monotonic_s()
            self._decided.set()


def _resumed_early(pid: int, failed: CriuFailed) -> CriuFailed:
    """Say what stands behind a connection with the broker that CRIU stumbled over."""
    early = CriuFailed(
        f"process {pid} asked for its external memory back while it was captured: its connection "
        "with the agent leads out of what is captured",
        next_step="let the workload call resume only when it is told that the capture is over, and "
        "capture it again; it goes on with its memory meanwhile",
    )
    early.add_note(str(failed))
    return early


def _open_network(pid: int) -> int:
    try:
        return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise AgentError(f"process {pid} has ended") from error


def _is_elsewhere(pid: int) -> bool:
    """Whether a process lives where paths, process ids or addresses mean something else."""
    ours = os.getpid()
    return any(
        namespaces.namespace_id(pid, kind) != namespaces.namespace_id(ours, kind)
        for kind in ("mnt", "net", "pid")
    )
