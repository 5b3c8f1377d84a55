"""What tests capture and restore: a process and all that comes of it, found by its folder."""

import contextlib
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.processes import end_processes_in, processes_in
from tests.support.waiting import wait_until

__all__ = ["Living"]

READY_S_MAX = 120
ENDED_S_MAX = 60


class Living(ABC):
    """Processes in a folder, in whatever life they are. Leaving the context ends them.

    The first life is a child of the test, which leads a session and has files as standard streams.
    Those that CRIU restores are somebody else's, and are told by their working directory.
    """

    home: Path
    pid: int
    """Its first process, as it was started."""

    def begin(
        self, home: Path, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the first life in an existing folder; returns when it answers.

        Raises:
            RuntimeError: It has ended instead; the message is what it said.
            TimeoutError: It does not answer in time.
        """
        self.home = home
        with (home / "output.txt").open("ab") as output:
            self._first_life = subprocess.Popen(  # noqa: S603 - no shell
                command,
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._first_life.pid
        try:
            wait_until(self._answers_first, f"what lives in {home} answers", seconds=READY_S_MAX)
        except BaseException:
            self.end()
            raise

    def _answers_first(self) -> bool:
        if self._first_life.poll() is not None:
            output = (self.home / "output.txt").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"it ended with status {self._first_life.returncode}:\n{output}")
        return self.answers()

    @abstractmethod
    def answers(self) -> bool:
        """Tell whether somebody listens, without waiting."""

    def processes(self) -> list[int]:
        """Return the ids of its living processes as seen from here."""
        return processes_in(self.home)

    def exit_code(self) -> int:
        """Wait for the end of the first life."""
        return self._first_life.wait(ENDED_S_MAX)

    def end(self) -> None:
        """Kill all of it. May be called at any time and again."""
        end_processes_in(self.home)
        # If it never was in `home`, or is dead already and nobody has asked.
        with contextlib.suppress(ProcessLookupError):
            self._first_life.kill()
        self._first_life.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
