"""Shows of captures and restores of the tree of four, by the program."""

import pytest

from tests.support.agent import FRESH, Agent
from tests.support.tree import ProcessTree

pytestmark = [pytest.mark.criu, pytest.mark.slow]


@pytest.fixture(params=["agent", pytest.param("s3_agent", marks=pytest.mark.s3)])
def any_agent(request: pytest.FixtureRequest) -> Agent:
    """Return the program with each kind of store in turn."""
    found: Agent = request.getfixturevalue(request.param)
    return found


def restored(agent: Agent, tree: ProcessTree, *options: str) -> list[int]:
    """Restore the tree, let it verify itself, and return its processes as seen from here."""
    document = agent.run("restore", "tree", *options)
    found = [member["pid"] for member in tree.check()["members"]]
    assert sorted(document["pids"]) == sorted(found)
    pids = tree.processes()
    assert document["root_pid"] in pids
    return pids


def test_tree_comes_back_every_way(any_agent: Agent, process_tree: ProcessTree) -> None:
    """Goal: captures harm nothing, and restores bring everything back, five times of ten.

    Method: capture the tree, which goes on; capture it to its end and restore it here, lazily;
    capture what was restored and restore that here, eagerly; then into fresh namespaces, one life
    after the other. It verifies itself in each.
    """
    agent, tree = any_agent, process_tree
    ids = tree.processes()
    with agent.nothing_left(tree.home):
        before = tree.check()["members"]
        first = agent.run("capture", "tree", "--pid", str(tree.pid))
        assert not first["stopped"]
        assert 0 < first["frozen_s"] < first["total_s"]
        after = tree.check()["members"]
        assert all(new["ticks"] > old["ticks"] for old, new in zip(before, after, strict=True))
        agent.capture_and_stop("tree", tree.pid, ids)
        assert restored(agent, tree) == ids
        tree.ask("touch", bytes=100_000)
        second = agent.capture_and_stop("tree", tree.pid, ids)
        assert second["snapshot"] != first["snapshot"]
        assert restored(agent, tree, "--eager") == ids
        tree.end()
        for options in ((), ("--eager",), ()):
            assert not set(restored(agent, tree, *FRESH, *options)) & set(ids)
            tree.end()
