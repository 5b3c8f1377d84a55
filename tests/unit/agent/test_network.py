"""Addresses of a fresh network; that they work is seen in `test_supervision`."""

import os
from pathlib import Path

import pytest

from snapagent.errors import AgentError
from snapagent.linux.network import ADDRESSES_MAX, fresh_network
from tests.support.processes import open_fds
from tests.support.supervised import needs_root

pytestmark = needs_root


def test_namespace_is_another_one() -> None:
    before = open_fds()
    mine = Path("/proc/self/ns/net").stat().st_ino
    fd = fresh_network(["192.0.2.1", "192.0.2.1/24", "2001:db8::1", "fe80::1", "127.0.0.1", "::"])
    assert os.fstat(fd).st_ino != mine
    assert Path("/proc/self/ns/net").stat().st_ino == mine
    os.close(fd)
    assert open_fds() == before


@pytest.mark.parametrize("address", ["", "nowhere", "192.0.2.1/33", "1.2.3.4%eth0", "ff02::1"])
def test_what_is_no_address_to_have(address: str) -> None:
    before = open_fds()
    with pytest.raises(AgentError, match="address"):
        fresh_network([address])
    assert open_fds() == before


def test_too_many_addresses() -> None:
    with pytest.raises(AgentError, match="at most"):
        fresh_network(["192.0.2.1"] * (ADDRESSES_MAX + 1))
