"""`snapagent run`: from settings to a daemon that serves until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from snapagent import api
from snapagent.config import notify_socket
from snapagent.lazy.readers import ReaderPool
from snapagent.linux import processes
from snapagent.server.app import make_server
from snapagent.server.gpus import DaemonGpus
from snapagent.server.handlers import Handlers
from snapagent.server.jobs import JobTable
from snapagent.server.journal import Journal
from snapagent.server.leftovers import clean_up
from snapagent.server.listener import Acceptor, daemon_lock, listening, open_run_directory
from snapagent.server.memory import make_broker
from snapagent.server.metrics import Metrics
from snapagent.server.policy import Policy
from snapagent.server.stores import Stores
from snapagent.server.work import Work
from snapstore import SnapError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapagent.config import Settings

__all__ = ["Companion", "run_daemon"]

_ANSWERS_S_MAX = 5.0
"""For answers that are under way when everything else has ended."""


class Companion(Protocol):
    """What else serves for as long as the daemon does, on threads of its own."""

    def start(self) -> None:
        """Serve from now on; called when nothing of an earlier daemon is left."""
        ...

    def close(self) -> None:
        """Stop; called when all jobs have ended."""
        ...


def run_daemon(
    settings: Settings, say: Callable[[str], None], companions: Sequence[Companion] = ()
) -> None:
    """Serve until SIGTERM or SIGINT; returns when all that was under way has ended.

    A second signal ends what is under way at once.

    Args:
        settings: All of them, checked.
        say: Told what people should know: what was found at the start, where it listens, its end.
        companions: Started before the first job is taken, and closed after the last one.

    Raises:
        AlreadyRunning: Another daemon has the socket or the directories.
        AgentError: It cannot listen.
    """
    config = settings.agent
    # Each piece of external memory is one, here and on its way to a holder.
    processes.allow_many_files()
    open_run_directory(config.run_directory)
    with (
        daemon_lock(config.state_directory),
        listening(settings.socket_path, settings.socket_group) as (listener, was_stale),
        contextlib.closing(Stores(settings)) as stores,
        contextlib.ExitStack() as served,
    ):
        left = clean_up(config, say)
        for job in left.jobs:
            assert job.error is not None, "made with one"
            say(f"{job.name}: {job.error.message}")
        for name in left.directories:
            say(f"removed {name}, which a killed agent had left")
        found = api.Found(
            jobs=[job.id for job in left.jobs],
            directories=left.directories,
            reasons=left.reasons,
            stale_socket=was_stale,
        )
        policy = Policy(settings.rules, settings.store)
        broker = make_broker(settings, policy)
        readers = ReaderPool(config.readers)
        gpus = None
        # It comes first and goes last: others may need it.
        own: list[Companion] = [readers]
        if broker is not None:
            gpus = DaemonGpus(broker.gpus, stores, prepare=settings.gpu_prepare, say=say)
            own += [broker, gpus]
        for companion in (*own, *companions):
            companion.start()
            served.callback(companion.close)
        work = Work(config, stores, policy, broker, gpus, readers)
        daemon = _Daemon(settings, stores, policy, work, say)
        asyncio.run(daemon.serve(listener, found, left.jobs))


class _Daemon:
    """One run."""

    def __init__(
        self,
        settings: Settings,
        stores: Stores,
        policy: Policy,
        work: Work,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._stores = stores
        self._policy = policy
        self._work = work
        self._say = say

    async def serve(
        self,
        listener: socket.socket,
        found: api.Found,
        left: list[api.CaptureJob | api.RestoreJob],
    ) -> None:
        """Serve until a signal, and then end in order."""
        settings = self._settings
        told = asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told.release)
        metrics = Metrics()
        journal = Journal(settings.agent.jobs_directory)
        jobs = JobTable(settings, journal, metrics.ended)
        jobs.add_ended(left)
        handlers = Handlers(
            settings,
            policy=self._policy,
            stores=self._stores,
            jobs=jobs,
            metrics=metrics,
            found=found,
            work=self._work,
        )
        runner = web.AppRunner(make_server(handlers, metrics), access_log=None)
        await runner.setup()
        assert runner.server is not None, "it is set up"
        accepting = asyncio.create_task(Acceptor(listener, runner.server).run())
        self._warm_up()
        broker = self._work.broker
        lending = f", lending memory at {broker.path}" if broker is not None else ""
        self._say(f"listening at {settings.socket_path}{lending}")
        _notify("READY=1")
        await told.acquire()
        _notify("STOPPING=1")
        handlers.stopping = True
        self._say(f"ending: no more jobs; what is under way has {settings.stop_s:g} s")
        await self._end_jobs(jobs, told)
        accepting.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWERS_S_MAX):
                await runner.cleanup()

    async def _end_jobs(self, jobs: JobTable, told: asyncio.Semaphore) -> None:
        """Let jobs end, at once at the second signal."""
        ending = asyncio.create_task(jobs.stop(self._settings.stop_s))
        hurry = asyncio.create_task(told.acquire())
        await asyncio.wait({ending, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await jobs.stop(0)
        hurry.cancel()
        await ending

    def _warm_up(self) -> None:
        """Open the default store, so that the first request does not wait for that."""
        if not self._settings.store:
            return

        def open_it() -> None:
            try:
                with self._stores.use(self._settings.store):
                    pass
            except SnapError as error:
                self._say(f"the store cannot be opened now: {error}")

        threading.Thread(target=open_it, name="snapagent-open", daemon=True).start()


def _notify(text: str) -> None:
    """Tell systemd, if it wants to know."""
    address = notify_socket()
    if address is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            channel.sendall(text.encode())
    except OSError as error:
        print(f"snapagent: cannot tell systemd: {error}", file=sys.stderr)  # noqa: T201
