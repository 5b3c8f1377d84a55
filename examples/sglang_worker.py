"""A worker on SGLang that is captured warm and restored.

    SNAPSHOT_CONTROL_DIR=/snapshot-control python examples/sglang_worker.py MODEL --port 8000

Needs SGLang (later than 0.5.5) and a GPU. Answers `POST /generate` with `{"prompt": "..."}`.
"""

from __future__ import annotations

import argparse
from typing import Any

from small_http import Answer, answering, prompt_of

from snapagent.workload.engines import SglangEngine
from snapagent.workload.handshake import Handshake, Outcome
from snapagent.workload.procedure import park_async

FRAMEWORK = "sglang"
TOKENS_MAX = 64


class Worker:
    """Generates text on the engine's own event loop."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - of a package that is not there
        """Take an engine that is initialised."""
        self._engine = engine

    async def generate(self, prompt: str) -> str:
        """Return the continuation of a prompt."""
        parameters = {"temperature": 0, "max_new_tokens": TOKENS_MAX}
        result = await self._engine.async_generate(prompt, sampling_params=parameters)
        text = str(result["text"])
        if not text.strip():
            raise RuntimeError("SGLang generated nothing")
        return text

    async def probe(self) -> str:
        """Answer one real request."""
        return await self.generate("The capital of France is")

    async def answer(self, path: str, body: bytes) -> Answer:
        """Answer one request of a client."""
        return {"text": await self.generate(prompt_of(path, body))}


async def run(engine: Any, arguments: argparse.Namespace, handshake: Handshake | None) -> None:  # noqa: ANN401
    """Let the engine be captured, and serve."""
    worker = Worker(engine)
    outcome = None
    if handshake is not None:
        adapter = SglangEngine(engine, worker.probe, asynchronous=True)
        outcome = await park_async(handshake, adapter)
    async with await answering(worker.answer, arguments.host, arguments.port) as server:
        if handshake is not None and outcome is Outcome.RESTORED:
            handshake.announce_restored()
        print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


def main() -> None:
    """Read the arguments, and stand by if this process is only the place for a restored one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS")
    arguments = parser.parse_args()
    handshake = Handshake.from_environment(FRAMEWORK)
    if handshake is not None:
        if handshake.standby:
            handshake.stand_by()
        handshake.begin()
    import sglang  # Slow to load, and not needed when standing by.

    engine = sglang.Engine(
        model_path=arguments.model,
        tp_size=arguments.tensor_parallel,
        # Without these two, neither can memory be released nor do weights come back.
        enable_memory_saver=True,
        enable_weights_cpu_backup=True,
    )
    try:
        engine.loop.run_until_complete(run(engine, arguments, handshake))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
