"""A worker on TensorRT-LLM that is captured warm and restored.

    SNAPSHOT_CONTROL_DIR=/snapshot-control python examples/trtllm_worker.py MODEL --port 8000

Needs TensorRT-LLM 1.4 and a GPU. Answers `POST /generate` with `{"prompt": "..."}`, one request
after the other. The KV cache is in the snapshot: `--kv-cache` keeps it small.
"""

from __future__ import annotations

import argparse
from typing import Any

from small_http import Answer, answering_alone, prompt_of

from snapagent.workload.engines import TensorRtEngine
from snapagent.workload.handshake import Handshake, Outcome
from snapagent.workload.procedure import park

FRAMEWORK = "trtllm"
TOKENS_MAX = 64


class Worker:
    """Generates text, and blocks meanwhile."""

    def __init__(self, engine: Any, parameters: Any) -> None:  # noqa: ANN401 - of a package not there
        """Take an engine that is initialised, and its sampling parameters."""
        self._engine = engine
        self._parameters = parameters

    def generate(self, prompt: str) -> str:
        """Return the continuation of a prompt."""
        (result,) = self._engine.generate([prompt], self._parameters, use_tqdm=False)
        text = str(result.outputs[0].text)
        if not text.strip():
            raise RuntimeError("TensorRT-LLM generated nothing")
        return text

    def probe(self) -> str:
        """Answer one real request."""
        return self.generate("The capital of France is")

    def answer(self, path: str, body: bytes) -> Answer:
        """Answer one request of a client."""
        return {"text": self.generate(prompt_of(path, body))}


def main() -> None:
    """Start the engine, let it be captured, and serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--kv-cache", type=float, default=0.1, help="share of the free GPU memory")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS")
    arguments = parser.parse_args()
    handshake = Handshake.from_environment(FRAMEWORK)
    if handshake is not None:
        if handshake.standby:
            handshake.stand_by()
        handshake.begin()
    from tensorrt_llm import LLM, SamplingParams  # Slow, not when standing by.

    engine = LLM(
        model=arguments.model,
        tensor_parallel_size=arguments.tensor_parallel,
        kv_cache_config={"free_gpu_memory_fraction": arguments.kv_cache},
    )
    try:
        worker = Worker(engine, SamplingParams(temperature=0.0, max_tokens=TOKENS_MAX))
        outcome = park(handshake, TensorRtEngine(worker.probe)) if handshake is not None else None

        def listening() -> None:
            if handshake is not None and outcome is Outcome.RESTORED:
                handshake.announce_restored()
            print("listening", flush=True)

        answering_alone(worker.answer, arguments.host, arguments.port, listening)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
