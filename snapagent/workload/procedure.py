"""Taking an engine through a capture and a restore, in the one order that is safe.

One real generation, so that whatever is made lazily is in the snapshot; no new requests; caches
given back; ready. After the restore: caches again, requests again, one real generation, serve.

An engine is blocking or made for asyncio; the steps are the same and are written once.
"""

from __future__ import annotations

import inspect
import traceback
from typing import TYPE_CHECKING, Protocol

from snapagent.workload.handshake import READY, Handshake, HandshakeError, Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Engine", "park", "park_async"]


class Engine(Protocol):
    """What can be parked. Each step either does it, or returns something to await.

    Adapters for engines are in `snapagent.workload.engines`; a server of your own has these four.
    """

    def quiesce(self) -> Awaitable[None] | None:
        """Take no more requests, and end or finish those under way."""

    def park(self) -> Awaitable[None] | None:
        """Give back what need not be in a snapshot, such as the KV cache."""

    def resume(self) -> Awaitable[None] | None:
        """Undo as much of `park` and `quiesce` as was done; also after one of them has failed."""

    def check(self) -> Awaitable[None] | None:
        """Answer one real request; raises if it cannot."""


def park(handshake: Handshake, engine: Engine, timeout_s: float | None = None) -> Outcome:
    """Let an engine be captured, block until it is in its next life, and wake it up there.

    Call `handshake.begin` before the engine is made, and `handshake.announce_restored` once it
    serves again.

    Args:
        handshake: Has been begun.
        engine: Initialised, and of the blocking kind.
        timeout_s: As in `Handshake.wait`.

    Returns:
        Whether this is a restored life. The engine takes requests in either.

    Raises:
        HandshakeError: as from `Handshake.wait`; the engine takes requests again.
        Exception: what a step of the engine raised. Before the capture, the engine was resumed and
            nothing says that it is ready. After the restore, the reason stands in
            `<framework>-restore-error` too.
    """

    async def wait() -> Outcome:
        return handshake.wait(timeout_s)

    async def finish(step: Awaitable[None] | None) -> None:
        if step is not None:
            if inspect.iscoroutine(step):
                step.close()
            raise HandshakeError(f"{type(engine).__name__} is made for asyncio: use park_async")

    # As nothing in it waits for an event loop, the first push takes it to its end.
    steps = _steps(handshake, engine, wait, finish)
    try:
        steps.send(None)
    except StopIteration as end:
        return Outcome(end.value)
    raise AssertionError("a blocking procedure has waited for an event loop")


async def park_async(
    handshake: Handshake, engine: Engine, timeout_s: float | None = None
) -> Outcome:
    """Do as `park` does in an event loop, which goes on meanwhile.

    Steps of a blocking engine block the loop. If the task is cancelled while it waits, the engine
    takes requests again.
    """

    async def wait() -> Outcome:
        return await handshake.wait_async(timeout_s)

    async def finish(step: Awaitable[None] | None) -> None:
        if step is not None:
            await step

    return await _steps(handshake, engine, wait, finish)


async def _steps(
    handshake: Handshake,
    engine: Engine,
    wait: Callable[[], Awaitable[Outcome]],
    finish: Callable[[Awaitable[None] | None], Awaitable[None]],
) -> Outcome:
    await finish(engine.check())
    try:
        await finish(engine.quiesce())
        await finish(engine.park())
        handshake.announce_ready()
        try:
            outcome = await wait()
        except BaseException as error:
            _withdraw(handshake, error)
            raise
    except BaseException as error:
        # As if nobody had wanted a snapshot.
        try:
            await finish(engine.resume())
        except Exception as second:  # noqa: BLE001 - the first one counts
            error.add_note(f"the engine could not be resumed after that: {second!r}")
        raise
    try:
        await finish(engine.resume())
        await finish(engine.check())
    except BaseException as error:
        if outcome is Outcome.RESTORED:
            _tell(handshake, error)
        raise
    return outcome


def _withdraw(handshake: Handshake, error: BaseException) -> None:
    try:
        handshake.withdraw()
    except HandshakeError as second:
        # It may have been captured and restored in the very moment in which the wait was ended.
        error.add_note(f"nor could {READY} be taken back: {second}")


def _tell(handshake: Handshake, error: BaseException) -> None:
    try:
        handshake.announce_failure("".join(traceback.format_exception(error)))
    except HandshakeError as second:
        error.add_note(f"nor could that be told to the agent: {second}")
