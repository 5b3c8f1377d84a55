"""The agent's ways in criu.py: a resident agent in a process of its own, and the command line.

    python -m tools.bench.criu_agent CRIU STORE

The resident agent has everything imported and the store open. It restores what a line of JSON on
its standard input says, and answers with a line when the processes run and one when it has let
them go.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import snapstore
from snapagent.config import AgentConfig
from snapagent.linux import namespaces
from snapagent.restore import Restoration, RestoreRequest
from snapagent.supervision import Place
from snapstore.cli.program import SWITCH_INTERVAL_S
from tools.bench.measure import BenchError

Where = Literal["here", "fresh"]
T = TypeVar("T")


@dataclass(frozen=True)
class Restored:
    """What a resident agent told of one restore; times in seconds from the request on."""

    root_pid: int
    running_s: float
    filled_s: float
    cpu_s: float


class ResidentAgent:
    """A running agent with an open store. A context manager, which ends it."""

    def __init__(self, criu: Path, store: Path) -> None:
        """Start it; it is ready for requests when this returns."""
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and this module.
            [sys.executable, "-m", "tools.bench.criu_agent", str(criu), str(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._receive()

    def restore(self, name: str, where: Where, on_running: Callable[[int], None]) -> Restored:
        """Restore a snapshot and return when the agent has let go of it.

        Args:
            name: Which.
            where: Into namespaces of their own, of process ids and of networks, or the present.
            on_running: Called with the root's process id when the processes run.
        """
        started = time.perf_counter()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": name, "where": where}) + "\n")
        self._process.stdin.flush()
        running = self._receive()
        running_s = time.perf_counter() - started
        root_pid = int(running["root_pid"])
        on_running(root_pid)
        filled = self._receive()
        filled_s = time.perf_counter() - started
        return Restored(root_pid, running_s, filled_s, filled["cpu_s"])

    def _receive(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("the resident agent ended; it has said why")
        answer: dict[str, float] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        """Return the agent itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


@contextlib.contextmanager
def resident_agents(criu: Path, stores: dict[str, Path]) -> Iterator[dict[str, ResidentAgent]]:
    """Run an agent for each store."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(ResidentAgent(criu, store)) for name, store in stores.items()
        }


def in_network_of(pid: int, action: Callable[[], T]) -> T:
    """Do something in the network of a process, on a thread that ends afterwards."""
    results: list[T] = []

    def run() -> None:
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            namespaces.set_namespace(fd, namespaces.NETWORK)
        finally:
            os.close(fd)
        results.append(action())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not results:
        raise BenchError(f"nothing can be asked in the network of process {pid}")
    return results[0]


def end_restored(root_pid: int) -> None:
    """Kill a restored process, and reap it and its keeper, which are children of this process.

    They are since the benchmark adopts orphans: else their ids would be free a second later only.
    """
    keeper = _parent(root_pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(root_pid, signal.SIGKILL)
    pid = root_pid if keeper == os.getpid() else keeper
    os.waitpid(pid, 0)


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("PPid:")]
    return int(line.split()[1])


# -- the resident agent ----------------------------------------------------------------------------


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _serve(config: AgentConfig, store: snapstore.Store) -> None:
    _tell({})
    for line in sys.stdin:
        request = json.loads(line)
        before_s = _cpu_s()
        place = Place(network=request["where"], pids=request["where"])
        wanted = RestoreRequest(name=request["name"], place=place)
        with Restoration(store, wanted, config) as restoration:
            restoration.start()
            _tell({"root_pid": restoration.root_pid})
            restoration.wait_filled()
            restoration.release()
        _tell({"cpu_s": _cpu_s() - before_s})


def _tell(answer: dict[str, float]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Serve until standard input ends."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    criu, store = map(Path, sys.argv[1:])
    os.environ["SNAPAGENT_CRIU"] = str(criu)
    with snapstore.open_store(store.absolute().as_uri()) as opened:
        _serve(AgentConfig.from_environment(), opened)


if __name__ == "__main__":
    main()
