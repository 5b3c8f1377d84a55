"""What stands in for `LazyPages` where CRIU loads all memory itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapagent.lazy.stats import LazyStats

if TYPE_CHECKING:
    from snapagent.lazy.stats import PageRun

__all__ = ["NothingLazy"]


class NothingLazy:
    """Nothing is missing once CRIU has ended: there is nothing to do, and nothing to wait for."""

    @property
    def stats(self) -> LazyStats:
        """Zeros."""
        return LazyStats()

    @property
    def recorded_order(self) -> list[PageRun]:
        """None: nothing is asked for."""
        return []

    def start(self) -> None:
        """Do nothing."""

    def start_fill(self) -> None:
        """Do nothing."""

    def wait_filled(self, timeout_s: float | None = None) -> bool:
        """Say that nothing is missing."""
        del timeout_s
        return True

    def close(self) -> None:
        """Do nothing."""
