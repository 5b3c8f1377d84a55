"""Adapters for engines: the right calls in the right order, also after errors."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapagent.workload.engines import SglangEngine, TensorRtEngine, VllmEngine
from snapagent.workload.handshake import Handshake, HandshakeError, HandshakeTimeout, Outcome
from snapagent.workload.procedure import park, park_async
from tests.support.engine_stand_ins import (
    AsyncLLM,
    OutOfOrder,
    SglangEngineStandIn,
    TensorRtLLM,
    sglang_modules,
)

VLLM_PARKING = ["pause_generation abort", "sleep 1", "wake_up ['weights']"]
VLLM = [
    *("check_health", "generate"),
    *VLLM_PARKING,
    *("wake_up None", "resume_generation"),
    *("check_health", "generate"),
]
SGLANG = [
    "generate",
    *("pause_generation abort", "release_memory_occupation"),
    *("resume_memory_occupation", "continue_generation"),
    "generate",
]


class AgentInPlace(Handshake):
    """A handshake whose agent answers as soon as the workload is ready."""

    answer = "restore-complete"

    def __init__(self, directory: str, framework: str) -> None:
        super().__init__(directory, framework)
        self.is_ready = asyncio.Event()

    def announce_ready(self, text: str = "ready") -> None:
        super().announce_ready(text)
        self.is_ready.set()
        assert (Path(self.directory) / "ready-for-snapshot").exists()
        if self.answer:
            (Path(self.directory) / self.answer).write_text("done\n")


@pytest.fixture
def handshake(tmp_path: Path) -> AgentInPlace:
    handshake = AgentInPlace(str(tmp_path), "engine")
    handshake.begin()
    return handshake


def vllm_engine(engine: AsyncLLM, *, keep_weights: bool = True) -> VllmEngine:
    async def probe() -> str:
        return str([found async for found in engine.generate("Hello", None, "probe")])

    return VllmEngine(engine, probe, keep_weights=keep_weights)


def test_vllm(handshake: AgentInPlace) -> None:
    engine = AsyncLLM()
    assert asyncio.run(park_async(handshake, vllm_engine(engine))) is Outcome.RESTORED
    assert engine.calls == VLLM


def test_vllm_without_weights_on_the_gpu(handshake: AgentInPlace) -> None:
    engine = AsyncLLM()
    asyncio.run(park_async(handshake, vllm_engine(engine, keep_weights=False)))
    assert engine.calls == [call for call in VLLM if call != "wake_up ['weights']"]


def test_vllm_that_was_captured_goes_on(handshake: AgentInPlace) -> None:
    handshake.answer = "snapshot-complete"
    engine = AsyncLLM()
    assert asyncio.run(park_async(handshake, vllm_engine(engine))) is Outcome.CAPTURED
    assert engine.calls == VLLM
    with pytest.raises(HandshakeError, match="nothing was restored"):
        handshake.announce_restored()


@pytest.mark.parametrize("at", range(len(VLLM_PARKING)))
def test_vllm_goes_on_when_parking_fails(handshake: AgentInPlace, at: int) -> None:
    engine = AsyncLLM()
    engine.fails_at = VLLM_PARKING[at]
    with pytest.raises(RuntimeError, match="has failed"):
        asyncio.run(park_async(handshake, vllm_engine(engine)))
    assert not (Path(handshake.directory) / "ready-for-snapshot").exists()
    # A pause that failed may not have paused; whoever resumes then is told so, not more.
    assert engine.calls[-1] == "resume_generation"
    assert engine.weights
    assert engine.kv_cache


def test_a_failure_after_the_restore_is_written_down(handshake: AgentInPlace) -> None:
    engine = AsyncLLM()
    engine.fails_at = "resume_generation"
    with pytest.raises(RuntimeError, match="has failed"):
        asyncio.run(park_async(handshake, vllm_engine(engine)))
    told = (Path(handshake.directory) / "engine-restore-error").read_text()
    assert told.startswith("Traceback")
    assert told.endswith("RuntimeError: resume_generation has failed\n")


def test_an_engine_is_resumed_when_nobody_captures_it(handshake: AgentInPlace) -> None:
    handshake.answer = ""
    engine = AsyncLLM()
    with pytest.raises(HandshakeTimeout):
        asyncio.run(park_async(handshake, vllm_engine(engine), timeout_s=0.01))
    assert engine.calls == VLLM[:-2]
    assert not (Path(handshake.directory) / "ready-for-snapshot").exists()


def test_an_engine_is_resumed_when_its_task_is_cancelled(handshake: AgentInPlace) -> None:
    handshake.answer = ""
    engine = AsyncLLM()

    async def cancelled() -> None:
        task = asyncio.create_task(park_async(handshake, vllm_engine(engine)))
        await handshake.is_ready.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert engine.calls == VLLM[:-2]


def test_an_asynchronous_engine_needs_the_asynchronous_form(handshake: AgentInPlace) -> None:
    engine = AsyncLLM()
    with pytest.raises(HandshakeError, match="VllmEngine is made for asyncio: use park_async"):
        park(handshake, vllm_engine(engine))
    assert engine.calls == []


# -- SGLang ---------------------------------------------------------------------------------------


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangEngineStandIn]:
    for name, stand_in in sglang_modules().items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    loop = asyncio.new_event_loop()
    yield SglangEngineStandIn(loop)
    loop.close()


def test_sglang(handshake: AgentInPlace, sglang: SglangEngineStandIn) -> None:
    adapter = SglangEngine(sglang, lambda: sglang.generate("Hello"))
    assert park(handshake, adapter) is Outcome.RESTORED
    assert sglang.calls == SGLANG


def test_sglang_in_an_event_loop(handshake: AgentInPlace, sglang: SglangEngineStandIn) -> None:
    adapter = SglangEngine(sglang, lambda: sglang.async_generate("Hello"), asynchronous=True)
    assert asyncio.run(park_async(handshake, adapter)) is Outcome.RESTORED
    assert sglang.calls == SGLANG


def test_sglang_goes_on_when_memory_cannot_be_released(
    handshake: AgentInPlace, sglang: SglangEngineStandIn
) -> None:
    sglang.tokenizer_manager.fails_at = "release_memory_occupation"
    adapter = SglangEngine(sglang, lambda: sglang.generate("Hello"))
    with pytest.raises(RuntimeError, match="has failed"):
        park(handshake, adapter)
    assert sglang.calls == SGLANG[:-1]
    assert sglang.generate("Hello")["text"]


# -- TensorRT-LLM ---------------------------------------------------------------------------------


def test_tensorrt(handshake: AgentInPlace) -> None:
    engine = TensorRtLLM()
    adapter = TensorRtEngine(lambda: engine.generate(["Hello"], use_tqdm=False))
    assert park(handshake, adapter) is Outcome.RESTORED
    assert engine.calls == ["generate", "generate"]


def test_a_blocking_engine_in_an_event_loop(handshake: AgentInPlace) -> None:
    engine = TensorRtLLM()
    adapter = TensorRtEngine(lambda: engine.generate(["Hello"]))
    assert asyncio.run(park_async(handshake, adapter)) is Outcome.RESTORED


def test_an_engine_that_cannot_answer_is_never_ready(handshake: AgentInPlace) -> None:
    engine = TensorRtLLM()
    engine.fails_at = "generate"
    with pytest.raises(RuntimeError, match="has failed"):
        park(handshake, TensorRtEngine(lambda: engine.generate(["Hello"])))
    assert list(Path(handshake.directory).iterdir()) == []


# -- the stand-ins themselves ---------------------------------------------------------------------


async def vllm_sleeps_awake(engine: AsyncLLM) -> None:
    await engine.sleep()


async def vllm_resumes_without_cache(engine: AsyncLLM) -> None:
    await engine.pause_generation()
    await engine.sleep()
    await engine.wake_up(tags=["weights"])
    await engine.resume_generation()


async def vllm_wakes_awake(engine: AsyncLLM) -> None:
    await engine.wake_up()


@pytest.mark.parametrize("wrong", [vllm_sleeps_awake, vllm_resumes_without_cache, vllm_wakes_awake])
def test_a_wrong_order_is_seen(wrong: Callable[[AsyncLLM], object]) -> None:
    with pytest.raises(OutOfOrder):
        asyncio.run(wrong(AsyncLLM()))  # type: ignore[arg-type]


def test_a_wrong_order_is_seen_by_sglang(sglang: SglangEngineStandIn) -> None:
    adapter = SglangEngine(sglang, lambda: None)
    with pytest.raises(OutOfOrder):
        adapter.park()
