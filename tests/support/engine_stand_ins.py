"""Stand-ins for inference engines: their methods and signatures, and their wrath.

Each keeps the calls that it got, and fails as the engine would, or worse, when they come in an
order that the engine does not allow.
"""

import asyncio
import types
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

TEXT = "Paris"


def output(text: str) -> types.SimpleNamespace:
    """What vLLM and TensorRT-LLM give for one prompt."""
    return types.SimpleNamespace(outputs=[types.SimpleNamespace(text=text)])


class OutOfOrder(Exception):
    """The engine was called in a state that does not allow it."""


class Recorder:
    """Keeps what was called, and can be told to fail at one call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails_at: str | None = None

    def record(self, call: str, *, allowed: bool) -> None:
        self.calls.append(call)
        if not allowed:
            raise OutOfOrder(f"{call} after {self.calls[:-1]}")
        if call == self.fails_at:
            raise RuntimeError(f"{call} has failed")


class AsyncLLM(Recorder):
    """vLLM's engine of that name, version 0.32."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.weights = True
        self.kv_cache = True

    async def generate(
        self, prompt: str, sampling_params: object, request_id: str
    ) -> AsyncIterator[types.SimpleNamespace]:
        del prompt, sampling_params, request_id
        await asyncio.sleep(0)
        self.record("generate", allowed=self.weights and self.kv_cache and not self.paused)
        yield output(TEXT)

    async def pause_generation(
        self,
        *,
        mode: Literal["abort", "wait", "keep"] = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        del wait_for_inflight_requests, clear_cache
        await asyncio.sleep(0)
        self.record(f"pause_generation {mode}", allowed=not self.paused)
        self.paused = True

    async def resume_generation(self) -> None:
        await asyncio.sleep(0)
        self.record("resume_generation", allowed=self.paused and self.weights and self.kv_cache)
        self.paused = False

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        del mode
        await asyncio.sleep(0)
        self.weights = self.kv_cache = False
        self.record(f"sleep {level}", allowed=self.paused)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await asyncio.sleep(0)
        asleep = not (self.weights and self.kv_cache)
        self.record(f"wake_up {tags}", allowed=asleep)
        self.weights |= tags is None or "weights" in tags
        self.kv_cache |= tags is None or "kv_cache" in tags

    async def check_health(self) -> None:
        await asyncio.sleep(0)
        self.record("check_health", allowed=True)

    def shutdown(self, timeout: float | None = None) -> None:
        del timeout
        self.record("shutdown", allowed=True)


@dataclass(kw_only=True)
class PauseGenerationReqInput:
    mode: Literal["abort", "retract", "in_place"] = "abort"


@dataclass(kw_only=True)
class ContinueGenerationReqInput:
    pass


@dataclass(kw_only=True)
class ReleaseMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass(kw_only=True)
class ResumeMemoryOccupationReqInput:
    tags: list[str] | None = None


class TokenizerManager(Recorder):
    """The part of SGLang's engine that its requests go to."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.occupied = True

    async def generate_request(self, obj: object, request: None) -> AsyncIterator[dict[str, Any]]:
        del obj, request
        await asyncio.sleep(0)
        self.record("generate", allowed=self.occupied and not self.paused)
        yield {"text": TEXT}

    async def pause_generation(self, obj: PauseGenerationReqInput) -> None:
        await asyncio.sleep(0)
        self.record(f"pause_generation {obj.mode}", allowed=not self.paused)
        self.paused = True

    async def continue_generation(self, obj: ContinueGenerationReqInput) -> None:
        assert isinstance(obj, ContinueGenerationReqInput)
        await asyncio.sleep(0)
        self.record("continue_generation", allowed=self.paused and self.occupied)
        self.paused = False

    async def release_memory_occupation(
        self, obj: ReleaseMemoryOccupationReqInput, request: None = None
    ) -> None:
        assert isinstance(obj, ReleaseMemoryOccupationReqInput)
        del request
        await asyncio.sleep(0)
        # It has to be idle.
        allowed = self.paused and self.occupied
        self.occupied = False
        self.record("release_memory_occupation", allowed=allowed)

    async def resume_memory_occupation(
        self, obj: ResumeMemoryOccupationReqInput, request: None = None
    ) -> None:
        assert isinstance(obj, ResumeMemoryOccupationReqInput)
        del request
        await asyncio.sleep(0)
        self.record("resume_memory_occupation", allowed=not self.occupied)
        self.occupied = True


class SglangEngineStandIn:
    """SGLang's `Engine`: it blocks on a loop of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.tokenizer_manager = TokenizerManager()

    @property
    def calls(self) -> list[str]:
        return self.tokenizer_manager.calls

    def generate(
        self, prompt: str, sampling_params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        del sampling_params
        return self.loop.run_until_complete(self.async_generate(prompt))

    def shutdown(self) -> None:
        self.tokenizer_manager.record("shutdown", allowed=True)

    async def async_generate(
        self, prompt: str, sampling_params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        del sampling_params
        return await anext(self.tokenizer_manager.generate_request(prompt, None))


class TensorRtLLM(Recorder):
    """TensorRT-LLM's `LLM`, version 1.4."""

    def generate(
        self, inputs: list[str], sampling_params: object = None, *, use_tqdm: bool = True
    ) -> list[types.SimpleNamespace]:
        del sampling_params, use_tqdm
        self.record("generate", allowed=True)
        return [output(TEXT) for _ in inputs]

    def shutdown(self) -> None:
        self.record("shutdown", allowed=True)


def sglang_modules() -> dict[str, types.ModuleType]:
    """Return the modules in which SGLang has its requests."""
    names = ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.io_struct")
    modules = {name: types.ModuleType(name) for name in names}
    requests = modules[names[-1]]
    for kind in (
        PauseGenerationReqInput,
        ContinueGenerationReqInput,
        ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput,
    ):
        setattr(requests, kind.__name__, kind)
    return modules
