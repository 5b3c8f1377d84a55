"""A captured tree and a store that can be held, for tests that kill in the middle."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.s3_proxy import Proxy, Request, Trouble
from tests.support.waiting import wait_until


@dataclass
class Gate:
    """Holds what a capture sends or a restore asks for, while it is closed."""

    proxy: Proxy
    run_directory: Path
    closed: bool = False
    closes_with_criu: bool = False
    """Close it by itself once CRIU has begun to restore."""
    closes_when: Callable[[], bool] = lambda: False
    """Close it by itself once that is so."""
    held: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Decide about each request from now on."""
        self.proxy.plan = self._decide

    def _decide(self, request: Request) -> Trouble | None:
        if not request.is_data or request.method not in {"GET", "PUT", "POST"}:
            return None
        if self.closes_with_criu and any(self.run_directory.glob("restore-*/restore.log")):
            self.closed = True
        if self.closes_when():
            self.closed = True
        if not self.closed:
            return None
        self.held.append(request)
        return "stalled"

    def await_held(self, process: subprocess.Popen[str]) -> None:
        """Wait until this one, or what it restores, waits at the gate."""
        wait_until(lambda: bool(self.held) or process.poll() is not None, "a request of data")
        assert self.held, process.communicate()

    def open(self) -> None:
        """Let everybody through who comes, also again."""
        self.closed = self.closes_with_criu = False
        self.proxy.released.set()


@contextlib.contextmanager
def gate_before(endpoint: str, run_directory: Path) -> Iterator[Gate]:
    """Put a gate between an agent, which works there, and its S3 server."""
    with Proxy(endpoint).running() as proxy:
        yield Gate(proxy, run_directory)
