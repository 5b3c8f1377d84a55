"""The supervisor: one small process for each restore or capture, which owns what comes to be.

::

    agent ── supervisor ── keeper ── criu
                              └───── restored processes

It is started by `supervision` with one end of a socket, and has a session of its own, so that
Ctrl-C reaches the agent alone. It forks the keeper (see `keeper`) into the place, hands it CRIU to
run, and holds duplicates of the userfaultfds, so that a page which is missing blocks its process
and never reads as zeros, whatever becomes of the agent. It ends

- when told to `kill`, or when the agent's end of the socket closes without a release: it kills
  everything below it, waits until all of that has ended, *then* closes the userfaultfds, removes
  the work directory, and where the agent is gone writes why;
- when told to `release`: it closes the userfaultfds and goes, and the processes live on;
- in a capture it never kills: the processes are not below it, and CRIU is waited for. CRIU killed
  in the middle of a dump would leave its foreign code in them, or leave them stopped; CRIU whose
  sockets the agent has closed, or whose agent is dead, puts them right and fails.

What if one of them is killed (SIGKILL)?

=============== ==================================================================================
the agent       the supervisor sees the socket's end at whatever step it is, and does as above
the supervisor  the keeper sees its end and kills what is below; the agent, told by `on_death`,
                waits for that, and kills what it knows by id if the keeper is gone as well
the keeper      with fresh process ids the kernel ends all of them. Elsewhere the supervisor has
                become the parent of the processes, or where it cannot (in a container) kills them
                by their ids; then it tells the agent
criu            its status is told to the agent, which says `kill`
=============== ==================================================================================

The library is not loaded, nor what takes long to load, such as `dataclasses`: half of the time in
which it starts would be that.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Final

from snapagent.keeper import KeeperOrder, keep
from snapagent.linux import namespaces, processes
from snapagent.linux.ghosts import remove_ghosts, remove_ghosts_below
from snapagent.linux.packets import BadPacketError, Channel, Packet, channel_pair

__all__ = ["KILL_S", "main"]

KILL_S: Final = 15.0
"""After so long it is told which processes are still alive, and waited for on."""
STOP_S: Final = 2.0


def main(arguments: list[str]) -> int:
    """Supervise for whoever holds the other end of the socket whose fd is the argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The agent's end is what ends it: whoever ends a whole service with SIGTERM ends the agent.
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    processes.name_process("snapagent-super", "snapagent: supervisor of one restore or capture")
    processes.adopt_orphans()
    processes.allow_many_files()
    packet = channel.receive()
    if packet is None:
        return 0
    return _Supervisor(channel, packet).main()


class _Supervisor:
    def __init__(self, agent: Channel, start: Packet) -> None:
        self._agent = agent
        self._capture = start.text("task") == "capture"
        self._work = start.text("work")
        self._reasons = start.text("reasons")
        self._pids = start.numbers("pids")
        self._ghosts = start.texts("ghosts")
        self._root_fd = -1
        """Of the place, if it is another one."""
        self._fresh_pids = bool(start.number("fresh_pids"))
        self._start = start
        self._held: list[int] = []
        self._running = False
        self._agent_gone = False
        self._keeper_lost = False
        self._released = False
        self._ending: str | None = None
        """Why all has to end, once it has to."""
        self._keeper: Channel
        self._keeper_pid = 0
        self._keeper_fd = -1
        self._namespace = ""

    def main(self) -> int:
        """Do all of it; return the exit status."""
        try:
            self._fork_keeper()
        except (OSError, BadPacketError) as error:
            self._tell("failed", {"message": str(error)})
            self._clean_up()
            return 1
        self._serve()
        if self._released:
            if not self._fresh_pids:
                # It hands the processes on when it ends, and is to be reaped.
                processes.wait_for_ends([self._keeper_fd], STOP_S)
            self._clean_up()
            self._tell("released", {})
            return 0
        left = self._end_everything()
        self._remove_ghosts()
        self._clean_up()
        reason = self._ending or ""
        if self._agent_gone:
            self._write_reason(reason)
        self._tell("ended", {"reason": reason, "left": left})
        return 0

    def _tell(self, kind: str, values: dict[str, object], fds: tuple[int, ...] = ()) -> None:
        # Should the agent be gone, its closed end is what is seen next.
        with contextlib.suppress(OSError):
            self._agent.send(kind, values, fds)

    # -- the beginning ----------------------------------------------------------------------------

    def _fork_keeper(self) -> None:
        start = self._start
        fds = list(start.fds)
        directories = {
            name: (path, fds.pop(0))
            for name, path in zip(start.texts("names"), start.texts("paths"), strict=True)
        }
        network_fd = fds.pop(0) if start.number("network") else None
        join = start.number("join")
        target = namespaces.open_target(join) if join else None
        if target is not None:
            self._root_fd = os.dup(target.root_fd)
        order = KeeperOrder(
            self._fresh_pids, self._capture, network_fd, target, directories, self._pids
        )
        if self._fresh_pids:
            namespaces.unshare(namespaces.PIDS)
        elif target is not None:
            namespaces.set_namespace(target.pidfd, namespaces.PIDS)
        self._keeper, theirs = channel_pair()
        self._keeper_pid = os.fork()
        if self._keeper_pid == 0:
            keep(theirs, order)
        theirs.close()
        for fd in order.fds():
            os.close(fd)
        self._keeper_fd = os.pidfd_open(self._keeper_pid)
        self._namespace = namespaces.namespace_id(self._keeper_pid, "pid") or ""

    # -- serving ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serve the agent and the keeper until it is released or has to end."""
        poll = select.poll()
        # The keeper first: where it has died, what the agent says follows from that.
        for channel in (self._keeper, self._agent):
            poll.register(channel.fileno(), select.POLLIN)
        while not self._released:
            # CRIU in the middle of a dump is waited for: its end is what ends it then.
            if self._ending is not None and not (self._capture and self._running):
                return
            for fd, _ in poll.poll():
                try:
                    if fd == self._keeper.fileno():
                        self._hear_keeper()
                    else:
                        self._hear_agent()
                except (BadPacketError, OSError) as error:
                    self._end_because(f"the supervisor failed: {error}")
                if self._agent_gone and fd == self._agent.fileno():
                    poll.unregister(fd)

    def _end_because(self, reason: str) -> None:
        self._ending = self._ending or reason

    def _hear_agent(self) -> None:
        packet = self._agent.receive()
        if packet is None:
            self._agent_gone = True
            self._end_because("the agent ended without releasing it")
            return
        match packet.kind:
            case "hold":
                self._held += packet.fds
            case "run":
                self._running = True
                self._keeper.send("run", packet.values, packet.fds)
                packet.close_fds()
            case "release":
                self._keeper.send("release", {})
            case "kill":
                self._end_because(packet.text("reason"))
            case _:
                packet.close_fds()
                raise BadPacketError(f"the agent sent {packet.kind!r}")

    def _hear_keeper(self) -> None:
        packet = self._keeper.receive()
        if packet is None:
            self._keeper_lost = True
            self._running = False
            self._end_because("the keeper of the processes was killed")
            return
        match packet.kind:
            case "ready":
                values: dict[str, object] = {"keeper": self._keeper_pid}
                self._tell("ready", values | {"namespace": self._namespace}, (self._keeper_fd,))
            case "ran":
                self._running = False
                self._tell("ran", packet.values)
            case "released":
                self._released = True
            case "failed":
                self._tell("failed", packet.values)
                self._end_because(packet.text("message"))
            case _:
                raise BadPacketError(f"the keeper sent {packet.kind!r}")

    # -- the end ----------------------------------------------------------------------------------

    def _end_everything(self) -> list[int]:
        """End all that is below; return what is still alive after a time, and then wait for that.

        A capture has nothing below but CRIU, which is waited for as long as it takes. If the keeper
        was killed CRIU is a child of this process, or of the init in a container, where nobody can
        wait for it.
        """
        if self._capture:
            self._tell("lost", {"reason": self._ending or ""})
            self._keeper.close()
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
            return []
        left = self._kill(KILL_S)
        if left:
            # Until nothing runs that could read a missing page as zeros. The agent need not wait.
            self._tell("alive", {"left": left})
            while self._kill(KILL_S):
                pass
        return left

    def _kill(self, timeout_s: float) -> list[int]:
        """Kill everything below; return what has not ended in time."""
        left: list[int] = []
        if not self._fresh_pids:
            processes.stop_child(self._keeper_pid, self._keeper_fd, STOP_S)
            left = processes.kill_descendants(self._keeper_pid, timeout_s)
        # It is a child that was not reaped: the id is still its own.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._keeper_fd, signal.SIGKILL)
        if processes.wait_for_ends([self._keeper_fd], timeout_s):
            left.append(self._keeper_pid)
        # Had the keeper been killed before, what it left is this process's.
        left += processes.kill_descendants(os.getpid(), timeout_s)
        started = processes.read_state(os.getpid())
        if self._keeper_lost and started is not None:
            # Or in a container it is the init's there.
            strays = processes.Strays(self._pids, self._namespace, started.started_ticks)
            left += processes.kill_strays(strays, timeout_s)
        return left

    def _remove_ghosts(self) -> None:
        """Remove what a CRIU that was killed has left in the place."""
        if self._capture or not self._ghosts:
            return
        if self._root_fd < 0:
            remove_ghosts(self._ghosts)
        else:
            with contextlib.suppress(OSError):
                remove_ghosts_below(self._root_fd, self._ghosts)

    def _clean_up(self) -> None:
        """Close the userfaultfds, reap, remove the work directory."""
        for fd in self._held:
            os.close(fd)
        self._held = []
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if self._work:
            _remove_tree(self._work)

    def _write_reason(self, why: str) -> None:
        if not self._reasons:
            return
        line = json.dumps({"ended": why, "time_ns": time.time_ns()}) + "\n"
        with contextlib.suppress(OSError):
            fd = os.open(self._reasons, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(fd, "wb", buffering=0) as file:
                file.write(line.encode())


def _remove_tree(directory: str) -> None:
    """Remove a directory with all in it, as far as that goes, and a file system mounted there."""
    if os.path.ismount(directory):
        with contextlib.suppress(OSError):
            namespaces.detach_mount(directory)
    for _, folders, files, fd in os.fwalk(directory, topdown=False):
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=fd)
        for name in folders:
            with contextlib.suppress(OSError):
                # A symbolic link to a directory is listed among them, and is no directory.
                os.unlink(name, dir_fd=fd)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=fd)
    with contextlib.suppress(OSError):
        os.rmdir(directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
