"""The workloads of the agent's tests, dumped and restored with CRIU alone.

What fails here fails for reasons that have nothing to do with the store or the agent.
"""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import await_free_ids, processes_in
from tests.support.servers import (
    CRIU_OPTIONS,
    Heartbeat,
    PostgresClient,
    PostgresServer,
    RedisClient,
    RedisServer,
    Server,
)
from tests.support.tree import CRIU_OPTIONS as TREE_OPTIONS
from tests.support.tree import ProcessTree
from tests.support.waiting import wait_until
from tools.live_process import Criu

pytestmark = [pytest.mark.criu, pytest.mark.slow]

KEYS = 20_000
RESTORE_S_MAX = 60


@pytest.fixture(params=["eager", "lazy"])
def restore(request: pytest.FixtureRequest, criu: Criu) -> Callable[[Path], None]:
    """Return CRIU's restore in one of its two ways; established connections come back."""

    def eager(images: Path) -> None:
        criu.restore(images, "--tcp-established")

    def lazy(images: Path) -> None:
        with criu.lazy_pages(images) as options:
            criu.restore(images, "--tcp-established", *options)

    return lazy if request.param == "lazy" else eager


@pytest.fixture
def images(work_dir: Path) -> Path:
    """Return an empty folder for the images of a dump."""
    folder = work_dir / "images"
    folder.mkdir()
    return folder


# -- the tree of four -----------------------------------------------------------------------------


def test_tree_notices_what_is_wrong(process_tree: ProcessTree) -> None:
    """Goal: the self-check is worth something. Method: change what it verifies, from outside."""
    process_tree.check()
    with (process_tree.home / "kept-2.txt").open("r+b") as file:
        file.write(b"something else")
    with pytest.raises(AssertionError, match=r"process 2: the content of kept-2.txt has changed"):
        process_tree.check()


def test_tree_survives_a_dump(
    criu: Criu, process_tree: ProcessTree, images: Path, restore: Callable[[Path], None]
) -> None:
    """Goal: CRIU restores all that the tree holds, and the tree can go on changing.

    Method: let the tree change in every way, dump it to its end, restore it, let it verify itself
    and change again.
    """

    def change() -> None:
        process_tree.ask("touch", bytes=100_000)
        process_tree.ask("grow", bytes=1_000_000)
        process_tree.ask("fork")
        for request in ("discard", "move", "fork", "release", "zombie"):
            process_tree.ask(request)

    change()
    ids = process_tree.processes()
    before = process_tree.check()
    criu.dump(process_tree.pid, images, *TREE_OPTIONS)
    await_free_ids(ids)
    restore(images)
    after = process_tree.check()
    assert [member["pid"] for member in after["members"]] == ids
    for old, new in zip(before["members"], after["members"], strict=True):
        assert new["ticks"] > old["ticks"]
    change()
    process_tree.check()


@contextmanager
def restored_elsewhere(criu: Criu, images: Path, home: Path) -> Iterator[None]:
    """Restore into network, process and mount namespaces of their own, which end with the body."""
    script = 'ip link set lo up && "$@" && exec sleep infinity'
    command = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
    command += ["sh", "-c", script, "sh", str(criu.program), "restore", "--restore-detached"]
    command += ["--images-dir", str(images), "--log-file", f"{images}.log", "--tcp-established"]
    with subprocess.Popen(  # noqa: S603 - no shell but ours
        command,
        stdin=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            process.kill()
    wait_until(lambda: not processes_in(home), "the namespaces end", seconds=RESTORE_S_MAX)


def test_tree_answers_from_other_namespaces(
    criu: Criu, process_tree: ProcessTree, images: Path
) -> None:
    """Goal: the tree can be asked wherever it lives, and sees the ids that it had.

    Method: dump it, and restore it twice into fresh network and process namespaces.
    """
    ids = process_tree.processes()
    criu.dump(process_tree.pid, images, *TREE_OPTIONS)
    for _ in range(2):
        with restored_elsewhere(criu, images, process_tree.home):
            wait_until(process_tree.responds, "it answers", seconds=RESTORE_S_MAX)
            after = process_tree.check()
            assert [member["pid"] for member in after["members"]] == ids
            assert not set(ids) & set(process_tree.processes())


# -- servers --------------------------------------------------------------------------------------


def dump_and_restore(
    criu: Criu, server: Server, images: Path, restore: Callable[[Path], None]
) -> None:
    """End a server with a dump and bring it back with the ids it had."""
    ids = server.processes()
    criu.dump(server.pid, images, *CRIU_OPTIONS)
    await_free_ids(ids)
    restore(images)


def test_redis_only_pauses(
    criu: Criu, redis_server: RedisServer, images: Path, restore: Callable[[Path], None]
) -> None:
    """Goal: clients of Redis see a pause and nothing else.

    Method: dump and restore it while one connection counts without end and another waits; then
    read all data over the old and a new connection.
    """
    with RedisClient(redis_server.port) as idle, RedisClient(redis_server.port) as busy:
        idle.fill(KEYS)
        contents = idle.contents(KEYS)
        with Heartbeat(busy.beat) as heartbeat:
            heartbeat.await_beats(10)
            dump_and_restore(criu, redis_server, images, restore)
            heartbeat.await_beats(10)
        assert idle.contents(KEYS) == contents
        with RedisClient(redis_server.port) as new:
            assert new.contents(KEYS) == contents


def test_postgres_only_pauses(
    criu: Criu, postgres_server: PostgresServer, images: Path, restore: Callable[[Path], None]
) -> None:
    """Goal: clients of PostgreSQL see a pause and nothing else.

    Method: dump and restore it while one connection updates a row without end and another is
    inside a transaction; then read all data over the old and a new connection.
    """
    with PostgresClient(postgres_server.port) as idle, PostgresClient(postgres_server.port) as busy:
        idle.fill(KEYS)
        contents = idle.contents()
        backend = idle.ask("SELECT pg_backend_pid()")
        idle.ask("BEGIN")
        idle.ask("INSERT INTO things VALUES (0, 'not yet')")
        with Heartbeat(busy.beat) as heartbeat:
            heartbeat.await_beats(10)
            dump_and_restore(criu, postgres_server, images, restore)
            heartbeat.await_beats(10)
        assert idle.ask("SELECT payload FROM things WHERE id = 0") == ["not yet"]
        idle.ask("ROLLBACK")
        assert idle.ask("SELECT pg_backend_pid()") == backend
        assert idle.contents() == contents
        with PostgresClient(postgres_server.port) as new:
            assert new.contents() == contents
