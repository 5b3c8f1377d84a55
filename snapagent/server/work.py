"""The work of jobs: requests of the API turned into captures and restores, on threads."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from snapagent import api
from snapagent.capture import CaptureRequest
from snapagent.capture import find_obstacles as obstacles_of_process
from snapagent.errors import AgentError
from snapagent.linux import processes
from snapagent.preflight import obstacles_json
from snapagent.recorded import recorded_capture, recorded_restore
from snapagent.restore import RestoreRequest
from snapagent.restore import find_obstacles as obstacles_of_snapshot
from snapagent.supervision import Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from snapagent.config import AgentConfig
    from snapagent.control import State
    from snapagent.lazy.readers import ReaderPool
    from snapagent.memory.broker import MemoryBroker
    from snapagent.preflight import Obstacle
    from snapagent.server.gpus import DaemonGpus
    from snapagent.server.jobs import Job
    from snapagent.server.policy import Peer, Policy
    from snapagent.server.stores import Stores

__all__ = ["Work"]


class Work:
    """Does what requests ask for. Thread-safe; everything blocks.

    Attributes:
        broker: Lends external memory, if the daemon does.
        gpus: What it does for GPUs besides.
        readers: Read memory for restores.
    """

    def __init__(
        self,
        config: AgentConfig,
        stores: Stores,
        policy: Policy,
        broker: MemoryBroker | None,
        gpus: DaemonGpus | None,
        readers: ReaderPool,
    ) -> None:
        self._config = config
        self.readers = readers
        self.broker = broker
        self.gpus = gpus
        self._stores = stores
        self._policy = policy

    def capture(
        self, job: Job[api.CaptureDone], body: api.CaptureRequestBody, peer: Peer
    ) -> Callable[[], api.CaptureDone]:
        """Return the work of a capture."""

        def look_again(state: State) -> None:
            # It stands still now: nobody can have become another user's since.
            if state == "committing":
                self._policy.require_processes(peer, body.pid, "capture", body.name)

        def work() -> api.CaptureDone:
            request = CaptureRequest(
                pid=body.pid,
                name=body.name,
                labels=body.labels,
                stop=body.stop,
                freeze_fast=body.freeze_fast,
                broker=self.broker,
            )
            with self._first(), self._stores.use(job.store) as store:
                done = recorded_capture(
                    store,
                    request,
                    self._config,
                    job.tell,
                    warn=job.warn,
                    control=job.control,
                    entry=job.id,
                )
            return msgspec.convert(done.document(), api.CaptureDone)

        job.on_state = look_again
        return work

    def restore(
        self, job: Job[api.RestoreDone], body: api.RestoreRequestBody, peer: Peer
    ) -> Callable[[], api.RestoreDone]:
        """Return the work of a restore."""
        target = body.into_pid
        life = processes.read_state(target) if target is not None else None

        def look_again(state: State) -> None:
            # The supervisor is in its namespaces by now, if it was that process all the time.
            if state == "restoring" and target is not None:
                now = processes.read_state(target)
                if now is None or life is None or now.started_ticks != life.started_ticks:
                    raise AgentError(f"process {target} has ended")
                self._policy.require_namespaces(peer, target, body.name)

        def work() -> api.RestoreDone:
            with self._first(), self._stores.use(job.store, body.integrity) as store:
                done = recorded_restore(
                    store,
                    _restore_request(body, self.broker, self.readers),
                    self._config,
                    job.tell,
                    warn=job.warn,
                    control=job.control,
                    entry=job.id,
                )
            if self.gpus is not None:
                self.gpus.restored(job.store, body.integrity, done)
            return msgspec.convert(done.document(), api.RestoreDone)

        job.on_state = look_again
        return work

    def _first(self) -> AbstractContextManager[None]:
        """What the daemon does besides waits for the length of a `with` block."""
        return self.gpus.job() if self.gpus is not None else contextlib.nullcontext()

    def preflight_process(self, body: api.PreflightProcessBody) -> api.PreflightAnswer:
        """Say what stands in the way of a capture."""
        return _preflight(
            obstacles_of_process(body.pid, self._config, stop=body.stop, broker=self.broker)
        )

    def preflight_snapshot(
        self, body: api.PreflightSnapshotBody, store_url: str
    ) -> api.PreflightAnswer:
        """Say what stands in the way of a restore."""
        request = RestoreRequest(
            name=body.name,
            images=body.images,
            place=_place(body),
            allow_driver_change=body.allow_driver_change,
            broker=self.broker,
        )
        with self._stores.use(store_url) as store:
            return _preflight(obstacles_of_snapshot(store, request, self._config))


def _place(body: api.RestoreRequestBody | api.PreflightSnapshotBody) -> Place:
    return Place(network=body.network, pids=body.pids, join_pid=body.into_pid)


def _restore_request(
    body: api.RestoreRequestBody, broker: MemoryBroker | None, readers: ReaderPool
) -> RestoreRequest:
    return RestoreRequest(
        name=body.name,
        images=body.images,
        place=_place(body),
        eager=body.eager,
        record_s=body.record_s,
        force=body.force,
        allow_driver_change=body.allow_driver_change,
        broker=broker,
        readers=readers,
    )


def _preflight(obstacles: list[Obstacle]) -> api.PreflightAnswer:
    return api.PreflightAnswer(
        possible=not any(one.blocking for one in obstacles),
        obstacles=[api.ObstacleBody(**one) for one in obstacles_json(obstacles)],  # type: ignore[arg-type]
    )
