"""A server with external memory beside the same one without, through a daemon and back.

    python -m tools.bench.external_server DIR [--external-mib 2048] [--own-mib 300] [--rounds 3]
        [--copies 10] [--copy-mib 256] [--out docs/benchmarks/external-server.json]

The server is `examples/http_server.py`, its memory random. Once it keeps most of it with the
daemon's broker, once all of it itself. Either is captured to its end by the daemon, and restored
some times into a fresh network and fresh process ids. It answers while it checks all of its memory;
what it answers is compared with what it said before. The store is below DIR, which should be on a
tmpfs so that no disk is measured.

Then copies of a smaller server with external memory are restored at once, 1 to `--copies` of them,
by daemons that may use 1, 2 and so on of the cores, up to all. With `--out` the tables go beside
the JSON, into a file that ends with `.md`.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import snapstore
from snapagent import api
from snapagent.client import Daemon, find_daemon
from snapagent.config import AgentConfig
from snapagent.handshake import ControlDirectory
from snapagent.linux.probe import in_network_of
from tools.bench import measure
from tools.bench.measure import BenchError, Report

EXAMPLE = measure.ROOT / "examples" / "http_server.py"
PATHS = ("/state", "/item/7")
WARM_UP = len(PATHS)
COPY_OWN_MIB = 16
WAIT_S_MAX = 300.0
POLL_S = 0.002
RUNS = ("filling", "releasing", "done")
ENDS = ("done", "failed", "cancelled", "interrupted")
PACKAGES = ("blake3", "xxhash")

Sample = dict[str, object]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does.

    Raises:
        BenchError: It does not.
    """
    deadline = time.monotonic() + WAIT_S_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"still waiting for: {what}")
        time.sleep(POLL_S)


class Node:
    """A daemon on some of the cores. A context manager, which ends it."""

    def __init__(self, work: Path, store: str, cores: Sequence[int]) -> None:
        """Start it; it takes jobs when this returns."""
        self.run_directory = work / "run"
        self.socket = self.run_directory / "agent.sock"
        self.broker = self.run_directory / "memory.sock"
        settings = {
            "SNAPAGENT_RUN_DIR": str(self.run_directory),
            "SNAPAGENT_STATE_DIR": str(work / "state"),
            "SNAPAGENT_MEMORY_SOCKET": str(self.broker),
            "SNAPAGENT_CRIU": str(AgentConfig.from_environment().criu.resolve()),
            "SNAPAGENT_JOBS_AT_ONCE": "64",
            "SNAPAGENT_CONFIG": "/dev/null",
            "SNAPSTORE_URL": store,
        }
        with (work / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "snapagent", "run"],
                env={**os.environ, **settings, "PYTHONPATH": str(measure.ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509 - no threads yet
            )
        try:
            wait_until(lambda: find_daemon(self.socket) is not None, "the daemon listens")
        except BaseException:
            self._process.kill()
            raise
        self.daemon = Daemon(self.socket)

    def await_no_memory(self) -> None:
        """Wait until all external memory was given back."""

        def is_free() -> bool:
            memory = self.daemon.ask("GET", "/v1/status", api.Status).memory
            return memory is not None and not memory.processes

        wait_until(is_free, "memory is given back")

    def __enter__(self) -> Self:
        """Return the node itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(WAIT_S_MAX)
        finally:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Stored:
    """A captured server: what it is called, where it lives, what it answered, what it took."""

    name: str
    home: Path
    control: Path
    port: int
    answers: dict[str, object]
    done: api.CaptureDone


def ask(port: int, path: str) -> dict[str, object]:
    """Ask a server in this network."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S_MAX)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer: dict[str, object] = json.loads(connection.getresponse().read())
    # It counts requests, of which there are more each time.
    answer.pop("requests", None)
    return answer


def store_server(node: Node, work: Path, name: str, own_mib: int, external_mib: int) -> Stored:
    """Start a server, ask it, and capture it to its end."""
    home, control = work / name, work / f"{name}-control"
    home.mkdir()
    control.mkdir()
    output = home / "output"
    arguments = [EXAMPLE, "--port", "0", "--warm-up", str(WARM_UP), "--mebibytes", str(own_mib)]
    arguments += ["--external-mebibytes", str(external_mib)]
    environment = {
        "PYTHONPATH": str(measure.ROOT),
        "SNAPSHOT_CONTROL_DIR": str(control),
        "SNAPAGENT_MEMORY_SOCKET": str(node.broker),
    }
    with output.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, *map(str, arguments)],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(lambda: b"port" in output.read_bytes() or process.poll() is not None, name)
        if process.poll() is not None:
            raise BenchError(f"{name} has ended: {output.read_text()}")
        port = int(output.read_text().split()[-1])
        answers: dict[str, object] = {path: ask(port, path) for path in PATHS}
        with ControlDirectory.of_process(process.pid) as agent:
            agent.wait_ready(WAIT_S_MAX)
        body = api.CaptureRequestBody(name=name, pid=process.pid, stop=True, freeze_fast=True)
        done = node.daemon.run_capture(body)
    finally:
        process.kill()
        process.wait()
    node.await_no_memory()
    return Stored(name, home, control, port, answers, done)


def restore_alone(node: Node, stored: Stored) -> Sample:
    """Restore a server elsewhere, wake it up as soon as it runs, and take its first answer.

    Raises:
        BenchError: It failed, or answers something else than before.
    """
    started = time.perf_counter()
    body = api.RestoreRequestBody(name=stored.name, pids="fresh", network="fresh")
    job = node.daemon.ask("POST", "/v1/restores", api.RestoreJob, body)
    target = f"/v1/restores/{job.id}"
    follow(node, target, RUNS)
    with ControlDirectory.open(str(stored.control)) as control:
        control.clear_for_restore()
        control.announce_restored()
        (pid,) = processes_in(stored.home)
        in_network_of(pid, lambda: ask(stored.port, PATHS[1]))
        answers_s = time.perf_counter() - started
        done = follow(node, target, ENDS).result
        whole_s = time.perf_counter() - started
        control.wait_serving("http", WAIT_S_MAX)
        checked_s = time.perf_counter() - started
    if done is None or done.root_pid != pid:
        raise BenchError(f"{stored.name} was not restored")
    require_same(stored, pid)
    end(node, [pid])
    return {
        "name": stored.name,
        "agent_setup_s": done.agent_setup_s,
        "criu_restore_s": done.criu_restore_s,
        "running_s": done.running_s,
        "external_s": done.external_s,
        "fill_s": done.fill_s,
        "total_s": done.total_s,
        "answers_s": answers_s,
        "whole_s": whole_s,
        "checked_s": checked_s,
        "lazy_bytes": sum(int(done.lazy[f"{word}_bytes"] or 0) for word in ("fault", "fill")),
        "external_bytes": done.external_bytes,
    }


def follow(node: Node, target: str, until: Sequence[str]) -> api.RestoreJob:
    """Wait until a restore is in one of these states.

    Raises:
        BenchError: It has failed.
    """
    job = node.daemon.ask("GET", target, api.RestoreJob)
    while job.state not in (*until, *ENDS):
        job = node.daemon.ask("GET", f"{target}?wait_s=60&seen={job.version}", api.RestoreJob)
    if job.error is not None:
        raise BenchError(f"{target}: {job.error.message}")
    return job


def restore_copies(node: Node, stored: Stored, count: int) -> Sample:
    """Restore some at once; each answers the same when all are there.

    Raises:
        BenchError: One failed, or answers something else than before.
    """
    body = api.RestoreRequestBody(name=stored.name, pids="fresh", network="fresh")
    started = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        jobs = [pool.submit(node.daemon.run_restore, body) for _ in range(count)]
        done = [job.result() for job in jobs]
    wall_s = time.perf_counter() - started
    with ControlDirectory.open(str(stored.control)) as control:
        control.announce_restored()
    for one in done:
        require_same(stored, one.root_pid)
    end(node, [one.root_pid for one in done])
    return {
        "copies": count,
        "wall_s": wall_s,
        "running_s": [one.running_s for one in done],
        "total_s": [one.total_s for one in done],
        "bytes": sum(one.external_bytes + one.eager_bytes for one in done)
        + sum(int(one.lazy[f"{word}_bytes"] or 0) for one in done for word in ("fault", "fill")),
    }


def require_same(stored: Stored, pid: int) -> None:
    """Compare what a server answers with what it said before it was captured.

    Raises:
        BenchError: It is something else.
    """
    answers = in_network_of(pid, lambda: {path: ask(stored.port, path) for path in PATHS})
    if answers != stored.answers:
        raise BenchError(f"{stored.name} answers {answers}, and said {stored.answers} before")


def end(node: Node, pids: Sequence[int]) -> None:
    """Kill restored servers, and wait until they and their memory are gone."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids), "they are gone")
    node.await_no_memory()


def processes_in(home: Path) -> list[int]:
    """Return the processes that work in a directory, or below it."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError):
                if (path / "cwd").readlink().is_relative_to(home):
                    found.append(int(path.name))
    return found


# -- what it all comes to -------------------------------------------------------------------------


def capture_sample(url: str, stored: Stored) -> Sample:
    """Tell what a capture took, and how large what CRIU made of it is."""
    done = stored.done
    sizes = {"images_bytes": 0, "pages_bytes": 0, "external_bytes": 0}
    with snapstore.open_store(url) as store:
        for entry in store.snapshot(stored.name).walk():
            if entry.is_file:
                path = Path(os.fsdecode(entry.path))
                is_external = path.parts[0] == "external"
                kind = "pages" if path.name.startswith("pages-") else "images"
                sizes["external_bytes" if is_external else f"{kind}_bytes"] += entry.size_bytes
    return {
        "name": stored.name,
        "agent_setup_s": done.agent_setup_s,
        "criu_dump_s": done.criu_dump_s,
        "commit_s": done.commit_s,
        "total_s": done.total_s,
        "frozen_s": done.frozen_s,
        **sizes,
    }


def bench(options: argparse.Namespace, work: Path, report: Report) -> None:
    """Measure everything into a report."""
    url = f"file://{work}/store"
    snapstore.init_store(url).close()
    cores = sorted(os.sched_getaffinity(0))
    own, external = options.own_mib, options.external_mib
    with Node(work, url, cores) as node:
        servers = [
            store_server(node, work, "external", own, external),
            store_server(node, work, "own", own + external, 0),
        ]
        report.summary["captures"] = [capture_sample(url, one) for one in servers]
        for _ in range(options.rounds):
            report.samples += [restore_alone(node, one) for one in servers]
        copy = store_server(node, work, "copy", COPY_OWN_MIB, options.copy_mib)
    at_once: list[Sample] = []
    for used in [count for count in (1, 2, 4, 8, 16, 32, 64) if count < len(cores)] + [len(cores)]:
        with Node(work, url, cores[:used]) as node:
            restore_copies(node, copy, 1)  # opens the store, and is not timed
            at_once += [
                {"cores": used} | restore_copies(node, copy, count)
                for count in sorted({1, 2, 5, options.copies})
            ]
    report.summary["at_once"] = at_once


def head(report: Report) -> str:
    """Return how it was measured."""
    machine, loads = report.machine, report.conditions["load_average_after"]
    before = machine["load_average"]
    assert isinstance(before, list)
    assert isinstance(loads, list)
    return (
        f"# A server with external memory\n\n`{report.command_line}`\n\n"
        f"{machine['cpu_model']}, {machine['cores']} cores, {report.date}; load average "
        f"{before[0]:.1f} before and {loads[0]:.1f} after. *external*: most of the memory is with "
        "the broker; *own*: all of it is the server's."
    )


def tables(report: Report) -> str:
    """Return what was measured for people."""
    captures: list[Sample] = report.summary["captures"]  # type: ignore[assignment]
    at_once: list[Sample] = report.summary["at_once"]  # type: ignore[assignment]
    parts = [
        ("Captures: MB of what is stored, and seconds", capture_table(captures)),
        ("Restores: seconds from the request on, medians", restore_table(report.samples)),
        ("At once", at_once_table(at_once)),
    ]
    return "\n\n".join(f"## {title}\n{text}" for title, text in parts)


def capture_table(samples: list[Sample]) -> str:
    """Return a row for each server."""
    sizes = ("images_bytes", "pages_bytes", "external_bytes")
    times = ("agent_setup_s", "criu_dump_s", "commit_s", "total_s", "frozen_s")
    rows = [
        [f"memory: {one['name']}"]
        + [f"{number(one[key]) / measure.MB:.2f}" for key in sizes]
        + [f"{number(one[key]):.2f}" for key in times]
        for one in samples
    ]
    header = ("server", "CRIU's images", "CRIU's pages", "external")
    return measure.markdown_table((*header, "setup", "CRIU dump", "commit", "all", "frozen"), rows)


def restore_table(samples: list[Sample]) -> str:
    """Return medians for each server."""
    keys = ("agent_setup_s", "criu_restore_s", "running_s", "external_s", "answers_s", "whole_s")
    rows = []
    for name in ("external", "own"):
        row = [f"memory: {name}"]
        for key in (*keys, "checked_s"):
            found = [number(one[key]) for one in samples if one["name"] == name and one[key]]
            row.append(f"{statistics.median(found):.2f}" if found else "-")
        rows.append(row)
    header = ("server", "setup", "CRIU", "runs", "external there", "first answer", "all there")
    return measure.markdown_table((*header, "has checked all"), rows)


def at_once_table(samples: list[Sample]) -> str:
    """Return a row for each number of cores and copies."""
    alone = {one["cores"]: number(one["wall_s"]) for one in samples if one["copies"] == 1}
    rows = []
    for one in samples:
        wall_s, running_s = number(one["wall_s"]), one["running_s"]
        assert isinstance(running_s, list)
        rows.append(
            [
                str(one["cores"]),
                str(one["copies"]),
                f"{wall_s:.2f}",
                f"{statistics.median(running_s):.2f}",
                f"{number(one['bytes']) / wall_s / measure.GB:.2f}",
                f"{alone[one['cores']] * number(one['copies']) / wall_s:.2f}",
            ]
        )
    header = ("cores", "copies", "all there s", "median runs s", "GB/s", "beside one by one")
    return measure.markdown_table(header, rows)


def number(value: object) -> float:
    """Return a number of a sample."""
    assert isinstance(value, int | float), value
    return float(value)


def main() -> int:
    """Measure, print JSON to stdout and tables to stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--external-mib", type=int, default=2048)
    parser.add_argument("--own-mib", type=int, default=300)
    parser.add_argument("--copy-mib", type=int, default=256)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = {key: getattr(options, key) for key in ("external_mib", "own_mib", "copy_mib")}
    conditions: Sample = {"rounds": options.rounds, "copies": options.copies, **sizes}
    report = Report("external-server", measure.machine(options.directory), conditions)
    words = [f"--{key.replace('_', '-')} {value}" for key, value in conditions.items()]
    report.command_line = f"python -m tools.bench.external_server DIR {' '.join(words)}"
    report.versions = {name: version(name) for name in ("snapstore", *PACKAGES)}
    with tempfile.TemporaryDirectory(prefix="server-", dir=options.directory) as folder:
        try:
            bench(options, Path(folder), report)
        finally:
            for pid in processes_in(Path(folder)):
                os.kill(pid, signal.SIGKILL)
    report.conditions["load_average_after"] = measure.machine(options.directory)["load_average"]
    text = tables(report)
    if options.out is not None:
        report.write(options.out)
        options.out.with_suffix(".md").write_text(f"{head(report)}\n\n{text}\n")
    print(json.dumps({"summary": report.summary, "samples": report.samples}, indent=1))
    print(text, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
