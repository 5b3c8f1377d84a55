"""The kernels of `blake3.cu` as code for one kind of GPU: compiled once, then kept on disk.

NVRTC compiles them (the extra `gpu`); where it is missing there are none, and whoever would have
hashed on the GPU does it on the processor.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from snapagent.errors import AgentError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["KernelsUnavailable", "load_kernels"]

_SOURCE = Path(__file__).with_name("blake3.cu")
_DIGEST_BYTES: Final = 32
_CODE_BYTES_MAX: Final = 16 << 20
_OPTIONS: Final = (b"--std=c++17",)


class KernelsUnavailable(AgentError):
    """There is no code for this GPU, and none can be made. Chunks are hashed by the processor."""


def load_kernels(architecture: tuple[int, int], directory: Path) -> bytes:
    """Return the code for a GPU of this compute capability, out of the cache if it is there.

    Takes less than a second to compile. Several processes may do it at once: each writes the same.

    Args:
        architecture: Major and minor number.
        directory: Where code is kept; made if it is missing. Whoever can write there decides what
            runs on the GPU, so nobody but this user should.

    Raises:
        KernelsUnavailable: NVRTC is not installed, or cannot compile for this GPU.
    """
    nvrtc = _nvrtc()
    name = "sm_{}{}".format(*architecture)
    source = _SOURCE.read_bytes()
    version = ".".join(map(str, _call(nvrtc.nvrtcVersion())))
    told = "\0".join((version, name, *map(bytes.decode, _OPTIONS))).encode()
    key = hashlib.sha256(hashlib.sha256(source).digest() + told).hexdigest()
    kept = directory / f"blake3-{name}-{key[:32]}.cubin"
    code = _read(kept)
    if code is None:
        code = _compile(nvrtc, source, name)
        # Without a cache the next one compiles again: no reason to fail.
        with contextlib.suppress(OSError):
            _write(kept, code)
    return code


def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415 - an extra, and half a second to load

        _call(nvrtc.nvrtcVersion())
    except (ImportError, OSError, RuntimeError) as error:
        raise KernelsUnavailable(
            f"NVRTC cannot be used: {error}",
            next_step="install the extra gpu and NVIDIA's nvidia-cuda-nvrtc to hash on the GPU",
        ) from error
    module: ModuleType = nvrtc
    return module


def _compile(nvrtc: Any, source: bytes, name: str) -> bytes:  # noqa: ANN401 - a module without types
    options = [f"--gpu-architecture={name}".encode(), *_OPTIONS]
    (program,) = _call(nvrtc.nvrtcCreateProgram(source, _SOURCE.name.encode(), 0, None, None))
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(result[0]):
            (size,) = _call(nvrtc.nvrtcGetProgramLogSize(program))
            log = bytearray(size)
            _call(nvrtc.nvrtcGetProgramLog(program, log))
            text = bytes(log).rstrip(b"\0").decode(errors="replace")
            raise KernelsUnavailable(
                f"NVRTC cannot compile {_SOURCE.name} for {name}: {text[-500:] or result[0]}",
                next_step="use a newer NVRTC, which knows this GPU",
            )
        (size,) = _call(nvrtc.nvrtcGetCUBINSize(program))
        code = bytearray(size)
        _call(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


def _call(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(result[0]):
        raise KernelsUnavailable(f"NVRTC failed: {result[0]}")
    return result[1:]


def _read(path: Path) -> bytes | None:
    """Return what is kept, unless it is damaged or not there."""
    try:
        with path.open("rb") as file:
            data = file.read(_CODE_BYTES_MAX)
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.write(hashlib.sha256(code).digest() + code)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
