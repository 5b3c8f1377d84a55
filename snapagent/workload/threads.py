"""Calls that block, in programs that run on an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["on_a_thread"]

T = TypeVar("T")


async def on_a_thread(call: Callable[[], T], stop: Callable[[], None]) -> T:
    """Run a call on a thread of its own, which has ended when this returns, however it does.

    Args:
        call: What blocks.
        stop: Lets it return soon, whatever it was waiting for; called if the task is cancelled.
    """
    loop = asyncio.get_running_loop()
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="waiting") as pool:
        future = loop.run_in_executor(pool, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop()
            # Whatever it says now, the task was cancelled.
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await future
            raise
