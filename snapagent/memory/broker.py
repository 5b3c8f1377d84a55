"""The memory broker: owns memory of workloads, so that it outlives them, and lends it to them.

Invariants:

1. Memory of a session goes to its owner and processes below it, and to nobody else.
2. While memory is frozen for a capture or being filled, the broker gives it to nobody.
3. Whatever a workload says or leaves unsaid: others are served, and it has no more than the limits.
4. Memory of a process that has ended is freed.
5. If the broker dies, no memory is lost: what is mapped stays mapped, and what is released is held
   by another process for the next broker (`holder`). If that dies, the broker starts another one.

One thread serves all connections, without ever waiting for one of them. A broker is embedded in an
agent; there may be several in a process, each with a socket of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import select
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from snapagent.errors import AgentError, PreflightFailed
from snapagent.gpu.owned import GpuMemory
from snapagent.linux import peers, processes
from snapagent.linux.memfds import has_open, make_memfd
from snapagent.linux.packets import BadPacketError, Channel
from snapagent.memory.buffers import FillBuffers
from snapagent.memory.held import REVIVE_S, HeldMemory, take_over
from snapagent.memory.ledger import BrokerLimits, Ledger, Refused, Region, Session, State
from snapagent.memory.lent import Admissions, AdmittedSession, FrozenSession, LentRegion
from snapagent.memory.listening import listen
from snapagent.memory.placement import HOST
from snapagent.memory.requests import Hooks, Reply, Requests, Visitor
from snapagent.precedence import Precedence

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from snapagent.gpu.engine import GpuSettings
    from snapagent.linux.peers import Process
    from snapagent.memory.placement import Rank, SessionPlace

__all__ = ["BrokerLimits", "MemoryBroker", "SessionStatus"]

_HELD_STATES = frozenset({State.RELEASED, State.FROZEN, State.FILLED})
_FILL_THREADS_MAX = 16
"""More are not faster: memory is not."""
_EVENTS = select.EPOLLIN | select.EPOLLRDHUP


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """What the broker knows of one process's memory."""

    session: str
    pids: tuple[int, ...]
    uid: int | None
    rank: Rank
    state: str
    regions: int
    size_bytes: int


class MemoryBroker:
    """A broker at a Unix socket. A context manager; all methods are thread-safe.

    ::

        with MemoryBroker(Path("/run/snapagent/memory.sock")) as broker:
            capture(store, CaptureRequest(pid=pid, name=name, broker=broker), config)
    """

    def __init__(
        self,
        path: Path,
        *,
        limits: BrokerLimits | None = None,
        mode: int = 0o600,
        may_use: Callable[[int, frozenset[int]], bool] | None = None,
        fill_threads: int = 0,
        gpu: GpuSettings | None = None,
    ) -> None:
        """Prepare; nothing is begun before `start`.

        Args:
            path: Of its socket.
            limits: What workloads may have.
            mode: Permissions of the socket.
            may_use: Tells whether a user, with these groups, may have memory; by default all who
                may write to the socket. Who has some already, as after a restore, is not asked.
            fill_threads: How many fill memory at a time, in all restores together, each with
                48 MiB; 0 means one per usable core, 16 at most.
            gpu: How memory of GPUs is filled and stored.
        """
        self.path = path
        self._mode = mode
        self._may_use = may_use or (lambda _uid, _gids: True)
        self._lock = threading.RLock()
        self._ledger = Ledger(limits or BrokerLimits())
        hooks = Hooks(self._watch, self._close_later, self._drop, self._hold, self._forget_held)
        self.gpus = GpuMemory(gpu)
        """What makes memory of GPUs."""
        self.precedence = Precedence()
        """Of memory that processes need before they run, in all restores together."""
        self._requests = Requests(self._ledger, hooks, self.gpus)
        self._connections: dict[int, tuple[Channel, Visitor]] = {}
        self._pidfds: dict[int, Process] = {}
        self._to_close: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._buffers = FillBuffers(
            fill_threads or min(_FILL_THREADS_MAX, len(os.sched_getaffinity(0)))
        )
        self._stack = contextlib.ExitStack()
        self._is_closing = False

    def start(self) -> None:
        """Listen, and serve from now on.

        Raises:
            AgentError: The socket cannot be made, or another broker has it.
        """
        with contextlib.ExitStack() as stack:
            self._listener = stack.enter_context(listen(self.path, self._mode))
            stack.callback(self._unlink, self.path.stat().st_ino)
            self._epoll = stack.enter_context(select.epoll())
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.callback(os.close, self._wake)
            self._spare = os.dup(self._wake)
            stack.callback(self._close_spare)
            self._epoll.register(self._listener, select.EPOLLIN)
            self._epoll.register(self._wake, select.EPOLLIN)
            found = take_over(self.path)
            self._held = HeldMemory(self.path)
            stack.callback(self._held.close)
            self._epoll.register(self._held, select.EPOLLRDHUP)
            for session in found:
                self._enter(session)
            self._freer = threading.Thread(target=self._free, name="snapagent-memory-free")
            self._thread = threading.Thread(target=self._serve, name="snapagent-memory")
            self._freer.start()
            self._thread.start()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Stop serving. What workloads have mapped they keep, what is released waits. Idempotent.

        The next broker at the same path gets what is released from the holder.
        """
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            with contextlib.suppress(AttributeError):
                self._keep_holder()
            for session in list(self._ledger.sessions):
                self._drop(session, waits=session.state in _HELD_STATES)
            with contextlib.suppress(OSError, AttributeError):
                os.eventfd_write(self._wake, 1)
        with contextlib.suppress(AttributeError):
            self._thread.join()
            self._to_close.put(None)
            self._freer.join()
        with self._lock:
            for fd in list(self._connections):
                self._hang_up(fd)
        self._stack.close()
        self.gpus.engines.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def holder_pid(self) -> int:
        """The process that holds released memory as well; it outlives this one if it has to."""
        return self._held.pid

    @property
    def limits(self) -> BrokerLimits:
        """What workloads may have."""
        return self._ledger.limits

    @property
    def has_holder(self) -> bool:
        """Whether released memory would outlive this process now."""
        with self._lock:
            return self._held.is_alive

    def status(self) -> list[SessionStatus]:
        """Tell what memory there is, and whose."""
        with self._lock:
            return [
                SessionStatus(
                    session=session.id,
                    pids=tuple(sorted(owner.pid for owner in session.owners)),
                    uid=session.uid,
                    rank=session.rank,
                    state=session.state.value,
                    regions=len(session.regions),
                    size_bytes=session.size_bytes,
                )
                for session in self._ledger.sessions
            ]

    def states(self, pids: Collection[int]) -> dict[int, str]:
        """Tell in which state the memory of processes is; of those that have some."""
        wanted = frozenset(pids)
        with self._lock:
            return {
                owner.pid: session.state.value
                for session in self._ledger.sessions
                for owner in session.owners
                if owner.pid in wanted
            }

    # -- captures ---------------------------------------------------------------------------------

    def freeze(self, pid: int) -> list[FrozenSession]:
        """Keep the memory of a tree as it is until `FrozenSession.thaw`, to be read.

        Args:
            pid: Root of the tree.

        Raises:
            PreflightFailed: A process of it still has memory mapped, or is being captured.
        """
        pids = [pid, *processes.descendants(pid)]
        for one in pids:
            # The broker and its holder have it open, of course.
            if one not in {os.getpid(), self._held.pid} and has_open(one):
                raise PreflightFailed(
                    f"process {one} has external memory mapped, which CRIU would copy",
                    next_step="let the workload call release, also in children of fork, and wait "
                    "for it",
                )
        with self._lock:
            tree = {process for one in pids if (process := _process(one)) is not None}
            found = [one for one in self._ledger.sessions if tree & one.owners.keys()]
            for session in found:
                if session.state is not State.RELEASED:
                    raise PreflightFailed(
                        f"the external memory of process {min(session.owners).pid} is "
                        f"{session.state.value}",
                        next_step="let the workload call release, and wait for captures to end",
                    )
            # Always in the same order, so that the same memory gets the same names.
            found.sort(key=lambda session: (str(session.rank), min(session.owners)))
            frozen: list[FrozenSession] = []
            try:
                frozen.extend(map(self._frozen, found))
            except OSError as error:
                for each in frozen:
                    each.thaw()
                raise AgentError(
                    f"the external memory of process {pid} cannot be read: {error.strerror}",
                    next_step="raise the agent's limit on open files",
                ) from error
            return frozen

    def _frozen(self, session: Session) -> FrozenSession:
        lent = _lent([session.regions[number] for number in sorted(session.regions)])
        session.state = State.FROZEN
        return FrozenSession(
            session.id,
            session.rank,
            lent,
            thaw=functools.partial(self._thaw, session),
            connected=functools.partial(self._connected, session),
            gpus=self.gpus,
        )

    def _connected(self, session: Session) -> list[int]:
        with self._lock:
            return sorted(
                visitor.process.pid
                for _, visitor in self._connections.values()
                if visitor.session is session or visitor.process in session.owners
            )

    def _thaw(self, session: Session) -> None:
        with self._lock:
            if session.state is State.FROZEN:
                session.state = State.RELEASED
                self._wake_waiting(session)

    # -- restores ---------------------------------------------------------------------------------

    def admit(
        self,
        places: Sequence[tuple[Rank, SessionPlace]],
        owner: int,
        devices: Mapping[str, str] | None = None,
    ) -> Admissions:
        """Make the memory of sessions that are to be restored.

        That of the host is all zeros, that of GPUs is undefined.

        Args:
            places: What to make, with the rank of each.
            owner: The process below which those that have it come to life.
            devices: Which GPUs take the place of those of the snapshot, by UUID.

        Raises:
            AgentError: There is no room for it; nothing is left.
        """
        made: list[AdmittedSession] = []
        try:
            for rank, place in places:
                made.append(self._admit(rank, place, owner, devices or {}))
        except BaseException:
            Admissions(made, self._buffers, self.gpus).abort()
            raise
        return Admissions(made, self._buffers, self.gpus)

    def _admit(
        self, rank: Rank, place: SessionPlace, owner: int, devices: Mapping[str, str]
    ) -> AdmittedSession:
        with self._lock:
            session = Session(place.session, rank, None, State.FILLING, {})
            try:
                self._ledger.add(session)
                self._watch_all(session, [owner])
                _require_owner(session, owner)
                for one in place.regions:
                    device = devices.get(one.device, one.device)
                    region = Region(one.region, one.address, one.length, one.huge, -1, device)
                    self._ledger.check_room(session, region)
                    region.fd = self._make(region)
                    self._ledger.put(session, region)
                lent = _lent([session.regions[one.region] for one in place.regions])
            except BaseException as error:
                self._drop(session)
                if isinstance(error, Refused | OSError | AgentError):
                    raise AgentError(
                        f"the external memory of the snapshot cannot be made: {error}",
                        next_step="end other workloads, or raise the broker's limits",
                    ) from error
                raise
        return AdmittedSession(
            place,
            lent,
            filled=lambda: self._filled(session),
            hand_over=lambda pids: self._hand_over(session, pids),
            abort=lambda: self._abort(session),
            was_resumed=lambda: session.state is State.SHARED,
        )

    def _make(self, region: Region) -> int:
        if region.device != HOST:
            return self.gpus.make(region.device, region.length)
        if region.huge:
            try:
                return make_memfd(region.length, huge=True)
            except OSError:
                region.huge = False
        return make_memfd(region.length, huge=False)

    def _filled(self, session: Session) -> None:
        with self._lock:
            if session.state is State.FILLING:
                session.state = State.FILLED
                self._wake_waiting(session)

    def _hand_over(self, session: Session, pids: Collection[int]) -> None:
        with self._lock:
            if session.state in {State.FILLING, State.FILLED}:
                try:
                    self._watch_all(session, pids)
                except OSError as error:
                    raise AgentError(
                        f"the restored processes cannot be watched: {error.strerror}",
                        next_step="raise the agent's limit on open files",
                    ) from error
                if not session.owners:
                    self._drop(session)
                    return
                # Without the holder it would only not survive this broker.
                with contextlib.suppress(Refused):
                    self._held.hold(session)

    def _abort(self, session: Session) -> None:
        with self._lock:
            self._drop(session)

    # -- owners -----------------------------------------------------------------------------------

    def _watch(self, session: Session, process: Process) -> None:
        """Make a process the only owner; none is left if it has ended."""
        self._watch_all(session, [process.pid], only={process})

    def _watch_all(
        self, session: Session, pids: Iterable[int], only: Collection[Process] | None = None
    ) -> None:
        """Make these the owners, as far as they live.

        Raises:
            OSError: There are too many open files; nothing has changed.
        """
        found: dict[Process, int] = {}
        with contextlib.ExitStack() as stack:
            for pid in pids:
                opened = peers.open_process(pid)
                if opened is None:
                    continue
                process, pidfd = opened
                if process in found or (only is not None and process not in only):
                    os.close(pidfd)
                    continue
                found[process] = pidfd
                self._pidfds[pidfd] = process
                stack.callback(self._forget, pidfd)
                self._epoll.register(pidfd, select.EPOLLIN)
            stack.pop_all()
        # Only now: had it failed, those before would still be watched.
        old, session.owners = session.owners, found
        for pidfd in old.values():
            self._forget(pidfd)

    def _forget(self, pidfd: int) -> None:
        if self._pidfds.pop(pidfd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(pidfd)
            os.close(pidfd)

    def _process_ended(self, pidfd: int) -> None:
        if processes.wait_for_ends([pidfd], 0):
            return  # The number belonged to another one when this was told.
        process = self._pidfds[pidfd]
        for session in list(self._ledger.sessions):
            if session.owners.get(process) == pidfd:
                del session.owners[process]
                if not session.owners:
                    self._drop(session)
        self._forget(pidfd)

    def _drop(self, session: Session, *, waits: bool = False) -> None:
        if not waits:
            self._forget_held(session)
        for pidfd in session.owners.values():
            self._forget(pidfd)
        session.owners.clear()
        self._close_later(self._ledger.drop(session))
        self._wake_waiting(session)

    def _hold(self, session: Session) -> None:
        self._keep_holder()
        if not self._held.has(session):
            self._held.hold(session)

    def _keep_holder(self) -> None:
        """Replace the holder if it has died, which is noticed at once."""
        if not self._held.is_alive and self._held.revive():
            self._epoll.register(self._held, select.EPOLLRDHUP)

    def _forget_held(self, session: Session) -> None:
        self._held.forget(session)

    def _enter(self, session: Session) -> None:
        """Take a session on that an earlier broker had; what lives of its owners is watched."""
        owners = set(session.owners)
        session.owners.clear()
        self._ledger.sessions.add(session)
        regions = list(session.regions.values())
        session.regions.clear()
        for region in regions:
            self._ledger.put(session, region)
        self._watch_all(session, [owner.pid for owner in owners], only=owners)
        if not session.owners:
            self._drop(session)
            return
        self._held.hold(session)

    def _close_later(self, fds: list[int]) -> None:
        if fds:
            self._to_close.put(fds)

    def _free(self) -> None:
        """Give memory back to the kernel, a second for every few gigabytes; on its own thread."""
        while (fds := self._to_close.get()) is not None:
            for fd in fds:
                os.close(fd)

    # -- connections ------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            # Without a holder, one is tried for again and again.
            found = self._epoll.poll(None if self.has_holder else REVIVE_S)
            with self._lock:
                if self._is_closing:
                    return
                self._keep_holder()
            for fd, _ in found:
                with self._lock:
                    self._handle(fd)

    def _handle(self, fd: int) -> None:
        if self._is_closing:
            return
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._pidfds:
            self._process_ended(fd)
        elif fd in self._connections:
            self._receive(fd)

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError as error:
            if error.errno in peers.NO_DESCRIPTORS:
                self._turn_away()
            return  # Else it has gone again.
        peer = peers.peer_of(connected)
        if peer is None:
            connected.close()
            return
        state = processes.read_state(peer.pid)
        os.close(peer.pidfd)
        if state is None or not self._has_room(peer.uid):
            connected.close()
            return
        connected.setblocking(False)  # noqa: FBT003 - the only argument
        if not self._may_use(peer.uid, peer.gids) and not self._owns_any(peer.pid):
            _refuse(connected, peer.uid)
            return
        visitor = Visitor(peers.Process(peer.pid, state.started_ticks), peer.uid)
        self._connections[connected.fileno()] = (Channel(connected), visitor)
        self._epoll.register(connected.fileno(), _EVENTS)

    def _turn_away(self) -> None:
        """Without a descriptor for who waits, hang up: else `poll` would tell of it for ever."""
        self._close_spare()
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        # What was just closed is free, unless another thread was faster.
        with contextlib.suppress(OSError):
            self._spare = os.dup(self._wake)

    def _close_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _has_room(self, uid: int) -> bool:
        limits = self._ledger.limits
        own = sum(visitor.uid == uid for _, visitor in self._connections.values())
        return len(self._connections) < limits.connections and own < limits.connections_per_user

    def _owns_any(self, pid: int) -> bool:
        owners = {owner for session in self._ledger.sessions for owner in session.owners}
        return peers.is_below(pid, owners)

    def _receive(self, fd: int) -> None:
        channel, visitor = self._connections[fd]
        try:
            packet = channel.receive()
            reply = self._requests.answer(visitor, packet) if packet is not None else None
        except Refused as refused:
            packet, reply = None, Reply("refused", {"code": refused.code, "message": str(refused)})
        except BlockingIOError:
            return
        except (BadPacketError, OSError):
            self._hang_up(fd)
            return
        if reply is not None:
            self._send(fd, reply)
        elif packet is None:
            self._hang_up(fd)

    def _send(self, fd: int, reply: Reply) -> None:
        channel, _ = self._connections[fd]
        try:
            channel.send(reply.kind, reply.values, reply.fds)
        except (BadPacketError, OSError):
            # It does not take its answers: nobody waits for that.
            self._hang_up(fd)

    def _wake_waiting(self, session: Session) -> None:
        """Answer those who wait for a session whose state has changed."""
        for fd, (_, visitor) in list(self._connections.items()):
            if visitor.session is session and visitor.waits:
                visitor.waits = False
                if session.state is State.DROPPED:
                    message = "the memory was given up: the restore failed, or its owner has ended"
                    self._send(fd, Reply("refused", {"code": "lost", "message": message}))
                else:
                    self._send(fd, self._requests.ready(session))

    def _hang_up(self, fd: int) -> None:
        channel, _ = self._connections.pop(fd)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        channel.close()

    def _unlink(self, inode: int) -> None:
        # Another broker may have come in its place.
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == inode:
                self.path.unlink()


def _refuse(connected: socket.socket, uid: int) -> None:
    """Say why, and hang up."""
    message = (
        f"uid {uid} may have no external memory: give it a rule with `capture`, or set "
        'broker_users = "all", in the configuration of the agent'
    )
    channel = Channel(connected)
    with contextlib.suppress(OSError):
        channel.send("refused", {"code": "denied", "message": message})
    channel.close()


def _process(pid: int) -> Process | None:
    state = processes.read_state(pid)
    return peers.Process(pid, state.started_ticks) if state is not None else None


def _require_owner(session: Session, pid: int) -> None:
    if not session.owners:
        raise Refused("lost", f"process {pid} has ended")


def _lent(regions: Sequence[Region]) -> tuple[LentRegion, ...]:
    """Duplicate descriptors, so that whoever uses them does not depend on the session.

    Raises:
        OSError: There are too many open files.
    """
    lent: list[LentRegion] = []
    with contextlib.ExitStack() as stack:
        for one in regions:
            fd = os.dup(one.fd)
            stack.callback(os.close, fd)
            lent.append(LentRegion(one.number, one.address, one.length, one.huge, fd, one.device))
        stack.pop_all()
    return tuple(lent)
