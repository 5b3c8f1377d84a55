"""The process right above a restored tree: its parent, and what ends it when the supervisor dies.

A child that the supervisor forks into the place where the processes are to live. It runs CRIU,
adopts whatever loses its parent, and reaps. In fresh process ids it is their first process: the
kernel ends all others with it, and it stays after the supervisor, without any open file, until
nothing else is left. Elsewhere it ends with the supervisor, and the tree goes to the init there.

If the supervisor's end of the channel closes without a release, it kills all that is below it. Only
in a capture it waits for CRIU instead: CRIU killed in the middle of a dump would leave its foreign
code in processes that are to go on, whereas CRIU whose sockets are broken puts them right itself.

Loads nothing of the library: see `supervisor`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from snapagent.linux import cgroups, namespaces, processes
from snapagent.linux.packets import BadPacketError, Channel, Packet

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KeeperOrder", "keep"]

KILL_S_MAX: Final = 60.0
GUESTS_S_MAX: Final = 60.0
GUESTS_POLL_S: Final = 0.02
CRASHED: Final = 70
NOT_STARTED: Final = 127
PIDS_LEFT_FREE: Final = 1000
LAST_PID_MAX: Final = 32_000
"""Below the smallest `pid_max` that a kernel has by default."""

_ENDED_ONLY_BY_ITS_CHANNEL: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class KeeperOrder(NamedTuple):
    """Where the keeper goes and what it takes along. It owns the fds."""

    fresh_pids: bool
    capture: bool
    network_fd: int | None
    target: namespaces.Target | None
    directories: dict[str, tuple[str, int]]
    """By name: path and O_PATH fd of those that arguments may name as `{name}`."""
    pids: Sequence[int]
    """The ids that the restored processes and threads will want."""

    def fds(self) -> list[int]:
        """Return all fds in it."""
        fds = [fd for _, fd in self.directories.values()]
        if self.network_fd is not None:
            fds.append(self.network_fd)
        if self.target is not None:
            fds += [self.target.pidfd, self.target.root_fd]
        return fds


def keep(channel: Channel, order: KeeperOrder) -> NoReturn:
    """Be the keeper, in a child just forked. Never returns."""
    status = CRASHED
    try:
        status = _Keeper(channel, order).main()
    except BaseException:  # noqa: BLE001 - above is the supervisor's code, which is not for this process.
        sys.excepthook(*sys.exc_info())  # It prints, and takes nothing that has to be loaded.
    finally:
        sys.stderr.flush()
        os._exit(status)


class _Keeper:
    def __init__(self, channel: Channel, order: KeeperOrder) -> None:
        self._channel = channel
        self._order = order
        self._criu: int | None = None

    def main(self) -> int:
        """Prepare the place, serve until released or orphaned; return the exit status."""
        processes.close_all_but([self._channel.fileno(), *self._order.fds()])
        for number in _ENDED_ONLY_BY_ITS_CHANNEL:
            signal.signal(number, signal.SIG_IGN)
        wake, self._wake_writer = _wake_at_child_ends()
        try:
            self._go()
        except OSError as error:
            self._tell("failed", {"message": str(error)})
            return 1
        self._tell("ready", {})
        if self._serve(wake):
            self._stay(wake)
        else:
            self._end()
        return 0

    # -- the place --------------------------------------------------------------------------------

    def _go(self) -> None:
        """Enter the place."""
        os.chdir("/")
        order = self._order
        if order.target is not None:
            if not order.capture:
                # What is restored is the container's; what a capture takes is not on its account.
                cgroups.join(order.target.group_files)
            processes.forbid_inspection()
            namespaces.enter(order.target, ipc=not order.capture)
            order.target.close()
        if order.fresh_pids:
            namespaces.own_mounts()
            namespaces.own_proc()
        else:
            processes.adopt_orphans()
        if order.network_fd is not None:
            namespaces.set_namespace(order.network_fd, namespaces.NETWORK)
            os.close(order.network_fd)
        _check_proc()
        if order.fresh_pids:
            _keep_free(order.pids)
            processes.name_process("snapagent-init", "snapagent: init of restored processes")
        else:
            processes.name_process("snapagent-keep", "snapagent: keeper of restored processes")

    # -- serving ----------------------------------------------------------------------------------

    def _serve(self, wake: socket.socket) -> bool:
        """Run what the supervisor asks for; return whether the tree is released from it."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(wake.fileno(), select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if wake.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
                self._reap()
            if self._channel.fileno() in ready:
                packet = self._channel.receive()
                if packet is None:
                    return False
                if packet.kind == "release":
                    return True
                self._run(packet)

    def _reap(self) -> None:
        """Remove all children that have ended; tell of CRIU's end."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._criu:
                self._criu = None
                self._tell_ran(os.waitstatus_to_exitcode(status), "")

    def _tell_ran(self, status: int, message: str) -> None:
        self._tell("ran", {"status": status, "message": message})

    def _tell(self, kind: str, values: dict[str, object]) -> None:
        # Should the supervisor be gone, its closed end is what is seen next.
        with contextlib.suppress(OSError):
            self._channel.send(kind, values)

    def _run(self, packet: Packet) -> None:
        """Start a program, with the packet's fds and the directories as fds of its own."""
        try:
            argv = self._checked_argv(packet)
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._become(argv, packet.fds, writer)
            os.close(writer)
            with open(reader, "rb") as pipe:
                problem = pipe.read().decode()
            if problem:
                os.waitpid(pid, 0)
                self._tell_ran(NOT_STARTED, problem)
            else:
                self._criu = pid
        except (BadPacketError, OSError) as error:
            self._tell_ran(NOT_STARTED, str(error))
        finally:
            packet.close_fds()

    def _checked_argv(self, packet: Packet) -> list[str]:
        argv = packet.texts("argv")
        if self._criu is not None:
            raise BadPacketError("a program is running already")
        if not argv:
            raise BadPacketError("a program has no name")
        return argv

    def _become(self, argv: list[str], fds: Sequence[int], writer: int) -> NoReturn:
        """In a child: become the program, or say why not and end."""
        try:
            for number in (*_ENDED_ONLY_BY_ITS_CHANNEL, signal.SIGPIPE, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            words = self._names()
            words.update({f"fd{place}": str(fd) for place, fd in enumerate(fds)})
            for fd in fds:
                processes.keep_over_exec(fd)
            for word, value in words.items():
                argv = [argument.replace(f"{{{word}}}", value) for argument in argv]
            if "work" in self._order.directories:
                self._log_to(self._order.directories["work"][1])
            os.execv(argv[0], argv)  # noqa: S606 - what the agent asks for, with no shell.
        except BaseException as error:  # noqa: BLE001 - whatever it is, this process ends here.
            os.write(writer, f"cannot start {argv[0]}: {error}".encode())
        os._exit(NOT_STARTED)

    def _names(self) -> dict[str, str]:
        """Return how the program to be started can name each directory.

        Where the root directory is another one, the paths mean nothing: there the program has the
        directories open. Not by `self`, since processes that CRIU starts open them as well.
        """
        if self._order.target is None:
            return {name: path for name, (path, _) in self._order.directories.items()}
        names = {}
        for name, (_, fd) in self._order.directories.items():
            processes.keep_over_exec(fd)
            names[name] = f"/proc/{os.getpid()}/fd/{fd}"
        return names

    def _log_to(self, directory_fd: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        log = os.open("criu.out", flags, 0o600, dir_fd=directory_fd)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    # -- the end ----------------------------------------------------------------------------------

    def _end(self) -> None:
        """The supervisor is gone: end what is below, or let a capture's CRIU finish."""
        if self._order.capture:
            while self._criu is not None:
                pid, _ = os.waitpid(-1, 0)
                if pid == self._criu:
                    self._criu = None
        elif not self._order.fresh_pids:
            processes.kill_descendants(os.getpid(), KILL_S_MAX)
        # In fresh process ids all others end with this one.

    def _stay(self, wake: socket.socket) -> None:
        """The tree lives on by itself: hold nothing, tell so, and as an init go on reaping."""
        signal.set_wakeup_fd(-1)
        for end in (wake, self._wake_writer):
            end.close()
        with open(os.devnull, "r+b", buffering=0) as nothing:
            for fd in range(3):
                os.dup2(nothing.fileno(), fd)
        processes.close_all_but([self._channel.fileno()])
        self._tell("released", {})
        self._channel.close()
        if not self._order.fresh_pids:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        _await_guests()


def _await_guests() -> None:
    """Wait for those who came into this pid namespace from outside, which ends with its init.

    A capture that stops the tree has CRIU in here, which has just killed the last of its processes
    and still has to say that it went well.
    """
    for _ in range(round(GUESTS_S_MAX / GUESTS_POLL_S)):
        try:
            os.kill(-1, 0)
        except ProcessLookupError:
            return
        select.select([], [], [], GUESTS_POLL_S)


def _wake_at_child_ends() -> tuple[socket.socket, socket.socket]:
    """Return a socket that gets a byte at each SIGCHLD, and its other end, to be kept open."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.settimeout(0)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return reader, writer


def _check_proc() -> None:
    """Raise if `/proc` is not that of this process's own namespace: CRIU could do nothing."""
    try:
        shown = os.readlink("/proc/self")
    except OSError as error:
        raise OSError(error.errno, "there is no /proc in the place to restore into") from error
    if shown != str(os.getpid()):
        raise OSError(0, "the /proc in the place to restore into shows other process ids than its")


def _keep_free(pids: Sequence[int]) -> None:
    """Let processes of a fresh namespace that are given any id get none that is in `pids`.

    CRIU itself and what it starts are among them, and small ids are usual in a snapshot.
    """
    for last in range(0, LAST_PID_MAX, PIDS_LEFT_FREE):
        if not any(last < pid <= last + PIDS_LEFT_FREE for pid in pids):
            with open("/proc/sys/kernel/ns_last_pid", "w") as file:
                file.write(str(last) if last else "1")
            return
