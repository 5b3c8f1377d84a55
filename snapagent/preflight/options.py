"""What the caller will ask of CRIU, which decides what is an obstacle and what is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, Protocol

from snapstore.units import MIB

__all__ = ["CaptureConditions", "RestoreConditions", "RestorePlace"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureConditions:
    """How a process is to be captured.

    Attributes:
        criu: The program; by default the one in the search path.
        criu_cache: A file that keeps what CRIU said of this machine.
        tcp: What becomes of TCP connections: they are kept, closed, or forbid the capture.
        stop: Whether the process ends with the capture.
        file_locks: Whether held file locks are captured.
        link_remap: Whether CRIU may link files that lost one of their names to a new one.
        shell_job: Whether a session or a group from outside is accepted.
        terminal: Whether a terminal from outside is accepted; the snapshot can then be restored
            only by CRIU itself, from a terminal.
        external_unix: Whether datagram unix sockets to the outside are accepted.
        ghost_bytes_max: How large a removed file may be that CRIU puts into the images.
        memory_bytes_max: How much memory the tree may have; by default, any amount.
        devices: Beginnings of device paths that a plugin of CRIU deals with, `/dev/nvidia`.
    """

    criu: Path | None = None
    criu_cache: Path | None = None
    tcp: Literal["keep", "close", "refuse"] = "keep"
    stop: bool = False
    file_locks: bool = True
    link_remap: bool = True
    shell_job: bool = False
    terminal: bool = False
    external_unix: bool = False
    ghost_bytes_max: int = MIB
    memory_bytes_max: int | None = None
    devices: tuple[str, ...] = ()


class RestorePlace(Protocol):
    """Where processes come to live: in the agent's namespaces, in fresh ones, in those of another.

    `snapagent.supervision.Place` is one.
    """

    @property
    def network(self) -> str:
        """`here` or `fresh`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Those that a fresh network gets besides the loopback ones."""

    @property
    def pids(self) -> str:
        """`here` or `fresh`."""

    @property
    def join_pid(self) -> int | None:
        """The process whose namespaces and root directory are used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreConditions:
    """How a snapshot is to be restored.

    Attributes:
        criu: The program; by default the one in the search path.
        criu_cache: A file that keeps what CRIU said of this machine.
        tcp: What becomes of captured TCP connections: they come back, or are closed.
        work_directory: Where the agent keeps sockets and logs meanwhile.
        work_bytes: How much room that takes.
    """

    criu: Path | None = None
    criu_cache: Path | None = None
    tcp: Literal["keep", "close"] = "keep"
    work_directory: Path = Path("/run")
    work_bytes: int = 16 * MIB
