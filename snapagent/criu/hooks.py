"""CRIU's action scripts as calls into the agent, which can say no.

CRIU runs a program at certain points of its work and waits for it; at some of them it gives up
when the program fails. Ours is a shell script that tells the agent the point and waits for its
answer, over two FIFOs beside it. CRIU closes all descriptors before it runs the script, so that
the script has to find them by its own path.

If the agent dies, its end of the FIFOs closes and the script fails at once: a dump that nobody
made durable leaves its source running.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
from typing import TYPE_CHECKING, Self

from snapagent.criu.sessions import FirstError, WakeUp
from snapagent.errors import AgentError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["ScriptHooks"]

_SCRIPT = """\
#!/bin/sh
# Ask the agent whether CRIU may go on. Its end of the FIFOs closes when it dies.
here=${0%/*}
[ -p "$here/hook-request" ] && [ -p "$here/hook-answer" ] || exit 1
# Opening both ways never blocks; a reader alone then sees when the agent is gone.
exec 3<>"$here/hook-request" 4<>"$here/hook-answer" 5<"$here/hook-answer" 4>&-
printf '%s\\n' "$CRTOOLS_SCRIPT_ACTION" >&3
read -r answer <&5 || exit 1
[ "$answer" = ok ]
"""

_ACTION = re.compile(rb"[a-z][a-z-]{0,31}")
_REQUEST_BYTES_MAX = 4096


class ScriptHooks:
    """A script for `--action-script` that asks this process. A context manager.

    Attributes:
        path: The script.
    """

    def __init__(
        self,
        directory: Path,
        on_action: Mapping[str, Callable[[], bool]],
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Make the script and its FIFOs in `directory`, from which programs can be run.

        Args:
            directory: An existing one for this alone, which CRIU can reach by this path or
                another.
            on_action: What to ask for CRIU's actions, such as `post-dump`; called on a thread of
                this object, one at a time. False makes the script fail; so does an exception,
                which is kept. All other actions pass.
            on_error: Called once with the first error, on that thread.

        Raises:
            AgentError: They cannot be made there.
        """
        self.path = directory / "hook"
        self._request_path = directory / "hook-request"
        self._answer_path = directory / "hook-answer"
        self._on_action = dict(on_action)
        self._first_error = FirstError(on_error)
        self._wake_up = WakeUp()
        self._closing = threading.Lock()
        self._fds: list[int] = []
        try:
            self._make()
        except OSError as error:
            self._remove()
            raise AgentError(f"{directory}: cannot make a hook for CRIU: {error}") from error
        self._thread = threading.Thread(target=self._run, name="criu-hooks", daemon=True)

    @property
    def error(self) -> BaseException | None:
        """The first exception of an action, or what else went wrong."""
        return self._first_error.error

    def start(self) -> None:
        """Answer from now on. Call it once."""
        self._thread.start()

    def close(self) -> None:
        """Stop and remove everything; a script that waits fails. May be called again.

        Waits for an action that is at work; not for an action or `on_error` to call.
        """
        self._wake_up.call()
        with self._closing:
            if self._thread.ident is not None:
                self._thread.join()
            self._remove()

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _make(self) -> None:
        for path in (self._request_path, self._answer_path):
            os.mkfifo(path, 0o600)
            # Both ways: one alone would wait for a peer, or see its end after each script.
            self._fds.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
        with os.fdopen(fd, "w", encoding="ascii") as script:
            script.write(_SCRIPT)

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _remove(self) -> None:
        self._close_fds()
        for path in (self.path, self._request_path, self._answer_path):
            path.unlink(missing_ok=True)
        self._wake_up.close()

    def _run(self) -> None:
        requests, answers = self._fds
        try:
            while self._wake_up.wait_for(requests, select.POLLIN):
                for line in os.read(requests, _REQUEST_BYTES_MAX).splitlines():
                    # What a script that was killed has not read is not for the next one.
                    with contextlib.suppress(BlockingIOError):
                        os.read(answers, _REQUEST_BYTES_MAX)
                    os.write(answers, b"ok\n" if self._may_go_on(line) else b"no\n")
        except BaseException as error:  # noqa: BLE001 - kept, and reported to the owner
            self._first_error.report(error)
        finally:
            # Nobody answers any more: a script that waits sees that.
            self._close_fds()

    def _may_go_on(self, line: bytes) -> bool:
        if not _ACTION.fullmatch(line):
            self._first_error.report(ProtocolError(f"hook: {line[:64]!r} is no action of CRIU"))
            return False
        try:
            action = self._on_action.get(line.decode("ascii"))
            return action is None or action()
        except BaseException as error:  # noqa: BLE001 - kept, and reported to the owner
            self._first_error.report(error)
            return False
