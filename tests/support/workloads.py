"""Fixtures of living things to capture and restore: the tree of four, Redis and PostgreSQL.

Whatever life they are in when the test ends, and however it ends, they are dead afterwards.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.network_locks import without_network_locks
from tests.support.servers import PostgresServer, RedisServer, Server, folder_of, postgres_program
from tests.support.tree import ProcessTree

S = TypeVar("S", bound=Server)


@pytest.fixture
def process_tree(work_dir: Path) -> Iterator[ProcessTree]:
    """Start a small tree of four processes."""
    home = work_dir / "tree"
    home.mkdir()
    with without_network_locks(), ProcessTree(home) as tree:
        yield tree


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """Start an empty Redis."""
    if not Path(RedisServer.PROGRAM).exists():
        pytest.skip("no Redis: run tools/install_servers.sh")
    yield from running(RedisServer)


@pytest.fixture
def postgres_server() -> Iterator[PostgresServer]:
    """Start a PostgreSQL with an empty database."""
    try:
        postgres_program("initdb")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    yield from running(PostgresServer)


def running(kind: type[S]) -> Iterator[S]:
    """Run a server in a new folder."""
    with without_network_locks(), folder_of(kind.user) as home, kind(home) as server:
        yield server
