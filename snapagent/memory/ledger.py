"""Who has which memory, and in which state: the broker's book. Used under the broker's lock.

A *session* is all external memory of one process. Its token lives in the memory of that process and
so goes wherever that is captured and restored. As a source and what was restored from it have the
same token, a peer has to be the right process as well: an owner, or below one.

States of a session, and so of its regions::

    SHARED ──release──► RELEASED ──freeze──► FROZEN ──thaw──► RELEASED ──resumed──► SHARED
                    FILLING ──filled──► FILLED ──resumed──► SHARED

It is dropped, with its regions, when it says so or when all of its owners have ended.
"""

from __future__ import annotations

import collections
import enum
import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from snapagent.linux.peers import Process, is_below
from snapagent.memory.placement import HOST
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from snapagent.memory.placement import Rank
    from snapagent.memory.requests import Visitor

__all__ = ["BrokerLimits", "Ledger", "Refused", "Region", "Session", "State", "session_id"]

_ADDRESS_MAX = 1 << 57
_NUMBER_MAX = (1 << 32) - 1
"""Of a region. Many of them at a time go to the holder and into snapshots, so they are short."""


def machine_bytes() -> int:
    """How much memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Refused(Exception):
    """What a workload asked for is refused; it is told the code and the message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class State(enum.Enum):
    """Of a session."""

    SHARED = "shared"
    """The workload maps the memory."""
    RELEASED = "released"
    """The broker alone has it."""
    FROZEN = "frozen"
    """It is being read for a capture."""
    FILLING = "filling"
    """It is being read from a store."""
    FILLED = "filled"
    """It is whole, and its workload has not come for it yet."""
    DROPPED = "dropped"
    """It is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLimits:
    """What workloads can have of a broker; whatever they do, it is no more.

    Attributes:
        connections: At a time.
        connections_per_user: Of these, of one user.
        sessions: In all.
        sessions_per_user: Of these, of one user other than those that were restored.
        regions: In all: each is a descriptor that the broker holds.
        regions_per_session: Of one process.
        session_bytes: Of one process, counting what it never touched.
        total_bytes: Of all.
        gpu_bytes: Of all on any one GPU; 0 is as much as it has. What is on GPUs does not count
            otherwise.
    """

    connections: int = 512
    connections_per_user: int = 128
    sessions: int = 256
    sessions_per_user: int = 64
    regions: int = 16384
    regions_per_session: int = 2048
    session_bytes: int = field(default_factory=machine_bytes)
    total_bytes: int = field(default_factory=machine_bytes)
    gpu_bytes: int = 0


@dataclass(slots=True)
class Region:
    """A file in memory, or memory of a GPU; the session owns its descriptor."""

    number: int
    address: int
    length: int
    huge: bool
    fd: int
    device: str = HOST
    """The UUID of the GPU, or `host`."""


@dataclass(slots=True, eq=False)
class Session:
    """All external memory of one process."""

    id: str
    rank: Rank
    uid: int | None
    """Whose it is; None if it is being restored and nobody has come for it."""
    state: State
    owners: dict[Process, int]
    """Processes that may speak for it, they and those below them, with a pidfd each."""
    regions: dict[int, Region] = field(default_factory=dict)
    speaker: Visitor | None = None
    """The last connection of an owner: what is left of earlier ones of the same process is void."""

    @property
    def size_bytes(self) -> int:
        """Of all regions."""
        return sum(region.length for region in self.regions.values())

    @property
    def host_bytes(self) -> int:
        """Of those that are no GPU's."""
        return sum(region.length for region in self.regions.values() if region.device == HOST)

    def owns(self, pid: int) -> bool:
        """Tell whether a process may speak for it."""
        return is_below(pid, set(self.owners))


class Ledger:
    """All sessions of a broker."""

    def __init__(self, limits: BrokerLimits) -> None:
        self.limits = limits
        self.sessions: set[Session] = set()
        self._bytes: collections.Counter[str] = collections.Counter()
        """By device."""
        self._regions = 0

    def find(self, token_id: str, pid: int) -> Session | None:
        """Return the session that a peer means, if it is one that it may have."""
        for session in self.sessions:
            if session.id == token_id and session.owns(pid):
                return session
        return None

    def add(self, session: Session) -> None:
        """Begin a session.

        Raises:
            Refused: There are too many.
        """
        limits = self.limits
        if len(self.sessions) >= limits.sessions:
            raise Refused("limit", f"there are {limits.sessions} sessions already")
        own = sum(one.uid == session.uid for one in self.sessions)
        if session.uid is not None and own >= limits.sessions_per_user:
            raise Refused("limit", f"user {session.uid} has {own} sessions already")
        self.sessions.add(session)

    def check_room(self, session: Session, region: Region) -> None:
        """Check that a session may have one more region.

        Raises:
            Refused: It may not.
        """
        limits = self.limits
        _check_place(session, region)
        if len(session.regions) >= limits.regions_per_session:
            raise Refused("limit", f"a process can have {limits.regions_per_session} regions")
        if self._regions >= limits.regions:
            raise Refused("limit", f"there are {limits.regions} regions already")
        self._check_bytes(session, region)

    def _check_bytes(self, session: Session, region: Region) -> None:
        limits, device, length = self.limits, region.device, region.length
        if device != HOST:
            if limits.gpu_bytes and self._bytes[device] + length > limits.gpu_bytes:
                raise Refused(
                    "limit",
                    f"all processes together can have {limits.gpu_bytes} bytes of {device}",
                )
            return
        if session.host_bytes + length > limits.session_bytes:
            raise Refused("limit", f"a process can have {limits.session_bytes} bytes")
        if self._bytes[HOST] + length > limits.total_bytes:
            raise Refused("limit", f"all processes together can have {limits.total_bytes} bytes")

    def put(self, session: Session, region: Region) -> None:
        """Enter a region that was checked; the session owns its descriptor from now on."""
        session.regions[region.number] = region
        self._bytes[region.device] += region.length
        self._regions += 1

    def take_out(self, session: Session, number: int) -> int:
        """Remove a region and return its descriptor, for the caller to close.

        Raises:
            Refused: There is none.
        """
        region = session.regions.pop(number, None)
        if region is None:
            raise Refused("wrong", f"there is no region {number}")
        self._bytes[region.device] -= region.length
        self._regions -= 1
        return region.fd

    def drop(self, session: Session) -> list[int]:
        """End a session and return its descriptors, for the caller to close. Idempotent."""
        fds = [self.take_out(session, number) for number in list(session.regions)]
        session.state = State.DROPPED
        self.sessions.discard(session)
        return fds


def _check_place(session: Session, region: Region) -> None:
    """Raise `Refused` if there can be no such region, or not beside the others."""
    length, number = region.length, region.number
    if not 0 <= number <= _NUMBER_MAX:
        raise Refused("wrong", f"a region has a number up to {_NUMBER_MAX}")
    if number in session.regions:
        raise Refused("wrong", f"there is a region {number} already")
    if length <= 0 or (length | region.address) % PAGE_BYTES or region.address <= 0:
        raise Refused("wrong", f"{length} bytes at {region.address:#x} are no pages")
    if region.address + length > _ADDRESS_MAX:
        raise Refused("wrong", f"there is no address {region.address:#x}")
    for one in session.regions.values():
        if one.address < region.address + length and region.address < one.address + one.length:
            raise Refused("wrong", f"region {one.number} is at {region.address:#x} already")


def session_id(token: str) -> str:
    """What a session is called where its token must not be: in snapshots and messages."""
    return hashlib.sha256(token.encode()).hexdigest()
