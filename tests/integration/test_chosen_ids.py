"""Clients that choose the ids of their jobs, and so can always cancel; without CRIU."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent import AGENT_S_MAX, Agent
from tests.support.daemon import Daemon, program, running_daemon
from tests.support.processes import stop_process
from tests.support.users import NOBODY, as_nobody
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.criu,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a daemon is root's"),
]

MINE = "0123456789abcdef"
CONFIG = f"""
jobs_kept = 1
socket_group = "{NOBODY}"
[[rules]]
uid = {NOBODY}
may = ["restore", "read"]
names = ["team/a/*"]
"""
WAITING = {"7", "45", "271"}
"""The numbers of poll, recvfrom and ppoll."""


@pytest.fixture
def daemon(plain_agent: Agent) -> Iterator[Daemon]:
    plain_agent.folder.chmod(0o711)
    with running_daemon(plain_agent, CONFIG) as daemon:
        yield daemon


def test_a_job_has_the_id_that_was_chosen(daemon: Daemon) -> None:
    """Goal: it is that of the job and of its entry in the history, and never used twice."""
    job = daemon.begin("/v1/restores", name="none", id=MINE)
    assert job == f"/v1/restores/{MINE}"
    daemon.await_end(job)
    answer = daemon.ask("POST", "/v1/restores", {"name": "none", "id": MINE})
    assert (answer.status, answer.error["code"]) == (409, "JobExists")
    assert daemon.get("/v1/history")["entries"][0]["id"] == MINE
    # Not even when it is forgotten: the new entry would hide the old one.
    daemon.await_end(daemon.begin("/v1/restores", name="none"))
    # Which is done a moment after the other one shows that it has ended.
    wait_until(lambda: daemon.ask("GET", job).status == 404, "it is forgotten")
    again = daemon.await_end(daemon.begin("/v1/restores", name="none", id=MINE))
    assert again["error"]["code"] == "JobExists"
    assert len(daemon.get("/v1/history")["entries"]) == 2


@pytest.mark.parametrize(
    "job_id",
    ["", "0" * 15, "0" * 17, "0123456789ABCDEF", "0" * 16 + "\n", "../../../../../x", 7, "é" * 16],
)
def test_hostile_ids(daemon: Daemon, job_id: object) -> None:
    answer = daemon.ask("POST", "/v1/restores", {"name": "none", "id": job_id})
    assert answer.status == 400, answer
    assert "$.id" in answer.error["message"]


def test_what_was_cancelled_before_it_came_is_not_begun(daemon: Daemon) -> None:
    """Goal: whoever cancels first is heard, but for nobody else."""
    with as_nobody():
        assert daemon.ask("DELETE", f"/v1/restores/{MINE}").status == 404
    assert daemon.ask("DELETE", "/v1/restores/" + "0" * 16).status == 404
    assert daemon.begin("/v1/restores", name="none", id=MINE)
    answer = daemon.ask("POST", "/v1/restores", {"name": "none", "id": "0" * 16})
    assert (answer.status, answer.error["code"]) == (409, "Interrupted")
    assert {one["id"] for one in daemon.get("/v1/restores")["restores"]} == {MINE}


@pytest.mark.parametrize("command", ["restore", "capture"])
def test_interrupted_before_the_answer(daemon: Daemon, command: str) -> None:
    """Goal: Ctrl-C is told to a daemon that has not answered yet.

    Method: stop the daemon; interrupt the command when it waits for an answer; let it go on.
    """
    arguments = ["none"] if command == "restore" else ["--pid", str(1 << 22), "none"]
    stop_process(daemon.process.pid)
    try:
        process = program(
            daemon.agent, command, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        stat = Path(f"/proc/{process.pid}/syscall")
        wait_until(lambda: stat.read_text("ascii").split()[0] in WAITING, "it waits")
        process.send_signal(signal.SIGINT)
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=AGENT_S_MAX)
    assert process.returncode == 130, errors
    told = [
        line
        for line in daemon.ask("GET", "/v1/metrics").body.decode().splitlines()
        if f'operation="DELETE /v1/{command}s/{{id}}"' in line
    ]
    assert told, errors
