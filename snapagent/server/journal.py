"""What is under way, written down so that the next start knows what a killed daemon had begun.

One small file for each job that has not ended, replaced at each of its states.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from snapagent import api
from snapstore.clock import SystemClock, format_utc

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Journal"]

FILE_BYTES_MAX: Final = 1 << 20
JOBS_MAX: Final = 8192
_NAME = re.compile(r"([0-9a-f]{16})\.json")


class Journal:
    """A directory of files. Each is written by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, answer: api.CaptureJob | api.RestoreJob) -> None:
        """Write a job down as it is. Where that cannot be, the work goes on and the log tells."""
        path = self._directory / f"{answer.id}.json"
        new = path.with_suffix(".new")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_bytes(msgspec.json.encode(answer))
            new.replace(path)
        except OSError as error:
            _say(f"cannot write {path}: {error}")

    def remove(self, job_id: str) -> None:
        """Forget a job that has ended."""
        with contextlib.suppress(OSError):
            (self._directory / f"{job_id}.json").unlink()

    def names(self) -> list[str]:
        """Return the ids of what is written down."""
        with contextlib.suppress(FileNotFoundError):
            found = [_NAME.fullmatch(path.name) for path in self._directory.iterdir()]
            return sorted(match[1] for match in found if match is not None)
        return []

    def take_left(self, reasons: Mapping[str, str]) -> list[api.CaptureJob | api.RestoreJob]:
        """Return what was under way when an earlier daemon was killed, as interrupted; forget it.

        Args:
            reasons: Why, by id, as far as somebody lived to tell it.
        """
        found: list[api.CaptureJob | api.RestoreJob] = []
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self._directory.iterdir())[:JOBS_MAX]:
                match = _NAME.fullmatch(path.name)
                if match is not None:
                    try:
                        found.append(_interrupted(path, reasons.get(match[1])))
                    except (OSError, msgspec.DecodeError) as error:
                        _say(f"{path} makes no sense: {error}")
                path.unlink(missing_ok=True)
        return found


def _say(text: str) -> None:
    print(f"snapagent: {text}", file=sys.stderr)  # noqa: T201


def _interrupted(path: Path, reason: str | None) -> api.CaptureJob | api.RestoreJob:
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX)
    job = msgspec.json.decode(data, type=api.CaptureJob | api.RestoreJob)
    error = api.ErrorBody(
        code="DaemonLost",
        exit_code=1,
        message=f"the agent was killed in {job.state}" + (f": {reason}" if reason else ""),
        next_step="begin it again: nothing of it is left",
        retryable=True,
    )
    now = format_utc(SystemClock().now_ns())
    fields = msgspec.structs.asdict(job)
    steps = [*fields["steps"], {"state": "interrupted", "at": now}]
    kind = "capture" if isinstance(job, api.CaptureJob) else "restore"
    fields |= {
        "kind": kind,
        "state": "interrupted",
        "steps": steps,
        "error": error,
        "progress": None,
    }
    return api.job_of(fields | {"version": job.version + 1})
