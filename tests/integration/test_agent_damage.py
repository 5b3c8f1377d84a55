"""Shows that processes never run on damaged data, wherever the damage is, and that this is said."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import snapstore
from tests.support.agent import FRESH, Agent, Asking, Document, agent_folder, failed
from tests.support.daemon import running_daemon
from tests.support.network_locks import without_network_locks
from tests.support.programs.tree_parts import BLOCK
from tests.support.tree import MEMBERS, ProcessTree
from tests.support.waiting import wait_until
from tools.live_process import Criu

pytestmark = [pytest.mark.criu, pytest.mark.slow]

SEED = 7
SAMPLE_BYTES = 512
BLOCKS_BEFORE = 3


@dataclass(frozen=True)
class Stored:
    """A tree that was captured to its end, in a directory, without compression."""

    tree: ProcessTree
    agent: Agent
    packs: list[Path]

    @contextmanager
    def damaged(self, content: bytes) -> Iterator[Path]:
        """Flip one bit in the middle of some content, and put it right afterwards."""
        ((path, offset),) = [
            (path, offset)
            for path in self.packs
            if (offset := path.read_bytes().find(content)) >= 0
        ]
        offset += len(content) // 2
        flip(path, offset)
        try:
            yield path
        finally:
            flip(path, offset)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def stored(criu: Criu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp("damaged")
    home = folder / "tree"
    home.mkdir()
    with without_network_locks(), agent_folder() as own:
        agent = Agent(f"file://{folder}/store", own)
        snapstore.init_store(agent.url).close()
        with ProcessTree(home, seed=SEED) as tree:
            agent.run("capture", "tree", "--pid", str(tree.pid), "--stop", "--freeze-fast")
            packs = [path for path in (folder / "store" / "packs").rglob("*") if path.is_file()]
            yield Stored(tree, agent, packs)


def shared_memory() -> bytes:
    """Return what one kind of shared memory begins with, which CRIU loads itself."""
    return random.Random(SEED + 1).randbytes(SAMPLE_BYTES)


def private_memory() -> bytes:
    """Return what is in the middle of the memory of the last process, far from all other memory."""
    generator = random.Random(SEED * MEMBERS + MEMBERS - 1)
    blocks = [generator.randbytes(BLOCK) for _ in range(BLOCKS_BEFORE + 1)]
    return blocks[-1][BLOCK // 2 :][:SAMPLE_BYTES]


def assert_tells(error: Document, pack: Path) -> None:
    assert error["code"] == "DigestMismatch"
    assert pack.name[:12] in error["message"]


def test_damage_where_criu_reads(stored: Stored) -> None:
    with stored.agent.nothing_left(stored.tree.home), stored.damaged(shared_memory()) as pack:
        assert_tells(stored.agent.fails("restore", "tree", *FRESH, code=4), pack)


@pytest.mark.parametrize("options", [(), ("--eager",)], ids=["lazy", "eager"])
def test_damage_where_memory_is_filled(stored: Stored, options: tuple[str, ...]) -> None:
    """Nobody touches it: the filling in the background finds it."""
    with stored.agent.nothing_left(stored.tree.home), stored.damaged(private_memory()) as pack:
        assert_tells(stored.agent.fails("restore", "tree", *FRESH, *options, code=4), pack)
    assert stored.tree.wrong_memory() == ""


@pytest.mark.parametrize("options", [(), ("--eager",)], ids=["lazy", "eager"])
def test_damage_where_others_read(stored: Stored, options: tuple[str, ...]) -> None:
    """Processes of the daemon read the memory, and find it as threads do."""
    agent, tree = stored.agent, stored.tree
    with (
        agent.nothing_left(tree.home),
        running_daemon(agent, "readers = 2\n"),
        stored.damaged(private_memory()) as pack,
    ):
        assert_tells(agent.fails("restore", "tree", *FRESH, *options, code=4), pack)
    assert tree.wrong_memory() == ""


def test_damage_where_memory_is_touched(stored: Stored) -> None:
    """Nothing is filled but what is touched, and the tree verifies all of its memory."""
    tree = stored.tree
    with stored.agent.nothing_left(tree.home), stored.damaged(private_memory()) as pack:
        process = stored.agent.start("restore", "tree", *FRESH, "--record", "1000")
        wait_until(lambda: process.poll() is not None or tree.answers(), "the tree listens")
        asking = Asking(tree.check)
        assert_tells(failed(process, code=4), pack)
        assert isinstance(asking.wait(), ConnectionError)
    assert tree.wrong_memory() == ""
