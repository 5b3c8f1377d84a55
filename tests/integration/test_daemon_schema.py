"""The daemon's API, asked everything that its own description allows, and more.

Method: schemathesis makes requests from the description, always the same ones, and compares the
answers with it. It asks as a user who owns nothing: ids of processes are guessed, and nobody's
process is to be captured.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

import snapstore
from tests.support.agent import Agent, agent_folder
from tests.support.daemon import Daemon, running_daemon
from tests.support.users import NOBODY

pytestmark = [
    pytest.mark.criu,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a daemon is root's"),
]

EXAMPLES = 12
SEED = 4711
TIMEOUT_S = 30
CONFIG = f"""
socket_group = "{NOBODY}"
jobs_queued = 4096
[[rules]]
uid = {NOBODY}
may = ["restore", "read", "capture"]
names = ["*"]
"""
RELAY = Path(__file__).parents[1] / "support" / "programs" / "relay.py"


@contextlib.contextmanager
def relayed(path: Path) -> Iterator[str]:
    """Let TCP clients reach a socket with a path, as nobody."""
    with subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, str(RELAY), str(path), str(NOBODY)], stdout=subprocess.PIPE, text=True
    ) as relay:
        assert relay.stdout is not None
        yield f"http://127.0.0.1:{int(relay.stdout.readline())}"
        relay.kill()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    url = f"file://{tmp_path_factory.mktemp('schema')}/store"
    snapstore.init_store(url).close()
    with agent_folder() as folder:
        folder.chmod(0o711)
        with running_daemon(Agent(url, folder), CONFIG) as daemon:
            yield daemon


@pytest.fixture(scope="module")
def schema(daemon: Daemon) -> Iterator[Any]:
    description = daemon.get("/v1/openapi.json")
    with relayed(daemon.socket) as url:
        found = schemathesis.openapi.from_dict(description)
        found.config.update(base_url=url)
        yield found


def test_answers_are_as_described(daemon: Daemon, schema: Any) -> None:
    """Goal: no answer differs from the description, none tells of a failure of the agent."""
    asked = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        strategy = operation.as_strategy() | operation.as_strategy(
            generation_mode=schemathesis.GenerationMode.NEGATIVE
        )

        @seed(SEED)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def ask(case: Any) -> None:
            case.call_and_validate(timeout=TIMEOUT_S)

        ask()
        asked.add(operation.definition.raw["operationId"])
    assert len(asked) == 17
    daemon.stop()
