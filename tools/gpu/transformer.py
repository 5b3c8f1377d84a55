"""A workload for captures: a transformer with random weights in external GPU memory.

    python -m tools.gpu.transformer CONTROL BROKER GIB DEVICES [plain] [uncompiled]

Needs torch with CUDA. Its layers are spread over so many GPUs; it runs as a CUDA graph and compiled
by `torch.compile`. At the Unix socket CONTROL each connection brings one word and gets one line:
`release` and `resume` are for captures, `outputs` runs all of it and says digests, `weights` says a
digest of every weight. `plain` memory is CUDA's own, which the driver's checkpoint has to carry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch  # type: ignore[import-not-found,unused-ignore]

from snapagent.workload import TorchPool
from tools.gpu.serving import serve

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN = 4096
HEADS = 32
TOKENS = 16
_BYTES_PER_LAYER = 12 * HIDDEN * HIDDEN * 2


class Layer(torch.nn.Module):  # type: ignore[misc,no-any-unimported,unused-ignore]
    """Attention and a perceptron."""

    def __init__(self, device: str) -> None:
        super().__init__()
        kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "bias": False}
        self.norms = torch.nn.ModuleList(
            torch.nn.LayerNorm(HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self.query = torch.nn.Linear(HIDDEN, 3 * HIDDEN, **kind)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN, **kind)
        self.up = torch.nn.Linear(HIDDEN, 4 * HIDDEN, **kind)
        self.down = torch.nn.Linear(4 * HIDDEN, HIDDEN, **kind)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - torch has no types here
        """Run it."""
        batch, tokens, _ = x.shape
        parts = self.query(self.norms[0](x)).view(batch, tokens, 3, HEADS, HIDDEN // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, tokens, HIDDEN))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Workload:
    """The model, its inputs, and what was made of them."""

    def __init__(self, broker: str, gib: float, devices: int, wishes: Sequence[str]) -> None:
        torch.manual_seed(7)
        began = time.perf_counter()
        self.pool = (
            None if "plain" in wishes else TorchPool(socket_path=broker, devices=range(devices))
        )
        count = max(devices, round(gib * (1 << 30) / _BYTES_PER_LAYER))
        place = self.pool.use() if self.pool is not None else contextlib.nullcontext()
        with place, torch.no_grad():
            self.layers = [Layer(f"cuda:{number * devices // count}") for number in range(count)]
            for layer in self.layers:
                for parameter in layer.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(std=0.02)
        self.devices = devices
        self.parts = [
            torch.nn.Sequential(*(one for one in self.layers if _device(one) == number))
            for number in range(devices)
        ]
        self.inputs = [
            torch.randn(1, TOKENS, HIDDEN, device=f"cuda:{number}", dtype=torch.bfloat16)
            for number in range(devices)
        ]
        with torch.no_grad():
            self.graphs = [self._capture(number) for number in range(devices)]
            is_compiled = "uncompiled" not in wishes
            self.compiled = [
                torch.compile(part[0]) if is_compiled else part[0] for part in self.parts
            ]
            self.reference = self.outputs()
        self.made_s = time.perf_counter() - began

    def _capture(self, number: int) -> tuple[Any, Any]:
        part, x = self.parts[number], self.inputs[number]
        with torch.cuda.device(number):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    part(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = part(x)
        return graph, out

    def outputs(self) -> str:
        """Run graphs, compiled layers and plain ones; say digests of what they give."""
        found = []
        with torch.no_grad():
            for number in range(self.devices):
                with torch.cuda.device(number):
                    graph, out = self.graphs[number]
                    out.zero_()
                    graph.replay()
                    x = self.inputs[number]
                    results = [out, self.compiled[number](x), self.parts[number](x)]
                    torch.cuda.synchronize()
                    found += [_digest(one) for one in results]
        return json.dumps(found)

    def weights(self) -> str:
        """Sum every weight up, as integers, in two ways."""
        digest = hashlib.sha256()
        for layer in self.layers:
            for parameter in layer.parameters():
                words = parameter.detach().view(torch.int16).flatten()
                digest.update(str(int(words.sum(dtype=torch.int64))).encode())
                digest.update(str(int(words[::3].sum(dtype=torch.int64))).encode())
        return digest.hexdigest()

    def facts(self) -> str:
        """Say how large it is."""
        free = [torch.cuda.mem_get_info(number)[0] for number in range(self.devices)]
        return json.dumps(
            {
                "layers": len(self.layers),
                "external_bytes": self.pool.memory.size_bytes if self.pool is not None else 0,
                "torch_reserved_bytes": [
                    torch.cuda.memory_reserved(number) for number in range(self.devices)
                ],
                "free_bytes": free,
                "made_s": self.made_s,
                "torch": torch.__version__,
            }
        )

    def release(self) -> str:
        """Let go of the memory."""
        began = time.perf_counter()
        if self.pool is not None:
            self.pool.release()
        return str(time.perf_counter() - began)

    def resume(self) -> str:
        """Get it back."""
        began = time.perf_counter()
        if self.pool is not None:
            self.pool.resume(120)
        return str(time.perf_counter() - began)


def _device(layer: Layer) -> int:
    index: int = layer.out.weight.device.index
    return index


def _digest(tensor: Any) -> str:  # noqa: ANN401 - torch has no types here
    raw = tensor.detach().contiguous().view(torch.int16).cpu().numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def main(control: str, broker: str, gib: str, devices: str, *wishes: str) -> None:
    """Make it, and answer for ever."""
    workload = Workload(broker, float(gib), int(devices), wishes)
    serve(control, lambda word: str(getattr(workload, word)()))


if __name__ == "__main__":
    main(*sys.argv[1:])
