"""Jobs: captures and restores as state machines, how many at once, and what is kept of them.

A job's state is changed by the thread that does its work, under the job's lock, along
`CAPTURE_STATES` or `RESTORE_STATES`. Everything else happens on the loop's thread.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from snapagent import api
from snapagent.control import CAPTURE_STATES, ENDED, RESTORE_STATES, Control
from snapagent.errors import AgentError, DaemonBusy, DaemonEnding, JobExists, NoSuchJob
from snapagent.server import shares
from snapstore import SnapError
from snapstore.clock import SystemClock, format_utc
from snapstore.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from snapagent.config import Settings
    from snapagent.control import State
    from snapagent.server.journal import Journal
    from snapstore import Progress

__all__ = ["AnyAnswer", "Job", "JobTable"]

WARNINGS_MAX: Final = 64

AnyAnswer = api.CaptureJob | api.RestoreJob
R = TypeVar("R", api.CaptureDone, api.RestoreDone)


class Job(Generic[R]):
    """One capture or restore of this daemon. Methods may be called from any thread."""

    def __init__(
        self, kind: type[R], *, name: str, store: str, uid: int, job_id: str | None = None
    ) -> None:
        self.id = job_id or secrets.token_hex(8)
        self.is_capture = kind is api.CaptureDone
        self.name = name
        self.store = store
        self.uid = uid
        self.control = Control(self.enter)
        self.on_state: Callable[[State], None] = lambda _: None
        """Called before a state is entered, by the work; may refuse it."""
        self.on_step: Callable[[AnyAnswer], None] = lambda _: None
        """Gets what there will be to tell of a new state, before anybody is told."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after every change, on the thread that made it."""
        self._allowed = CAPTURE_STATES if self.is_capture else RESTORE_STATES
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._steps: list[tuple[State, str]] = [("queued", self._now())]
        self._version = 1
        self._progress: api.ProgressBody | None = None
        self._result: R | None = None
        self._error: api.ErrorBody | None = None
        self._warnings: list[str] = []

    def _now(self) -> str:
        return format_utc(self._clock.now_ns())

    @property
    def kind(self) -> str:
        """Which of both it is."""
        return "capture" if self.is_capture else "restore"

    @property
    def state(self) -> State:
        """Where it is."""
        with self._lock:
            return self._steps[-1][0]

    def enter(self, state: State) -> None:
        """Go into a state. Into the one in which it is: nothing."""
        if state == self.state:
            return
        self.on_state(state)
        self._change(state)

    def _change(self, state: State) -> None:
        with self._lock:
            now = self._steps[-1][0]
            assert state in self._allowed[now], f"a {self.kind} does not go from {now} to {state}"
            steps = [*self._steps, (state, self._now())]
            next_answer = self._answer(steps, self._version + 1)
        self.on_step(next_answer)
        with self._lock:
            self._steps = steps
            self._version += 1
        self.on_change()

    def succeed(self, result: R) -> None:
        """End well."""
        self._result = result
        self._change("done")

    def fail(self, error: SnapError) -> None:
        """End with an error: `cancelled` if that is why."""
        self._error = api.error_body(error)
        self._change("cancelled" if self.control.cancelled else "failed")

    def tell(self, progress: Progress) -> None:
        """Say how far it is."""
        self._progress = api.ProgressBody(
            phase=progress.phase,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
            total_is_estimate=progress.is_estimate,
        )
        self.on_change()

    def warn(self, text: str) -> None:
        """Keep a word for whoever asked for it."""
        with self._lock:
            if len(self._warnings) < WARNINGS_MAX:
                self._warnings.append(text)
            self._version += 1
        self.on_change()

    def answer(self) -> AnyAnswer:
        """Say all of it as it is now."""
        with self._lock:
            return self._answer(self._steps, self._version)

    def _answer(self, steps: list[tuple[State, str]], version: int) -> AnyAnswer:
        return api.job_of(
            {
                "id": self.id,
                "version": version,
                "name": self.name,
                "store": self.store,
                "uid": self.uid,
                "cancelling": self.control.cancelled,
                "progress": self._progress,
                "error": self._error,
                "warnings": list(self._warnings),
                "kind": self.kind,
                "state": steps[-1][0],
                "steps": [{"state": state, "at": at} for state, at in steps],
                "result": self._result,
            }
        )


_AnyJob = Job[api.CaptureDone] | Job[api.RestoreDone]


class _Entry:
    """A job in the table: alive with its work, or ended with what is left to say."""

    def __init__(self, answer: AnyAnswer, job: _AnyJob | None) -> None:
        self.last = answer
        self.job = job
        self.waiting: set[asyncio.Event] = set()

    @property
    def answer(self) -> AnyAnswer:
        return self.last if self.job is None else self.job.answer()

    def wake(self) -> None:
        for event in self.waiting:
            event.set()


class JobTable:
    """All jobs. Only for the loop's thread, but for what jobs themselves call."""

    def __init__(
        self, settings: Settings, journal: Journal, on_end: Callable[[AnyAnswer], None]
    ) -> None:
        """Make an empty one, of this loop.

        Args:
            settings: How many at once, waiting and kept.
            journal: Where what is under way is written down.
            on_end: Told of each job that ended.
        """
        self._settings = settings
        self._journal = journal
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._entries: dict[str, _Entry] = {}
        self._queue: list[tuple[_AnyJob, Callable[[], None]]] = []
        self._at_work: list[int] = []
        """Whose jobs have a thread now."""
        self._running = 0
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    # -- beginning --------------------------------------------------------------------------------

    def add_ended(self, answers: Iterable[AnyAnswer]) -> None:
        """Keep what an earlier daemon left."""
        for answer in answers:
            self._entries[answer.id] = _Entry(answer, None)

    def submit(self, job: Job[R], work: Callable[[], R]) -> AnyAnswer:
        """Begin a job now or when there is room.

        Raises:
            DaemonBusy: As many wait as may, of all or of this user, or the daemon is about to end
                (`DaemonEnding`).
            JobExists: There is one with this id.
        """
        if job.id in self._entries:
            raise JobExists(
                f"there is a job {job.id} already",
                next_step="choose ids at random, or leave them to the agent",
            )
        if self._stopping:
            raise DaemonEnding("the agent is about to end", next_step="ask again when it runs")
        self._require_place(job.uid)
        entry = _Entry(job.answer(), job)
        self._entries[job.id] = entry
        job.on_change = poke = _Poke(self._loop, entry, self._journal)
        job.on_step = poke.write_down
        self._journal.write(job.answer())
        self._running += 1
        self._idle.clear()
        self._queue.append((job, functools.partial(self._work, job, work)))
        self._start_next()
        return job.answer()

    def _require_place(self, uid: int) -> None:
        begun = [entry.job.uid for entry in self._entries.values() if entry.job is not None]
        places = self._settings.jobs_at_once + self._settings.jobs_queued
        if shares.may_join(uid, begun, places):
            return
        if len(begun) >= places:
            said = f"{len(begun)} captures and restores are under way or wait already"
        else:
            said = (
                f"uid {uid} has {begun.count(uid)} captures and restores under way or waiting, and "
                f"the last {places - len(begun)} of {places} places are for others"
            )
        raise DaemonBusy(said, next_step="wait, cancel some, or raise jobs_at_once or jobs_queued")

    def _start_next(self) -> None:
        places = self._settings.jobs_at_once
        while (index := shares.next_to_start(self._waiting(), self._at_work, places)) is not None:
            job, run = self._queue.pop(index)
            self._at_work.append(job.uid)
            # A daemon thread: a store that does not answer must not keep the program from its end.
            threading.Thread(target=run, name=f"snapagent-{job.kind}", daemon=True).start()

    def _waiting(self) -> list[int]:
        return [job.uid for job, _ in self._queue]

    def _work(self, job: Job[R], work: Callable[[], R]) -> None:
        """Do a job's work, on its thread."""
        try:
            job.control.enter("preflight")
            job.succeed(work())
        except SnapError as error:
            job.fail(error)
        except BaseException:  # noqa: BLE001 - a bug of ours; others' jobs must not end with it
            traceback.print_exc(file=sys.stderr)
            job.fail(AgentError("the agent has failed: its log tells more", next_step="report it"))
        finally:
            self._loop.call_soon_threadsafe(self._worked, job)

    def _worked(self, job: _AnyJob) -> None:
        self._at_work.remove(job.uid)
        self._ended(job.id)

    def _ended(self, job_id: str) -> None:
        entry = self._entries[job_id]
        assert entry.job is not None, "ended once"
        entry.last, entry.job = entry.job.answer(), None
        self._on_end(entry.last)
        self._running -= 1
        if self._running == 0:
            self._idle.set()
        entry.wake()
        self._forget()
        self._start_next()

    def _forget(self) -> None:
        ended = [(name, one.last.uid) for name, one in self._entries.items() if one.job is None]
        for index in shares.excess([uid for _, uid in ended], self._settings.jobs_kept):
            del self._entries[ended[index][0]]

    # -- looking ----------------------------------------------------------------------------------

    def all(self) -> list[AnyAnswer]:
        """Return all jobs, the newest first."""
        return [entry.answer for entry in reversed(self._entries.values())]

    def get(self, job_id: str) -> AnyAnswer:
        """Return one.

        Raises:
            NoSuchJob: There is none with this id.
        """
        return self._entry(job_id).answer

    def _entry(self, job_id: str) -> _Entry:
        entry = self._entries.get(job_id)
        if entry is None:
            raise NoSuchJob(f"there is no job {job_id}", next_step="see `snapagent history`")
        return entry

    async def wait(self, job_id: str, *, seen: int, timeout_s: float) -> AnyAnswer:
        """Return a job once its version is another than `seen`, or it has ended, or time is up."""
        entry = self._entry(job_id)
        deadline_s = self._loop.time() + timeout_s
        while (answer := entry.answer).version == seen and answer.state not in ENDED:
            left_s = deadline_s - self._loop.time()
            if left_s <= 0 or not await self.await_change(job_id, left_s):
                break
        return entry.answer

    async def await_change(self, job_id: str, timeout_s: float) -> bool:
        """Wait until anything about a job changes, its progress too; false when time is up."""
        entry = self._entry(job_id)
        event = asyncio.Event()
        entry.waiting.add(event)
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            entry.waiting.discard(event)
        return True

    # -- ending -----------------------------------------------------------------------------------

    def cancel(self, job_id: str, reason: str = "cancelled") -> AnyAnswer:
        """End a job soon, unless it has ended or is too late for that; returns it as it is now."""
        entry = self._entry(job_id)
        job = entry.job
        if job is None or not job.control.cancel(reason):
            return entry.answer
        for waiting in self._queue:
            if waiting[0] is job:
                self._queue.remove(waiting)
                job.fail(Interrupted(reason))
                self._ended(job_id)
                break
        else:
            entry.wake()
        return entry.answer

    async def stop(self, grace_s: float) -> None:
        """Take no more jobs; end those that wait, and others after a time; return when all have.

        Whoever is cancelled while this waits only makes it end sooner: call it again with 0.
        """
        self._stopping = True
        for job, _ in list(self._queue):
            self.cancel(job.id, "the agent was stopped")
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for job_id, entry in list(self._entries.items()):
                if entry.job is not None:
                    self.cancel(job_id, "the agent was stopped")
        await self._idle.wait()


class _Poke:
    """Tells the loop of changes of a job, from other threads, and the journal of its states.

    The journal hears of a state first: whoever was told of it finds it there after a crash. Of many
    changes in a moment the loop hears once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, entry: _Entry, journal: Journal) -> None:
        self._loop = loop
        self._entry = entry
        self._journal = journal
        self._pending = threading.Event()
        self._lock = threading.Lock()
        self._written = 1

    def __call__(self) -> None:
        self.write_down(self._entry.answer)
        if not self._pending.is_set():
            self._pending.set()
            self._loop.call_soon_threadsafe(self._wake)

    def write_down(self, answer: AnyAnswer) -> None:
        """Let the journal have it if it is news, or forget a job that has ended.

        Threads may come late with what was so before; then it is none.
        """
        with self._lock:
            if answer.version <= self._written:
                return
            # A job that is about to end is forgotten when it has.
            if answer.state not in ENDED:
                self._written = answer.version
                self._journal.write(answer)
            elif self._entry.answer.state in ENDED:
                self._written = answer.version
                self._journal.remove(answer.id)

    def _wake(self) -> None:
        self._pending.clear()
        self._entry.wake()
