"""What a daemon that was killed has left: found and removed by the next start.

The supervisors have ended half-done restores and let captured processes go on by then, or are about
to: a directory whose supervisor still works in it is locked, and waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from snapagent.history import ENTRIES_MAX, History, read_history
from snapagent.recorded import collect_reasons
from snapagent.server.journal import Journal
from snapagent.workdir import remove_abandoned
from snapstore.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapagent.config import AgentConfig
    from snapagent.server.jobs import AnyAnswer

__all__ = ["Leftovers", "clean_up"]

SUPERVISORS_S_MAX: Final = 20.0
_POLL_S = 0.05


class Leftovers:
    """What was found.

    Attributes:
        jobs: What was under way, now interrupted.
        directories: Names of work directories that had to be removed, as nobody else had.
        reasons: How many supervisors had written why they ended something.
        busy: Work directories in which somebody still works, such as a command without a daemon.
    """

    def __init__(
        self, jobs: list[AnyAnswer], directories: list[str], reasons: int, busy: list[str]
    ) -> None:
        self.jobs = jobs
        self.directories = directories
        self.reasons = reasons
        self.busy = busy


def clean_up(config: AgentConfig, warn: Callable[[str], None]) -> Leftovers:
    """Remove what is left, write down what is known of it, and return it.

    Where jobs were under way, waits a while for their supervisors to have done their part.
    """
    journal = Journal(config.jobs_directory)
    unfinished = journal.names()
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + SUPERVISORS_S_MAX
    removed, busy = remove_abandoned(config)
    while busy and unfinished and clock.monotonic_s() < deadline_s:
        clock.sleep_s(_POLL_S)
        more, busy = remove_abandoned(config)
        removed += more
    history = History(config.history_file, warn=warn)
    reasons = collect_reasons(config, history)
    try:
        entries = read_history(config.history_file, limit=ENTRIES_MAX)
    except OSError as error:
        warn(f"the record cannot be read: {error}")
        entries = []
    told = {entry.id: entry.reason for entry in entries if entry.reason}
    return Leftovers(journal.take_left(told), removed, reasons, busy)
