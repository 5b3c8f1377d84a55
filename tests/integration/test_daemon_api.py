"""The daemon's API and its socket, asked as its clients do; without CRIU."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

import snapstore
from snapagent.api import BODY_BYTES_MAX
from snapagent.config import RUN_VARIABLE, STATE_VARIABLE
from snapagent.server.routes import ROUTES
from tests.support.agent import ROOT, Agent, agent_folder, failed
from tests.support.daemon import Daemon, program, running_daemon
from tests.support.users import NOBODY, as_nobody
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.criu,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a daemon is root's"),
]

NO_JOB = "0123456789abcdef"
CONFIG = f"""
socket_group = "{NOBODY}"
[[rules]]
uid = {NOBODY}
may = ["restore", "read", "capture"]
names = ["team/a/*"]
"""


@pytest.fixture
def daemon(plain_agent: Agent) -> Iterator[Daemon]:
    """Run one for the test alone, with nothing in its history."""
    with running(plain_agent) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Run one for all tests that do not care what it was asked before."""
    url = f"file://{tmp_path_factory.mktemp('shared')}/store"
    snapstore.init_store(url).close()
    with agent_folder() as folder, running(Agent(url, folder)) as daemon:
        yield daemon


@contextlib.contextmanager
def running(agent: Agent) -> Iterator[Daemon]:
    agent.folder.chmod(0o711)
    with running_daemon(agent, CONFIG) as daemon:
        yield daemon


def test_describes_itself(daemon: Daemon) -> None:
    """Goal: health, status, metrics and description are there, and the description has all."""
    assert daemon.get("/v1/health") == {"healthy": True, "memory_is_held": True}
    status = daemon.get("/v1/status")
    assert status["pid"] == daemon.process.pid
    assert status["store"] == daemon.agent.url
    assert not status["found_at_start"]["stale_socket"]
    described = daemon.get("/v1/openapi.json")
    operations = {
        (method.upper(), path) for path, methods in described["paths"].items() for method in methods
    }
    assert operations == {(route.method, route.path) for route in ROUTES}
    metrics = daemon.ask("GET", "/v1/metrics").body.decode()
    assert 'snapagent_jobs_ended_total{kind="restore",state="done"} 0.0' in metrics
    assert 'operation="GET /v1/health",status="200"' in metrics


@pytest.mark.parametrize(
    ("method", "target", "raw", "status", "said"),
    [
        ("GET", "/v1/nothing", None, 404, "there is nothing"),
        ("PUT", "/v1/captures", b"{}", 405, "not with PUT"),
        ("POST", "/v1/captures", b"{", 400, "the body"),
        ("POST", "/v1/captures", b"", 415, "refused"),
        ("POST", "/v1/captures", b'{"name": "a", "pid": 0}', 400, ">= 1"),
        ("POST", "/v1/captures", b'{"name": "a", "pid": 9, "x": 1}', 400, "unknown field `x`"),
        ("POST", "/v1/captures", b'{"name": "a//b", "pid": 9}', 400, "matching regex"),
        ("POST", "/v1/restores", b'{"name": "\xff"}', 400, "the body"),
        # Named, since these bytes would become a name that no environment variable has room for.
        pytest.param("POST", "/v1/restores", b"[" * 100_000, 400, "too deep", id="open"),
        pytest.param("POST", "/v1/restores", b"[" * 700 + b"]" * 700, 400, "too deep", id="deep"),
        pytest.param(
            "POST", "/v1/restores", b'"' + b"x" * BODY_BYTES_MAX + b'"', 413, "too large", id="huge"
        ),
        ("GET", f"/v1/captures/{NO_JOB}", None, 404, "no job"),
        ("DELETE", f"/v1/restores/{NO_JOB}", None, 404, "no job"),
        ("GET", f"/v1/restores/{NO_JOB}/events", None, 404, "no job"),
        ("GET", "/v1/restores/..%2f", None, 400, "not an id"),
        ("GET", "/v1/history?limit=0", None, 400, ">= 1"),
        ("GET", "/v1/history?limit=1&limit=2", None, 400, "twice"),
        ("GET", "/v1/history?unknown=1", None, 400, "unknown field"),
        ("POST", "/v1/preflight/restore", b'{"name": "none"}', 404, "none"),
        ("POST", "/v1/preflight/capture", b'{"pid": 4194304}', 404, "no process"),
    ],
)
def test_what_is_wrong_is_named(
    shared_daemon: Daemon, method: str, target: str, raw: bytes | None, status: int, said: str
) -> None:
    answer = shared_daemon.ask(method, target, raw=raw or None)
    assert answer.status == status, answer
    assert said in answer.error["message"]
    if status == 405:
        assert "POST" in answer.headers["allow"]


def test_job_that_fails(daemon: Daemon) -> None:
    """Goal: a job shows its states, its error, and in the history; its stream ends with it."""
    job = daemon.begin("/v1/restores", name="team/none:v1")
    ended = daemon.await_end(job)
    assert [step["state"] for step in ended["steps"]] == ["queued", "preflight", "failed"]
    assert ended["error"]["code"] == "RefNotFound"
    assert ended["error"]["exit_code"] == 3
    lines = daemon.ask("GET", f"{job}/events").body.splitlines()
    assert json.loads(lines[-1]) == ended
    assert daemon.get("/v1/restores")["restores"] == [ended]
    assert daemon.get("/v1/captures")["captures"] == []
    (entry,) = daemon.get("/v1/history")["entries"]
    assert entry["id"] == ended["id"]
    assert entry["result"] == "error"
    assert daemon.ask("GET", job.replace("restores", "captures")).status == 404
    assert daemon.ask("DELETE", job).document == ended
    described = daemon.get("/v1/openapi.json")
    schema = {"$ref": "#/components/schemas/RestoreJob", "components": described["components"]}
    jsonschema.validate(ended, schema)


def test_ended_jobs_are_forgotten(plain_agent: Agent) -> None:
    with running_daemon(plain_agent, "jobs_kept = 2\n") as daemon:
        jobs = [daemon.begin("/v1/restores", name=f"none:{number}") for number in range(4)]
        for job in jobs:
            while (answer := daemon.ask("GET", f"{job}?wait_s=60&seen=2")).status == 200:
                if answer.document["state"] == "failed":
                    break
        # A job tells that it has ended a moment before it is counted among those that have.
        wait_until(
            lambda: len(daemon.get("/v1/restores")["restores"]) == 2, "two jobs are forgotten"
        )


def test_another_user(daemon: Daemon) -> None:
    """Goal: the policy holds for a real other user, who sees nothing of others."""
    mine = daemon.begin("/v1/restores", name="team/b/x")
    daemon.await_end(mine)
    with as_nobody():
        assert daemon.ask("GET", mine).status == 404
        assert daemon.get("/v1/restores")["restores"] == []
        assert daemon.get("/v1/history")["entries"] == []
        answer = daemon.ask("POST", "/v1/restores", {"name": "team/b/x"})
        assert answer.status == 403
        assert answer.error["exit_code"] == 7
        assert 'names = ["team/b/x:latest"]' in answer.error["next_step"]
        body = {"name": "team/a/x", "store": "file:///elsewhere"}
        assert "file:///elsewhere" in daemon.ask("POST", "/v1/restores", body).error["next_step"]
        body = {"name": "team/a/x", "pid": daemon.process.pid}
        answer = daemon.ask("POST", "/v1/captures", body)
        assert "any_process = true" in answer.error["next_step"]
        body = {"name": "team/a/x", "into_pid": daemon.process.pid}
        assert daemon.ask("POST", "/v1/restores", body).status == 403
        theirs = daemon.begin("/v1/restores", name="team/a/x")
        assert daemon.await_end(theirs)["error"]["code"] == "RefNotFound"
        assert daemon.get("/v1/status")["jobs"]["restore"] == {"failed": 2}
        assert len(daemon.get("/v1/history")["entries"]) == 1
    assert daemon.ask("GET", theirs).status == 200


AS_NOBODY = f"""
import os, sys
import msgspec, snapagent.api, snapagent.client, snapagent.config
from snapagent.cli.main import app
# Only now, as others may not be able to read the interpreter.
os.setgroups([]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)
app(sys.argv[1:])
"""


def test_program_of_another_user(shared_daemon: Daemon) -> None:
    """Goal: the command asks for its user, and tells what rule is missing, with code 7."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # noqa: TID251 - handed on
    environment |= {
        "SNAPAGENT_SOCKET": str(shared_daemon.socket),
        "SNAPSTORE_URL": shared_daemon.agent.url,
    }
    found = {}
    for name in ("team/b/x", "team/a/x"):
        done = subprocess.run(  # noqa: S603 - this interpreter
            [sys.executable, "-c", AS_NOBODY, "restore", name, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        found[name] = (done.returncode, json.loads(done.stdout)["error"]["code"])
    assert found == {"team/b/x": (7, "PolicyRefused"), "team/a/x": (3, "RefNotFound")}


@pytest.mark.parametrize("arguments", [["restore", "none"], ["preflight", "none"], ["history"]])
def test_commands_say_the_same(shared_daemon: Daemon, arguments: list[str]) -> None:
    """Goal: with and without a shared_daemon, output and exit code are the same."""
    said = []
    for more in ([], ["--no-daemon"]):
        process = program(
            shared_daemon.agent,
            *arguments,
            "--json",
            *more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        output, errors = process.communicate(timeout=60)
        said.append((process.returncode, output, errors))
    assert said[0] == said[1]


def test_names_that_are_no_text(shared_daemon: Daemon) -> None:
    """Goal: bytes that no JSON can say are refused before the daemon is asked."""
    error = failed(shared_daemon.agent.start("restore", "tree\udcff"), code=2)
    assert error["code"] == "UsageError"


def test_commands_load_little(shared_daemon: Daemon) -> None:
    """Goal: a command that asks the daemon does not load what does the work."""
    code = (
        "import sys; from snapagent.cli.main import app\n"
        "try: app(['restore', 'none', '--quiet'])\n"
        "except SystemExit: pass\n"
        "print(*(name for name in ('numpy', 'asyncio', 'aiohttp', 'snapagent.restore', "
        "'snapagent.capture', 'snapstore.repository', 'http.client') if name in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # noqa: TID251 - handed on
    environment |= {
        "SNAPAGENT_SOCKET": str(shared_daemon.socket),
        "SNAPSTORE_URL": shared_daemon.agent.url,
    }
    done = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
    assert "none" in done.stderr


def test_one_daemon_only(shared_daemon: Daemon, tmp_path: Path) -> None:
    """Goal: a second one is refused with 6, whether it has the same state or only the socket."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    same = program(shared_daemon.agent, "run", **pipes)
    assert "another agent works with" in same.communicate(timeout=60)[1]
    assert same.returncode == 6
    config = tmp_path / "other.toml"
    config.write_text("", encoding="utf-8")
    code = "import os, sys; os.environ['SNAPAGENT_STATE_DIR'] = sys.argv[1]\n"
    code += "from snapagent.cli.main import app; app(['run'])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # noqa: TID251 - handed on
    environment |= {"SNAPAGENT_SOCKET": str(shared_daemon.socket)}
    other = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "somebody listens at" in other.stderr
    assert other.returncode == 6
    assert shared_daemon.get("/v1/health") == {"healthy": True, "memory_is_held": True}


def test_dead_socket_is_replaced(plain_agent: Agent) -> None:
    plain_agent.run_directory.mkdir()
    path = plain_agent.run_directory / "agent.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with running_daemon(plain_agent) as daemon:
        assert daemon.get("/v1/status")["found_at_start"]["stale_socket"]
        assert path.stat().st_mode & 0o777 == 0o660
    assert not path.exists()
    path.write_text("no socket", encoding="utf-8")
    process = program(plain_agent, "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert "no socket" in process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert path.read_text(encoding="utf-8") == "no socket"


def test_check(plain_agent: Agent) -> None:
    """Goal: `run --check` tells what holds, or what is wrong, and does nothing."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    good = program(plain_agent, "run", "--check", "--json", **pipes)
    assert json.loads(good.communicate(timeout=60)[0])["store"] == plain_agent.url
    assert good.returncode == 0
    assert not plain_agent.run_directory.exists()
    wrong = {
        "jobs = 3": "jobs: there is no such key",
        'socket_group = "no-such-group"': "there is no group 'no-such-group'",
        f'socket_group = "{1 << 32}"': "there is no group",
    }
    for line, said in wrong.items():
        (plain_agent.folder / "agent.toml").write_text(f"{line}\n", encoding="utf-8")
        bad = program(plain_agent, "run", "--check", **pipes)
        assert said in bad.communicate(timeout=60)[1]
        assert bad.returncode == 2


def test_unknown_variables_are_warned_of(
    plain_agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPAGENT_JOB_KEPT", "3")
    with running_daemon(plain_agent) as daemon:
        said = daemon.stop()
    assert "warning: there is no variable SNAPAGENT_JOB_KEPT, the nearest one is" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_in_order(plain_agent: Agent, number: signal.Signals) -> None:
    with running_daemon(plain_agent) as daemon:
        daemon.process.send_signal(number)
        assert daemon.process.wait(60) == 0
        assert "ending" in daemon.log.read_text(encoding="utf-8")
    assert not list(plain_agent.run_directory.iterdir())
    assert not plain_agent.processes()


COMPANY = """
from snapagent.config import load_settings
from snapagent.server.run import run_daemon

class Companion:
    def start(self): print("companion serves", flush=True)
    def close(self): print("companion is closed", flush=True)

run_daemon(load_settings(), lambda text: print(text, flush=True), [Companion()])
"""


def test_companions_serve_as_long_as_the_daemon(plain_agent: Agent) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # noqa: TID251 - handed on
    environment |= {RUN_VARIABLE: str(plain_agent.run_directory)}
    environment |= {STATE_VARIABLE: str(plain_agent.folder / "state")}
    command = [sys.executable, "-c", COMPANY]
    with subprocess.Popen(  # noqa: S603 - this interpreter
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "companion serves\n"
        assert process.stdout.readline().startswith("listening at")
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().splitlines()[-1] == "companion is closed"
    assert process.returncode == 0


def test_only_the_run_directory_is_opened_for_others(plain_agent: Agent, tmp_path: Path) -> None:
    """A socket may be put into a directory that others must not enter: that is not changed."""
    plain_agent.run_directory.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    with running_daemon(plain_agent, f'socket = "{tmp_path}/a.sock"\n'):
        assert (tmp_path / "a.sock").is_socket()
        assert tmp_path.stat().st_mode & 0o777 == 0o700
        assert plain_agent.run_directory.stat().st_mode & 0o777 == 0o711
    plain_agent.run_directory.chmod(0o777)
    process = program(plain_agent, "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert "other users may change" in process.communicate(timeout=60)[1]
    assert process.returncode == 1


def test_requests_that_are_cut_off_do_not_fill_the_log(daemon: Daemon) -> None:
    """Goal: whoever may connect cannot write into the log as often as it likes."""
    head = b"POST /v1/captures HTTP/1.1\r\nHost: agent\r\nContent-Type: application/json\r\n"
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as cut:
            cut.connect(str(daemon.socket))
            cut.sendall(head + b'Content-Length: 100\r\n\r\n{"na')
    cut_off = 'operation="POST /v1/captures",status="400"} 3.0'
    wait_until(lambda: cut_off in daemon.ask("GET", "/v1/metrics").body.decode(), "their ends")
    assert "Traceback" not in daemon.log.read_text(encoding="utf-8")
