"""Shows that clients of real servers see a capture and a restore as a pause, and nothing else."""

import pytest

from tests.support.agent import Agent
from tests.support.servers import (
    Heartbeat,
    PostgresClient,
    PostgresServer,
    RedisClient,
    RedisServer,
    Server,
)

pytestmark = [pytest.mark.criu, pytest.mark.slow]

KEYS = 20_000


def pause_and_replace(agent: Agent, server: Server, heartbeat: Heartbeat) -> None:
    """Capture a server that goes on; then to its end, and restore it with the ids it had."""
    heartbeat.await_beats(10)
    first = agent.run("capture", "server", "--pid", str(server.pid))
    assert heartbeat.longest_pause_s < first["total_s"]
    heartbeat.await_beats(10)
    agent.capture_and_stop("server", server.pid, server.processes())
    agent.run("restore", "server")
    heartbeat.await_beats(10)


def test_redis_only_pauses(agent: Agent, redis_server: RedisServer) -> None:
    """Method: capture and restore it while one connection counts without end and another waits;
    then read all data over the old and a new connection.
    """
    with (
        agent.nothing_left(),
        RedisClient(redis_server.port) as idle,
        RedisClient(redis_server.port) as busy,
    ):
        idle.fill(KEYS)
        contents = idle.contents(KEYS)
        with Heartbeat(busy.beat) as heartbeat:
            pause_and_replace(agent, redis_server, heartbeat)
        assert idle.contents(KEYS) == contents
        with RedisClient(redis_server.port) as new:
            assert new.contents(KEYS) == contents


def test_postgres_only_pauses(agent: Agent, postgres_server: PostgresServer) -> None:
    """Method: capture and restore it while one connection updates a row without end and another is
    inside a transaction; then read all data over the old and a new connection.
    """
    port = postgres_server.port
    with agent.nothing_left(), PostgresClient(port) as idle, PostgresClient(port) as busy:
        idle.fill(KEYS)
        contents = idle.contents()
        backend = idle.ask("SELECT pg_backend_pid()")
        idle.ask("BEGIN")
        idle.ask("INSERT INTO things VALUES (0, 'not yet')")
        with Heartbeat(busy.beat) as heartbeat:
            pause_and_replace(agent, postgres_server, heartbeat)
        assert idle.ask("SELECT payload FROM things WHERE id = 0") == ["not yet"]
        idle.ask("ROLLBACK")
        assert idle.ask("SELECT pg_backend_pid()") == backend
        assert idle.contents() == contents
        with PostgresClient(port) as new:
            assert new.contents() == contents
