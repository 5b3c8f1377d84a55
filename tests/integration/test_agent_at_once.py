"""Shows of several restores of one snapshot at once, whose files without a name do not collide."""

from pathlib import Path

import pytest

from tests.support.agent import FRESH, Agent, killed, succeeded
from tests.support.network_locks import without_network_locks
from tests.support.s3_proxy import Proxy
from tests.support.supervised import inside_network
from tests.support.tree import ProcessTree
from tests.support.waiting import wait_until
from tools import seaweed

pytestmark = [pytest.mark.criu, pytest.mark.slow]

SLOW_S = 0.05
COUNT = 4


def ghosts_in(home: Path) -> set[str]:
    return {path.name for path in home.glob("*.ghost")}


@pytest.mark.s3
def test_trees_with_removed_files(
    s3_agent: Agent, s3: seaweed.S3Server, s3_bucket: str, work_dir: Path
) -> None:
    """Goal: restores at once of one snapshot make each file without a name under names of their
    own, and one that is killed meanwhile removes none but its own.

    Method: a restore stands still, and its files are there, since its store has ceased to answer.
    Restore the same four times, kill the first meanwhile, and let all four verify themselves, each
    in its network. A file that is named like one of another restore must stay.
    """
    home = work_dir / "tree"
    home.mkdir()
    others = home / "deleted-0.txt.cr.1.ghost"
    with without_network_locks(), ProcessTree(home, abstract=True) as tree:
        s3_agent.capture_and_stop("tree", tree.pid, tree.processes())
        with s3_agent.nothing_left(), Proxy(s3.endpoint).running() as proxy:
            proxy.delay_s = SLOW_S
            slow = s3_agent.at(s3.url(s3_bucket, endpoint=proxy.endpoint))
            doomed = slow.start("restore", "tree", *FRESH)
            wait_until(lambda: bool(ghosts_in(home)), "files of the first restore")
            proxy.plan = lambda request: "stalled" if request.is_data else None
            others.touch()
            started = [s3_agent.start("restore", "tree", *FRESH) for _ in range(COUNT)]
            killed(doomed)
            roots = [succeeded(one)["root_pid"] for one in started]
            try:
                assert len(set(roots)) == COUNT
                for root in roots:
                    inside_network(root, tree.check)
            finally:
                tree.end()
            wait_until(lambda: ghosts_in(home) == {others.name}, "only the one of others")
            assert not tree.wrong_memory()
