"""What the daemon counts, in Prometheus's text format. No names of snapshots, no ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from snapagent import api
from snapagent.control import CAPTURE_STATES, ENDED, RESTORE_STATES
from snapagent.memory.ledger import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapagent.server.jobs import AnyAnswer

__all__ = ["Metrics"]

MEMORY_STATES: Final = tuple(state.value for state in State if state is not State.DROPPED)
_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Metrics:
    """Counters of one daemon. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._ended = Counter(
            "snapagent_jobs_ended",
            "Captures and restores that ended, by how",
            ["kind", "state"],
            registry=self._registry,
        )
        self._now = Gauge(
            "snapagent_jobs", "Jobs under way", ["kind", "state"], registry=self._registry
        )
        self._bytes = Counter(
            "snapagent_bytes",
            "Bytes of jobs that went well, by where they came from",
            ["kind", "source"],
            registry=self._registry,
        )
        self._phases = Histogram(
            "snapagent_phase_seconds",
            "Time of each phase of jobs that went well",
            ["kind", "phase"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._gpu_fills = Counter(
            "snapagent_gpu_fills",
            "Restores that filled GPUs, by what that waited for",
            ["bottleneck"],
            registry=self._registry,
        )
        self._requests = Counter(
            "snapagent_http_requests", "Answers", ["operation", "status"], registry=self._registry
        )
        self._owners = Gauge(
            "snapagent_external_processes",
            "Processes that have external memory, by its state",
            ["state"],
            registry=self._registry,
        )
        self._external = Gauge(
            "snapagent_external_bytes", "External memory of all processes", registry=self._registry
        )
        self._regions = Gauge(
            "snapagent_external_regions", "Pieces of external memory", registry=self._registry
        )
        self._held = Gauge(
            "snapagent_external_held",
            "1 if released external memory would outlive this process",
            registry=self._registry,
        )
        for state in MEMORY_STATES:
            self._owners.labels(state)
        for kind, states in (("capture", CAPTURE_STATES), ("restore", RESTORE_STATES)):
            for state in ENDED & set(states):
                self._ended.labels(kind, state)

    def answered(self, operation: str, status: int) -> None:
        """Count an answer."""
        self._requests.labels(operation, str(status)).inc()

    def ended(self, job: AnyAnswer) -> None:
        """Count a job that ended."""
        kind = "capture" if isinstance(job, api.CaptureJob) else "restore"
        self._ended.labels(kind, job.state).inc()
        if isinstance(job.result, api.CaptureDone):
            done = job.result
            self._count(
                kind,
                {"setup": done.agent_setup_s, "criu": done.criu_dump_s, "commit": done.commit_s}
                | {"frozen": done.frozen_s, "total": done.total_s}
                | ({} if done.cuda_checkpoint_s is None else {"gpu": done.cuda_checkpoint_s}),
                {word: done.ingest[f"{word}_bytes"] for word in ("zero", "known", "new")},
            )
        elif isinstance(job.result, api.RestoreDone):
            run = job.result
            self._count(
                kind,
                {"setup": run.agent_setup_s, "criu": run.criu_restore_s, "fill": run.fill_s}
                | {"first_answer": run.running_s, "total": run.total_s}
                | ({} if run.cuda_restore_s is None else {"gpu": run.cuda_restore_s}),
                {word: run.lazy[f"{word}_bytes"] or 0 for word in ("fault", "fill", "zero")}
                | {"eager": run.eager_bytes}
                | {f"external_{name}": count for name, count in run.external_sources.items()},
            )
            if run.gpu_bottleneck is not None:
                self._gpu_fills.labels(run.gpu_bottleneck).inc()

    def _count(self, kind: str, phases: dict[str, float], sources: dict[str, float]) -> None:
        for phase, seconds in phases.items():
            self._phases.labels(kind, phase).observe(seconds)
        for source, count in sources.items():
            self._bytes.labels(kind, source).inc(count)

    def text(self, jobs: Iterable[AnyAnswer], memory: api.MemoryStatus | None) -> bytes:
        """Return all of it as text; `memory` is what the broker has, if there is one."""
        if memory is not None:
            for state in MEMORY_STATES:
                self._owners.labels(state).set(memory.processes.get(state, 0))
            self._external.set(memory.size_bytes)
            self._regions.set(memory.regions)
            self._held.set(memory.holder_pid is not None)
        self._now.clear()
        for job in jobs:
            if job.state not in ENDED:
                kind = "capture" if isinstance(job, api.CaptureJob) else "restore"
                self._now.labels(kind, job.state).inc()
        return generate_latest(self._registry)
