"""A workload for captures: one process for each rank, each with weights in external GPU memory.

    python -m tools.gpu.ranks CONTROL BROKER RANKS GPUS GIB ENGINE BACKEND

The first process has no GPU and starts the others; rank n uses GPU n modulo GPUS. ENGINE is
`torch`, or `driver`, which needs nothing but the driver and has no communicator. BACKEND is that of
torch.distributed: `nccl`, or `gloo` where ranks share a GPU. At the Unix socket CONTROL each
connection brings one word, which goes to all ranks at once, and gets a list of their answers:
`facts`, `weights` (checksums of all), `join FILE` (make the communicator, over a new file),
`reduce` (digests of what all-reduce gives), `leave` (destroy it), `release` and `resume`.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.gpu.serving import serve

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB, GIB = 1 << 20, 1 << 30
RESUME_S_MAX = 200
COLLECTIVE_S_MAX = 90
ROW_WORDS = 4096
REDUCED_WORDS = 1 << 22
_PATTERN_BYTES = MIB


class Wishes(NamedTuple):
    """What all ranks are told."""

    broker: str
    ranks: int
    gpus: int
    gib: float
    engine: str
    backend: str

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Wishes:
        """Read them as they stand on the command line."""
        broker, ranks, gpus, gib, engine, backend = arguments
        return cls(broker, int(ranks), int(gpus), float(gib), engine, backend)

    @property
    def size_bytes(self) -> int:
        """Of the weights of each rank."""
        return max(int(self.gib * GIB) // (2 * MIB), 1) * 2 * MIB


# -- a rank ----------------------------------------------------------------------------------------


class TorchRank:
    """Weights as tensors of torch, and torch.distributed."""

    def __init__(self, rank: int, wishes: Wishes) -> None:
        import torch  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415 - optional

        from snapagent.workload import TorchPool  # noqa: PLC0415 - not in the first process

        began = time.perf_counter()
        torch.set_num_threads(1)
        self.torch, self.rank, self.wishes = torch, rank, wishes
        self.ordinal = rank % wishes.gpus
        torch.cuda.set_device(self.ordinal)
        self.pool = TorchPool(socket_path=wishes.broker, devices=[self.ordinal], rank=rank)
        left = wishes.size_bytes
        self.tensors: list[Any] = []
        generator = torch.Generator(f"cuda:{self.ordinal}").manual_seed(1000 + rank)
        with self.pool.use():
            while left:
                size = min(left, GIB)
                made = torch.empty(size // 8, dtype=torch.int64, device=f"cuda:{self.ordinal}")
                self.tensors.append(made.random_(generator=generator))
                left -= size
        torch.cuda.synchronize()
        self.made_s = time.perf_counter() - began

    def facts(self) -> dict[str, object]:
        """Say how large it is."""
        torch = self.torch
        return {
            "rank": self.rank,
            "external_bytes": self.pool.memory.size_bytes,
            "torch_reserved_bytes": torch.cuda.memory_reserved(self.ordinal),
            "made_s": self.made_s,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            **_host_memory(),
        }

    def weights(self) -> str:
        """Sum all of them up on the GPU, so that both content and place of each word count."""
        torch = self.torch
        found = []
        for one in self.tensors:
            rows = one.view(-1, ROW_WORDS)
            for sums in (rows.sum(0), rows.sum(1)):
                places = torch.arange(1, len(sums) + 1, device=sums.device)
                found.append(int((sums * places).sum()))
        return hashlib.sha256(repr(found).encode()).hexdigest()

    def join(self, file: str) -> list[str]:
        """Make the communicator, together with all others; says which threads there are then."""
        torch = self.torch
        device: dict[str, Any] = {}
        if self.wishes.backend == "nccl":
            # So that it is made now, and not with the first collective.
            device["device_id"] = torch.device("cuda", self.ordinal)
        torch.distributed.init_process_group(
            self.wishes.backend,
            init_method=f"file://{file}",
            rank=self.rank,
            world_size=self.wishes.ranks,
            timeout=timedelta(seconds=COLLECTIVE_S_MAX),
            **device,
        )
        torch.distributed.barrier()
        return _threads()

    def reduce(self) -> list[str]:
        """All-reduce some of the weights, as integers and as numbers; say digests of both."""
        torch = self.torch
        words = self.tensors[0][:REDUCED_WORDS]
        found = []
        for one in (words.clone(), (words % 65536).to(torch.float32) / 7):
            torch.distributed.all_reduce(one)
            raw = one.cpu().numpy().tobytes()
            found.append(hashlib.sha256(raw).hexdigest()[:16])
        return found

    def leave(self) -> list[str]:
        """Destroy the communicator, and give back what torch keeps of CUDA's own memory."""
        torch = self.torch
        torch.cuda.synchronize()
        torch.distributed.destroy_process_group()
        gc.collect()
        torch.cuda.empty_cache()
        return _threads()

    def release(self) -> str:
        """Let go of the memory."""
        self.pool.release()
        return "released"

    def resume(self) -> str:
        """Get it back."""
        self.pool.resume(RESUME_S_MAX)
        return "resumed"


class DriverRank:
    """Weights without torch; nothing is reduced."""

    def __init__(self, rank: int, wishes: Wishes) -> None:
        from snapagent.workload import DeviceMemory, libcuda  # noqa: PLC0415 - as above

        began = time.perf_counter()
        self.rank = rank
        self.ordinal = rank % wishes.gpus
        self.memory = DeviceMemory(wishes.broker, rank=rank)
        self.cuda = libcuda.load_libcuda()
        self.context = ctypes.c_void_p()
        self.cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.ordinal)
        self.block = self.memory.allocate(wishes.size_bytes, device=self.ordinal)
        noise = random.Random(rank)  # noqa: S311 - to be the same again, not to be secret
        for offset in range(0, wishes.size_bytes, _PATTERN_BYTES):
            data = noise.randbytes(_PATTERN_BYTES)
            self._copy("cuMemcpyHtoDAsync_v2", self.block.address + offset, data, len(data))
        self.made_s = time.perf_counter() - began

    def _copy(self, function: str, to: object, source: object, length: int) -> None:
        self.cuda.call("cuCtxSetCurrent", self.context)
        self.cuda.call(function, to, source, length, None)
        self.cuda.call("cuStreamSynchronize", None)

    def _digest(self, length: int) -> str:
        digest = hashlib.blake2b(digest_size=16)
        into = ctypes.create_string_buffer(_PATTERN_BYTES)
        for offset in range(0, length, _PATTERN_BYTES):
            size = min(_PATTERN_BYTES, length - offset)
            self._copy("cuMemcpyDtoHAsync_v2", into, self.block.address + offset, size)
            digest.update(into.raw[:size])
        return digest.hexdigest()

    def facts(self) -> dict[str, object]:
        """Say how large it is."""
        return {
            "rank": self.rank,
            "external_bytes": self.memory.size_bytes,
            "made_s": self.made_s,
            **_host_memory(),
        }

    def weights(self) -> str:
        """Say a digest of all of them."""
        return self._digest(self.block.size_bytes)

    def join(self, _file: str) -> list[str]:
        """Do nothing: there is no communicator."""
        return _threads()

    def reduce(self) -> list[str]:
        """Say a digest of the first bytes, which are this rank's alone."""
        return [self._digest(_PATTERN_BYTES)]

    def leave(self) -> list[str]:
        """Do nothing."""
        return _threads()

    def release(self) -> str:
        """Let go of the memory."""
        self.memory.release()
        return "released"

    def resume(self) -> str:
        """Get it back."""
        self.memory.resume(RESUME_S_MAX)
        return "resumed"


def _threads() -> list[str]:
    """Return the names of threads: libraries name those that a communicator has."""
    tasks = Path("/proc/self/task").iterdir()
    return sorted({(task / "comm").read_text(encoding="utf-8").strip() for task in tasks})


def _host_memory() -> dict[str, object]:
    """Return what of this process a capture takes: memory of its own, not of files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {
        "host_bytes": sum(
            int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("RssAnon", "RssShmem")
        )
    }


def be_rank(rank: int, channel: socket.socket, wishes: Wishes) -> None:
    """Make it, and answer until the first process is gone."""
    made: TorchRank | DriverRank
    made = TorchRank(rank, wishes) if wishes.engine == "torch" else DriverRank(rank, wishes)
    with channel, channel.makefile("rw", encoding="utf-8") as lines:
        _say(lines, {"ready": rank})
        for line in lines:
            word, *arguments = line.split()
            began = time.perf_counter()
            try:
                value = getattr(made, word)(*arguments)
                answer = {"value": value, "s": round(time.perf_counter() - began, 4)}
            except Exception as error:  # noqa: BLE001 - told to who asked
                answer = {"failed": f"{type(error).__name__}: {error}"}
            _say(lines, answer)


def _say(lines: Any, answer: dict[str, object]) -> None:  # noqa: ANN401 - a text file both ways
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


# -- the first process -----------------------------------------------------------------------------


class Ranks:
    """All of them, each at one end of a socket pair."""

    def __init__(self, wishes: Wishes, arguments: Sequence[str]) -> None:
        """Start them, and wait until all are ready."""
        self._channels = []
        self._processes = []
        for rank in range(wishes.ranks):
            ours, theirs = socket.socketpair()
            numbers = [str(rank), str(theirs.fileno())]
            with theirs:
                command = [sys.executable, "-m", "tools.gpu.ranks", "--rank", *numbers, *arguments]
                self._processes.append(
                    subprocess.Popen(  # noqa: S603 - this program
                        command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                    )
                )
            self._channels.append(ours.makefile("rw", encoding="utf-8"))
            ours.close()
        self._hear()

    def answer(self, words: str) -> str:
        """Let all of them do the same at once; returns what they say, as JSON."""
        for channel in self._channels:
            channel.write(words + "\n")
            channel.flush()
        return json.dumps(self._hear())

    def _hear(self) -> list[object]:
        answers: list[object] = []
        failures = []
        for rank, channel in enumerate(self._channels):
            line = channel.readline()
            answer = json.loads(line) if line else {"failed": "it has ended"}
            if "failed" in answer:
                failures.append(f"rank {rank}: {answer['failed']}")
            answers.append(answer)
        if failures:
            raise RuntimeError("; ".join(failures))
        return answers


def main(arguments: list[str]) -> None:
    """Be the first process, or a rank."""
    if arguments[0] == "--rank":
        _, rank, fd, *rest = arguments
        try:
            be_rank(int(rank), socket.socket(fileno=int(fd)), Wishes.of(rest))
        finally:
            # Nobody needs torch to be taken down in order, which can wait for other ranks.
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
    control, *rest = arguments
    ranks = Ranks(Wishes.of(rest), rest)
    serve(control, ranks.answer)


if __name__ == "__main__":
    main(sys.argv[1:])
