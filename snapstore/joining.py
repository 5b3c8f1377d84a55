"""Waiting for threads that use what is closed after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection
    from concurrent.futures import Future

__all__ = ["wait_for_all"]

_T = TypeVar("_T")


def wait_for_all(futures: Collection[Future[_T]]) -> None:
    """Return once all have ended, whatever they ended with.

    A second Ctrl-C would otherwise break the wait after the first one: then descriptors were closed
    that the threads still use. It is raised when all have ended. Futures are waited for, and not
    threads, since CPython 3.11 takes a thread for ended whose `join` was interrupted.
    """
    interrupted: KeyboardInterrupt | None = None
    while not all(future.done() for future in futures):
        try:
            for future in futures:
                future.exception()
        except KeyboardInterrupt as interrupt:
            interrupted = interrupt
    if interrupted is not None:
        raise interrupted
