"""What answers the requests: checks bodies, asks the policy, begins jobs.

One method for each route, named after it. They run on the loop; what blocks goes to threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

import snapstore
from snapagent import api
from snapagent.control import ENDED
from snapagent.errors import DaemonBusy, NoSuchJob
from snapagent.history import ENTRIES_MAX, History, read_history
from snapagent.recorded import collect_reasons
from snapagent.server.called_off import CalledOff
from snapagent.server.jobs import Job
from snapagent.server.memory import describe_broker
from snapagent.server.openapi import description
from snapagent.server.policy import require_same_pids
from snapstore.clock import SystemClock, format_utc
from snapstore.errors import Interrupted, PolicyRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapagent.config import Settings
    from snapagent.history import Entry
    from snapagent.server.jobs import AnyAnswer, JobTable
    from snapagent.server.metrics import Metrics
    from snapagent.server.policy import Peer, Policy
    from snapagent.server.routes import HistoryQuery, WaitQuery
    from snapagent.server.stores import Stores
    from snapagent.server.work import Work

__all__ = ["Handlers"]

LOOKS_MAX: Final = 16
"""Preflights and readings of the history at once."""
TELL_S: Final = 0.2
"""Between two lines of a stream that only tell of progress."""
KEEP_ALIVE_S: Final = 15.0
T = TypeVar("T")


class LineSink(Protocol):
    """Where the lines of a stream go."""

    async def write(self, data: bytes) -> None:
        """Send one; waits as long as the peer does not take it."""
        ...


class Handlers:
    """Answers requests of one daemon. On the loop's thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        policy: Policy,
        stores: Stores,
        jobs: JobTable,
        metrics: Metrics,
        found: api.Found,
        work: Work,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._stores = stores
        self._jobs = jobs
        self._metrics = metrics
        self._found = found
        self._work = work
        self._broker = work.broker
        self._gpus = work.gpus
        self._started = format_utc(SystemClock().now_ns())
        self._called_off = CalledOff()
        self._looks = 0
        self._description = description()
        self.stopping = False

    # -- captures and restores --------------------------------------------------------------------

    async def begin_capture(self, peer: Peer, body: api.CaptureRequestBody) -> AnyAnswer:
        """Begin to capture."""
        store = self._stores.url(body.store)
        self._policy.require(peer, "capture", body.name, store)
        require_same_pids(peer)
        self._policy.require_processes(peer, body.pid, "capture", body.name)
        self._require_wanted(peer, body.id)
        job = Job(api.CaptureDone, name=body.name, store=store, uid=peer.uid, job_id=body.id)
        return self._jobs.submit(job, self._work.capture(job, body, peer))

    async def begin_restore(self, peer: Peer, body: api.RestoreRequestBody) -> AnyAnswer:
        """Begin to restore."""
        store = self._stores.url(body.store)
        self._policy.require(peer, "restore", body.name, store)
        if body.into_pid is not None:
            require_same_pids(peer)
            self._policy.require_namespaces(peer, body.into_pid, body.name)
        self._require_wanted(peer, body.id)
        job = Job(api.RestoreDone, name=body.name, store=store, uid=peer.uid, job_id=body.id)
        return self._jobs.submit(job, self._work.restore(job, body, peer))

    def _require_wanted(self, peer: Peer, job_id: str | None) -> None:
        if job_id is not None and self._called_off.take(peer.uid, job_id):
            raise Interrupted(f"job {job_id} was cancelled before it was begun")

    async def list_captures(self, peer: Peer) -> api.CaptureJobs:
        """List captures."""
        jobs = [job for job in self._jobs.all() if self._may_see(peer, job)]
        return api.CaptureJobs(captures=[one for one in jobs if isinstance(one, api.CaptureJob)])

    async def list_restores(self, peer: Peer) -> api.RestoreJobs:
        """List restores."""
        jobs = [job for job in self._jobs.all() if self._may_see(peer, job)]
        return api.RestoreJobs(restores=[one for one in jobs if isinstance(one, api.RestoreJob)])

    async def get_capture(self, peer: Peer, job_id: str, query: WaitQuery) -> AnyAnswer:
        """Look at a capture."""
        return await self._wait(peer, api.CaptureJob, job_id, query)

    async def get_restore(self, peer: Peer, job_id: str, query: WaitQuery) -> AnyAnswer:
        """Look at a restore."""
        return await self._wait(peer, api.RestoreJob, job_id, query)

    async def _wait(
        self, peer: Peer, kind: type[AnyAnswer], job_id: str, query: WaitQuery
    ) -> AnyAnswer:
        job = self._find(peer, kind, job_id)
        if query.wait_s == 0:
            return job
        return await self._jobs.wait(job_id, seen=query.seen, timeout_s=query.wait_s)

    async def cancel_capture(self, peer: Peer, job_id: str) -> AnyAnswer:
        """Cancel a capture."""
        return self._cancel(peer, api.CaptureJob, job_id)

    async def cancel_restore(self, peer: Peer, job_id: str) -> AnyAnswer:
        """Cancel a restore."""
        return self._cancel(peer, api.RestoreJob, job_id)

    def _cancel(self, peer: Peer, kind: type[AnyAnswer], job_id: str) -> AnyAnswer:
        try:
            job = self._find(peer, kind, job_id)
        except NoSuchJob:
            # The request that begins it may be under way.
            self._called_off.add(peer.uid, job_id)
            raise
        if not peer.is_root and job.uid != peer.uid:
            raise PolicyRefused(
                f"uid {peer.uid} may not cancel what uid {job.uid} began",
                next_step=f"let uid {job.uid} or root do it",
            )
        return self._jobs.cancel(job_id)

    async def watch_capture(self, peer: Peer, job_id: str, out: LineSink) -> None:
        """Follow a capture."""
        self._find(peer, api.CaptureJob, job_id)
        await self._watch(job_id, out)

    async def watch_restore(self, peer: Peer, job_id: str, out: LineSink) -> None:
        """Follow a restore."""
        self._find(peer, api.RestoreJob, job_id)
        await self._watch(job_id, out)

    async def _watch(self, job_id: str, out: LineSink) -> None:
        """Write a line for each change; of progress alone, some each second."""
        version = -1
        while True:
            answer = self._jobs.get(job_id)
            await out.write(msgspec.json.encode(answer) + b"\n")
            if answer.state in ENDED:
                return
            if answer.version == version:
                await self._jobs.wait(job_id, seen=version, timeout_s=TELL_S)
            version = answer.version
            if self._jobs.get(job_id) == answer:
                await self._jobs.await_change(job_id, KEEP_ALIVE_S)

    def _find(self, peer: Peer, kind: type[AnyAnswer], job_id: str) -> AnyAnswer:
        job = self._jobs.get(job_id)
        if not isinstance(job, kind) or not self._may_see(peer, job):
            raise NoSuchJob(f"there is no job {job_id}", next_step="see `snapagent history`")
        return job

    def _may_see(self, peer: Peer, job: AnyAnswer) -> bool:
        return job.uid == peer.uid or self._policy.allows(peer, "read", job.name, job.store)

    # -- the rest ---------------------------------------------------------------------------------

    async def preflight_process(
        self, peer: Peer, body: api.PreflightProcessBody
    ) -> api.PreflightAnswer:
        """Say what stands in the way of a capture."""
        require_same_pids(peer)
        self._policy.require_look(peer, body.pid)
        return await self._look(lambda: self._work.preflight_process(body))

    async def preflight_snapshot(
        self, peer: Peer, body: api.PreflightSnapshotBody
    ) -> api.PreflightAnswer:
        """Say what stands in the way of a restore."""
        store = self._stores.url(body.store)
        self._policy.require(peer, "read", body.name, store)
        if body.into_pid is not None:
            require_same_pids(peer)
            self._policy.require_namespaces(peer, body.into_pid, body.name)
        return await self._look(lambda: self._work.preflight_snapshot(body, store))

    async def history(self, peer: Peer, query: HistoryQuery) -> api.HistoryAnswer:
        """List what was captured and restored."""
        config = self._settings.agent
        limit = query.limit if peer.is_root else ENTRIES_MAX

        def read() -> list[Entry]:
            # Of what commands without a daemon did whose agents were killed.
            collect_reasons(config, History(config.history_file))
            return read_history(config.history_file, limit=limit)

        entries = await self._look(read)
        store = self._settings.store
        seen = [
            one
            for one in entries
            if peer.is_root or self._policy.allows_text(peer, "read", one.name, store)
        ]
        return api.HistoryAnswer(
            entries=[
                msgspec.convert(one, api.HistoryEntry, from_attributes=True)
                for one in seen[: query.limit]
            ]
        )

    async def status(self, _peer: Peer) -> api.Status:
        """Describe the daemon."""
        counts: dict[str, dict[str, int]] = {"capture": {}, "restore": {}}
        for job in self._jobs.all():
            states = counts["capture" if isinstance(job, api.CaptureJob) else "restore"]
            states[job.state] = states.get(job.state, 0) + 1
        settings = self._settings
        return api.Status(
            version=snapstore.VERSION,
            pid=os.getpid(),
            started=self._started,
            stopping=self.stopping,
            socket=str(settings.socket_path),
            store=settings.store or None,
            stores_open=self._stores.urls,
            readers=len(self._work.readers.pids),
            jobs=counts,
            memory=self._memory(),
            gpu=self._gpus.describe() if self._gpus is not None else None,
            found_at_start=self._found,
        )

    async def health(self, _peer: Peer) -> api.Health:
        """Tell whether jobs are taken."""
        is_held = self._broker.has_holder if self._broker is not None else None
        return api.Health(healthy=not self.stopping, memory_is_held=is_held)

    async def metrics(self, _peer: Peer) -> bytes:
        """Return the counters."""
        return self._metrics.text(self._jobs.all(), self._memory())

    def _memory(self) -> api.MemoryStatus | None:
        return describe_broker(self._broker) if self._broker is not None else None

    async def openapi(self, _peer: Peer) -> dict[str, object]:
        """Describe the API."""
        return self._description

    async def _look(self, work: Callable[[], T]) -> T:
        """Do what blocks on a thread of its own, of which there are not too many.

        A daemon thread, since a store that does not answer must not keep the program from its end.
        """
        if self._looks >= LOOKS_MAX:
            raise DaemonBusy("too many ask at once", next_step="ask again")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            self._looks -= 1
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, result, None)

        self._looks += 1
        threading.Thread(target=run, name="snapagent-look", daemon=True).start()
        return await done
