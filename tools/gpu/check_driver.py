"""What the CUDA driver of this machine does, as JSON: what it promises nowhere, and we rely on.

    python -m tools.gpu.check_driver > driver.json

Needs nothing but Python and the driver. Each check runs in processes of its own, so that one that
fails leaves the others alone. Errors are results, too: their names are what the emulated driver of
the tests has to say in the same case.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from snapagent.errors import AgentError, GpuFailed
from snapagent.gpu.driver import Gpu, load_driver, memory_at
from snapagent.workload import libcuda
from snapagent.workload.shared_gpu import opened_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
_PATTERN = 0x5A
_CHILD_S_MAX = 60


def attempt(function: Callable[..., object], *arguments: object) -> object:
    """Return what a call gives, or the name of its error."""
    try:
        return function(*arguments)
    except GpuFailed as error:
        return error.error_name
    except AgentError as error:
        return str(error)


def grain() -> int:
    """Return the granularity of device memory."""
    return load_driver().granularity(0)


def read_bytes(gpu: Gpu, address: int, length: int) -> bytes:
    """Copy from the device, and wait."""
    into = (ctypes.c_ubyte * length)()
    gpu.copy_out(ctypes.addressof(into), address, length, 0)
    gpu.stream_synchronize(0)
    return bytes(into)


def kind_of_bytes(data: bytes) -> str:
    """Say what was found, in a word."""
    if data == bytes(len(data)):
        return "zeros"
    return "the pattern" if data == bytes([_PATTERN]) * len(data) else "something else"


# -- children ---------------------------------------------------------------------------------


class Child:
    """This program in another process, which answers one line for each it is told."""

    def __init__(self, role: str, fd: int = -1) -> None:
        """Start it."""
        self.process = subprocess.Popen(  # noqa: S603 - this program
            [sys.executable, "-m", "tools.gpu.check_driver", "--role", role, str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd] if fd >= 0 else [],
            text=True,
        )

    def hear(self) -> str:
        """Wait for its next line."""
        assert self.process.stdout is not None, "a pipe"
        ready, _, _ = select.select([self.process.stdout], [], [], _CHILD_S_MAX)
        return self.process.stdout.readline().strip() if ready else "no answer"

    def ask(self, line: str) -> str:
        """Tell it a line, and wait for its answer."""
        assert self.process.stdin is not None, "a pipe"
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def child(role: str, fd: int = -1) -> Iterator[Child]:
    """Run a child for a while."""
    one = Child(role, fd)
    try:
        yield one
    finally:
        one.end()


def tell(value: object) -> None:
    """Answer the parent."""
    print(value, flush=True)


def role_context(_: int) -> None:
    """Have a context on every device, and nothing else."""
    driver = load_driver()
    opened = [driver.open(device.ordinal) for device in driver.devices]
    tell("ready")
    for _line in sys.stdin:
        tell(json.dumps([gpu.memory_info()[0] for gpu in opened]))


def role_exporter(fd: int) -> None:
    """Make memory with a pattern in it, send its descriptor, and wait to be killed."""
    driver = load_driver()
    length = 64 * grain()
    memory = driver.make_memory_file(0, length)
    with driver.open(0) as gpu, gpu.mapped(memory, length) as address:
        gpu.fill(address, _PATTERN, length, 0)
        gpu.synchronize()
    with socket.socket(fileno=fd) as channel:
        socket.send_fds(channel, [b"x"], [memory])
        tell("sent")
        sys.stdin.readline()


class Target:
    """What a process that is checkpointed has: addresses, and memory of another process there."""

    def __init__(self, fd: int) -> None:
        """Map what the parent's descriptor is of."""
        self.driver, self.fd, self.length = load_driver(), fd, 64 * grain()
        self.gpu = self.driver.open(0)
        self.address = self.driver.reserve(self.length)
        self.own = ctypes.c_uint64()
        self.gpu.call("cuMemAlloc_v2", ctypes.byref(self.own), 3 * MIB)
        self.gpu.fill(self.own.value, 0x11, 3 * MIB, 0)
        self.gpu.synchronize()
        self.map()

    def map(self) -> str:
        """Map the memory at the reserved addresses."""
        handle = self.driver.import_memory(self.fd)
        self.driver.map(self.address, self.length, handle, [0])
        self.driver.release_memory(handle)
        return f"mapped at {self.address:#x}"

    def unmap(self) -> str:
        """Unmap it; the addresses stay reserved."""
        self.gpu.synchronize()
        self.driver.unmap(self.address, self.length)
        return "unmapped"

    def close(self) -> str:
        """Close the descriptor."""
        os.close(self.fd)
        return "closed"

    def read(self) -> str:
        """Look at both memories."""
        lent = kind_of_bytes(read_bytes(self.gpu, self.address, MIB))
        own = read_bytes(self.gpu, self.own.value, 3 * MIB) == b"\x11" * (3 * MIB)
        return f"{lent}, its own memory {'is right' if own else 'is WRONG'}"


def role_target(fd: int) -> None:
    """Do what the parent says."""
    target = Target(fd)
    tell("ready")
    for line in sys.stdin:
        tell(attempt(getattr(target, line.strip())))


class Sharer:
    """Shares memory with other processes by CUDA IPC."""

    def __init__(self) -> None:
        """Have some, with a pattern in it."""
        self.driver, self.length = load_driver(), 64 * MIB
        self.gpu = self.driver.open(0)
        self.own, self.opened = ctypes.c_uint64(), ctypes.c_uint64()
        self.gpu.call("cuMemAlloc_v2", ctypes.byref(self.own), self.length)
        self.gpu.fill(self.own.value, _PATTERN, self.length, 0)
        self.gpu.synchronize()

    def export(self) -> str:
        """Name it to others."""
        handle = libcuda.IpcHandle()
        self.gpu.call("cuIpcGetMemHandle", ctypes.byref(handle), self.own.value)
        return bytes(handle).hex()

    def open(self, name: str) -> str:
        """Open what somebody has named."""
        handle = libcuda.IpcHandle.from_buffer_copy(bytes.fromhex(name))
        self.gpu.call("cuIpcOpenMemHandle_v2", ctypes.byref(self.opened), handle, 1)
        return kind_of_bytes(read_bytes(self.gpu, self.opened.value, MIB))

    def close(self) -> str:
        """Close it."""
        self.gpu.call("cuIpcCloseMemHandle", self.opened)
        self.opened = ctypes.c_uint64()
        return "closed"

    def seen(self) -> str:
        """Say what can be seen of it from within."""
        return f"{opened_bytes(self.driver.library) // MIB} MiB are opened"

    def export_opened(self) -> str:
        """Try to name to others what was opened."""
        handle = libcuda.IpcHandle()
        self.gpu.call("cuIpcGetMemHandle", ctypes.byref(handle), self.opened.value)
        return "named"

    def read(self) -> str:
        """Look at its own."""
        return kind_of_bytes(read_bytes(self.gpu, self.own.value, MIB))


def role_sharer(_: int) -> None:
    """Do what the parent says."""
    sharer = Sharer()
    tell("ready")
    for line in sys.stdin:
        word, *arguments = line.split()
        tell(attempt(getattr(sharer, word), *arguments))


def role_plain(_: int) -> None:
    """Have nothing to do with CUDA."""
    tell("ready")
    sys.stdin.readline()


# -- checks -----------------------------------------------------------------------------------


def check_devices() -> dict[str, object]:
    """What there is."""
    driver = load_driver()
    return {
        "driver": driver.version,
        "devices": [device._asdict() for device in driver.devices],
        "granularity": [driver.granularity(device.ordinal) for device in driver.devices],
    }


def check_without_context() -> dict[str, object]:
    """Which functions do without a context."""
    driver = load_driver()
    length = grain()
    found: dict[str, object] = {}
    handle = attempt(driver.create_memory, 0, length)
    found["create"] = handle if isinstance(handle, str) else "works"
    if not isinstance(handle, int):
        return found
    fd = attempt(driver.export_memory, handle)
    if isinstance(fd, int):
        found["export"] = f"works: {Path(f'/proc/self/fd/{fd}').readlink()}"
        imported = attempt(driver.import_memory, fd)
        found["import"] = "works" if isinstance(imported, int) else imported
        found["same_handle"] = imported == handle
        found["fstat"] = str(os.fstat(fd))
    address = attempt(driver.reserve, length)
    found["reserve"] = hex(address) if isinstance(address, int) else address
    if isinstance(address, int):
        found["map"] = attempt(driver.map, address, length, handle, [0]) or "works"
        found["unmap"] = attempt(driver.unmap, address, length) or "works"
    code = driver.library.code("cuMemGetInfo_v2", ctypes.byref(ctypes.c_size_t()), None)
    found["memory_info"] = driver.library.error_name(code)
    found["copy"] = driver.library.error_name(
        driver.library.code("cuMemsetD8Async", address, 0, 1, None)
    )
    return found


def check_context_cost() -> dict[str, object]:
    """How much memory of a device a context takes, and how long it takes to make."""
    driver = load_driver()
    found: dict[str, object] = {}
    with contextlib.ExitStack() as stack:
        seconds, gpus = [], []
        for device in driver.devices:
            began = time.perf_counter()
            gpus.append(stack.enter_context(driver.open(device.ordinal)))
            seconds.append(round(time.perf_counter() - began, 3))
        found["create_s"] = seconds
        before = [gpu.memory_info()[0] for gpu in gpus]
        one = stack.enter_context(child("context"))
        one.hear()
        after = [gpu.memory_info()[0] for gpu in gpus]
        found["cost_mib"] = [(b - a) / MIB for b, a in zip(before, after, strict=True)]
        found["free_mib_beside_two"] = [free / MIB for free in after]
    return found


def check_speed() -> dict[str, object]:
    """How long it takes to make memory, to export and to map it."""
    driver = load_driver()
    length, count = 16 * grain(), 32
    with driver.open(0) as gpu:
        began = time.perf_counter()
        fds = [driver.make_memory_file(0, length) for _ in range(count)]
        made_s = time.perf_counter() - began
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            addresses = [stack.enter_context(gpu.mapped(fd, length)) for fd in fds]
            mapped_s = time.perf_counter() - began
            content = {kind_of_bytes(read_bytes(gpu, address, length)) for address in addresses}
            began = time.perf_counter()
        unmapped_s = time.perf_counter() - began
        began = time.perf_counter()
        for fd in fds:
            os.close(fd)
        closed_s = time.perf_counter() - began
    return {
        "region_mib": length / MIB,
        "make_ms": made_s / count * 1e3,
        "map_ms": mapped_s / count * 1e3,
        "unmap_ms": unmapped_s / count * 1e3,
        "close_ms": closed_s / count * 1e3,
        "content_of_new_memory": sorted(content),
    }


def check_errors() -> dict[str, object]:
    """What mistakes are called."""
    driver = load_driver()
    length = grain()
    found: dict[str, object] = {}
    with driver.open(0) as gpu:
        handle = driver.create_memory(0, length)
        two = driver.create_memory(0, 2 * length)
        address = driver.reserve(4 * length)
        found["create_odd_length"] = attempt(driver.create_memory, 0, length // 2)
        found["create_no_device"] = attempt(driver.create_memory, 99, length)
        found["create_too_much"] = attempt(driver.create_memory, 0, 1 << 42)
        found["map_unreserved"] = attempt(driver.map, address + (1 << 36), length, handle, [0])
        found["map_odd_address"] = attempt(driver.map, address + 4096, length, handle, [0])
        found["map_part"] = attempt(driver.map, address + 2 * length, length, two, [0])
        found["unmap_part_mapped"] = attempt(driver.unmap, address + 2 * length, length)
        found["map"] = attempt(driver.map, address, length, handle, [0])
        found["map_twice"] = attempt(driver.map, address, length, handle, [0])
        found["map_elsewhere_too"] = attempt(driver.map, address + length, length, handle, [0])
        found["unmap_second"] = attempt(driver.unmap, address + length, length)
        found["unmap_too_much"] = attempt(driver.unmap, address, 2 * length)
        found["free_mapped_addresses"] = attempt(driver.free_addresses, address, 4 * length)
        found["copy_to_unmapped"] = attempt(gpu.fill, address + 3 * length, 0, 16, 0)
        found["release"] = attempt(driver.release_memory, handle)
        found["use_after_release"] = attempt(gpu.fill, address, 0, 16, 0)
        gpu.synchronize()
        found["unmap"] = attempt(driver.unmap, address, length)
        found["unmap_again"] = attempt(driver.unmap, address, length)
        found["release_twice"] = attempt(driver.release_memory, handle)
        found["free_addresses"] = attempt(driver.free_addresses, address, 4 * length)
        again = driver.reserve(4 * length, address=address)
        found["reserve_same_address"] = again == address
        hint = 0x2F00_0000_0000
        found["reserve_hint"] = driver.reserve(length, address=hint) == hint
        read, _ = os.pipe()
        found["import_a_pipe"] = attempt(driver.import_memory, read)
        found["register_twice"] = _register_twice(gpu)
        found["no_stream"] = attempt(gpu.stream_synchronize, 0)
        found["image"] = attempt(gpu.module_load, b"no image")
    found["fork"] = _in_fork()
    return found


def _register_twice(gpu: Gpu) -> list[object]:
    buffer = (ctypes.c_ubyte * (4 * MIB))()
    address = -(-ctypes.addressof(buffer) // 4096) * 4096
    found = [attempt(gpu.host_register, address, MIB) for _ in range(2)]
    return found + [attempt(gpu.host_unregister, address) for _ in range(2)]


def _in_fork() -> str:
    """Call the driver in a child of a process that has used it."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        library = load_driver().library
        names = [library.error_name(library.code("cuInit", 0))]
        names.append(library.error_name(library.code("cuCtxSynchronize")))
        os.write(theirs, " ".join(names).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(ours, 1000).decode()


def check_descriptor_keeps_memory() -> dict[str, object]:
    """Whether a descriptor alone keeps memory, when the process that made it is dead."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found: dict[str, object] = {}
    # Until the exporter is dead, this process has not even loaded the driver.
    with child("context") as observer, ours:
        observer.hear()
        before = json.loads(observer.ask("free?"))[0]
        with theirs, child("exporter", theirs.fileno()) as exporter:
            _, (fd, *_), _, _ = socket.recv_fds(ours, 1, 4)
            exporter.hear()
            found["used_mib_with_exporter"] = (before - json.loads(observer.ask("free?"))[0]) / MIB
        second = os.dup(fd)
        os.close(fd)
        found["used_mib_exporter_dead"] = (before - json.loads(observer.ask("free?"))[0]) / MIB
        driver = load_driver()
        length = 64 * grain()
        with driver.open(0) as gpu:
            for time_number in ("first", "second"):
                with gpu.mapped(second, length) as address:
                    content = kind_of_bytes(read_bytes(gpu, address, length))
                    found[f"content_{time_number}_import"] = content
        found["used_mib_own_context_closed"] = (before - json.loads(observer.ask("free?"))[0]) / MIB
        os.close(second)
        found["used_mib_descriptor_closed"] = (before - json.loads(observer.ask("free?"))[0]) / MIB
    return found


def _states(pid: int) -> object:
    driver = load_driver()
    state = ctypes.c_int(-1)
    return attempt(driver.call, "cuCheckpointProcessGetState", pid, ctypes.byref(state)) or (
        state.value
    )


def _act(pid: int, what: str) -> object:
    driver = load_driver()
    arguments: ctypes.Structure
    if what == "Lock":
        arguments = libcuda.CheckpointLockArguments(timeout_ms=10000)
    else:
        arguments = libcuda.CheckpointRestoreArguments()
    began = time.perf_counter()
    failed = attempt(driver.call, f"cuCheckpointProcess{what}", pid, ctypes.byref(arguments))
    return failed or round(time.perf_counter() - began, 3)


def check_checkpoint() -> dict[str, object]:
    """What a checkpoint does with addresses, and with memory of another process."""
    driver = load_driver()
    length = 64 * grain()
    found: dict[str, object] = {}
    with driver.open(0) as gpu, child("plain") as plain:
        plain.hear()
        found["state_without_cuda"] = _states(plain.process.pid)
        found["state_of_nobody"] = _states(1 << 22)
        found["state_of_itself"] = _states(os.getpid())
        fd = driver.make_memory_file(0, length)
        with gpu.mapped(fd, length) as address:
            gpu.fill(address, _PATTERN, length, 0)
            gpu.synchronize()
            found |= _round_trip(fd, gpu)
            found["content_in_exporter"] = kind_of_bytes(read_bytes(gpu, address, length))
        os.close(fd)
    return found


def _round_trip(fd: int, gpu: Gpu) -> dict[str, object]:
    found: dict[str, object] = {}
    with child("target", fd) as target:
        target.hear()
        pid = target.process.pid
        tid = ctypes.c_int(-1)
        of = (pid, ctypes.byref(tid))
        found["state"] = _states(pid)
        found["restore_thread"] = (
            attempt(load_driver().call, "cuCheckpointProcessGetRestoreThreadId", *of)
            or tid.value == pid
        )
        found["checkpoint_without_lock"] = _act(pid, "Checkpoint")
        # Last of all, with another child, since it may be lost.
        found["unmap"] = target.ask("unmap")
        free = gpu.memory_info()[0]
        for what in ("Lock", "Lock", "Checkpoint", "Checkpoint"):
            found[f"{what} {'again' if what in found else ''}".strip()] = _act(pid, what)
        found["state_checkpointed"] = _states(pid)
        found["freed_mib"] = (gpu.memory_info()[0] - free) / MIB
        found["open_files_checkpointed"] = _nvidia_files(pid)
        for what in ("Unlock", "Restore", "Unlock"):
            found[f"{what} {'later' if what in found else ''}".strip()] = _act(pid, what)
        found["map_again"] = target.ask("map")
        found["read_again"] = target.ask("read")
    with child("target", fd) as target:
        target.hear()
        pid = target.process.pid
        found["mapped_lock"] = _act(pid, "Lock")
        found["mapped_checkpoint"] = _act(pid, "Checkpoint")
        found["mapped_state"] = _states(pid)
        found["mapped_restore"] = _act(pid, "Restore")
        found["mapped_unlock"] = _act(pid, "Unlock")
        found["mapped_read"] = target.ask("read")
    return found


def check_ipc() -> dict[str, object]:
    """What a checkpoint does with memory that was opened by CUDA IPC, and what is seen of it."""
    found: dict[str, object] = {}
    for case, whose in (("opened", "both"), ("exported", "owner"), ("closed", "both")):
        with child("sharer") as owner, child("sharer") as user:
            owner.hear()
            user.hear()
            before = _nvidia_files(user.process.pid)
            found[f"{case}_seen_before"] = user.ask("seen")
            found[f"{case}_open"] = user.ask(f"open {owner.ask('export')}")
            found[f"{case}_seen"] = [owner.ask("seen"), user.ask("seen")]
            found[f"{case}_named_again"] = user.ask("export_opened")
            found[f"{case}_files_same"] = _nvidia_files(user.process.pid) == before
            if case == "closed":
                found["closed_close"] = user.ask("close")
                found["closed_seen_after"] = user.ask("seen")
            pids = [owner.process.pid] + ([user.process.pid] if whose == "both" else [])
            for what in ("Lock", "Checkpoint", "Restore", "Unlock"):
                found[f"{case}_{what}"] = [_word(_act(pid, what)) for pid in pids]
            found[f"{case}_states"] = [_states(pid) for pid in pids]
            found[f"{case}_read"] = owner.ask("read")
    return found


def _word(took: object) -> object:
    return took if isinstance(took, str) else "works"


def _nvidia_files(pid: int) -> dict[str, object]:
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(path.readlink()))
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {
        "descriptors": sorted(link for link in links if "nvidia" in link),
        "mappings": sorted({line.split()[-1] for line in maps if "/dev/nvidia" in line}),
    }


def check_host_memory() -> dict[str, object]:
    """How fast copies are, and what registering costs."""
    driver = load_driver()
    length = 64 * grain()
    found: dict[str, object] = {}
    with driver.open(0) as gpu:
        fd = driver.make_memory_file(0, length)
        with gpu.mapped(fd, length) as address:
            began = time.perf_counter()
            host = gpu.host_alloc(length)
            found["alloc_s_per_gib"] = (time.perf_counter() - began) * (1 << 30) / length
            memory_at(host, length)[:] = bytes([_PATTERN]) * length
            found["in_gb_s"] = _rate(gpu, length, lambda: gpu.copy_in(address, host, length, 0))
            found["out_gb_s"] = _rate(gpu, length, lambda: gpu.copy_out(host, address, length, 0))
            began = time.perf_counter()
            for _ in range(10000):
                gpu.fill(address, _PATTERN, 16, 0)
            found["call_us"] = (time.perf_counter() - began) / 10000 * 1e6
            gpu.synchronize()
        os.close(fd)
    return found


def _rate(gpu: Gpu, length: int, copy: Callable[[], None]) -> float:
    copy()
    gpu.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        copy()
    gpu.synchronize()
    return 8 * length / (time.perf_counter() - began) / 1e9


_CHECKS: dict[str, Callable[[], dict[str, object]]] = {
    "devices": check_devices,
    "without_context": check_without_context,
    "context_cost": check_context_cost,
    "speed": check_speed,
    "errors": check_errors,
    "descriptor_keeps_memory": check_descriptor_keeps_memory,
    "host_memory": check_host_memory,
    "checkpoint": check_checkpoint,
    "ipc": check_ipc,
}
_ROLES = {
    "context": role_context,
    "exporter": role_exporter,
    "target": role_target,
    "plain": role_plain,
    "sharer": role_sharer,
}


def run_all() -> dict[str, object]:
    """Run each check in a process of its own."""
    results: dict[str, object] = {}
    for name in _CHECKS:
        done = subprocess.run(  # noqa: S603 - this program
            [sys.executable, "-m", "tools.gpu.check_driver", "--check", name],
            capture_output=True,
            text=True,
            timeout=2 * _CHILD_S_MAX,
            check=False,
        )
        try:
            results[name] = json.loads(done.stdout)
        except ValueError:
            results[name] = {"failed": done.returncode, "output": done.stderr[-2000:]}
    return results


def main(arguments: list[str]) -> None:
    """Run all checks, or the one or the role that is named."""
    if arguments[:1] == ["--role"]:
        _ROLES[arguments[1]](int(arguments[2]))
    elif arguments[:1] == ["--check"]:
        print(json.dumps(_CHECKS[arguments[1]](), default=str))
    else:
        print(json.dumps(run_all(), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
