"""The workload's side of NVIDIA Snapshot's handshake: files in a directory shared with an agent.

::

    begin()            old files are taken away; then the engine starts and answers once
    announce_ready()   `ready-for-snapshot`: from here on an agent may capture at any moment
    wait()             until a life in which `restore-complete` is there
    announce_restored()   `<framework>-restore-ready`, once it serves again

While a capture may happen, nothing is open that belongs to this machine: a watch of inotify is tied
to one file system, and the next life may be in another container of another node. Therefore the
first life does not watch. It sleeps, and being frozen is what wakes it, as
`snapagent.linux.standstill` explains. If it is in another life then, it watches the directory for
the file. If not, it sleeps on.

Imports nothing but the standard library, so that every worker can afford it.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Final, Self

from snapagent.linux.standstill import Sleeper, Woken, present_life
from snapagent.workload.threads import on_a_thread
from snapagent.workload.watch import FileWatch, Stopped, is_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from snapagent.linux.standstill import Life

__all__ = [
    "DIRECTORY_VARIABLES",
    "READY",
    "RESTORE_COMPLETE",
    "SNAPSHOT_COMPLETE",
    "STANDBY_VARIABLES",
    "Handshake",
    "HandshakeCancelled",
    "HandshakeError",
    "HandshakeTimeout",
    "Outcome",
    "restore_error_name",
    "restore_ready_name",
]

DIRECTORY_VARIABLES: Final = ("SNAPSHOT_CONTROL_DIR", "DYN_SNAPSHOT_CONTROL_DIR")
"""Where the directory is named; the first that is set counts."""
STANDBY_VARIABLES: Final = ("SNAPSHOT_RESTORE_STANDBY", "DYN_SNAPSHOT_RESTORE_STANDBY")

READY: Final = "ready-for-snapshot"
SNAPSHOT_COMPLETE: Final = "snapshot-complete"
RESTORE_COMPLETE: Final = "restore-complete"

TEXT_BYTES_MAX: Final = 64 << 10
LOOK_S: Final = 1.0
"""How often the first life looks for files: only older agents write one for it."""

_FRAMEWORK = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class HandshakeError(Exception):
    """The handshake cannot go on; the message says what to do.

    Not of the library's tree of errors, which is not loaded in workloads.
    """


class HandshakeTimeout(HandshakeError, TimeoutError):
    """What was waited for did not come in time. The wait may be repeated."""


class HandshakeCancelled(HandshakeError):
    """`cancel` was called."""


class Outcome(enum.Enum):
    """What has become of a workload that was ready to be captured."""

    RESTORED = "restored"
    """This is a later life: wake up and serve."""
    CAPTURED = "captured"
    """This is still the first life, and an older agent says that it has its snapshot."""


class _Stage(enum.Enum):
    NEW = "new"
    BEGUN = "begun"
    READY = "ready"
    OVER = "over"


def restore_ready_name(framework: str) -> str:
    """Return the file that says that a restored workload serves.

    Raises:
        HandshakeError: that is no name for a framework.
    """
    return f"{_checked(framework)}-restore-ready"


def restore_error_name(framework: str) -> str:
    """Return the file that says why a restored workload does not serve."""
    return f"{_checked(framework)}-restore-error"


class Handshake:
    """One workload and its directory. Any thread may call; the stages come in their order."""

    def __init__(self, directory: str, framework: str, *, standby: bool = False) -> None:
        """Touch nothing yet.

        Args:
            directory: The one shared with the agent; it may appear later.
            framework: Who this is: lower case letters, digits, `-` and `_`; stands in file names.
            standby: Whether this process only keeps the place for one that will be restored.

        Raises:
            HandshakeError: the framework's name does not do.
        """
        self.directory: Final = os.path.abspath(directory)  # noqa: PTH100 - links stay as they are
        self.framework: Final = _checked(framework)
        self.standby: Final = standby
        # One that a handler of signals may take again, on the thread that has it.
        self._lock = threading.RLock()
        self._stage = _Stage.NEW
        self._life: Life | None = None
        self._sleepers: set[Sleeper] = set()
        self._cancelled = False
        self._outcome: Outcome | None = None

    @classmethod
    def from_environment(
        cls, framework: str, environment: Mapping[str, str] | None = None
    ) -> Self | None:
        """Return the handshake that the environment asks for, None if it asks for none."""
        if environment is None:
            environment = os.environ  # noqa: TID251 - in workloads, which have no settings module
        named = (environment.get(name) for name in DIRECTORY_VARIABLES)
        directory = next((value for value in named if value), None)
        if directory is None:
            return None
        standby = any(environment.get(name) == "1" for name in STANDBY_VARIABLES)
        return cls(directory, framework, standby=standby)

    # -- the stages -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take away what an earlier run left, before anything is initialised.

        A container that is started again finds the directory of the one before. Again after a
        `wait` is over, it begins the next round.

        Raises:
            HandshakeError: it is begun already, or the files cannot be removed.
        """
        self._go(_Stage.BEGUN, (_Stage.NEW, _Stage.OVER))
        self._outcome = None
        mine = (restore_ready_name(self.framework), restore_error_name(self.framework))
        for name in (READY, SNAPSHOT_COMPLETE, RESTORE_COMPLETE, *mine):
            self._remove(name)

    def announce_ready(self, text: str = "ready") -> None:
        """Say that it may be captured: from now on it may be frozen at any moment.

        Raises:
            HandshakeError: it was not begun, or the directory is not there or not writable.
        """
        self._go(_Stage.READY, (_Stage.BEGUN,))
        try:
            self._life = present_life()
        except OSError as error:
            raise HandshakeError(
                f"cannot tell one life from the next without /proc: {error}"
            ) from error
        self._write(READY, text)

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Block until an agent has done its part, in this life or the next.

        Args:
            timeout_s: How long at most, in each life: it begins anew with the restore. None, the
                default, waits as long as it takes: nobody knows when a snapshot will be wanted.

        Raises:
            HandshakeTimeout: neither file came in time.
            HandshakeCancelled: `cancel` was called, also before.
            HandshakeError: it is not ready, or the directory cannot be watched.
        """
        with self._sleeper() as sleeper:
            return self._wait(sleeper, timeout_s)

    async def wait_async(self, timeout_s: float | None = None) -> Outcome:
        """Do as `wait` does without blocking the event loop; a cancelled task waits no more."""
        with self._sleeper() as sleeper:
            return await on_a_thread(
                functools.partial(self._wait, sleeper, timeout_s), sleeper.wake
            )

    def withdraw(self) -> None:
        """Say that it may no longer be captured, instead of waiting on.

        Raises:
            HandshakeError: it was not ready, or the file cannot be removed.
        """
        self._go(_Stage.OVER, (_Stage.READY,))
        self._remove(READY)

    def announce_restored(self, text: str = "ready") -> None:
        """Say that it serves again, after it was restored, has woken up and was checked.

        Raises:
            HandshakeError: `wait` has not ended with a restore, or the file cannot be written.
        """
        self._require_restored()
        self._write(restore_ready_name(self.framework), text)

    def announce_failure(self, text: str) -> None:
        """Say why it does not serve after a restore.

        A restored process may have no other way to say it: its standard output is that of a
        container which is gone. Of a long text the end is kept.
        """
        self._require_restored()
        self._write(restore_error_name(self.framework), text)

    # -- standing by ------------------------------------------------------------------------------

    def stand_by(self) -> None:
        """Do nothing, in the place of a process that will be restored; ends when cancelled only.

        Raises:
            HandshakeCancelled: `cancel` was called. Handlers of signals may raise others.
        """
        with self._sleeper() as sleeper:
            self._stand_by(sleeper)

    async def stand_by_async(self) -> None:
        """Do as `stand_by` does without blocking the event loop."""
        with self._sleeper() as sleeper:
            await on_a_thread(functools.partial(self._stand_by, sleeper), sleeper.wake)

    def cancel(self) -> None:
        """End all waits of this handshake, present and future.

        May be called again, from any thread, and in a handler of signals.
        """
        with self._lock:
            self._cancelled = True
            for sleeper in tuple(self._sleepers):
                sleeper.wake()

    # -- parts ------------------------------------------------------------------------------------

    def _wait(self, sleeper: Sleeper, timeout_s: float | None) -> Outcome:
        with self._lock:
            self._check(_Stage.READY)
        outcome = self._sleep_through(sleeper, timeout_s)
        if outcome is None:
            outcome = self._watch(sleeper, timeout_s)
        self._outcome = outcome
        self._go(_Stage.OVER, (_Stage.READY,))
        return outcome

    def _sleep_through(self, sleeper: Sleeper, timeout_s: float | None) -> Outcome | None:
        """Sleep until it is known how it ends, or, with None, until this is another life."""
        end = None if timeout_s is None else _now() + timeout_s
        while True:
            if self._is_another_life():
                return None
            if is_file(self._path(RESTORE_COMPLETE)):
                return Outcome.RESTORED
            if is_file(self._path(SNAPSHOT_COMPLETE)):
                return Outcome.CAPTURED
            left = LOOK_S if end is None else min(LOOK_S, end - _now())
            if left <= 0:
                raise self._timeout(timeout_s, "no agent has captured this process")
            if sleeper.sleep(left) is Woken.CALLED:
                raise HandshakeCancelled(f"waiting in {self.directory} was cancelled")

    def _watch(self, sleeper: Sleeper, timeout_s: float | None) -> Outcome:
        """Wait in a later life until its agent says that the restore is complete."""
        try:
            FileWatch(self.directory, [RESTORE_COMPLETE]).wait(timeout_s, sleeper.bell)
        except TimeoutError as error:
            what = f"this process was restored, but no agent wrote {RESTORE_COMPLETE}"
            raise self._timeout(timeout_s, what) from error
        except Stopped as error:
            raise HandshakeCancelled(f"waiting in {self.directory} was cancelled") from error
        except OSError as error:
            raise _cannot_watch(self.directory, error) from error
        return Outcome.RESTORED

    def _stand_by(self, sleeper: Sleeper) -> None:
        while sleeper.sleep(LOOK_S * 3600) is not Woken.CALLED:
            pass
        raise HandshakeCancelled(f"standing by in {self.directory} was cancelled")

    def _is_another_life(self) -> bool:
        try:
            return present_life() != self._life
        except OSError:
            # It could be read in the first one.
            return True

    @contextlib.contextmanager
    def _sleeper(self) -> Iterator[Sleeper]:
        """Give a sleep that `cancel` ends."""
        sleeper = Sleeper()
        try:
            with self._lock:
                self._sleepers.add(sleeper)
                if self._cancelled:
                    sleeper.wake()
            yield sleeper
        finally:
            with self._lock:
                self._sleepers.discard(sleeper)
            sleeper.close()

    def _require_restored(self) -> None:
        with self._lock:
            self._check(_Stage.OVER)
            if self._outcome is not Outcome.RESTORED:
                raise HandshakeError(f"nothing was restored in {self.directory}, so do not say so")

    def _go(self, to: _Stage, came_from: tuple[_Stage, ...]) -> None:
        with self._lock:
            self._check(*came_from)
            self._stage = to

    def _check(self, *stages: _Stage) -> None:
        if self._stage not in stages:
            allowed = " or ".join(stage.value for stage in stages)
            raise HandshakeError(
                f"the handshake in {self.directory} is {self._stage.value}, not {allowed}: call "
                "begin, announce_ready, wait and announce_restored in this order"
            )

    def _timeout(self, timeout_s: float | None, what: str) -> HandshakeTimeout:
        return HandshakeTimeout(f"{what} within {timeout_s} s, in {self.directory}")

    def _path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def _remove(self, name: str) -> None:
        try:
            os.unlink(self._path(name))  # noqa: PTH108 - a path as a string
        except FileNotFoundError:
            return
        except OSError as error:
            raise HandshakeError(f"cannot remove {self._path(name)}: {error.strerror}") from error

    def _write(self, name: str, text: str) -> None:
        """Let a file appear whole."""
        temporary = self._path(f".{name}.{os.getpid()}.tmp")
        data = f"{text.rstrip()}\n".encode()[-TEXT_BYTES_MAX:]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o644), "wb") as file:  # noqa: PTH123 - an fd
                file.write(data)
            os.replace(temporary, self._path(name))  # noqa: PTH105 - paths as strings
        except OSError as error:
            raise HandshakeError(
                f"cannot write {name} into {self.directory}: {error.strerror}; mount the volume "
                f"that is shared with the agent there, or correct ${DIRECTORY_VARIABLES[0]}"
            ) from error


def _checked(framework: str) -> str:
    if not _FRAMEWORK.fullmatch(framework):
        raise HandshakeError(f"{framework!r} is no name for a framework: say something like vllm")
    return framework


def _cannot_watch(directory: str, error: OSError) -> HandshakeError:
    advice = ""
    if error.errno in (errno.EMFILE, errno.ENOSPC):
        limit = "max_user_instances" if error.errno == errno.EMFILE else "max_user_watches"
        advice = f"; raise fs.inotify.{limit}"
    return HandshakeError(f"cannot watch {directory}: {error.strerror}{advice}")


def _now() -> float:
    return time.monotonic()  # noqa: TID251 - the clock of the library is not loaded here
