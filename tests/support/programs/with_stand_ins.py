"""Run an example for an engine with a stand-in for the engine: its path, then its arguments.

At the end it prints what was called.
"""

import asyncio
import runpy
import signal
import sys
import types
from pathlib import Path
from typing import Any

from snapagent.workload import handshake
from tests.support.engine_stand_ins import (
    AsyncLLM,
    Recorder,
    SglangEngineStandIn,
    TensorRtLLM,
    sglang_modules,
)

made: list[Recorder] = []


def vllm_modules() -> dict[str, types.ModuleType]:
    names = ("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.v1", "vllm.v1.engine")
    modules = {name: types.ModuleType(name) for name in (*names, "vllm.v1.engine.async_llm")}

    def from_engine_args(engine_args: types.SimpleNamespace) -> AsyncLLM:
        assert engine_args.enable_sleep_mode
        made.append(engine := AsyncLLM())
        return engine

    modules["vllm"].SamplingParams = types.SimpleNamespace  # type: ignore[attr-defined]
    modules[names[2]].AsyncEngineArgs = types.SimpleNamespace  # type: ignore[attr-defined]
    modules["vllm.v1.engine.async_llm"].AsyncLLM = types.SimpleNamespace(  # type: ignore[attr-defined]
        from_engine_args=from_engine_args
    )
    return modules


def sglang_with_engine() -> dict[str, types.ModuleType]:
    def make(**arguments: Any) -> SglangEngineStandIn:
        assert arguments["enable_memory_saver"]
        assert arguments["enable_weights_cpu_backup"]
        engine = SglangEngineStandIn(asyncio.new_event_loop())
        made.append(engine.tokenizer_manager)
        return engine

    modules = sglang_modules()
    modules["sglang"].Engine = make  # type: ignore[attr-defined]
    return modules


def tensorrt_modules() -> dict[str, types.ModuleType]:
    def make(**arguments: Any) -> TensorRtLLM:
        assert arguments["kv_cache_config"]
        made.append(engine := TensorRtLLM())
        return engine

    module = types.ModuleType("tensorrt_llm")
    module.LLM = make  # type: ignore[attr-defined]
    module.SamplingParams = types.SimpleNamespace  # type: ignore[attr-defined]
    return {"tensorrt_llm": module}


def main() -> None:
    """Run it until it is terminated."""
    sys.modules |= vllm_modules() | sglang_with_engine() | tensorrt_modules()
    # Nobody freezes it, so it has to look.
    handshake.LOOK_S = 0.01  # type: ignore[misc]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except KeyboardInterrupt:
        print(*made[0].calls, sep="\n", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
