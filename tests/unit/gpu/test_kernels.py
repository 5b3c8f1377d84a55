"""Compiled kernels: made once, kept, checked when they are used again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapagent.gpu import kernels
from snapagent.gpu.kernels import KernelsUnavailable, load_kernels


class Nvrtc(SimpleNamespace):
    """NVRTC as `cuda.bindings` has it, but for compiling."""

    def __init__(self, *, version: tuple[int, int] = (13, 0), fails: bool = False) -> None:
        super().__init__()
        self.version = version
        self.fails = fails
        self.compiled: list[bytes] = []
        self.destroyed = 0

    def nvrtcVersion(self) -> tuple[int, int, int]:  # noqa: N802 - NVIDIA's name
        return (0, *self.version)

    def nvrtcCreateProgram(self, source: bytes, *_: object) -> tuple[int, bytes]:  # noqa: N802
        return (0, source)

    def nvrtcCompileProgram(self, _: bytes, count: int, options: list[bytes]) -> tuple[int]:  # noqa: N802
        assert count == len(options)
        self.compiled.append(options[0])
        return (6,) if self.fails else (0,)

    def nvrtcGetProgramLogSize(self, _: bytes) -> tuple[int, int]:  # noqa: N802
        return (0, 11)

    def nvrtcGetProgramLog(self, _: bytes, log: bytearray) -> tuple[int]:  # noqa: N802
        log[:] = b"no such gpu"
        return (0,)

    def nvrtcGetCUBINSize(self, _: bytes) -> tuple[int, int]:  # noqa: N802
        return (0, 4)

    def nvrtcGetCUBIN(self, _: bytes, code: bytearray) -> tuple[int]:  # noqa: N802
        code[:] = b"code"
        return (0,)

    def nvrtcDestroyProgram(self, _: bytes) -> tuple[int]:  # noqa: N802
        self.destroyed += 1
        return (0,)


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> Nvrtc:
    found = Nvrtc()
    monkeypatch.setattr(kernels, "_nvrtc", lambda: found)
    return found


def test_it_is_compiled_once(nvrtc: Nvrtc, tmp_path: Path) -> None:
    """Goal: once for each architecture and compiler; nobody else can read or write what is kept."""
    folder = tmp_path / "kernels"
    for _ in range(2):
        assert load_kernels((9, 0), folder) == b"code"
    assert nvrtc.compiled == [b"--gpu-architecture=sm_90"]
    load_kernels((10, 0), folder)
    nvrtc.version = (13, 1)
    load_kernels((9, 0), folder)
    assert len(nvrtc.compiled) == nvrtc.destroyed == 3
    assert folder.stat().st_mode & 0o77 == 0
    assert len([*folder.iterdir()]) == 3


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 36])
def test_what_is_damaged_is_made_anew(nvrtc: Nvrtc, tmp_path: Path, damage: bytes) -> None:
    load_kernels((9, 0), tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(damage)
    assert load_kernels((9, 0), tmp_path) == b"code"
    assert len(nvrtc.compiled) == 2
    load_kernels((9, 0), tmp_path)
    assert len(nvrtc.compiled) == 2


def test_where_nothing_can_be_kept(nvrtc: Nvrtc, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert load_kernels((9, 0), tmp_path / "file") == b"code"
    assert len(nvrtc.compiled) == 1


def test_a_gpu_that_the_compiler_does_not_know(nvrtc: Nvrtc, tmp_path: Path) -> None:
    nvrtc.fails = True
    with pytest.raises(KernelsUnavailable, match="no such gpu") as caught:
        load_kernels((99, 0), tmp_path)
    assert "newer NVRTC" in caught.value.next_step
    assert nvrtc.destroyed == 1


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing: dict[str, Any] = {"cuda": None, "cuda.bindings": None}
    for name, module in missing.items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
    with pytest.raises(KernelsUnavailable, match="cannot be used") as caught:
        load_kernels((9, 0), tmp_path)
    assert "extra gpu" in caught.value.next_step
