"""The examples for engines run as they are, on stand-ins for the engines; the test is the agent."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapagent.handshake import ControlDirectory
from tests.support.engine_stand_ins import TEXT
from tests.support.processes import open_files
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WAIT_S_MAX = 30

CALLS = {
    "vllm": [
        *("check_health", "generate", "pause_generation abort", "sleep 1", "wake_up ['weights']"),
        *("wake_up None", "resume_generation", "check_health", "generate", "generate", "shutdown"),
    ],
    "sglang": [
        *("generate", "pause_generation abort", "release_memory_occupation"),
        *("resume_memory_occupation", "continue_generation", "generate", "generate", "shutdown"),
    ],
    "trtllm": ["generate", "generate", "generate", "shutdown"],
}


def free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        port: int = any_socket.getsockname()[1]
        return port


@contextlib.contextmanager
def running(framework: str, port: int, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    example = str(ROOT / "examples" / f"{framework}_worker.py")
    program = ["-m", "tests.support.programs.with_stand_ins", example, "a-model", f"--port={port}"]
    with subprocess.Popen(  # noqa: S603 - no shell
        [sys.executable, *program],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(port: int, path: str, body: str) -> tuple[int, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S_MAX)
    with contextlib.closing(connection):
        connection.request("POST", path, body)
        response = connection.getresponse()
        answer: dict[str, str] = json.loads(response.read())
        return response.status, answer


@pytest.mark.parametrize("framework", CALLS)
def test_an_example_is_captured_and_serves(framework: str, tmp_path: Path) -> None:
    """Goal: each example passes through the handshake, and calls its engine in the right order.

    Method: run it; say that it was restored once it is ready; ask it; read what was called.
    """
    port = free_port()
    with (
        running(framework, port, SNAPSHOT_CONTROL_DIR=str(tmp_path)) as process,
        ControlDirectory.open(str(tmp_path)) as agent,
    ):
        agent.wait_ready(WAIT_S_MAX)
        agent.announce_restored()
        agent.wait_serving(framework, WAIT_S_MAX)
        assert ask(port, "/generate", '{"prompt": "The capital is"}') == (200, {"text": TEXT})
        for wrong in ("no JSON", '{"prompt": ""}', "[]"):
            assert ask(port, "/generate", wrong)[0] == 400
        assert ask(port, "/state", "")[0] == 400
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=WAIT_S_MAX)[0].splitlines()
    assert said[0].startswith("listening")
    assert said[1:] == CALLS[framework]


@pytest.mark.parametrize("framework", CALLS)
def test_an_example_stands_by(framework: str, tmp_path: Path) -> None:
    """In the place of a restored process it makes no engine, and touches no file."""
    (tmp_path / "restore-complete").touch()
    environment = {"SNAPSHOT_CONTROL_DIR": str(tmp_path), "SNAPSHOT_RESTORE_STANDBY": "1"}
    with running(framework, free_port(), **environment) as process:
        epoll = "anon_inode:[eventpoll]"
        wait_until(lambda: epoll in open_files(process.pid), "it stands by")
        assert [path.name for path in tmp_path.iterdir()] == ["restore-complete"]
        process.kill()
        assert process.communicate()[0] == ""
