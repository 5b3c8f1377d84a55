"""A tree of ranks, captured whole, ended, and restored whole: from a store, and from a cache."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import snapstore
from snapagent.capture import CaptureRequest, capture
from snapagent.config import AgentConfig
from snapagent.gpu.engine import GpuSettings
from snapagent.lazy.readers import ReaderPool
from snapagent.memory.broker import MemoryBroker
from snapagent.memory.filling import read_places
from snapagent.memory.warming import warm_external, warm_threads
from snapagent.restore import Restoration, RestoreRequest
from snapagent.supervision import Place
from tools.gpu.living import Living, kill_tree
from tools.gpu.pinned import pinned_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from snapagent.gpu.driver import Driver
    from snapstore import Snapshot

__all__ = ["NCCL_VARIABLES", "WholeOptions", "run_whole"]

NAME: Final = "gpu/ranks:v1"
MIB, GIB = 1 << 20, 1 << 30
_CACHED_HOST_BYTES: Final = 2 * GIB
"""Of each rank, besides its GPU memory: what CRIU reads goes through the cache as well."""
_FREED_S_MAX: Final = 60
_POLL_S: Final = 0.05

NCCL_VARIABLES: Final = {
    # The driver cannot restore what these share between processes.
    "NCCL_P2P_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    # Connections come back where their addresses exist, and `lo` is there in every network.
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The same order of sums before and after.
    "NCCL_ALGO": "Ring",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOptions:
    """What is taken through a capture and a restore, and how.

    Attributes:
        ranks: Processes.
        gpus: That they use, rank n the GPU n modulo this.
        gib: Of GPU memory of each rank.
        engine: `torch` or `driver`; see `tools.gpu.ranks`.
        p2p: Whether NCCL may use peer access between GPUs. Communicators are destroyed before the
            capture, so that the driver may not mind.
        restores: How many restores there are out of the store; the first one reads pages that
            nobody has read before.
        cached: How many restores there are out of a registered cache; 0 for none.
        budget_bytes: Of the store's buffers.
        workers: Threads that fill each GPU; 0 for what the agent takes.
        code: Kernels that are compiled already.
    """

    ranks: int
    gpus: int
    gib: float
    engine: str = "torch"
    p2p: bool = False
    restores: int = 1
    cached: int = 0
    budget_bytes: int = 4 * GIB
    workers: int = 0
    code: bytes | None = None

    @property
    def backend(self) -> str:
        """Of torch.distributed: NCCL wants a GPU for each rank."""
        return "nccl" if self.ranks <= self.gpus else "gloo"

    @property
    def variables(self) -> Mapping[str, str]:
        """For the environment of the ranks."""
        left = {"NCCL_P2P_DISABLE"} if self.p2p else set()
        return {name: value for name, value in NCCL_VARIABLES.items() if name not in left}


def run_whole(
    options: WholeOptions,
    driver: Driver,
    folder: Path,
    result: dict[str, object],
    say: Callable[[str], None],
) -> None:
    """Do all of it. What is known is in `result` at any time, also when it fails.

    Args:
        options: What.
        driver: Of this machine.
        folder: In memory, for store and cache; the caller's to remove.
        result: Filled; has `ok` at the end.
        say: Told how far it is.

    Raises:
        SnapError: A capture or a restore failed.
        RuntimeError: The workload did.
    """
    result |= {"options": _described(options)}
    with tempfile.TemporaryDirectory(prefix="ranks-") as home:
        settings = GpuSettings(
            workers=options.workers,
            kernels=Path(home) / "kernels",
            code=options.code,
            registered_bytes=options.ranks * int(options.gib * GIB) + GIB if options.cached else 0,
        )
        with MemoryBroker(Path(home) / "memory.sock", gpu=settings) as broker:
            began = time.perf_counter()
            broker.gpus.engines.prepare(driver)
            result["engines_s"] = _since(began)
            engines = broker.gpus.engines.made[: options.gpus]
            result["pinned_gb_per_s"] = pinned_rate([one.gpu for one in engines])._asdict()
            say(f"engines are ready; pinned {result['pinned_gb_per_s']}")
            _Whole(options, broker, Path(home), folder, result, say).run()


class _Whole:
    """One tree in all of its lives, and what was measured of it."""

    def __init__(
        self,
        options: WholeOptions,
        broker: MemoryBroker,
        home: Path,
        folder: Path,
        result: dict[str, object],
        say: Callable[[str], None],
    ) -> None:
        self.options = options
        self.broker = broker
        self.folder = folder
        self.home = home
        self.result = result
        self.say = say
        self.living = Living(home)
        self.config = dataclasses.replace(
            AgentConfig.from_environment(),
            run_directory=home / "run",
            state_directory=home / "state",
        )
        self.readers = ReaderPool(self.config.readers)
        self.store_url = f"file://{folder}/store"
        self._meetings = itertools.count()
        self._before: tuple[object, object] = ((), ())

    def run(self) -> None:
        """Do all of it; what the ranks wrote is in the result if it fails."""
        self.result["readers"] = self.readers.count
        try:
            with self.readers:
                self._run()
        except BaseException:
            self.result["workload_output"] = self.living.output()
            raise

    def _run(self) -> None:
        options, result = self.options, self.result
        snapstore.init_store(self.store_url).close()
        wishes = (options.ranks, options.gpus, options.gib, options.engine, options.backend)
        arguments = [str(self.broker.path), *map(str, wishes)]
        with self.living.started("tools.gpu.ranks", arguments, options.variables) as process:
            self.say("the ranks are ready")
            result["ranks"] = [one["value"] for one in self.ask("facts")]
            result["before"] = before = self._compute()
            self._before = (before.pop("sums"), before.pop("weights"))
            result["capture"] = self._take(process.pid)
            process.wait()
        self.living.control.unlink(missing_ok=True)
        self._await_freed()
        self.say("it is captured and stopped")
        self._restore("store_restores", options.restores, None)
        if options.cached:
            self._restore("cached_restores", options.cached, self._make_cache())
        result["ok"] = True

    def _restore(self, name: str, count: int, cache: Path | None) -> None:
        runs: list[dict[str, object]] = []
        self.result[name] = runs
        for _ in range(count):
            runs.append(self._bring_back(cache))
            if not runs[-1]["same"]:
                raise RuntimeError(f"{name}: not what was captured")

    def ask(self, words: str) -> list[dict[str, object]]:
        """Ask all ranks."""
        answers: list[dict[str, object]] = json.loads(self.living.ask(words))
        return answers

    def _compute(self) -> dict[str, object]:
        """Let all ranks come together and compute, and say what each step took."""
        found: dict[str, object] = {}
        steps = (f"join {self.home}/meeting-{next(self._meetings)}", "reduce", "weights")
        for words, name in zip(steps, ("join", "sums", "weights"), strict=True):
            answers = self.ask(words)
            found[f"{name}_s"] = [one["s"] for one in answers]
            found[name] = [one["value"] for one in answers]
        found["threads_joined"] = found.pop("join")
        return found

    def _take(self, pid: int) -> dict[str, object]:
        """Let them leave and release, capture the tree, and end it."""
        found: dict[str, object] = {}
        for words in ("leave", "release"):
            answers = self.ask(words)
            found[f"{words}_s"] = [one["s"] for one in answers]
            if words == "leave":
                found["threads_left"] = [one["value"] for one in answers]
        options = snapstore.StoreOptions(
            memory_bytes=self.options.budget_bytes, compression=snapstore.Compression.NONE
        )
        request = CaptureRequest(pid=pid, name=NAME, broker=self.broker, stop=True)
        began = time.perf_counter()
        with snapstore.open_store(self.store_url, options) as store:
            done = capture(store, request, self.config)
        seconds = _since(began)
        return {
            **found,
            "seconds": seconds,
            "external_gb_per_s": round(done.external_bytes / seconds / 1e9, 2),
            **done.document(),
        }

    def _await_freed(self) -> None:
        """Wait until the broker has no memory of a life that has ended."""
        deadline = time.monotonic() + _FREED_S_MAX
        while self.broker.status() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _bring_back(self, cache: Path | None) -> dict[str, object]:
        """Restore in fresh namespaces, let all compute together, and end it."""
        self.living.control.unlink(missing_ok=True)
        request = RestoreRequest(
            name=NAME,
            place=Place(network="fresh", pids="fresh"),
            broker=self.broker,
            readers=self.readers,
        )
        options = snapstore.StoreOptions(memory_bytes=self.options.budget_bytes, node_cache=cache)
        found: dict[str, object] = {}
        began = time.perf_counter()
        with (
            snapstore.open_store(self.store_url, options) as store,
            Restoration(store, request, self.config) as restoration,
            contextlib.ExitStack() as stack,
        ):
            restoration.start()
            found["started_s"] = _since(began)
            found["resume_s"] = [one["s"] for one in self.ask("resume")]
            found["resumed_s"] = _since(began)
            meeting = f"{self.home}/meeting-{next(self._meetings)}"
            found["join_s"] = [one["s"] for one in self.ask(f"join {meeting}")]
            sums = self.ask("reduce")
            found["answered_s"] = _since(began)
            restoration.wait_filled()
            done = restoration.release()
            stack.callback(kill_tree, done.root_pid)
            weights = self.ask("weights")
            found["sums_same"] = [one["value"] for one in sums] == self._before[0]
            found["weights_same"] = [one["value"] for one in weights] == self._before[1]
            found["same"] = found["sums_same"] and found["weights_same"]
            found |= {**self._rates(), **done.document()}
        self._await_freed()
        self.say(f"restored: answered after {found['answered_s']} s, the same: {found['same']}")
        return found

    def _rates(self) -> dict[str, object]:
        """Say what filling each GPU was like."""
        each: list[dict[str, object]] = []
        total, longest = 0, 0.0
        for engine in self.broker.gpus.engines.made[: self.options.gpus]:
            report = engine.last_fill
            if report is None or not report.seconds:
                continue
            total += report.bytes
            longest = max(longest, report.seconds)
            each.append(
                {
                    "gpu": engine.gpu.device.ordinal,
                    "gb_per_s": round(report.bytes / report.seconds / 1e9, 2),
                    "bottleneck": report.bottleneck,
                    "bytes": report.bytes,
                    "threads": report.threads,
                    "seconds": round(report.seconds, 3),
                    "plan_s": round(report.plan_s, 4),
                    "read_s": round(report.read_s, 3),
                    "wait_s": round(report.wait_s, 3),
                    "hash_s": round(report.hash_s, 4),
                }
            )
        rate = round(total / longest / 1e9, 2) if longest else 0.0
        return {"gpus": each, "all_gb_per_s": rate}

    def _make_cache(self) -> Path:
        """Put all GPU memory into a node cache in memory, and lock its pages."""
        cache, options = self.folder / "cache", self.options
        size = options.ranks * (int(options.gib * GIB) + _CACHED_HOST_BYTES)
        snapstore.NodeCache.init(
            cache, budget_bytes=0, memory=self.folder / "decoded", memory_budget_bytes=size
        ).close()
        store_options = snapstore.StoreOptions(memory_bytes=options.budget_bytes, node_cache=cache)
        with snapstore.open_store(self.store_url, store_options) as store:
            snapshot = store.snapshot(NAME)
            began = time.perf_counter()
            _fill_cache(snapshot, store.options.threads_effective)
            filled_s = _since(began)
            threads = warm_threads(store.options)
            warmed = warm_external(snapshot, self.broker.gpus, threads=threads)
            self.result["cache"] = {
                "filled_s": filled_s,
                "registered_s": round(_since(began) - filled_s, 3),
                **warmed._asdict(),
            }
        self.say(f"the cache is filled and registered: {self.result['cache']}")
        return cache


def _fill_cache(snapshot: Snapshot, threads: int) -> None:
    """Fetch memory of the host as well, and without locking pages, so that each is timed."""
    cache = snapshot.node_cache
    assert cache is not None, "the store was opened with one"
    paths = [region.file for _, place in read_places(snapshot) for region in place.regions]

    def fill(path: str) -> None:
        with snapshot.open(path) as file, cache.file(file) as kept:
            for offset, length in kept.parts():
                kept.ensure(offset, length)

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(fill, paths))


def _described(options: WholeOptions) -> dict[str, object]:
    found = dataclasses.asdict(options)
    del found["code"]
    return found | {"backend": options.backend}


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 3)
