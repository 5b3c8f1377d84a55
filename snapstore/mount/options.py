"""How a mount works: values only, checked once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from snapstore.errors import UsageError
from snapstore.options import Integrity
from snapstore.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from snapstore.format.rank import RankNumber

__all__ = ["MEMORY_BYTES_MIN", "MountOptions"]

MEMORY_BYTES_DEFAULT = 512 * MIB
MEMORY_BYTES_MIN = 256 * MIB
"""The interpreter, two threads that fetch, and some blocks."""

_READ_AHEAD_KIB_MIN = 4
_READ_AHEAD_KIB_MAX = 16 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """What to mount, where, and how; immutable.

    Attributes:
        url: The store.
        name: Which snapshot; None mounts all names.
        directory: Where.
        ranks: Only these ranks; empty for all. Only with `name`.
        memory_bytes: For decoded bytes, buffers and the interpreter; the tables of what is mounted
            come on top.
        threads: Threads that fetch; 0 chooses by the storage.
        integrity: `FAST` checks the checksum of every frame; `STRONG` every chunk against its id
            as well, for which the chunk tables of a rank are read with its first byte.
        cache: The directory of the node's cache; None for none.
        timeout_s: How long a reader waits for a store that does not answer.
        warm: Fetch everything in the background.
        allow_other: Let other users in. None: if root mounts.
        read_ahead_kib: What the kernel reads ahead; 0 leaves it alone.
    """

    url: str
    name: str | None
    directory: Path
    ranks: tuple[RankNumber, ...] = ()
    memory_bytes: int = MEMORY_BYTES_DEFAULT
    threads: int = 0
    integrity: Integrity = Integrity.FAST
    cache: Path | None = None
    timeout_s: float = 60.0
    warm: bool = False
    allow_other: bool | None = None
    read_ahead_kib: int = 2048

    def __post_init__(self) -> None:
        if self.memory_bytes < MEMORY_BYTES_MIN:
            raise UsageError(
                f"a memory budget of {self.memory_bytes} bytes is too small for a mount",
                next_step=f"give at least {MEMORY_BYTES_MIN // MIB}MiB",
            )
        if not 0 < self.timeout_s <= 86_400:
            raise UsageError(
                f"cannot wait for {self.timeout_s:g} seconds", next_step="give 1 to 86400"
            )
        if self.threads < 0:
            raise UsageError(
                f"cannot work with {self.threads} threads", next_step="give 0 to let it choose"
            )
        fits = _READ_AHEAD_KIB_MIN <= self.read_ahead_kib <= _READ_AHEAD_KIB_MAX
        if self.read_ahead_kib and not fits:
            raise UsageError(
                f"the kernel cannot read {self.read_ahead_kib} KiB ahead",
                next_step=f"give 0, or {_READ_AHEAD_KIB_MIN} to {_READ_AHEAD_KIB_MAX}",
            )
        if self.name is None and (self.ranks or self.warm):
            raise UsageError(
                "ranks and warming need one snapshot", next_step="mount NAME[:TAG] instead of --all"
            )
