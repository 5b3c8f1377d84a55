"""Options that say where processes come to live, and who does the work."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.errors import UsageError

if TYPE_CHECKING:
    from snapagent.client import Daemon
    from snapagent.config import Settings

__all__ = [
    "DriverChange",
    "IntoPid",
    "Network",
    "NoDaemon",
    "Pids",
    "Where",
    "daemon",
    "require_place",
]


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

DriverChange = Annotated[
    bool,
    typer.Option(
        "--allow-driver-change",
        help="Restore GPU state although this machine has another version of the NVIDIA driver, "
        "which NVIDIA does not promise to work.",
    ),
]

NoDaemon = Annotated[
    bool,
    typer.Option("--no-daemon", help="Do it in this process, also if `snapagent run` serves here."),
]


def daemon(settings: Settings, *, unwanted: bool) -> Daemon | None:
    """Return the daemon of this node, if it runs, this user may ask it, and it is wanted."""
    from snapagent.client import find_daemon

    return None if unwanted else find_daemon(settings.socket_path)


def require_place(pids: Where, network: Where, into_pid: int | None) -> None:
    """Check that the options go together.

    Raises:
        UsageError: They contradict each other.
    """
    if into_pid is not None and Where.FRESH in {pids, network}:
        raise UsageError(
            "--into-pid says which namespaces, so none can be fresh",
            next_step="leave out --pids and --network",
        )
