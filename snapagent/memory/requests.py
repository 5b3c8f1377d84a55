"""What a workload may ask of the broker, and what it gets. Everything it says is hostile.

Runs under the broker's lock, on its thread, and never waits.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from snapagent.errors import AgentError, GpuOutOfMemory
from snapagent.linux.memfds import check_memfd, large_page_bytes, make_memfd
from snapagent.linux.packets import BadPacketError
from snapagent.memory.ledger import Refused, Region, Session, State, session_id
from snapagent.memory.placement import GPU_UUID, HOST
from snapagent.workload.client import PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapagent.gpu.owned import GpuMemory
    from snapagent.linux.packets import Packet
    from snapagent.linux.peers import Process
    from snapagent.memory.ledger import Ledger
    from snapagent.memory.placement import Rank

__all__ = ["OWNERS_ASKED_MAX", "Hooks", "Reply", "Requests", "Visitor"]

OWNERS_ASKED_MAX: Final = 1024
"""Of how many processes can be asked at a time."""

_TOKEN = re.compile(r"[0-9a-f]{64}\Z")
_RANK_MAX: Final = 65535
_TAKEN_MAX: Final = 64


@dataclass(slots=True, eq=False)
class Visitor:
    """A peer on a connection, as far as requests need it."""

    process: Process
    uid: int
    session: Session | None = None
    is_owner: bool = False
    """Whether it is the process that the session belongs to, not one below it."""
    waits: bool = False
    """Whether it gets an answer when the session can be mapped again."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; its descriptors stay the session's, or are closed once they are sent."""

    kind: str
    values: dict[str, object]
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Hooks:
    """What requests need of the broker.

    Attributes:
        watch: Makes a process the only owner of a session.
        close_later: Closes descriptors of memory, which may take long, elsewhere.
        drop: Ends a session.
        hold: Lets the holder have a session as well; raises `Refused` if it cannot.
        forget: Lets the holder close what it has of a session.
    """

    watch: Callable[[Session, Process], None]
    close_later: Callable[[list[int]], None]
    drop: Callable[[Session], None]
    hold: Callable[[Session], None]
    forget: Callable[[Session], None]


class Requests:
    """Answers requests out of a ledger."""

    def __init__(self, ledger: Ledger, hooks: Hooks, gpus: GpuMemory) -> None:
        self._ledger = ledger
        self._gpus = gpus
        self._hooks = hooks
        self._kinds: dict[str, Callable[[Visitor, Packet], Reply | None]] = {
            "hello": self._hello,
            "allocate": self._allocate,
            "adopt": self._adopt,
            "free": self._free,
            "release": self._release,
            "resume": self._resume,
            "take": self._take,
            "resumed": self._resumed,
            "bye": self._bye,
            "owners": self._owners,
        }

    def answer(self, visitor: Visitor, packet: Packet) -> Reply | None:
        """Do what a packet asks for; no answer yet if it has to wait.

        The packet's descriptors are consumed.

        Raises:
            Refused: It cannot be; nothing has changed.
            BadPacketError: It is no request: hang up.
        """
        try:
            return self._handler(visitor, packet)(visitor, packet)
        except BaseException:
            packet.close_fds()
            raise

    def _handler(
        self, visitor: Visitor, packet: Packet
    ) -> Callable[[Visitor, Packet], Reply | None]:
        if visitor.waits:
            raise BadPacketError("a request before the answer to the last one")
        handle = self._kinds.get(packet.kind)
        if handle is None or len(packet.fds) != (packet.kind == "adopt"):
            raise BadPacketError(f"no request: {packet.kind[:40]!r}, {len(packet.fds)} files")
        return handle

    def ready(self, session: Session) -> Reply:
        """Tell what there is to map."""
        return Reply("ready", {"regions": sorted(session.regions)})

    # -- the kinds --------------------------------------------------------------------------------

    def _hello(self, visitor: Visitor, packet: Packet) -> Reply:
        if not 1 <= packet.number("version") <= PROTOCOL_VERSION:
            raise Refused("version", f"this broker speaks version {PROTOCOL_VERSION}")
        if visitor.session is not None:
            raise BadPacketError("hello twice")
        token = packet.text("token")
        if not _TOKEN.match(token):
            raise BadPacketError("hello without a token")
        found = self._ledger.find(session_id(token), visitor.process.pid)
        if found is None:
            if packet.values.get("create") is not True:
                raise Refused(
                    "lost",
                    "the memory broker has no memory of this process: it was restored without the "
                    "agent, or the broker and the holder of its memory were both ended",
                )
            found = self._begin(visitor, token, packet)
        elif found.uid not in {None, visitor.uid} and visitor.uid != 0:
            raise Refused("denied", "the session belongs to another user")
        visitor.session = found
        visitor.is_owner = visitor.process in found.owners or found.state in {
            State.FILLING,
            State.FILLED,
        }
        if visitor.process in found.owners:
            # What waits in an earlier connection of it, whose answers were lost, is void.
            found.speaker = visitor
        released = visitor.is_owner and found.state is State.RELEASED
        return Reply("welcome", {"regions": sorted(found.regions), "released": released})

    def _begin(self, visitor: Visitor, token: str, packet: Packet) -> Session:
        session = Session(session_id(token), _rank(packet), visitor.uid, State.SHARED, {})
        self._ledger.add(session)
        try:
            self._hooks.watch(session, visitor.process)
        finally:
            if not session.owners:
                self._hooks.drop(session)
        if not session.owners:
            raise BadPacketError("it has ended")
        return session

    def _allocate(self, visitor: Visitor, packet: Packet) -> Reply:
        session = _owned(visitor, State.SHARED)
        region = _region(packet)
        self._ledger.check_room(session, region)
        if region.device != HOST:
            region.fd = self._on_gpu(region, lambda: self._gpus.make(region.device, region.length))
            self._ledger.put(session, region)
            return Reply("made", {"huge": False}, (region.fd,))
        page = large_page_bytes()
        region.huge = region.huge and page > 0 and not region.length % page
        try:
            region.fd = self._make(region)
        except OSError as error:
            raise Refused(
                "memory", f"the broker cannot make {region.length} bytes: {error.strerror}"
            ) from error
        self._ledger.put(session, region)
        return Reply("made", {"huge": region.huge}, (region.fd,))

    def _on_gpu(self, region: Region, do: Callable[[], int]) -> int:
        """Do something with memory of a GPU, whose errors the workload is told."""
        try:
            unit = self._gpus.granularity(region.device)
            if (region.length | region.address) % unit:
                raise Refused("wrong", f"{region.device} has memory in multiples of {unit} bytes")
            return do()
        except GpuOutOfMemory as error:
            raise Refused(
                "memory", f"{region.device} has no {region.length} bytes left: {error}"
            ) from error
        except AgentError as error:
            raise Refused("gpu", f"the broker cannot use {region.device}: {error}") from error

    def _make(self, region: Region) -> int:
        """Make the file; of small pages where there are not enough large ones."""
        if region.huge:
            try:
                return make_memfd(region.length, huge=True)
            except OSError as error:
                if error.errno not in {errno.ENOMEM, errno.EINVAL, errno.ENOENT, errno.ENODEV}:
                    raise
                region.huge = False
        return make_memfd(region.length, huge=False)

    def _adopt(self, visitor: Visitor, packet: Packet) -> Reply:
        """Take over memory of a broker that has died."""
        session = _owned(visitor, State.SHARED)
        region = _region(packet)
        (region.fd,) = packet.fds
        self._ledger.check_room(session, region)
        if not self._is_memory(region):
            raise Refused("wrong", "what was sent is no memory that a broker made")
        self._ledger.put(session, region)
        return Reply("adopted", {})

    def _is_memory(self, region: Region) -> bool:
        if region.device == HOST:
            return check_memfd(region.fd, region.length)
        check = self._gpus.is_memory
        return bool(self._on_gpu(region, lambda: check(region.fd, region.device, region.length)))

    def _free(self, visitor: Visitor, packet: Packet) -> Reply:
        session = _owned(visitor, State.SHARED)
        self._hooks.close_later([self._ledger.take_out(session, packet.number("region"))])
        return Reply("freed", {})

    def _release(self, visitor: Visitor, _: Packet) -> Reply:
        # Said again if the first answer was lost.
        session = _owned(visitor, State.SHARED, State.RELEASED)
        self._hooks.hold(session)
        session.state = State.RELEASED
        return Reply("released", {})

    def _resume(self, visitor: Visitor, _: Packet) -> Reply | None:
        session = _known(visitor)
        if session.state in {State.FROZEN, State.FILLING}:
            visitor.waits = True
            return None
        return self.ready(session)

    def _take(self, visitor: Visitor, packet: Packet) -> Reply:
        session = _known(visitor)
        if session.state in {State.FROZEN, State.FILLING}:
            raise Refused("state", "the memory is being read or filled")
        numbers = packet.numbers("regions")
        if not 0 < len(numbers) <= _TAKEN_MAX:
            raise Refused("wrong", f"take 1 to {_TAKEN_MAX} regions at a time")
        if not session.regions.keys() >= set(numbers):
            raise Refused("lost", "the memory broker does not have all of this memory")
        regions = [session.regions[number] for number in numbers]
        # After a restore they may be on other GPUs than the workload knows.
        devices = [region.device for region in regions]
        return Reply("taken", {"devices": devices}, tuple(region.fd for region in regions))

    def _resumed(self, visitor: Visitor, _: Packet) -> Reply:
        session = _owned(visitor, State.SHARED, State.RELEASED, State.FILLED)
        if session.state is State.SHARED:
            # Said again, the first answer was lost: but not by another one that came for it too.
            if visitor.process not in session.owners:
                raise Refused("state", f"the memory is {session.state.value}")
            return Reply("shared", {})
        self._hooks.watch(session, visitor.process)
        if not session.owners:
            self._hooks.drop(session)
            raise BadPacketError("it has ended")
        self._hooks.forget(session)
        session.uid = visitor.uid
        session.speaker = visitor
        session.state = State.SHARED
        return Reply("shared", {})

    def _bye(self, visitor: Visitor, _: Packet) -> Reply:
        session = _owned(visitor, State.SHARED, State.RELEASED, State.FILLED)
        self._hooks.drop(session)
        return Reply("gone", {})

    def _owners(self, visitor: Visitor, packet: Packet) -> Reply:
        """Tell which of some processes have memory here, for captures by other agents.

        Users other than root are told of their own.
        """
        sees_all = visitor.uid in {0, os.geteuid()}
        pids = packet.numbers("pids")
        if len(pids) > OWNERS_ASKED_MAX:
            raise Refused("wrong", f"ask of {OWNERS_ASKED_MAX} processes at a time")
        owners = {
            owner.pid
            for session in self._ledger.sessions
            for owner in session.owners
            if sees_all or session.uid == visitor.uid
        }
        return Reply("owners", {"pids": sorted(owners & set(pids))})


def _known(visitor: Visitor) -> Session:
    if visitor.session is None:
        raise BadPacketError("a request before hello")
    if visitor.session.state is State.DROPPED:
        raise Refused("lost", "the memory was given up: the restore failed, or its owner has ended")
    return visitor.session


def _owned(visitor: Visitor, *states: State) -> Session:
    session = _known(visitor)
    if not visitor.is_owner:
        raise Refused("denied", "only the process that has the memory may do that")
    speaker = session.speaker
    if speaker is not None and speaker is not visitor and speaker.process == visitor.process:
        raise Refused("denied", "the process speaks on a newer connection")
    if session.state not in states:
        raise Refused("state", f"the memory is {session.state.value}")
    return session


def _rank(packet: Packet) -> Rank:
    if packet.values.get("rank") == "host":
        return "host"
    rank = packet.number("rank")
    if isinstance(rank, bool) or not 0 <= rank <= _RANK_MAX:
        raise Refused("wrong", f"a rank is host or a number up to {_RANK_MAX}")
    return rank


def _region(packet: Packet) -> Region:
    return Region(
        number=packet.number("region"),
        address=packet.number("address"),
        length=packet.number("length"),
        huge=packet.values.get("huge") is True,
        fd=-1,
        device=_device(packet),
    )


def _device(packet: Packet) -> str:
    if "device" not in packet.values:
        return HOST
    device = packet.text("device")
    if not GPU_UUID.match(device):
        raise Refused("wrong", f"{device[:80]!r} is no UUID of a GPU")
    return device
