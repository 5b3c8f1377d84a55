"""A tree of ranks through the daemon, with a node cache that it fills and locks by itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

import snapstore
from snapagent import api
from snapagent.client import Daemon, find_daemon
from tools.gpu.living import Living, kill_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tools.gpu.whole import WholeOptions

__all__ = ["run_resident"]

NAME: Final = "gpu/resident:v1"
GIB: Final = 1 << 30
_HOST_BYTES: Final = 2 * GIB
"""Of each rank in the cache, besides its GPU memory."""
_DAEMON_S_MAX: Final = 60
_WARM_S_MAX: Final = 300
_FREED_S_MAX: Final = 60
_STOP_S_MAX: Final = 60
_POLL_S: Final = 0.05


def run_resident(
    options: WholeOptions,
    folder: Path,
    result: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Capture through a daemon, restore, let it fill the cache, and restore again.

    What is known is in `result` at any time; it has `ok` at the end.

    Args:
        options: What; `cached` says how many restores follow the first.
        folder: In memory, for store and cache; the caller's to remove.
        result: Filled.
        say: Told how far it is.

    Raises:
        SnapError: A capture or a restore failed.
        RuntimeError: The workload did, or what came back is not the same.
    """
    with tempfile.TemporaryDirectory(prefix="resident-") as name:
        home = Path(name)
        size = options.ranks * (int(options.gib * GIB) + _HOST_BYTES)
        snapstore.init_store(f"file://{folder}/store").close()
        snapstore.NodeCache.init(
            folder / "cache",
            budget_bytes=0,
            memory=folder / "decoded",
            memory_budget_bytes=size,
        ).close()
        variables = {
            "SNAPAGENT_RUN_DIR": f"{home}/run",
            "SNAPAGENT_STATE_DIR": f"{home}/state",
            "SNAPAGENT_CONFIG": f"{home}/agent.toml",
            "SNAPSTORE_URL": f"file://{folder}/store",
            "SNAPSTORE_CACHE": f"{folder}/cache",
            "SNAPAGENT_GPU_REGISTERED_BYTES": str(size),
        }
        (home / "agent.toml").touch()
        try:
            with _daemon(home, variables) as daemon:
                say("the daemon listens")
                _Resident(options, home, daemon, result, say).run()
        except BaseException:
            result["daemon_output"] = _tail(home / "daemon.txt")
            raise


@contextlib.contextmanager
def _daemon(home: Path, variables: Mapping[str, str]) -> Iterator[Daemon]:
    with (home / "daemon.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "snapagent", "run"],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + _DAEMON_S_MAX
        while (found := find_daemon(home / "run" / "agent.sock")) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon does not listen: {_tail(home / 'daemon.txt')}")
            time.sleep(_POLL_S)
        yield found
        process.terminate()
        process.wait(_STOP_S_MAX)
    finally:
        process.kill()
        process.wait()


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-3000:] if path.exists() else ""


class _Resident:
    """One tree in all of its lives."""

    def __init__(
        self,
        options: WholeOptions,
        home: Path,
        daemon: Daemon,
        result: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._daemon = daemon
        self._result = result
        self._say = say
        self._living = Living(home)
        self._broker = home / "run" / "memory.sock"

    def run(self) -> None:
        options, result = self._options, self._result
        arguments = [str(self._broker), str(options.ranks), str(options.gpus), str(options.gib)]
        arguments += [options.engine, options.backend]
        with self._living.started("tools.gpu.ranks", arguments, options.variables) as process:
            weights = self._living.ask("weights")
            self._living.ask("release")
            self._say("the ranks have released their memory")
            body = api.CaptureRequestBody(name=NAME, pid=process.pid, stop=True, freeze_fast=True)
            result["capture"] = msgspec.to_builtins(self._daemon.run_capture(body))
            process.wait()
        self._say("it is captured and stopped")
        self._await(_FREED_S_MAX, lambda status: not _has_memory(status))
        runs = result["restores"] = []
        for _ in range(1 + options.cached):
            runs.append(self._restore())
            if _digests(runs[-1].pop("weights")) != _digests(weights):
                raise RuntimeError("what came back is not what was captured")
            began = time.perf_counter()
            self._await(_WARM_S_MAX, lambda status: not _is_warming(status))
            runs[-1]["warmed_after_s"] = round(time.perf_counter() - began, 3)
            gpu = self._status().gpu
            runs[-1]["locked_bytes"] = gpu.registered_bytes if gpu is not None else 0
            self._say(f"restored: {runs[-1]['external_sources']} in {runs[-1]['seconds']} s")
        result["ok"] = True

    def _restore(self) -> dict[str, Any]:
        self._living.control.unlink(missing_ok=True)
        # Without kernels the processor would have to hash, and reads the store for that.
        integrity: Any = "fast" if self._options.code is not None else None
        body = api.RestoreRequestBody(name=NAME, pids="fresh", network="fresh", integrity=integrity)
        began = time.perf_counter()
        done = self._daemon.run_restore(body)
        try:
            found: dict[str, Any] = msgspec.to_builtins(done)
            self._living.ask("resume")
            found["seconds"] = round(time.perf_counter() - began, 3)
            found["weights"] = self._living.ask("weights")
        finally:
            kill_tree(done.root_pid)
        self._await(_FREED_S_MAX, lambda status: not _has_memory(status))
        return found

    def _status(self) -> api.Status:
        return self._daemon.ask("GET", "/v1/status", api.Status)

    def _await(self, seconds: float, reached: Callable[[api.Status], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not reached(self._status()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the daemon is not done after {seconds} s: {self._status()}")
            time.sleep(_POLL_S)


def _has_memory(status: api.Status) -> bool:
    return status.memory is not None and status.memory.size_bytes > 0


def _is_warming(status: api.Status) -> bool:
    return status.gpu is not None and status.gpu.warming > 0


def _digests(answer: str) -> list[object]:
    return [one["value"] for one in msgspec.json.decode(answer)]
