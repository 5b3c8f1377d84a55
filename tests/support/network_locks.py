"""Remove the network locks that CRIU leaves where nobody restores.

A dump that ends its process with established connections leaves a table of nftables which drops
what is sent between their addresses. The restore removes it, if there is one and it comes back to
the same network namespace; else a later connection that gets the same ports would find them dead.

A run of the tests has a network namespace of its own (see `conftest`), and one user of CRIU at a
time: so whatever table comes to be while a test works is that test's.
"""

import contextlib
from collections.abc import Iterator

from pyroute2.nftables.main import NFTables

PREFIX = "CRIU-"
# NFPROTO_INET: tables for both versions of IP.
FAMILY_INET = 1


def network_locks() -> set[str]:
    """Return the names of all tables of CRIU in this network namespace."""
    with NFTables(nfgen_family=FAMILY_INET) as nftables:
        names = {table.get_attr("NFTA_TABLE_NAME") for table in nftables.get_tables()}
    return {name for name in names if name.startswith(PREFIX)}


@contextlib.contextmanager
def without_network_locks() -> Iterator[None]:
    """Remove afterwards what the body has left."""
    before = network_locks()
    try:
        yield
    finally:
        with NFTables(nfgen_family=FAMILY_INET) as nftables:
            for name in network_locks() - before:
                nftables.table("del", name=name)
