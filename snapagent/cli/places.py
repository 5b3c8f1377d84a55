"""Options that say where processes come to live."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.errors import UsageError

if TYPE_CHECKING:
    from snapagent.supervision import Place

__all__ = ["IntoPid", "Network", "Pids", "Where", "parse_place"]


class Where(enum.Enum):
    """A namespace that is there, or one of their own."""

    HERE = "here"
    FRESH = "fresh"


Pids = Annotated[
    Where, typer.Option(help="Present pid namespace, or a fresh one: all pids are free there.")
]
Network = Annotated[
    Where, typer.Option(help="Present network, or a fresh one with the addresses of the sockets.")
]
IntoPid = Annotated[
    int | None,
    typer.Option(metavar="P", help="Namespaces and root directory of P, such as a container's."),
]


def parse_place(pids: Where, network: Where, into_pid: int | None) -> Place:
    """Put the options together.

    Raises:
        UsageError: They contradict each other.
    """
    from snapagent.supervision import Place

    if into_pid is not None and Where.FRESH in {pids, network}:
        raise UsageError(
            "--into-pid says which namespaces, so none can be fresh",
            next_step="leave out --pids and --network",
        )
    return Place(network=network.value, pids=pids.value, join_pid=into_pid)
