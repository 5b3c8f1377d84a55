"""Deterministic bytes of the kinds that snapshots hold, each a pure function of its seed."""

import numpy as np
import numpy.typing as npt

__all__ = [
    "WORDS",
    "ByteArray",
    "bf16",
    "constant",
    "fp16",
    "fp32",
    "nonzero_bytes",
    "pages",
    "random_bytes",
    "text",
]

ByteArray = npt.NDArray[np.uint8]

WORDS = (
    b"/usr/lib/x86_64-linux-gnu/libtorch_cuda.so ",
    b"self.model.layers.",
    b"def forward(self, hidden_states):\n        ",
    b"PYTHONPATH=",
    b"weight_scale_inv ",
    b"return torch.nn.functional.scaled_dot_product_attention(",
)


def random_bytes(size: int, seed: int = 0) -> ByteArray:
    """Bytes that nothing compresses."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def nonzero_bytes(size: int, seed: int = 0) -> ByteArray:
    """Bytes that nothing compresses, none of them zero."""
    return np.random.default_rng(seed).integers(1, 256, size, np.uint8)


def fp32(count: int, seed: int = 0) -> ByteArray:
    """Weights of a model as 32-bit floats."""
    return _weights(count, seed).view(np.uint8)


def fp16(count: int, seed: int = 0) -> ByteArray:
    """Weights of a model as IEEE 16-bit floats."""
    return _weights(count, seed).astype("<f2").view(np.uint8)


def bf16(count: int, seed: int = 0) -> ByteArray:
    """Weights of a model as bfloat16: the upper halves of 32-bit floats."""
    halves = _weights(count, seed).view("<u2")[1::2]
    return np.ascontiguousarray(halves).view(np.uint8)


def text(size: int, seed: int = 0) -> ByteArray:
    """Words of programs in random order, with numbers between them, as in a log."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(WORDS), size // 16 + 1).tolist()
    numbers = rng.integers(0, 1 << 20, len(chosen)).tolist()
    joined = b"".join(
        WORDS[word] + b"%05x " % number for word, number in zip(chosen, numbers, strict=True)
    )
    return np.frombuffer(joined[:size], np.uint8)


def constant(size: int, word: bytes = b"\x80\x3f") -> ByteArray:
    """One word again and again; the default is 1.0 as bfloat16."""
    return np.frombuffer((word * (size // len(word) + 1))[:size], np.uint8)


def pages(count: int, seed: int = 0, *, zero_share: float = 0.0) -> ByteArray:
    """Memory of a process: random pages, some of them zero."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (count, 4096), np.uint8)
    data[rng.random(count) < zero_share] = 0
    return data.reshape(-1)


def _weights(count: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype("<f4")
