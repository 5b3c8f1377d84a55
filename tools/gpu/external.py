"""GPU memory of a transformer through a capture and a restore, measured, as JSON.

    python -m tools.gpu.external --gib 20 --devices 1 > external.json

Needs root, CRIU (`$SNAPAGENT_CRIU`), torch with CUDA. A capture with the source going on, another
one that stops it, and a restore into a new process tree; outputs of CUDA graphs and of compiled
code have to be the same bits each time, and so has every weight. The exit code says whether.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import snapstore
from snapagent.capture import CaptureRequest, capture
from snapagent.config import AgentConfig
from snapagent.gpu.driver import load_driver
from snapagent.gpu.facts import driver_build
from snapagent.lazy.readers import ReaderPool
from snapagent.memory.broker import MemoryBroker
from snapagent.restore import Restoration, RestoreRequest
from snapagent.supervision import Place
from snapstore.cli.program import SWITCH_INTERVAL_S
from snapstore.units import GIB
from tools.gpu.living import Living, kill_tree
from tools.gpu.room import memory_folder

if TYPE_CHECKING:
    import subprocess

_VARIABLES = {
    # Its pool of compiling processes would be captured as well.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

_GONE_S_MAX = 60
_HOST_GIB_MAX = 8
"""Of a store, for what is no memory of GPUs."""


class Run:
    """One workload in all of its lives, and what was measured of it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self._began = time.monotonic()
        self.living = Living(folder)
        self.ask = self.living.ask
        self.result: dict[str, object] = {"gib": options.gib, "devices": options.devices}
        self.config = dataclasses.replace(
            AgentConfig.from_environment(),
            run_directory=folder / "run",
            state_directory=folder / "state",
        )
        self.readers = ReaderPool(self.config.readers)
        self.result["readers"] = self.readers.count
        self.store_url = options.store or f"file://{folder}/store"

    def workload(self, broker: Path) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """Start it, and kill it in the end."""
        arguments = [str(broker), str(self.options.gib), str(self.options.devices)]
        arguments += ["plain"] if self.options.plain else []
        arguments += ["uncompiled"] if self.options.uncompiled else []
        return self.living.started("tools.gpu.transformer", arguments, _VARIABLES)

    def take(self, broker: MemoryBroker, pid: int, *, stop: bool) -> dict[str, object]:
        """Release and capture."""
        released_s = float(self.ask("release"))
        options = snapstore.StoreOptions(
            memory_bytes=self.options.memory << 20, compression=snapstore.Compression.NONE
        )
        request = CaptureRequest(pid=pid, name="gpu/external:v1", broker=broker, stop=stop)
        began = time.perf_counter()
        with snapstore.open_store(self.store_url, options) as store:
            done = capture(store, request, self.config)
        seconds = time.perf_counter() - began
        return {
            "release_s": released_s,
            "seconds": seconds,
            "external_gb_s": done.external_bytes / seconds / 1e9,
            **done.document(),
        }

    def bring_back(self, broker: MemoryBroker, began: float) -> dict[str, object]:
        """Restore in fresh namespaces, and let it answer."""
        request = RestoreRequest(
            name="gpu/external:v1",
            place=Place(network="fresh", pids="fresh"),
            broker=broker,
            readers=self.readers,
            eager=self.options.eager,
        )
        options = snapstore.StoreOptions(memory_bytes=self.options.memory << 20)
        with (
            snapstore.open_store(self.store_url, options) as store,
            Restoration(store, request, self.config) as restoration,
        ):
            restoration.start()
            self.tell("it runs again")
            started_s = time.perf_counter() - began
            resumed_s = float(self.ask("resume"))
            outputs = self.ask("outputs")
            answered_s = time.perf_counter() - began
            restoration.wait_filled()
            done = restoration.release()
        return {
            "outputs": json.loads(outputs),
            "used_bytes": _used_bytes(),
            "started_s": started_s,
            "resume_s": resumed_s,
            "answered_s": answered_s,
            "external_gb_s": done.external_bytes / answered_s / 1e9,
            **done.document(),
        }

    def tell(self, what: str) -> None:
        """Say how far it is, for whoever ends it before it has ended."""
        seconds = time.monotonic() - self._began
        print(f"{seconds:.1f} s: {what}", file=sys.stderr, flush=True)

    def run(self) -> bool:
        """Do all of it; tells whether everything was the same."""
        result = self.result
        if not self.options.store:
            snapstore.init_store(self.store_url)
        driver = load_driver()
        result["gpus"] = [device._asdict() for device in driver.devices]
        result["driver"] = driver_build()
        with (
            MemoryBroker(self.folder / "memory.sock") as broker,
            self.readers,
            self.workload(self.folder / "memory.sock") as process,
        ):
            self.tell("the workload is ready")
            began = time.perf_counter()
            broker.gpus.engines.prepare(driver)
            result["engines_s"] = time.perf_counter() - began
            result["workload"] = json.loads(self.ask("facts"))
            before, weights = json.loads(self.ask("outputs")), self.ask("weights")
            result["outputs"] = before
            self.tell("it has computed")
            same = []
            if not self.options.once:
                result["capture"] = self.take(broker, process.pid, stop=False)
                self.tell("it is captured")
                result["source_resume_s"] = float(self.ask("resume"))
                same.append(json.loads(self.ask("outputs")) == before)
                result["source_outputs_same"] = same[0]
            result["capture_and_stop"] = self.take(broker, process.pid, stop=True)
            self.tell("it is captured and stopped")
            process.wait()
            self.living.control.unlink()
            taken = self._take_first_gpu() if self.options.move else None
            restored = self.bring_back(broker, time.perf_counter())
            self.tell("it is restored and has computed")
            if taken is not None:
                driver.release_memory(taken)
            result["restore"] = restored
            result["restored_outputs_same"] = restored["outputs"] == before
            result["restored_weights_same"] = self.ask("weights") == weights
            same += [restored["outputs"] == before, result["restored_weights_same"] is True]
            _kill(restored)
            if self.options.again:
                same.append(self._restore_again(broker) == before)
        result["ok"] = all(same)
        return all(same)

    def _restore_again(self, broker: MemoryBroker) -> object:
        """Restore it once more, when its first copy is gone; returns its outputs."""
        deadline = time.monotonic() + _GONE_S_MAX
        while broker.status() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.living.control.unlink()
        again = self.bring_back(broker, time.perf_counter())
        self.tell("it is restored once more and has computed")
        self.result["restore_again"] = again
        _kill(again)
        return again["outputs"]

    def _take_first_gpu(self) -> int:
        """Leave a GiB of the first GPU, so that the restore has to go to another one."""
        driver = load_driver()
        with driver.open(0) as gpu:
            free, _ = gpu.memory_info()
        unit = driver.granularity(0)
        return driver.create_memory(0, (free - (1 << 30)) // unit * unit)


def _kill(restored: dict[str, object]) -> None:
    root = restored["root_pid"]
    assert isinstance(root, int), "of the restored tree"
    kill_tree(root)


def _used_bytes() -> list[int]:
    """Say how much of each GPU is used, by everybody, a context of this process included."""
    driver, found = load_driver(), []
    for device in driver.devices:
        with driver.open(device.ordinal) as gpu:
            free, total = gpu.memory_info()
            found.append(total - free)
    return found


def main() -> int:
    """Run it, and print the result, also of what failed."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the weights")
    parser.add_argument("--devices", type=int, default=1, help="GPUs to spread them over")
    parser.add_argument("--store", help="URL of a store; by default a folder in /dev/shm")
    parser.add_argument("--huge", default="", help="a tmpfs for it instead: always, within_size")
    parser.add_argument("--memory", type=int, default=4096, help="MiB for the store")
    parser.add_argument("--eager", action="store_true", help="fill before the processes run")
    parser.add_argument("--once", action="store_true", help="only the capture that stops it")
    parser.add_argument("--plain", action="store_true", help="memory of CUDA, not external")
    parser.add_argument("--uncompiled", action="store_true", help="no torch.compile")
    parser.add_argument("--move", action="store_true", help="restore onto another GPU")
    parser.add_argument("--again", action="store_true", help="restore it a second time")
    options = parser.parse_args()
    if options.store and options.huge:
        parser.error("--huge is for the tmpfs that is made where there is no --store")
    with contextlib.ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="external-", dir="/dev/shm")
        home = Path(stack.enter_context(folder))
        if options.huge:
            size = int((options.gib + _HOST_GIB_MAX) * GIB)
            stored, _ = stack.enter_context(memory_folder(size, huge=options.huge))
            options.store = f"file://{stored}/store"
        run = Run(home, options)
        try:
            ok = run.run()
        except Exception as error:  # noqa: BLE001 - is the result
            ok = False
            notes = getattr(error, "__notes__", [])
            run.result |= {"error": f"{type(error).__name__}: {error}", "notes": notes}
            run.result["workload_output"] = run.living.output()
        print(json.dumps(run.result, indent=1, default=str))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
