"""CRIU's action scripts as calls into the agent, which can say no.

CRIU runs a program at certain points of its work and waits for it; at some of them it gives up
when the program fails. Ours is a shell script that tells the agent the point and waits for its
answer, over two FIFOs beside it. CRIU closes all descriptors before it runs the script, so that
the script has to find them by its own path.

If the agent dies, its end of the FIFOs closes and the script fails at once: a dump that nobody
made durable leaves its source running.
"""

from __future__ import annotations

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
printf '%s %s\\n' $$ "$CRTOOLS_SCRIPT_ACTION" >&3
# What was meant for a script that did not live to read it is skipped.
while read -r asker answer <&5; do
    [ "$asker" = $$ ] || continue
    [ "$answer" = ok ]
    exit
done
exit 1
"""

_REQUEST = re.compile(rb"([0-9]{1,10}) (.*)")
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
                    self._answer(line, answers)
        except BaseException as error:  # noqa: BLE001 - kept, and reported to the owner
            self._first_error.report(error)
        finally:
            # Nobody answers any more: a script that waits sees that.
            self._close_fds()

    def _answer(self, line: bytes, answers: int) -> None:
        """Answer one request: the process that asks, and CRIU's action."""
        request = _REQUEST.fullmatch(line)
        if request is None:
            self._first_error.report(ProtocolError(f"hook: {line[:64]!r} is no request of ours"))
            return
        asker, action = request.groups()
        os.write(answers, asker + (b" ok\n" if self._may_go_on(action) else b" no\n"))

    def _may_go_on(self, action: bytes) -> bool:
        if not _ACTION.fullmatch(action):
            self._first_error.report(ProtocolError(f"hook: {action[:64]!r} is no action of CRIU"))
            return False
        try:
            ask = self._on_action.get(action.decode("ascii"))
            return ask is None or ask()
        except BaseException as error:  # noqa: BLE001 - kept, and reported to the owner
            self._first_error.report(error)
            return False
