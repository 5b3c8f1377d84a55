"""Captures and restores of a daemon, held in any of their states from outside.

By a store that does not answer, by a CRIU that waits, or by a helper process that is stopped.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from snapagent.control import ENDED
from tests.support.agent import Agent
from tests.support.daemon import Daemon, HeldCriu, running_daemon
from tests.support.processes import stop_process
from tests.support.s3_proxy import Proxy, Request, Trouble
from tests.support.waiting import wait_until

FRESH = {"pids": "fresh", "network": "fresh"}
CAPTURE = "/v1/captures"
RESTORE = "/v1/restores"
STORED = "tree"
"""Name of the snapshot that is restored."""


@dataclass
class HeldWork:
    """A process to be captured, a gate before the store, a CRIU that can wait."""

    agent: Agent
    proxy: Proxy
    criu: HeldCriu
    pid: int
    held: list[Request] = field(default_factory=list, kw_only=True)

    def hold(self, *words: str) -> None:
        """Hold all requests to the store that have one of these words in their paths."""

        def plan(request: Request) -> Trouble | None:
            if any(word in request.path for word in words):
                self.held.append(request)
                return "stalled"
            return None

        self.proxy.plan = plan

    def await_held(self, daemon: Daemon, job: str) -> None:
        """Wait until one is held."""

        def held() -> bool:
            now = daemon.get(job)
            assert now["state"] not in ENDED, now
            return bool(self.held)

        wait_until(held, "a request is held")

    def open(self) -> None:
        """Let everybody through, also those who come again."""
        self.proxy.plan = lambda _: None
        self.proxy.released.set()

    @contextlib.contextmanager
    def daemon(self, config: str = "") -> Iterator[Daemon]:
        """Run a daemon."""
        with running_daemon(self.agent, config, criu=self.criu.program) as daemon:
            yield daemon

    def begin(self, daemon: Daemon, target: str) -> str:
        """Begin a capture of the process, or a restore elsewhere."""
        if target == CAPTURE:
            return daemon.begin(CAPTURE, name="again", pid=self.pid)
        return daemon.begin(RESTORE, name=STORED, record_s=1000, **FRESH)


@contextlib.contextmanager
def in_queued(work: HeldWork, daemon: Daemon, target: str) -> Iterator[str]:
    """The only place is taken by another job, which is held."""
    work.hold("/refs/")
    first = work.begin(daemon, RESTORE)
    daemon.await_state(first, "preflight")
    yield work.begin(daemon, target)


@contextlib.contextmanager
def in_preflight(work: HeldWork, daemon: Daemon, target: str) -> Iterator[str]:
    """The snapshot's name is not told; for a capture, nothing of another store."""
    work.hold("/refs/", "/snapstore.json", "/leases/")
    job = work.begin(daemon, target)
    work.await_held(daemon, job)
    yield job


@contextlib.contextmanager
def in_preparing(work: HeldWork, daemon: Daemon, target: str) -> Iterator[str]:
    """The hints of earlier restores do not come, which are asked for beside the supervisor."""
    work.hold("/hints/")
    job = daemon.begin(target, name=STORED, **FRESH)
    work.await_held(daemon, job)
    yield job


@contextlib.contextmanager
def in_criu(work: HeldWork, daemon: Daemon, target: str) -> Iterator[str]:
    """CRIU waits before its first step."""
    work.criu.close()
    job = work.begin(daemon, target)
    work.criu.await_held()
    yield job
    work.criu.open()


@contextlib.contextmanager
def in_committing(work: HeldWork, daemon: Daemon, target: str) -> Iterator[str]:
    """All has come; its packs, or what follows them, are not taken."""
    work.hold("/packs/", "/ranks/", "/layouts/", "/snapshots/")
    job = work.begin(daemon, target)
    work.await_held(daemon, job)
    yield job


@contextlib.contextmanager
def in_filling(work: HeldWork, daemon: Daemon, target: str) -> Iterator[str]:
    """The processes run; memory that nobody touches is not filled."""
    job = work.begin(daemon, target)
    daemon.await_state(job, "filling")
    yield job


@contextlib.contextmanager
def in_releasing(work: HeldWork, daemon: Daemon, target: str) -> Iterator[str]:
    """The supervisor does not hear that it may go, as it is stopped."""
    job = daemon.begin(target, name=STORED, record_s=2, **FRESH)
    daemon.await_state(job, "filling")
    supervisor = work.agent.process_named("snapagent-super")
    stop_process(supervisor)
    yield job
    os.kill(supervisor, signal.SIGCONT)


Holder = Callable[[HeldWork, Daemon, str], contextlib.AbstractContextManager[str]]
HELD: dict[str, dict[str, Holder]] = {
    CAPTURE: {
        "queued": in_queued,
        "preflight": in_preflight,
        "dumping": in_criu,
        "committing": in_committing,
    },
    RESTORE: {
        "queued": in_queued,
        "preflight": in_preflight,
        "preparing": in_preparing,
        "restoring": in_criu,
        "filling": in_filling,
        "releasing": in_releasing,
    },
}
CASES = [(target, state) for target, states in HELD.items() for state in states]
CANCELLED = [case for case in CASES if case[1] != "releasing"]
