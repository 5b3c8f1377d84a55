"""The broker's side of the holder: see `holder`."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from snapagent.errors import AgentError
from snapagent.linux.packets import FDS_MAX, BadPacketError, Channel, channel_pair
from snapagent.linux.peers import Process
from snapagent.memory.ledger import Refused, Region, Session, State
from snapagent.memory.listening import listen
from snapagent.memory.requests import OWNERS_ASKED_MAX
from snapstore.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from snapagent.linux.packets import Packet
    from snapagent.memory.placement import Rank

__all__ = ["REVIVE_S", "HeldMemory", "find_owners", "take_over"]

REVIVE_S: Final = 1.0
"""Between two attempts to replace a holder."""
_OWNERS_MAX: Final = 1024
"""Named in one packet."""
_ROOT: Final = Path(__file__).parents[2]
_SEND_S_MAX: Final = 10.0
_END_S_MAX: Final = 10.0
_TAKE_OVER_S_MAX: Final = 5.0
_POLL_S: Final = 0.02


class _AnswerError(BadPacketError):
    """The holder answered something else."""


class HeldMemory:
    """A holder process of this broker. Used under the broker's lock.

    One that has died is replaced by `revive`, and the next one gets all that it had.
    """

    def __init__(self, path: Path) -> None:
        """Start it.

        Raises:
            AgentError: It cannot be started.
        """
        self._path = path
        self._keys: dict[Session, int] = {}
        self._next_key = 1
        self._clock = SystemClock()
        self._start()

    def _start(self) -> None:
        self._next_try_s = self._clock.monotonic_s() + REVIVE_S
        self._channel, theirs = channel_pair()
        self._channel.set_timeout(_SEND_S_MAX)
        module = "snapagent.memory.holder"
        listener: socket.socket | None = None
        try:
            # One that has given everything away may still be about to end.
            socket_of(self._path).unlink(missing_ok=True)
            # Made here, so that it is there when this broker dies in the next moment.
            listener = listen(socket_of(self._path), 0o600)
            listener.setblocking(True)  # noqa: FBT003 - the only argument
            fds = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of ours
                [sys.executable, "-m", module, *map(str, fds), str(socket_of(self._path))],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )
        except (OSError, AgentError) as error:
            self._channel.close()
            raise AgentError(f"cannot start the holder of memory: {error}") from error
        finally:
            theirs.close()
            if listener is not None:
                listener.close()

    @property
    def is_alive(self) -> bool:
        """Whether there is a holder that listens to this broker."""
        if self._channel.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._channel, select.POLLRDHUP)
        return not poll.poll(0)

    def fileno(self) -> int:
        """Return what hangs up when the holder dies, to poll."""
        return self._channel.fileno()

    def revive(self) -> bool:
        """Start another holder in place of a dead one; tells whether there is one now.

        The broker has all the memory too, so that nothing is lost unless it dies before the new
        one has it. Tries once a second at most: what kills holders may do so again.
        """
        self._channel.close()
        if self._clock.monotonic_s() < self._next_try_s:
            return False
        # It may live and not listen any more; then nobody but this broker has it either.
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S_MAX)
        try:
            self._start()
            for session in list(self._keys):
                self.hold(session)
        except (AgentError, Refused):
            self._channel.close()
            return False
        return True

    def hold(self, session: Session) -> None:
        """Let it have all memory of a session. Returns when it is sure to have it.

        Raises:
            Refused: It is gone; the workload has to keep its memory.
        """
        key, self._next_key = self._next_key, self._next_key + 1
        regions = [session.regions[number] for number in sorted(session.regions)]
        owners = list(session.owners)
        batches = [regions[at : at + FDS_MAX] for at in range(0, len(regions), FDS_MAX)]
        # A tree may have more processes than fit into a packet.
        groups = [owners[at : at + _OWNERS_MAX] for at in range(0, len(owners), _OWNERS_MAX)]
        try:
            for batch, group in itertools.zip_longest(batches, groups or [[]], fillvalue=()):
                self._send(key, session, batch, group)
            self._channel.send("sure", {"key": key})
            if _next(self._channel).number("key") != key:
                raise _AnswerError(f"it does not have {session.id[:8]}")
        except (OSError, BadPacketError) as error:
            # Also one that only was too slow: its answers would come for other questions.
            self._channel.close()
            raise Refused("memory", f"nobody holds released memory now: {error}") from error
        self._keys[session] = key

    def has(self, session: Session) -> bool:
        """Tell whether it has all memory of a session."""
        return session in self._keys and self.is_alive

    def _send(
        self, key: int, session: Session, batch: Sequence[Region], owners: Sequence[Process]
    ) -> None:
        values: dict[str, object] = {
            "key": key,
            "session": session.id,
            "rank": session.rank,
            "uid": -1 if session.uid is None else session.uid,
            "pids": [owner.pid for owner in owners],
            "ticks": [owner.started_ticks for owner in owners],
            "numbers": [region.number for region in batch],
            "addresses": [region.address for region in batch],
            "lengths": [region.length for region in batch],
            "huge": [int(region.huge) for region in batch],
            "devices": [region.device for region in batch],
        }
        self._channel.send("keep", values, [region.fd for region in batch])

    def forget(self, session: Session) -> None:
        """Let it close what it has of a session, if it has anything."""
        key = self._keys.pop(session, None)
        if key is not None:
            # If it is gone, so is what it had.
            with contextlib.suppress(OSError):
                self._channel.send("forget", {"key": key})

    @property
    def pid(self) -> int:
        """Of the holder."""
        return self._process.pid

    def close(self) -> None:
        """Leave it alone: it goes at once if it holds nothing."""
        self._channel.close()
        if not self._keys:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S_MAX)
        # It outlives this broker, for the next one; nobody waits for it here.
        self._process.returncode = self._process.returncode or 0


def socket_of(path: Path) -> Path:
    """Where the holder of a broker can be asked for what it has."""
    return path.with_name(f"{path.name}.held")


def take_over(path: Path) -> list[Session]:
    """Get what the holder of an earlier broker has: released sessions, without pidfds.

    Raises:
        AgentError: It does not give it.
    """
    return _from_holder(path, takes=True)


def find_owners(path: Path, pids: Collection[int]) -> set[int]:
    """Return which of these processes have memory with the broker at a path, or with its holder.

    Only looks: whoever has the memory keeps it. Without broker and holder, nobody has any.

    Raises:
        AgentError: One of them is there and does not tell.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as end:
        end.settimeout(_SEND_S_MAX)
        try:
            end.connect(str(path))
        except PermissionError:
            return set()  # Whoever may not come has none, nor may it capture who has.
        except (FileNotFoundError, ConnectionRefusedError):
            pass  # There is none, or it was killed.
        except OSError as error:
            raise _not_told(path, error) from error
        else:
            try:
                return _ask_broker(Channel(end), sorted(pids))
            except (OSError, BadPacketError) as error:
                raise _not_told(path, error) from error
    sessions = _from_holder(path, takes=False)
    _close(sessions)
    return {owner.pid for session in sessions for owner in session.owners} & set(pids)


def _not_told(path: Path, error: Exception) -> AgentError:
    return AgentError(
        f"the memory broker at {path} does not tell who has external memory: {error}",
        next_step="see whether the agent there answers, and start it anew if not",
    )


def _ask_broker(channel: Channel, pids: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for at in range(0, len(pids), OWNERS_ASKED_MAX):
        # It may have refused already, and said so.
        with contextlib.suppress(BrokenPipeError):
            channel.send("owners", {"pids": pids[at : at + OWNERS_ASKED_MAX]})
        answer = _next(channel)
        if answer.values.get("code") == "denied":
            return set()
        if answer.kind != "owners":
            raise _AnswerError(str(answer.values.get("message", answer.kind))[:200])
        found |= set(answer.numbers("pids"))
    return found


def _from_holder(path: Path, *, takes: bool) -> list[Session]:
    """Get everything of a holder without a broker, which keeps it unless it hears `taken`."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + _TAKE_OVER_S_MAX
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as end:
            end.settimeout(_SEND_S_MAX)
            try:
                end.connect(str(socket_of(path)))
            except OSError:
                return []
            channel = Channel(end)
            try:
                found = _receive_all(channel)
                if takes:
                    channel.send("taken", {})
            except (OSError, BadPacketError) as error:
                # It may not have noticed yet that its broker is gone.
                if clock.monotonic_s() > deadline_s:
                    raise AgentError(
                        f"the memory that an earlier broker left cannot be had: {error}",
                        next_step=f"end the process that listens at {socket_of(path)}; that frees "
                        "the memory",
                    ) from error
            else:
                return found
        clock.sleep_s(_POLL_S)


def _receive_all(channel: Channel) -> list[Session]:
    found: dict[int, Session] = {}
    try:
        while (packet := _next(channel)).kind != "all":
            _add(found, packet)
        return list(found.values())
    except BaseException:
        _close(found.values())
        raise


def _close(sessions: Iterable[Session]) -> None:
    for session in sessions:
        for region in session.regions.values():
            os.close(region.fd)


def _next(channel: Channel) -> Packet:
    packet = channel.receive()
    if packet is None:
        raise BadPacketError("it hung up")
    return packet


def _add(found: dict[int, Session], packet: Packet) -> None:
    rank: Rank = "host" if packet.values.get("rank") == "host" else packet.number("rank")
    uid = packet.number("uid")
    session = found.setdefault(
        packet.number("key"),
        Session(
            packet.text("session"),
            rank,
            None if uid < 0 else uid,
            State.RELEASED,
            {},
        ),
    )
    session.owners |= dict.fromkeys(_owners(packet), -1)
    columns = [packet.numbers(key) for key in ("numbers", "addresses", "lengths", "huge")]
    rows = zip(*columns, packet.texts("devices"), packet.fds, strict=True)
    for number, address, length, huge, device, fd in rows:
        session.regions[number] = Region(number, address, length, bool(huge), fd, device)


def _owners(packet: Packet) -> Iterator[Process]:
    for pid, ticks in zip(packet.numbers("pids"), packet.numbers("ticks"), strict=True):
        yield Process(pid, ticks)
