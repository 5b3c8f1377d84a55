"""A worker on vLLM that is captured warm and restored.

    SNAPSHOT_CONTROL_DIR=/snapshot-control python examples/vllm_worker.py MODEL --port 8000

Needs vLLM 0.32 and a GPU. Answers `POST /generate` with `{"prompt": "..."}`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from typing import Any

from small_http import Answer, answering, prompt_of

from snapagent.workload.engines import VllmEngine
from snapagent.workload.handshake import Handshake, Outcome
from snapagent.workload.procedure import park_async

FRAMEWORK = "vllm"
TOKENS_MAX = 64


class Worker:
    """Generates text, and numbers its requests."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - of a package that is not there
        """Take an engine that is initialised."""
        self._engine = engine
        self._numbers = itertools.count()

    async def generate(self, prompt: str) -> str:
        """Return the continuation of a prompt."""
        from vllm import SamplingParams  # Slow to load, and not when standing by.

        parameters = SamplingParams(temperature=0.0, max_tokens=TOKENS_MAX)
        last = None
        async for output in self._engine.generate(prompt, parameters, str(next(self._numbers))):
            last = output
        if last is None or not last.outputs[0].text.strip():
            raise RuntimeError("vLLM generated nothing")
        return str(last.outputs[0].text)

    async def probe(self) -> str:
        """Answer one real request."""
        return await self.generate("The capital of France is")

    async def answer(self, path: str, body: bytes) -> Answer:
        """Answer one request of a client."""
        return {"text": await self.generate(prompt_of(path, body))}


async def run(arguments: argparse.Namespace, handshake: Handshake | None) -> None:
    """Start the engine, let it be captured, and serve."""
    # Workers that were forked from a process with threads do not survive a restore.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=arguments.model,
            enable_sleep_mode=True,
            gpu_memory_utilization=arguments.gpu_memory,
            tensor_parallel_size=arguments.tensor_parallel,
        )
    )
    try:
        worker = Worker(engine)
        outcome = None
        if handshake is not None:
            outcome = await park_async(handshake, VllmEngine(engine, worker.probe))
        async with await answering(worker.answer, arguments.host, arguments.port) as server:
            if handshake is not None and outcome is Outcome.RESTORED:
                handshake.announce_restored()
            print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
            await server.serve_forever()
    finally:
        engine.shutdown()


def main() -> None:
    """Read the arguments, and stand by if this process is only the place for a restored one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--gpu-memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS")
    arguments = parser.parse_args()
    handshake = Handshake.from_environment(FRAMEWORK)
    if handshake is not None:
        if handshake.standby:
            handshake.stand_by()
        handshake.begin()
    asyncio.run(run(arguments, handshake))


if __name__ == "__main__":
    main()
