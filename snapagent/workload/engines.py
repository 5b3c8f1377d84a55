"""Adapters: which calls park and resume an inference engine. Nothing of the engines is imported.

They were written against vLLM 0.32 (`AsyncLLM`), SGLang as of November 2026 (`Engine`; its pause
requests came after 0.5.5) and TensorRT-LLM 1.4.0rc1 (`LLM`). Each takes a `probe`, which lets the
engine answer one real request and raises if the answer is empty: engines make much only then.
"""

from __future__ import annotations

import gc
import importlib
import inspect
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["SglangEngine", "TensorRtEngine", "VllmAsyncLLM", "VllmEngine"]


class VllmAsyncLLM(Protocol):
    """What the adapter uses of `vllm.v1.engine.async_llm.AsyncLLM`."""

    async def pause_generation(self) -> None:
        """Abort what is under way and schedule nothing more."""

    async def resume_generation(self) -> None:
        """Schedule again."""

    async def sleep(self, level: int = 1) -> None:
        """Give up the KV cache, and with level 1 move the weights to host memory."""

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Get back memory: `weights`, `kv_cache`, or all of it."""

    async def check_health(self) -> None:
        """Raise if the engine is dead."""


class VllmEngine:
    """vLLM's `AsyncLLM`, made with `enable_sleep_mode=True`. Use it with `park_async`."""

    def __init__(
        self,
        engine: VllmAsyncLLM,
        probe: Callable[[], Awaitable[object]],
        *,
        keep_weights: bool = True,
    ) -> None:
        """Take an engine that is initialised.

        Args:
            engine: The engine.
            probe: Generates something with it.
            keep_weights: Whether weights are on the GPU when it is captured; else in host memory.
        """
        self._engine = engine
        self._probe = probe
        self._keep_weights = keep_weights
        self._paused = False
        self._asleep = False

    async def quiesce(self) -> None:
        """Abort what is under way; new requests wait."""
        self._paused = True
        await self._engine.pause_generation()

    async def park(self) -> None:
        """Give up the KV cache. Sleeping takes the weights away as well, so they are fetched."""
        self._asleep = True
        await self._engine.sleep(level=1)
        if self._keep_weights:
            await self._engine.wake_up(tags=["weights"])

    async def resume(self) -> None:
        """Get all memory back, and let requests go on."""
        if self._asleep:
            await self._engine.wake_up()
            self._asleep = False
        if self._paused:
            await self._engine.resume_generation()
            self._paused = False

    async def check(self) -> None:
        """Ask the engine, then generate."""
        await self._engine.check_health()
        await self._probe()


class SglangEngine:
    """SGLang's `Engine`, made with `enable_memory_saver=True` and `enable_weights_cpu_backup=True`.

    Its own methods block on its event loop, and must be called on the thread that made it: for
    `park`. In a server that runs on this very loop use `park_async` with `asynchronous`, which
    awaits the same requests of its tokenizer manager.
    """

    REQUESTS = "sglang.srt.managers.io_struct"

    def __init__(
        self,
        engine: Any,  # noqa: ANN401 - of a package that is not there
        probe: Callable[[], object],
        *,
        asynchronous: bool = False,
    ) -> None:
        """Take an engine that is initialised; the probe may give something to await."""
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._probe = probe
        self._asynchronous = asynchronous
        self._requests = importlib.import_module(self.REQUESTS)
        self._paused = False
        self._released = False

    def quiesce(self) -> Awaitable[None] | None:
        """Abort what is under way: memory can only be released when nothing runs."""
        return self._run(self._quiesce())

    def park(self) -> Awaitable[None] | None:
        """Release the KV cache, and the weights to their copy in host memory."""
        return self._run(self._park())

    def resume(self) -> Awaitable[None] | None:
        """Get memory back, and go on with requests."""
        return self._run(self._resume())

    def check(self) -> Awaitable[None] | None:
        """Generate: the engine has no other way to say that it is well."""
        answer = self._probe()
        return _discarded(answer) if inspect.isawaitable(answer) else None

    def _run(self, step: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
        if self._asynchronous:
            return step
        self._engine.loop.run_until_complete(step)
        return None

    async def _quiesce(self) -> None:
        self._paused = True
        await self._manager.pause_generation(self._requests.PauseGenerationReqInput(mode="abort"))

    async def _park(self) -> None:
        self._released = True
        await self._manager.release_memory_occupation(
            self._requests.ReleaseMemoryOccupationReqInput(), None
        )

    async def _resume(self) -> None:
        if self._released:
            await self._manager.resume_memory_occupation(
                self._requests.ResumeMemoryOccupationReqInput(), None
            )
            self._released = False
        if self._paused:
            await self._manager.continue_generation(self._requests.ContinueGenerationReqInput())
            self._paused = False


class TensorRtEngine:
    """TensorRT-LLM's `LLM`, which has no pause and no sleep: it is idle when `generate` is back.

    Its KV cache is part of the snapshot; make it small with `kv_cache_config`. The caller sees to
    it that no other thread generates.
    """

    def __init__(self, probe: Callable[[], object]) -> None:
        """Take what generates with the engine."""
        self._probe = probe

    def quiesce(self) -> None:
        """Nothing is under way."""

    def park(self) -> None:
        """Let go of what the last generations left, some of which holds GPU memory."""
        gc.collect()

    def resume(self) -> None:
        """Nothing was given back."""

    def check(self) -> None:
        """Generate."""
        self._probe()


async def _discarded(answer: Awaitable[object]) -> None:
    await answer
