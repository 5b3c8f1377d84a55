"""Doing a few things that wait for a store at the same time."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["in_parallel"]

_Result = TypeVar("_Result")


def in_parallel(work: Callable[[int], _Result], count: int, *, threads: int) -> list[_Result]:
    """Call `work` with 0 to `count - 1`; gives the results in order, or raises the first error.

    Unlike those of an executor its threads do not hold up the end of the program.
    """
    results: dict[int, _Result] = {}
    errors: list[BaseException] = []
    numbers = itertools.count()

    def run() -> None:
        for number in numbers:
            if number >= count or errors:
                return
            try:
                results[number] = work(number)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

    helpers = [
        threading.Thread(target=run, daemon=True, name="mount-tables")
        for _ in range(min(threads, count) - 1)
    ]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(count)]
