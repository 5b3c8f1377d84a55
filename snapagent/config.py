"""Where the agent finds CRIU and keeps its files: the only module that reads settings."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Self

__all__ = ["CRIU_VARIABLE", "RUN_VARIABLE", "STATE_VARIABLE", "AgentConfig"]

CRIU_VARIABLE = "SNAPAGENT_CRIU"
RUN_VARIABLE = "SNAPAGENT_RUN_DIR"
STATE_VARIABLE = "SNAPAGENT_STATE_DIR"

_CHECKOUT_CRIU = Path(__file__).parent.parent / "tools" / "criu" / "criu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of one agent; immutable.

    Attributes:
        criu: The CRIU program, 4.2 or later.
        run_directory: Sockets and logs of captures and restores under way; nothing of it outlives
            them. On a file system in memory: the paths of sockets must be short.
        state_directory: What outlives them: the record that `snapagent history` shows.
    """

    criu: Path
    run_directory: Path = Path("/run/snapagent")
    state_directory: Path = Path("/var/lib/snapagent")

    @property
    def criu_cache(self) -> Path:
        """File that keeps what CRIU said of this machine."""
        return self.state_directory / "criu.json"

    @classmethod
    def from_environment(cls) -> Self:
        """Take what the environment says, else the usual places.

        CRIU is taken from `$SNAPAGENT_CRIU`, else from the checkout that this package runs from,
        else from `$PATH`. Whether it is there is for preflight to tell.
        """
        named = os.environ.get(CRIU_VARIABLE)
        if named:
            criu = Path(named)
        elif _CHECKOUT_CRIU.exists():
            criu = _CHECKOUT_CRIU
        else:
            criu = Path(shutil.which("criu") or "criu")
        return cls(
            criu=criu,
            run_directory=Path(os.environ.get(RUN_VARIABLE) or "/run/snapagent"),
            state_directory=Path(os.environ.get(STATE_VARIABLE) or "/var/lib/snapagent"),
        )
