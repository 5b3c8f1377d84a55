"""What a snapshot says of GPUs, which is hostile until it was checked."""

import copy
from typing import Any

import pytest

from snapagent.errors import AgentError
from snapagent.gpu.facts import CudaFacts, GpuFacts, cuda_placement, read_cuda_facts

UUID = "GPU-00000007-0000-0000-0000-00000000000"
FACTS = CudaFacts(
    cuda=13000,
    driver="580.159.04",
    gpus=tuple(
        GpuFacts(uuid=f"{UUID}{number}", name="NVIDIA H200", total_bytes=150_109_880_320)
        for number in range(2)
    ),
    processes=(7, 9),
)


def test_what_was_written_is_read() -> None:
    written = cuda_placement(FACTS)
    assert read_cuda_facts(written, of="snapshot x") == FACTS
    assert read_cuda_facts({}, of="snapshot x") is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2),
        ("version", None),
        ("more", 1),
        ("cuda", -1),
        ("driver", "5" * 65),
        ("gpus", {}),
        ("gpus", [{}] * 300),
        ("gpus/0/uuid", "GPU-7"),
        ("gpus/0/uuid", f"{UUID}1"),
        ("gpus/0/total_bytes", 1 << 57),
        ("gpus/0/name", "x" * 257),
        ("gpus/0/more", 1),
        ("processes", [0]),
        ("processes", "all"),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_what_cannot_be_is_refused(path: str, value: object) -> None:
    document: dict[str, Any] = copy.deepcopy(cuda_placement(FACTS))
    at: Any = document["cuda"]
    *above, last = path.split("/")
    for name in above:
        at = at[int(name) if name.isdecimal() else name]
    at[last] = value
    with pytest.raises(AgentError, match="snapshot x"):
        read_cuda_facts(document, of="snapshot x")
