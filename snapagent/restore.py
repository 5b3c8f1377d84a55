"""Restoring a process tree straight out of a store.

Invariants, and the order of steps that follows from them:

1. No process runs on memory that is not its own: what is missing blocks until it was read and
   checked, also when the agent, the store or the supervisor dies.
2. All or nothing: until the restore is whole, everything it made hangs from the supervisor, which
   ends it. Nothing stays: process, namespace, mount, socket, file.
3. What can be known beforehand is said beforehand: CRIU starts only after preflight.
4. Memory is bounded by the budget of the store and one buffer for each thread or process that
   fills.
5. External memory is filled from the start, beside CRIU, and goes to its workload when it is whole.
6. Processes that had something in the CUDA driver wait in their next call of it until they have it
   back. Their memory is filled before they run, and nobody watches it then: the driver touches
   what it reads back, also thousands of pages that were never used, and waiting for these one by
   one takes ten times as long as all of its work.

Order: snapshot and small images, preflight, supervisor and place, external memory, image stream and
lazy-pages socket, CRIU, faults from its first moment, the tree runs, background fill (before that,
if it is asked for or GPUs are used), driver restore, release.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Self

import snapstore
from snapagent.control import Control
from snapagent.criu import program
from snapagent.criu.hooks import ScriptHooks
from snapagent.criu.image_set import find_images
from snapagent.criu.image_streamer import RestoreStreamer
from snapagent.errors import CriuFailed, PreflightFailed, ProtocolError, WorkloadLost
from snapagent.gpu.checkpoint import restore_cuda
from snapagent.gpu.facts import read_cuda_facts
from snapagent.gpu.owned import GpuMemory
from snapagent.lazy.daemon import LazyPages
from snapagent.lazy.fill import BUFFER_BYTES
from snapagent.lazy.reader import Source
from snapagent.lazy.readers import ImageReaders, ReaderPool
from snapagent.lazy.stats import LazyStats, PageRun
from snapagent.linux import processes
from snapagent.memory.filling import RegionFill, read_places
from snapagent.memory.placement import HOST
from snapagent.precedence import Precedence
from snapagent.preflight import (
    GpuPlan,
    Obstacles,
    RestoreConditions,
    check_images,
    plan_gpus,
    require,
)
from snapagent.restore_images import StreamedImages, read_facts
from snapagent.supervision import Place, Supervisor, criu_command
from snapagent.workdir import work_directory
from snapstore import SnapError
from snapstore.clock import SystemClock
from snapstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from snapagent.config import AgentConfig
    from snapagent.criu.image_set import ImageSet
    from snapagent.gpu.facts import CudaFacts
    from snapagent.memory.broker import MemoryBroker
    from snapagent.memory.lent import Admissions
    from snapagent.memory.placement import Rank, SessionPlace
    from snapagent.preflight import Obstacle
    from snapagent.restore_images import DumpFacts
    from snapstore import Progress, ProgressCallback, Snapshot, SnapshotId, Store

__all__ = [
    "Restoration",
    "RestoreRequest",
    "RestoreResult",
    "exact_name",
    "find_obstacles",
    "restore",
]

_HINT_TOPIC = "page-order"
_HINT_BYTES_MAX = 16 << 20
_TELL_S = 0.2
_REAP_S_MAX = 5.0
_CRIU_END_S_MAX = 2.0
_STOP_S_MAX = 2.0
_REAP_POLL_S = 0.01
_FIRST_THREADS_MAX = 4
"""That read and fill before the processes run. Chunks of pages are small, and threads hand the
interpreter over twice for each: with 16 it took 1.24 s where 4 took 0.77 s, on 16 cores."""
_READERS_BYTES_MIN = 256 << 20
"""Of memory to fill, for which processes are started if there are none yet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore, where to, and how.

    Attributes:
        name: `name`, `name:tag` or `name@b3:<id>`.
        images: Directory of the dump in the snapshot, if it holds several.
        place: Which namespaces.
        eager: Fill all memory before the processes run.
        record_s: Fill only what is touched for so long, and keep the order of first touches as a
            hint for later restores; then fill the rest.
        force: Restore although preflight found what forbids it.
        allow_driver_change: Restore GPU state although this machine has another version of the
            NVIDIA driver.
        broker: Gets the external memory of the snapshot, if it has any.
        readers: Read memory for it. Without, it starts some for itself where that pays.

    Raises:
        UsageError: The wishes contradict each other.
    """

    name: str
    images: str | None = None
    place: Place = dataclasses.field(default_factory=Place)
    eager: bool = False
    record_s: float | None = None
    force: bool = False
    allow_driver_change: bool = False
    broker: MemoryBroker | None = None
    readers: ReaderPool | None = None

    def __post_init__(self) -> None:
        if self.eager and self.record_s is not None:
            raise UsageError(
                "what is filled beforehand is not touched in any order",
                next_step="leave out --eager to record",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """What a restore did; times in seconds from the call.

    Attributes:
        name: What was asked for.
        snapshot: Which that was.
        root_pid: Root of the tree, as the agent's pid namespace sees it.
        pids: All process ids as the processes themselves see them.
        agent_setup_s: Until CRIU was started.
        criu_restore_s: From there until the processes ran; with what is filled before that.
        cuda_restore_s: From there until they had their GPU state back; none without any.
        fill_s: From there until all of their memory was in place.
        running_s: When the processes ran, with their GPUs: the time to the first answer.
        total_s: Until everything was done.
        eager_bytes: Loaded by CRIU before the processes ran.
        shared_bytes: Of these, shared memory, which cannot be lazy.
        external_bytes: Data of external memory, which was filled beside CRIU.
        external_sources: Of these, what came from the `store`, from where the node's `cache` has it
            decoded, and from files of that whose pages were `registered` with the driver.
        external_s: When all of that was in place; none without external memory.
        gpu_bottleneck: What filling memory of GPUs waited for, on the slowest of them: `read`,
            `copy` or `hash`; none without any.
        lazy: What was filled by userfaultfd, and how.
        bottleneck: Where most of the time went.
    """

    name: str
    snapshot: str
    root_pid: int
    pids: tuple[int, ...]
    agent_setup_s: float
    criu_restore_s: float
    cuda_restore_s: float | None
    fill_s: float
    running_s: float
    total_s: float
    eager_bytes: int
    shared_bytes: int
    external_bytes: int
    external_sources: dict[str, int]
    external_s: float | None
    gpu_bottleneck: str | None
    lazy: LazyStats
    bottleneck: str

    def document(self) -> dict[str, object]:
        """Everything as plain values, for JSON."""
        return dataclasses.asdict(self)


class Restoration:
    """One restore. A context manager: leaving it early ends the tree and removes everything.

    ::

        with Restoration(store, request, config) as restoration:
            restoration.start()         # the processes run
            restoration.wait_filled()   # all of their memory is in place
            result = restoration.release()  # they are on their own
    """

    def __init__(
        self,
        store: Store,
        request: RestoreRequest,
        config: AgentConfig,
        *,
        reason_file: Path | None = None,
        control: Control | None = None,
    ) -> None:
        """Prepare; nothing is begun before `start`.

        Args:
            store: Where the snapshot is; must stay open.
            request: What to restore.
            config: Settings of the agent.
            reason_file: Gets a line of JSON that says why the tree was ended, if this process is
                killed before it releases it.
            control: Told of the states from `preflight` to `releasing`, and cancels it.
        """
        self._control = control or Control()
        self._reason_file = reason_file
        self._store = store
        self._request = request
        self._config = config
        self._clock = SystemClock()
        self._started_s = self._clock.monotonic_s()
        self._setup_s = self._criu_s = self._running_s = self._filled_s = 0.0
        self._gpus = GpuPlan()
        self._cuda_processes = 0
        self._failure: BaseException | None = None
        self._failed = threading.Event()
        self._criu_ended = threading.Event()
        self._lock = threading.Lock()
        # That of others as well: all threads share one interpreter.
        broker = request.broker
        self._precedence = broker.precedence if broker is not None else Precedence()
        self._stack = contextlib.ExitStack()
        self._released = False
        self._started: Supervisor | None = None
        self._external: RegionFill | None = None
        self._images: ImageReaders | None = None
        self._admissions: Admissions | None = None
        self.root_pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # CRIU and the processes end before anybody stops serving them.
        try:
            self._end_tree()
        finally:
            self._stop_serving()
        if isinstance(error, snapstore.SnapError):
            # Whatever broke first when it was cancelled: that is why.
            self._control.check()

    def _stop_serving(self) -> None:
        """End all threads. Those that the store keeps waiting are not waited for.

        Nobody needs them any more, and they end when the store's patience does.
        """
        thread = threading.Thread(target=self._stack.close, name="snapagent-close", daemon=True)
        thread.start()
        thread.join(_STOP_S_MAX)

    def run(self, progress: ProgressCallback | None = None) -> RestoreResult:
        """Do all of it: start, record if that is asked for, wait until filled, release."""
        self.start()
        if self._request.record_s is not None:
            self.record(self._request.record_s)
        self.wait_filled(progress)
        return self.release()

    def start(self) -> None:
        """Bring the tree to life. Returns when its processes run.

        Raises:
            PreflightFailed: This snapshot cannot be restored here.
            CriuFailed: CRIU could not.
            IntegrityError: What CRIU or a process needed is damaged.
            Interrupted: It was cancelled.
        """
        request, config, control = self._request, self._config, self._control
        self._stack.enter_context(control.ends_with(self._fail))
        control.enter("preflight")
        target = _look_up(self._store, request)
        self._snapshot, facts, place = target.snapshot, target.facts, target.place
        self._facts, self._cuda = facts, target.cuda
        if place.pids == "here" and place.join_pid is None:
            self._await_reaped()
        found = Obstacles()
        self._gpus = _plan_gpus(found, target, request)
        if not request.force:
            obstacles = _obstacles(found, target, config)
            require(obstacles, of=f"snapshot {self._snapshot.id.short}", done="restored")
        control.enter("preparing")
        self._begin_readers(target.images)
        directory = self._stack.enter_context(work_directory(config, "restore"))
        work = directory.path
        argv, home = criu_command(config.criu)
        self._started = Supervisor.start(
            place,
            work,
            directories={"criu": home},
            pids=facts.images.pids,
            ghosts=facts.ghosts,
            reason_file=self._reason_file,
            on_death=lambda reason: self._fail(WorkloadLost(f"the processes ended: {reason}")),
        )
        # The directory stays locked for as long as anybody may still need it.
        self._started.hold(directory.lock)
        self._begin_external(target.external)
        streamer = RestoreStreamer(work, StreamedImages(target.images, facts), self._fail)
        self._stack.callback(streamer.close)
        # Before what they wait for, so that this is closed first: closing them waits for them.
        self._stack.enter_context(
            ScriptHooks(work, {"pre-resume": self._before_resume}, self._fail)
        )
        self._lazy = self._make_lazy(work)
        self._stack.callback(self._lazy.close)
        streamer.start()
        self._lazy.start()
        argv += program.restore_arguments(
            directory="{work}",
            shell_job=facts.is_shell_job,
            tcp_close=facts.images.inventory.tcp_close,
        )
        self._setup_s = self._elapsed_s()
        control.enter("restoring")
        self._run_criu(argv, work)
        self._criu_s = self._elapsed_s()
        control.enter("filling")
        if request.record_s is None:
            self._lazy.start_fill()
        self._restore_cuda()
        self._running_s = self._elapsed_s()

    def _restore_cuda(self) -> None:
        """Give the processes back what they had in the CUDA driver."""
        if self._cuda is None:
            return
        pids = [process.pid for process in self._supervisor.processes()]
        try:
            self._cuda_processes = restore_cuda(pids, self._gpus.changed)
        except SnapError:
            # If the tree was ended meanwhile, why is what counts.
            self._check()
            raise
        wanted = len(self._cuda.processes)
        if self._cuda_processes != wanted:
            raise WorkloadLost(
                f"{wanted} processes of the snapshot use GPUs, {self._cuda_processes} were restored"
            )

    def _begin_readers(self, images: ImageSet) -> None:
        """Let processes open the images, while CRIU is not there yet."""
        pool = self._request.readers
        if pool is None and self._facts.lazy_bytes >= _READERS_BYTES_MIN:
            pool = self._stack.enter_context(ReaderPool(self._config.readers))
        if pool is None or not pool.count:
            return
        files = {memory.image: memory.file for memory in self._facts.tasks.values()}
        options = self._store.options
        source = Source(
            url=self._store.url,
            name=exact_name(self._request.name, self._snapshot.id),
            integrity=options.integrity.value,
            node_cache=str(options.node_cache or ""),
        )
        paths = {image: images.path(image) for image in files}
        self._images = ImageReaders(pool, source, paths, files)
        self._stack.callback(self._images.close)

    def _begin_external(self, places: Sequence[tuple[Rank, SessionPlace]]) -> None:
        """Make external memory and begin to fill it; it goes if the restore does not end well."""
        broker = self._request.broker
        if broker is None or not places:
            return
        keeper = self._supervisor.keeper_pid
        self._admissions = broker.admit(places, keeper, self._gpus.devices)
        self._stack.callback(self._abort_external)
        self._external = self._stack.enter_context(
            RegionFill(
                self._snapshot,
                self._admissions,
                threads=self._store.options.threads_effective,
                on_error=self._fail,
                precedence=self._precedence,
            )
        )

    def _bottleneck(self, lazy: LazyStats) -> str:
        """Name what most of the time went into."""
        reads = lazy.read_s >= lazy.copy_s
        filling = "reading and checking memory" if reads else "copying memory"
        first_s = lazy.filling_s if self._fills_first else 0.0
        parts = {
            "the agent's setup": self._setup_s,
            "CRIU": self._criu_s - self._setup_s - first_s,
            "the CUDA driver": self._running_s - self._criu_s,
            filling: self._filled_s - self._running_s + first_s,
        }
        return max(parts, key=lambda name: parts[name])

    def _abort_external(self) -> None:
        if self._admissions is not None and not self._released:
            self._admissions.abort()

    def _await_reaped(self) -> None:
        """Wait a moment for processes that have ended but keep ids of the snapshot.

        Whoever has just captured and stopped a tree restores it at once; where its parent is gone,
        init needs a second to notice.
        """
        deadline_s = self._clock.monotonic_s() + _REAP_S_MAX
        for pid in self._facts.images.pids:
            while (state := processes.read_state(pid)) is not None and state.ended:
                if self._clock.monotonic_s() > deadline_s:
                    return  # Preflight tells who it is.
                self._clock.sleep_s(_REAP_POLL_S)

    @property
    def _supervisor(self) -> Supervisor:
        assert self._started is not None, "started before used"
        return self._started

    def _external_s(self) -> float | None:
        ended_s = self._external.ended_s if self._external is not None else None
        return ended_s - self._started_s if ended_s is not None else None

    def _elapsed_s(self) -> float:
        return self._clock.monotonic_s() - self._started_s

    def _make_lazy(self, work: Path) -> LazyPages:
        request, threads = self._request, self._store.options.threads_effective
        images = self._images
        if self._fills_first:
            threads = min(threads, _FIRST_THREADS_MAX)
        if images is not None:
            # What is read elsewhere is only copied here. But a service lets each read wait, so that
            # as many are to wait at once as without.
            threads = max(images.count, threads if self._store.is_service else 0)
        return LazyPages(
            work,
            self._facts.tasks,
            threads=threads,
            buffer_bytes=BUFFER_BYTES,
            hold=self._supervisor.hold,
            on_error=self._fail,
            # Else once the processes run: until then CRIU needs the processors.
            fill=self._fills_first,
            order=[] if self._fills_first or request.record_s is not None else self._hint(),
            record=request.record_s is not None,
            # With processes that read there is nothing that others would have to wait for.
            precedence=self._precedence if self._fills_first and images is None else None,
            readers=images.reader if images is not None else None,
        )

    @property
    def _fills_first(self) -> bool:
        """Whether private memory is in place before any process runs."""
        return self._cuda is not None or self._request.eager

    def _hint(self) -> list[PageRun]:
        """In which order earlier restores touched pages; advice, so that it may be missing."""
        data = self._store.get_hint(_HINT_TOPIC, self._snapshot.id.hex, _HINT_BYTES_MAX)
        if data is None:
            return []
        with contextlib.suppress(snapstore.SnapError):
            return [PageRun(*run) for run in snapstore.decode_page_order(data)]
        return []

    def _run_criu(self, argv: list[str], work: Path) -> None:
        try:
            ran = self._supervisor.run(argv)
            if ran.message:
                raise CriuFailed(f"CRIU cannot be started: {ran.message}")
            if ran.status != 0 and isinstance(self._failure, ProtocolError | None):
                # That its sockets broke is only how it looks from here: its log knows why.
                failed = program.criu_failed("restore", ran.status, work / "restore.log")
                raise failed from self._failure
        except WorkloadLost:
            # What has failed first is why the supervisor was told to end it.
            self._check()
            raise
        finally:
            self._criu_ended.set()
        self._check()
        root = self._supervisor.root(self._facts.images.processes[0].pid)
        if root is None:
            raise WorkloadLost(
                "the restored process ended at once",
                next_step="look at what it wrote; its memory was right",
            )
        self.root_pid = root

    def _before_resume(self) -> bool:
        """CRIU waits, all tasks are restored and none runs yet; on the hooks' thread."""
        if self._fills_first:
            if not self._lazy.wait_filled():
                # It was closed: all of this is over.
                return False
            self._lazy.unwatch()
        if self._request.eager:
            while self._external is not None and not self._external.wait_filled(_TELL_S):
                if self._failed.is_set():
                    return False
        return True

    def _fail(self, error: BaseException) -> None:
        """Keep the first error and end the tree, so that whoever waits for it wakes up."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
        self._failed.set()
        # On another thread: this one may be of those that are waited for.
        threading.Thread(target=self._end_after, args=(error,), name="snapagent-end").start()

    def _end_after(self, error: BaseException) -> None:
        if isinstance(error, ProtocolError):
            # Mostly CRIU has failed, and is about to end and tell why in its log.
            self._criu_ended.wait(_CRIU_END_S_MAX)
        self._end_tree()

    def _end_tree(self) -> None:
        if self._started is not None and not self._released:
            self._started.kill(str(self._failure or "the restore was not finished"))

    def _check(self) -> None:
        with self._lock:
            failure = self._failure
        if failure is None:
            return
        self._end_tree()
        reason = self._started.ended if self._started is not None else None
        if isinstance(failure, ProtocolError) and reason not in {None, str(failure)}:
            # CRIU hung up since somebody had ended it.
            raise WorkloadLost(f"the processes ended: {reason}") from failure
        raise failure

    def record(self, seconds: float) -> None:
        """Let the processes run on what they touch, keep the order of that, and fill the rest.

        The hint is for later restores of the same snapshot. If it cannot be kept, nothing is lost.
        Of what was filled before the processes run there is nothing to record.

        Raises:
            WorkloadLost: The processes were ended meanwhile.
        """
        if self._fills_first:
            return
        self._failed.wait(seconds)
        self._check()
        order = [snapstore.PageRun(*run) for run in self._lazy.recorded_order]
        with contextlib.suppress(snapstore.SnapError):
            data = snapstore.encode_page_order(order)
            self._store.put_hint(_HINT_TOPIC, self._snapshot.id.hex, data)
        self._lazy.start_fill()

    def wait_filled(self, progress: ProgressCallback | None = None) -> None:
        """Wait until all memory is in place.

        Raises:
            WorkloadLost: The processes were ended, since their memory could not be filled.
        """
        try:
            while not self._is_filled():
                self._check()
                if progress is not None:
                    progress(self._progress())
        finally:
            self._check()
        self._filled_s = self._elapsed_s()

    def _is_filled(self) -> bool:
        """Wait a moment for all memory to be in place; tells whether it is."""
        if not self._lazy.wait_filled(timeout_s=_TELL_S):
            return False
        return self._external is None or self._external.wait_filled(_TELL_S)

    def _progress(self) -> Progress:
        stats = self._lazy.stats
        done = stats.fault_bytes + stats.fill_bytes + stats.zero_bytes
        total = self._facts.lazy_bytes
        if self._external is not None:
            done += self._external.done_bytes
            total += self._external.total_bytes
        return snapstore.Progress("fill", done, total)

    def release(self) -> RestoreResult:
        """Let the tree go: it lives on without the agent.

        Raises:
            WorkloadLost: It was ended before.
            Interrupted: It was cancelled before.
        """
        # In this order, for there is no way from `releasing` to being cancelled.
        self._control.settle()
        self._control.enter("releasing")
        if self._admissions is not None:
            self._admissions.hand_over([process.pid for process in self._supervisor.processes()])
        self._supervisor.release()
        self._released = True
        stats = self._lazy.stats
        return RestoreResult(
            name=self._request.name,
            snapshot=self._snapshot.id.hex,
            root_pid=self.root_pid,
            pids=tuple(process.pid for process in self._facts.images.processes),
            agent_setup_s=self._setup_s,
            criu_restore_s=self._criu_s - self._setup_s,
            cuda_restore_s=self._running_s - self._criu_s if self._cuda_processes else None,
            fill_s=self._filled_s - self._running_s,
            running_s=self._running_s,
            total_s=self._elapsed_s(),
            eager_bytes=self._facts.eager_bytes,
            shared_bytes=self._facts.shared_bytes,
            external_bytes=self._external.done_bytes if self._external is not None else 0,
            external_sources=self._external.sources if self._external is not None else {},
            external_s=self._external_s(),
            gpu_bottleneck=self._external.gpu_bottleneck if self._external is not None else None,
            lazy=stats,
            bottleneck=self._bottleneck(stats),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """What is to be restored, looked up, and where to."""

    snapshot: Snapshot
    images: ImageSet
    facts: DumpFacts
    place: Place
    external: Sequence[tuple[Rank, SessionPlace]]
    cuda: CudaFacts | None


def exact_name(name: str, snapshot: SnapshotId) -> str:
    """Return how to name exactly this snapshot, whatever the name that it was found by means."""
    return str(snapstore.SnapshotRef(snapstore.parse_snapshot_ref(name).ref, snapshot))


def _look_up(store: Store, request: RestoreRequest) -> _Target:
    snapshot = store.snapshot(request.name)
    images = find_images(snapshot, request.images)
    cuda = _cuda_facts(snapshot)
    facts = read_facts(images)
    place = request.place
    if place.network == "fresh":
        place = dataclasses.replace(place, addresses=facts.addresses)
    external = read_places(snapshot)
    if external and request.broker is None:
        raise PreflightFailed(
            f"snapshot {snapshot.id.short} has external memory, and there is no memory broker",
            next_step="let a daemon restore it that has one: `snapagent run`, and `restore` "
            "without --no-daemon; see docs/external-memory.md",
        )
    return _Target(snapshot, images, facts, place, external, cuda)


def _cuda_facts(snapshot: Snapshot) -> CudaFacts | None:
    for rank in snapshot.ranks():
        if rank.number == "host":
            return read_cuda_facts(rank.meta.placement, of=f"snapshot {snapshot.id.short}")
    return None


def _plan_gpus(found: Obstacles, target: _Target, request: RestoreRequest) -> GpuPlan:
    needed: collections.Counter[str] = collections.Counter()
    for _, session in target.external:
        for region in session.regions:
            if region.device != HOST:
                needed[region.device] += region.length
    memory = request.broker.gpus if request.broker is not None else GpuMemory()
    return plan_gpus(
        found,
        target.cuda,
        needed,
        memory,
        allow_driver_change=request.allow_driver_change,
    )


def _obstacles(found: Obstacles, target: _Target, config: AgentConfig) -> list[Obstacle]:
    conditions = RestoreConditions(
        criu=config.criu,
        criu_cache=config.criu_cache,
        work_directory=config.run_directory,
    )
    requirements = target.snapshot.manifest.requirements
    found.extend(check_images(target.facts.images, requirements, target.place, conditions))
    return found.result()


def find_obstacles(store: Store, request: RestoreRequest, config: AgentConfig) -> list[Obstacle]:
    """Tell what stands in the way of a restore, and what deserves a word; nothing is changed.

    Raises:
        LookupFailed: There is no such snapshot.
        AgentError: It holds no processes.
        IntegrityError: It is damaged.
    """
    found, target = Obstacles(), _look_up(store, request)
    _plan_gpus(found, target, request)
    return _obstacles(found, target, config)


def restore(
    store: Store,
    request: RestoreRequest,
    config: AgentConfig,
    progress: ProgressCallback | None = None,
) -> RestoreResult:
    """Restore a process tree; returns when all of its memory is in place and it lives by itself.

    Several restores may run at once, also of one snapshot.

    Raises:
        PreflightFailed: This snapshot cannot be restored here.
        CriuFailed: CRIU could not.
        WorkloadLost: The processes were ended, since their memory could not be filled.
        IntegrityError: Data are damaged.
    """
    with Restoration(store, request, config) as restoration:
        return restoration.run(progress)
