"""What stands in the way of a capture or a restore, and the error that it becomes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from typing_extensions import override

from snapagent.errors import PreflightFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Obstacle", "Obstacles", "obstacles_json", "require"]

SUBJECTS_MAX = 20
"""Of one kind, so that a process with a million open files does not fill a screen."""
SHOWN_MAX = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Obstacle:
    """One thing that forbids what is asked, or that deserves a word before it is done.

    Attributes:
        code: A stable word for the kind; `docs/preflight.md` lists them all.
        subject: Which object it is about, in words a person can look for.
        remedy: What to do about it.
        blocking: Whether it cannot be done as long as this is so; otherwise it is a warning.
    """

    code: str
    subject: str
    remedy: str
    blocking: bool = True

    @override
    def __str__(self) -> str:
        kind = "" if self.blocking else "warning: "
        return f"{kind}{self.code}: {self.subject}; {self.remedy}"


class Obstacles:
    """Collects obstacles: no two equal ones, and of each kind a bounded number."""

    def __init__(self) -> None:
        self._found: dict[Obstacle, None] = {}
        self._counts: dict[tuple[str, bool], int] = {}

    def block(self, code: str, subject: str, remedy: str) -> None:
        """Add what forbids it."""
        self._add(Obstacle(code, subject, remedy))

    def warn(self, code: str, subject: str, remedy: str) -> None:
        """Add what only deserves a word."""
        self._add(Obstacle(code, subject, remedy, blocking=False))

    def add(self, code: str, subject: str, remedy: str, *, blocking: bool) -> None:
        """Add either."""
        self._add(Obstacle(code, subject, remedy, blocking=blocking))

    def extend(self, obstacles: Iterable[Obstacle]) -> None:
        """Add those that another check found."""
        for one in obstacles:
            self._add(one)

    def _add(self, obstacle: Obstacle) -> None:
        if obstacle in self._found:
            return
        key = (obstacle.code, obstacle.blocking)
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] <= SUBJECTS_MAX:
            self._found[obstacle] = None

    def result(self) -> list[Obstacle]:
        """Return them, those that forbid it first, otherwise in the order in which they came."""
        found = list(self._found)
        for (code, blocking), count in self._counts.items():
            if count > SUBJECTS_MAX:
                more = f"{count - SUBJECTS_MAX} more like these"
                found.append(Obstacle(code, more, "deal with all of them", blocking=blocking))
        return sorted(found, key=lambda one: not one.blocking)


def require(obstacles: Sequence[Obstacle], *, of: str = "", done: str = "done") -> None:
    """Go on only if nothing forbids it.

    Args:
        obstacles: What a check found.
        of: What was checked, for the message: `process 17`, `snapshot a:b`.
        done: What was to be done with it: `captured`, `restored`.

    Raises:
        PreflightFailed: Something forbids it. The message has a line for each such obstacle, with
            its remedy.
    """
    blocking = [one for one in obstacles if one.blocking]
    if not blocking:
        return
    lines = [f"- {one.code}: {one.subject}; {one.remedy}" for one in blocking[:SHOWN_MAX]]
    if len(blocking) > SHOWN_MAX:
        lines.append(f"- and {len(blocking) - SHOWN_MAX} more")
    head = f"{of} cannot be {done} here:" if of else "this cannot be done here:"
    raise PreflightFailed(
        "\n".join([head, *lines]),
        next_step="do what each line says, and check again with `snapagent preflight`",
    )


def obstacles_json(obstacles: Sequence[Obstacle]) -> list[dict[str, object]]:
    """Return obstacles as plain JSON values."""
    return [dataclasses.asdict(one) for one in obstacles]
