"""What workloads do with external GPU memory on this machine, as JSON: blocks, pools, dead brokers.

    python -m tools.gpu.check_workload > workload.json

Needs torch with CUDA. Each check runs in a process of its own and says what it found; one that
hangs is killed and says so.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch  # type: ignore[import-not-found,unused-ignore]

from snapagent.memory.broker import BrokerLimits, MemoryBroker
from snapagent.workload import (
    BrokerUnreachable,
    DeviceMemory,
    ExternalMemoryError,
    MemoryReleased,
    TorchPool,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
_CHECK_S_MAX = 60


@contextlib.contextmanager
def socket_path() -> Iterator[Path]:
    """Lend a place for the socket of a broker."""
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        yield Path(folder) / "memory.sock"


def check_blocks() -> dict[str, object]:
    """Blocks as tensors, both ways, and what they are after release and resume."""
    with socket_path() as path, MemoryBroker(path), DeviceMemory(str(path)) as memory:
        block = memory.allocate(8 * MIB)
        tensor = block.torch(torch.float32, (2, MIB))
        tensor.copy_(torch.arange(2 * MIB, dtype=torch.float32, device="cuda").view(2, MIB))
        same = torch.from_dlpack(block)
        found: dict[str, object] = {
            "dlpack_sees_the_same": bool(
                torch.equal(same.view(torch.float32).view(2, MIB), tensor)
            ),
            "dlpack_address": same.data_ptr() == block.address == tensor.data_ptr(),
        }
        before = tensor.cpu()
        memory.release()
        try:
            block.torch(torch.float32, 1)
        except MemoryReleased:
            found["released_is_refused"] = True
        memory.resume(30)
        found["same_after_resume"] = bool(torch.equal(tensor.cpu(), before))
        address = block.address
        del block, tensor
        gc.collect()
        memory.allocate(MIB)
        found["kept_by_dlpack"] = memory.size_bytes > 0 and same.data_ptr() == address
        found["still_right"] = bool(
            torch.equal(same.view(torch.float32).view(2, MIB).cpu(), before)
        )
        del same
        gc.collect()
        first = memory.allocate(8 * MIB)
        found["reused"] = first.address == address
        return found


def check_pool() -> dict[str, object]:
    """A pool: its limit, what goes back, and use from a child of fork."""
    limits = BrokerLimits(gpu_bytes=1024 * MIB)
    with socket_path() as path, MemoryBroker(path, limits=limits) as broker:
        pool = TorchPool(socket_path=str(path))
        found: dict[str, object] = {}
        with pool.use():
            kept = [
                torch.full((64 * MIB,), number, dtype=torch.uint8, device="cuda")
                for number in range(8)
            ]
        found["used_mib"] = pool.memory.size_bytes / MIB
        try:
            with pool.use():
                torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")
        except ExternalMemoryError as error:
            found["limit"] = f"{type(error).__name__}: {error}"
        pool.release()
        pool.resume(30)
        found["right"] = [int(one[0]) == int(one[-1]) == number for number, one in enumerate(kept)]
        del kept
        gc.collect()
        torch.cuda.empty_cache()
        found["used_mib_after_free"] = pool.memory.size_bytes / MIB
        found["broker_mib_after_free"] = broker.status()[0].size_bytes / MIB
        return found


def check_threads() -> dict[str, object]:
    """One thread that asks a pool for more, others that use torch: whether they wait for ever.

    torch takes only one thread at a time into a pool, but all of them share its allocator.
    """
    with socket_path() as path, MemoryBroker(path):
        pool = TorchPool(socket_path=str(path), region_bytes=32 * MIB)
        counts = [0] * 4
        began = time.monotonic()
        over = threading.Event()

        def grow() -> None:
            kept = []
            with pool.use():
                # None of them fits into what the pool has, so that each asks the broker.
                while time.monotonic() < began + 8 and counts[0] < 400:
                    size = (21 + counts[0] % 3) * MIB
                    kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                    counts[0] += 1
            over.set()

        def use(number: int) -> None:
            while not over.is_set():
                made = [torch.empty(number * MIB, dtype=torch.uint8, device="cuda")] * 2
                made.clear()
                counts[number] += 1

        threads = [threading.Thread(target=grow)]
        threads += [threading.Thread(target=use, args=(number,)) for number in range(1, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"rounds": counts, "seconds": time.monotonic() - began}


def check_dead_broker() -> dict[str, object]:
    """A broker that is killed, while memory is mapped and while it is released."""
    found: dict[str, object] = {}
    with socket_path() as path:
        first = _broker(path)
        pool = TorchPool(socket_path=str(path))
        with pool.use():
            tensor = torch.randint(0, 255, (256 * MIB,), dtype=torch.uint8, device="cuda")
        before = int(tensor.view(torch.int64).sum())
        first.kill()
        first.wait()
        found["mapped_memory_stays"] = int(tensor.view(torch.int64).sum()) == before
        try:
            pool.release()
        except BrokerUnreachable:
            found["release_is_refused"] = True
        second = _broker(path)
        pool.release()
        second.kill()
        second.wait()
        third = _broker(path)
        pool.resume(30)
        found["same_from_the_holder"] = int(tensor.view(torch.int64).sum()) == before
        third.kill()
        third.wait()
    return found


def _broker(path: Path) -> subprocess.Popen[bytes]:
    """Start a broker in a process of its own, and wait for it."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom snapagent.memory.broker import MemoryBroker\n"
        "with MemoryBroker(Path(sys.argv[1])):\n print('ready', flush=True)\n sys.stdin.read()\n"
    )
    process = subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None, "a pipe"
    process.stdout.readline()
    return process


_CHECKS: dict[str, Callable[[], dict[str, object]]] = {
    "blocks": check_blocks,
    "pool": check_pool,
    "dead_broker": check_dead_broker,
    "threads": check_threads,
}
_CONFIGURED = {
    "threads_lock_released": ("threads", "release_lock_on_cudamalloc:True"),
}


def run(name: str, configured: str = "") -> object:
    """Run a check in a process of its own."""
    variables = {"PYTORCH_CUDA_ALLOC_CONF": configured} if configured else {}
    try:
        done = subprocess.run(  # noqa: S603 - this program
            [sys.executable, "-m", "tools.gpu.check_workload", name],
            capture_output=True,
            text=True,
            timeout=_CHECK_S_MAX if name != "threads" else 30,
            env=os.environ | variables,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return {"failed": "it hung", "output": (error.stderr or b"").decode()[-2000:]}
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {"failed": done.returncode, "output": done.stderr[-2500:]}


def main(arguments: list[str]) -> None:
    """Run all checks, or the one that is named."""
    if arguments:
        print(json.dumps(_CHECKS[arguments[0]]()), flush=True)
        # torch may still have segments when the interpreter ends; nobody needs that to be orderly.
        os._exit(0)
    results = {name: run(name) for name in _CHECKS}
    results |= {name: run(*which) for name, which in _CONFIGURED.items()}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
