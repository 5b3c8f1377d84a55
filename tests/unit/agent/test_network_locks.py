"""Removing CRIU's tables of nftables: in one network, of one run, and no others."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2.nftables.main import NFTables

from snapagent.errors import AgentError
from snapagent.linux.network import fresh_network, in_network
from snapagent.linux.network_locks import (
    find_network_lock,
    network_lock_names,
    remove_network_lock,
)
from tests.support.network_locks import FAMILY_INET, network_locks
from tests.support.processes import open_fds
from tests.support.supervised import needs_root

RUN = "d717636f-c007-414a-af55-3b59dc9f04eb"
OTHER = "d717636f-c007-414a-bf55-3b59dc9f04eb"
CUT = "CRIU-d717636f-c007-414a-af"


@pytest.fixture
def network() -> Iterator[int]:
    """Return an fd of a network namespace of the test's own."""
    fd = fresh_network()
    yield fd
    os.close(fd)


def add_tables(*names: str) -> None:
    with NFTables(nfgen_family=FAMILY_INET) as nftables:
        for name in names:
            nftables.table("add", name=name)
            nftables.chain("add", table=name, name="output", type="filter", hook="output", policy=1)


@needs_root
@pytest.mark.parametrize("ours", [CUT, f"CRIU-{RUN}"])
def test_only_the_table_of_that_run_is_removed(network: int, ours: str) -> None:
    """CRIU cuts the name off, and one that does not would be understood as well."""
    others = {f"CRIU-{OTHER}", network_lock_names(OTHER)[0], "CRIU-17", "CRIU-"}
    in_network(network, lambda: add_tables(ours, *others))
    before = open_fds()
    assert find_network_lock(network, RUN) == ours
    remove_network_lock(network, RUN)
    assert in_network(network, network_locks) == others
    assert find_network_lock(network, RUN) is None
    remove_network_lock(network, RUN)
    assert open_fds() == before


@needs_root
def test_other_networks_are_not_touched(network: int) -> None:
    other = fresh_network()
    try:
        in_network(other, lambda: add_tables(CUT))
        assert find_network_lock(network, RUN) is None
        remove_network_lock(network, RUN)
        assert in_network(other, network_locks) == {CUT}
    finally:
        os.close(other)


@needs_root
@pytest.mark.parametrize("run_id", ["", "17", "*", RUN.upper(), RUN[:-1], RUN + "0", f"{RUN}\n"])
def test_what_is_no_run(network: int, run_id: str) -> None:
    in_network(network, lambda: add_tables("CRIU-", "CRIU-17", f"CRIU-{RUN}"))
    assert find_network_lock(network, run_id) is None
    remove_network_lock(network, run_id)
    assert in_network(network, network_locks) == {"CRIU-", "CRIU-17", f"CRIU-{RUN}"}


def test_what_is_no_network() -> None:
    with Path(os.devnull).open() as file, pytest.raises(AgentError, match=CUT) as caught:
        find_network_lock(file.fileno(), RUN)
    assert "nft list tables" in str(caught.value.next_step)
