"""The agent's side of a supervisor: starting it, running CRIU under it, letting go or ending it.

See `supervisor` for what it promises and for what happens when one of the processes is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Literal, Self

from snapagent.errors import AgentError, PreflightFailed, ProtocolError, WorkloadLost
from snapagent.linux import processes
from snapagent.linux.ghosts import remove_ghosts
from snapagent.linux.network import fresh_network
from snapagent.linux.packets import BadPacketError, Channel, Packet, channel_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import TracebackType

__all__ = ["Place", "RunResult", "Supervisor", "TreeProcess", "criu_command"]

START_S_MAX: Final = 30.0
KILL_S_MAX: Final = 60.0
"""For the supervisor to end everything; it gives up telling about it after a third of that."""
LAST_RESORT_S: Final = 10.0
RELEASE_S_MAX: Final = 30.0
TRACE_CHARS_MAX: Final = 2000
LIMITS: Final = "limits.so"
"""With it CRIU can capture other users' processes without CAP_SYS_RESOURCE."""

Task = Literal["restore", "capture"]


@dataclass(frozen=True)
class Place:
    """Where CRIU runs and, in a restore, where the processes come to live.

    Raises:
        PreflightFailed: the parts do not go together.
    """

    network: Literal["here", "fresh"] = "here"
    addresses: tuple[str, ...] = ()
    """Those that a fresh network gets, besides the loopback addresses."""
    pids: Literal["here", "fresh"] = "here"
    """`fresh`: a namespace of process ids, where every id is free, with its own mounts, `/proc`."""
    join_pid: int | None = None
    """Enter all namespaces and the root directory of this process, for instance a container's.

    What is restored is in its control groups as well, unless CRIU is told to manage them.
    """

    def __post_init__(self) -> None:
        fresh = "fresh" in (self.network, self.pids)
        if self.join_pid is not None and fresh:
            raise PreflightFailed("it is either in another process's namespaces or in fresh ones")
        if self.addresses and self.network != "fresh":
            raise PreflightFailed("only a fresh network can be given addresses")


@dataclass(frozen=True)
class RunResult:
    """How a program ended that ran under the supervisor."""

    status: int
    """The exit status; negative: the signal that ended it."""
    message: str
    """Why it could not be started, if it could not (status 127)."""


@dataclass(frozen=True)
class TreeProcess:
    """A process below the supervisor."""

    pid: int
    """As the agent sees it."""
    inner_pid: int
    """As it sees itself: in a restored tree that of the snapshot."""


def criu_command(program: Path) -> tuple[list[str], Path]:
    """Return how to start CRIU as arguments for `Supervisor.run`, and its directory.

    That which `tools/install_criu.sh` installs brings its loader and libraries, so it can be
    started where the root directory is another one. Give the directory to `Supervisor.start`.
    """
    home = program.resolve().parent
    if (home / "ld.so").exists():
        command = ["{criu}/ld.so", "--library-path", "{criu}/lib"]
        if (home / "lib" / LIMITS).exists():
            command += ["--preload", f"{{criu}}/lib/{LIMITS}"]
        return [*command, "{criu}/criu.bin"], home
    return [f"{{criu}}/{program.resolve().name}"], home


@dataclass
class _State:
    """What the watching thread has learned. Guarded by the condition of the supervisor."""

    ran: RunResult | None = None
    running: bool = False
    released: bool = False
    ended: str | None = None
    """Why all of it is gone, once it is."""
    left: list[int] = field(default_factory=list)
    """Processes that could not be ended in time."""
    told: bool = False
    """Whether nobody needs to be told of the end: it was asked for, or told already."""


class Supervisor:
    """A supervisor process and all that is below it.

    Methods may be called from any thread; `kill` also while another one waits in `run`. As a
    context manager it kills what was not released.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], channel: Channel, trace: IO[bytes]
    ) -> None:
        """Only `start` makes one."""
        self._process = process
        self._channel = channel
        self._trace = trace
        self._changed = threading.Condition()
        self._state = _State()
        self._on_death: Callable[[str], None] | None = None
        self._keeper_fd = -1
        self._strays: processes.Strays | None = None
        self._task: Task = "restore"
        self._work: Path | None = None
        self._ghosts: Sequence[str] = ()
        self._killing = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="supervision", daemon=True)
        self.keeper_pid = 0
        """The process above the tree: in fresh process ids their init, which stays."""

    @classmethod
    def start(
        cls,
        place: Place,
        work_directory: Path | None = None,
        *,
        task: Task = "restore",
        directories: Mapping[str, Path] | None = None,
        pids: Collection[int] = (),
        ghosts: Sequence[str] = (),
        reason_file: Path | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> Self:
        """Start a supervisor and prepare the place. Blocks for some 50 ms.

        Args:
            place: where.
            work_directory: is removed at the end, whatever the end; arguments name it `{work}`.
            task: what CRIU will do; in a capture nothing is ever killed, CRIU least of all.
            directories: further ones that arguments can name, as `criu` by `{criu}`.
            pids: the ids of all processes and threads of the snapshot. In fresh process ids no
                other process gets one of them; and they are what is left to find the processes by
                when the supervisor and its keeper were killed.
            ghosts: paths of files that CRIU makes for a moment, and nobody else; what it has left
                of them is removed, unless the tree is released.
            reason_file: gets a line of JSON (`ended`, `time_ns`) if it ends without the agent.
            on_death: called from another thread, once, with the reason, when the supervisor or the
                keeper ended without having been told to. In a restore everything is dead by then.
                In a capture CRIU may still run: let its sockets and scripts fail.

        Raises:
            AgentError: the place cannot be had. Nothing is left, except perhaps the work directory.
        """
        if task == "capture" and place.pids == "fresh":
            raise PreflightFailed("what is to be captured is not in fresh process ids")
        named = dict(directories or {})
        if work_directory is not None:
            named["work"] = work_directory
        values: dict[str, object] = {
            "task": task,
            "work": str(work_directory.absolute()) if work_directory else "",
            "reasons": str(reason_file.absolute()) if reason_file else "",
            "pids": sorted(pids),
            "ghosts": list(ghosts),
            "fresh_pids": int(place.pids == "fresh"),
            "join": place.join_pid or 0,
            "network": int(place.network == "fresh"),
            "names": list(named),
            "paths": [str(path.absolute()) for path in named.values()],
        }
        with contextlib.ExitStack() as fds:
            sent = []
            for path in named.values():
                sent.append(_open_directory(path))
                fds.callback(os.close, sent[-1])
            if place.network == "fresh":
                sent.append(fresh_network(place.addresses))
                fds.callback(os.close, sent[-1])
            supervisor = cls(*_spawn())
            supervisor._task, supervisor._work = task, work_directory
            supervisor._ghosts = ghosts if place.join_pid is None else ()
            supervisor._begin(values, sent, on_death)
        return supervisor

    def _begin(
        self, values: dict[str, object], fds: Sequence[int], on_death: Callable[[str], None] | None
    ) -> None:
        try:
            self._shake_hands(values, fds)
        except (AgentError, BadPacketError, OSError) as error:
            self._channel.close()
            self._wait_for_process(KILL_S_MAX)
            self._trace.close()
            if isinstance(error, AgentError):
                raise
            raise AgentError(f"cannot start a supervisor: {error}") from error
        self._on_death = on_death
        self._watcher.start()

    def _shake_hands(self, values: dict[str, object], fds: Sequence[int]) -> None:
        self._channel.set_timeout(START_S_MAX)
        self._channel.send("start", values, fds)
        answer = self._channel.receive()
        if answer is None:
            raise AgentError(f"the supervisor ended at its start: {self._last_words()}")
        if answer.kind != "ready":
            raise AgentError(f"cannot prepare the place: {answer.text('message')}")
        (self._keeper_fd,) = answer.fds
        self.keeper_pid = answer.number("keeper")
        started = processes.read_state(self._process.pid)
        pids = values["pids"]
        if started is not None and isinstance(pids, list):
            namespace = answer.text("namespace")
            self._strays = processes.Strays(pids, namespace, started.started_ticks)
        self._channel.set_timeout(None)

    @property
    def pid(self) -> int:
        """The id of the supervisor itself."""
        return self._process.pid

    @property
    def ended(self) -> str | None:
        """Why all of it is gone, once it is."""
        with self._changed:
            return self._state.ended

    # -- use --------------------------------------------------------------------------------------

    def run(self, argv: Sequence[str], *, pass_fds: Sequence[int] = ()) -> RunResult:
        """Run a program, CRIU, in the place, and wait for its end.

        The arguments may hold `{work}` and other directories' names, and `{fd0}`, `{fd1}`… for the
        numbers under which the program has `pass_fds`. The first one is the path of the program.
        What it writes to its standard output goes to `criu.out` in the work directory.

        Raises:
            WorkloadLost: it was killed meanwhile, by `kill` or by whatever killed the supervisor.
        """
        with self._changed:
            self._check_alive()
            if self._state.running:
                raise AgentError("the supervisor runs a program already")
            self._state.ran, self._state.running = None, True
        self._send("run", {"argv": list(argv)}, pass_fds)
        return self._wait_for_run()

    def _wait_for_run(self) -> RunResult:
        with self._changed:
            self._changed.wait_for(lambda: self._state.ran or self._state.ended is not None)
            self._state.running = False
            if self._state.ran is None:
                raise WorkloadLost(f"CRIU was ended: {self._state.ended}")
            return self._state.ran

    def processes(self) -> list[TreeProcess]:
        """Return what is alive below the supervisor, parents first, without the keeper.

        CRIU is among it while it runs.

        Raises:
            WorkloadLost: all of it has been ended.
        """
        with self._changed:
            self._check_alive()
        found = []
        for pid in processes.descendants(self.keeper_pid):
            inner = processes.inner_pid(pid)
            if inner is not None:
                found.append(TreeProcess(pid, inner))
        return found

    def root(self, inner_pid: int) -> int | None:
        """Return the restored process right below the keeper that has this id inside, if it lives.

        For after CRIU has ended and before `release`; the id is that of the snapshot, the one
        returned is the agent's.

        Raises:
            WorkloadLost: all of it has been ended.
        """
        with self._changed:
            self._check_alive()
        for pid in processes.children(self.keeper_pid):
            state = processes.read_state(pid)
            if state and not state.ended and processes.inner_pid(pid) == inner_pid:
                return pid
        return None

    def hold(self, userfaultfd: int) -> None:
        """Let the supervisor keep a duplicate until all processes have ended, or `release`.

        It may be any fd, for instance one that locks the work directory until it is not used.

        Returns as soon as it is sure that the supervisor has it or, if it has no room for it, will
        kill everything.
        """
        self._send("hold", {}, [userfaultfd])

    def release(self) -> None:
        """Let the restored processes live on their own; the supervisor goes.

        They come below the init of their namespace of process ids. The work directory is removed.

        Raises:
            WorkloadLost: they had been killed before.
        """
        with self._changed:
            self._check_alive()
            if self._state.running:
                raise AgentError("CRIU still runs: there is nothing to release yet")
        self._send("release", {})
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._state.released or self._state.ended is not None, RELEASE_S_MAX
            )
            if self._state.released:
                return
        if not done:
            self.kill("it could not be released in time")
        raise WorkloadLost(f"the restored processes were ended: {self._state.ended}")

    # -- the end ----------------------------------------------------------------------------------

    def kill(self, reason: str) -> None:
        """End everything below the supervisor, and the supervisor; return when all of it has ended.

        Safe to repeat, and after `release`, when it does nothing. In a capture it does not end
        CRIU, but waits for it to end: close its sockets first.

        Raises:
            AgentError: something could not be ended in time; the message has the process ids. The
                supervisor goes on waiting for it before it lets go of the userfaultfds.
        """
        with self._killing:
            with self._changed:
                if self._state.released or self._state.ended is not None:
                    return self._check_left()
                self._state.told = True
            with contextlib.suppress(OSError):
                self._channel.send("kill", {"reason": reason})
            if not self._wait_for_end(KILL_S_MAX):
                if self._task == "capture":
                    raise AgentError("CRIU does not end its dump: look at the process it captures")
                # The keeper sees the end of it and kills; `_watch` waits for that.
                self._process.kill()
                self._wait_for_end(KILL_S_MAX)
            with self._changed:
                self._check_left()
        return None

    def _wait_for_end(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self._state.ended is not None or bool(self._state.left), seconds
            )

    def _check_left(self) -> None:
        if self._state.left:
            left = ", ".join(map(str, self._state.left))
            raise AgentError(f"processes that could not be ended (they hang in the kernel): {left}")

    def _check_alive(self) -> None:
        if self._state.ended is not None:
            raise WorkloadLost(f"the processes were ended: {self._state.ended}")
        if self._state.released:
            raise AgentError("the processes were released from their supervisor")

    def _send(self, kind: str, values: dict[str, object], fds: Sequence[int] = ()) -> None:
        try:
            self._channel.send(kind, values, fds)
        except BadPacketError as error:
            raise ProtocolError(str(error)) from error
        except OSError as error:
            # The watcher is about to find out.
            self._wait_for_end(KILL_S_MAX)
            raise WorkloadLost(f"the processes were ended: {self._state.ended}") from error

    # -- the watching thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        """Take in what the supervisor tells, until it ends; then see to it that all has ended."""
        reason = self._listen()
        self._channel.shut_down()
        if not self._wait_for_process(KILL_S_MAX):
            self._process.kill()
            self._wait_for_process(LAST_RESORT_S)
        if not self._state.released:
            left = []
            if reason is None:
                reason = f"the supervisor was killed: {self._last_words()}"
                if self._task == "capture":
                    # Before the wait for CRIU, which may itself wait for what the agent does now.
                    self._tell_death(reason)
                left = self._end_the_rest()
            with self._changed:
                self._state.ended, self._state.left = reason, left
                self._changed.notify_all()
            self._tell_death(reason)
        self._tidy()

    def _listen(self) -> str | None:
        """Take in messages until the supervisor's end; return why it ended, if it said so."""
        reason = None
        while True:
            try:
                packet = self._channel.receive()
            except (BadPacketError, OSError):
                return None
            if packet is None:
                return reason
            if packet.kind == "ended":
                reason = packet.text("reason")
            elif packet.kind == "lost":
                self._tell_death(packet.text("reason"))
            self._take_in(packet)

    def _tell_death(self, reason: str) -> None:
        """Call `on_death`, once, unless the end was asked for."""
        with self._changed:
            told, self._state.told = self._state.told, True
        if self._on_death is not None and not told:
            self._on_death(reason)

    def _take_in(self, packet: Packet) -> None:
        with self._changed:
            match packet.kind:
                case "ran":
                    self._state.ran = RunResult(packet.number("status"), packet.text("message"))
                case "released":
                    self._state.released = True
                case "alive":
                    self._state.left = packet.numbers("left")
                case _:
                    packet.close_fds()
            self._changed.notify_all()

    def _end_the_rest(self) -> list[int]:
        """Do what the supervisor would have done and the keeper has not; return what is left.

        In a capture it only waits.
        """
        left = []
        if self._task == "capture":
            if processes.wait_for_ends([self._keeper_fd], KILL_S_MAX):
                left.append(self.keeper_pid)
        else:
            if processes.wait_for_ends([self._keeper_fd], LAST_RESORT_S):
                left += processes.kill_descendants(self.keeper_pid, LAST_RESORT_S)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._keeper_fd, signal.SIGKILL)
            if self._strays is not None:
                left += processes.kill_strays(self._strays, LAST_RESORT_S)
            remove_ghosts(self._ghosts)
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
        return left

    def _wait_for_process(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _last_words(self) -> str:
        self._wait_for_process(LAST_RESORT_S)
        self._trace.seek(0)
        text = self._trace.read().decode(errors="replace").strip()
        return text[-TRACE_CHARS_MAX:] or f"status {self._process.returncode}"

    def _tidy(self) -> None:
        self._channel.close()
        self._trace.close()
        os.close(self._keeper_fd)

    def __enter__(self) -> Self:
        """Return the supervisor itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kill what was not released."""
        self.kill("it was not released" if error is None else f"the agent failed: {error}")


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise AgentError(f"cannot use the directory {path}: {error.strerror}") from error


def _spawn() -> tuple[subprocess.Popen[bytes], Channel, IO[bytes]]:
    """Start a supervisor process that waits for its first message."""
    ours, theirs = channel_pair()
    trace = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it, later.
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r});"
    code += " from snapagent.supervisor import main; sys.exit(main(sys.argv[1:]))"
    try:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, with code of ours.
            [sys.executable, "-I", "-S", "-c", code, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=trace,
            pass_fds=[theirs.fileno()],
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        trace.close()
        raise AgentError(f"cannot start a supervisor: {error}") from error
    finally:
        theirs.close()
    return process, ours, trace
