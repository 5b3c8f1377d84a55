"""Memory of a broker in this process: allocated, released, mapped again at the same addresses."""

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from snapagent.memory.broker import BrokerLimits, MemoryBroker
from snapagent.workload import (
    Block,
    BrokerUnreachable,
    HostMemory,
    MemoryLost,
    MemoryRefused,
    MemoryReleased,
    NotTheOwner,
    external_memory,
)
from tests.support.external import broker_process
from tests.support.processes import stop_process
from tests.support.supervised import has_ended
from tests.support.waiting import wait_until

KIB, MIB = 1 << 10, 1 << 20
REGION = 2 * MIB


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        yield Path(folder) / "memory.sock"


@pytest.fixture
def broker(path: Path) -> Iterator[MemoryBroker]:
    with MemoryBroker(path, limits=BrokerLimits(session_bytes=64 * MIB)) as running:
        yield running


@pytest.fixture
def memory(broker: MemoryBroker) -> Iterator[HostMemory]:
    with make(broker.path) as made:
        yield made


def make(path: Path) -> HostMemory:
    return HostMemory(str(path), region_bytes=REGION, reserve_bytes=256 * MIB)


@pytest.mark.slow
def test_any_sequence_keeps_what_was_written(memory: HostMemory, rng: random.Random) -> None:
    """Goal: every block has its own bytes, whatever comes and goes around it.

    Method: random steps against a dict of blocks and what was written to them: blocks of odd
    sizes and alignments, freed or forgotten in any order, with releases in between.
    """
    expected: dict[Block, bytes] = {}
    for _ in range(300):
        kind = rng.choice(["allocate"] * 4 + ["free", "forget", "write", "cycle"])
        if kind == "allocate":
            size = rng.choice([1, 63, 64, 65, 4096, 5000, 100_000, 3 * MIB + 1])
            alignment = rng.choice([1, 64, 4096, 2 * MIB])
            block = memory.allocate(size, alignment=alignment)
            assert not block.address % max(alignment, 64)
            expected[block] = write(block, rng)
        elif kind == "cycle":
            memory.release()
            memory.resume(10)
        elif expected:
            block = rng.choice(list(expected))
            if kind == "write":
                expected[block] = write(block, rng)
            else:
                del expected[block]
                if kind == "free":
                    block.free()
            del block
        if memory.size_bytes > 40 * MIB:
            expected.clear()
    spans = sorted((block.address, block.address + block.size_bytes) for block in expected)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    for block, content in expected.items():
        assert bytes(block.buffer) == content


def write(block: Block, rng: random.Random) -> bytes:
    content = rng.randbytes(block.size_bytes)
    block.buffer[:] = content
    return content


def test_arrays_are_views_at_the_same_addresses(memory: HostMemory) -> None:
    block = memory.allocate(1000)
    array = block.numpy("float32", (10, 5), offset=64)
    array[:] = np.arange(50).reshape(10, 5)
    address = array.__array_interface__["data"][0]
    assert address == block.address + 64
    memory.release()
    memory.resume(10)
    assert array.sum() == sum(range(50))
    assert block.numpy("float32", (10, 5), offset=64).__array_interface__["data"][0] == address
    assert block.numpy(np.int8, 0).shape == (0,)
    with pytest.raises(ValueError, match="has no"):
        block.numpy("float64", 126)
    assert block.numpy("uint8", np.int64(5)).shape == (5,)
    assert block.numpy("uint8", (np.int32(2), 3)).shape == (2, 3)
    for shape in (-1, (-1, 5), (-2, -3)):
        with pytest.raises(ValueError, match="no shape"):
            block.numpy("uint8", shape)


def test_a_block_is_freed_once() -> None:
    """Goal: of threads that free one block, none frees what another block has got meanwhile."""
    meeting = threading.Barrier(2)
    taken: list[int] = []

    class Slow:
        def check_mapped(self) -> None: ...

        def drop(self, address: int) -> None: ...

        def take_back(self, address: int) -> None:
            taken.append(address)
            meeting.wait(10)
            meeting.wait(10)

    block = Block(Slow(), 4096, 64)
    first = threading.Thread(target=block.free)
    first.start()
    meeting.wait(10)
    second = threading.Thread(target=block.free)
    second.start()
    second.join(10)
    meeting.wait(10)
    first.join(10)
    assert taken == [4096]


def test_tensors_are_views() -> None:
    torch = pytest.importorskip("torch")
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        path = Path(folder) / "memory.sock"
        with MemoryBroker(path), make(path) as memory:
            tensor = memory.allocate(64).torch(torch.bfloat16, (4, 8))
            tensor.fill_(3)
            memory.release()
            memory.resume(10)
            assert float(tensor.sum()) == 96


@pytest.mark.slow
def test_views_keep_a_block_alive(memory: HostMemory) -> None:
    """What nobody can see any more is used again, and only then."""
    array = memory.allocate(MIB).numpy("uint8", MIB)[10:20]
    address = array.__array_interface__["data"][0] - 10
    gc.collect()
    other = memory.allocate(MIB)
    assert other.address != address
    del array
    gc.collect()
    assert memory.allocate(MIB).address == address


def test_empty_regions_go_back(memory: HostMemory, broker: MemoryBroker) -> None:
    blocks = [memory.allocate(REGION) for _ in range(3)]
    large = memory.allocate(10 * MIB)
    assert broker.status()[0].size_bytes == 3 * REGION + 10 * MIB
    for block in [*blocks, large]:
        block.free()
    # One is kept for whoever allocates next.
    assert broker.status()[0].size_bytes == memory.size_bytes == REGION
    with pytest.raises(ValueError, match="was freed"):
        _ = large.buffer
    large.free()


def test_the_api_says_when_memory_is_released(memory: HostMemory) -> None:
    block = memory.allocate(100)
    memory.release()
    memory.release()
    for use in (
        lambda: block.buffer,
        lambda: block.numpy("uint8", 1),
        lambda: memory.allocate(1),
        block.free,
    ):
        with pytest.raises(MemoryReleased, match="call resume first"):
            use()
    memory.resume(10)
    memory.resume(10)
    block.free()


@pytest.mark.slow
def test_touching_released_memory_is_a_clean_death(broker: MemoryBroker) -> None:
    """Goal: no view reads or writes anything between release and resume.

    Method: in a child that has released, touch one; the kernel ends it with SIGSEGV.
    """
    for doing in ("print(array[0])", "array[0] = 1"):
        script = f"""
import resource
from snapagent.workload import HostMemory
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
memory = HostMemory({str(broker.path)!r}, region_bytes={REGION}, reserve_bytes={16 * MIB})
array = memory.allocate(4096).numpy("uint8", 4096)
memory.release()
{doing}
"""
        ended = subprocess.run([sys.executable, "-c", script], check=False, cwd=ROOT)  # noqa: S603 - ours
        assert ended.returncode == -signal.SIGSEGV
    wait_until(lambda: not broker.status(), "the memory of the dead is freed")


ROOT = Path(__file__).parents[3]


def test_a_child_of_fork_shares_the_memory(memory: HostMemory) -> None:
    """Goal: parent and child see each other's writes, also after both were released and resumed.

    Method: fork; the child writes, tries what only its parent may, releases and resumes.
    """
    array = memory.allocate(100).numpy("uint8", 100)
    array[:] = 0
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            array[0] = 1
            refusals = 0
            for attempt in (lambda: memory.allocate(1), lambda: memory.take_back(0)):
                try:
                    attempt()
                except NotTheOwner:
                    refusals += 1
            memory.release()
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            memory.resume(10)
            array[1] = 2
            status = 0 if refusals == 2 and array[2] == 3 else 2
        finally:
            os._exit(status)
    os.read(ready[0], 1)
    memory.release()
    memory.resume(10)
    array[2] = 3
    os.write(go[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert list(array[:3]) == [1, 2, 3]
    for fd in (*ready, *go):
        os.close(fd)


def test_several_threads_allocate_and_free(memory: HostMemory) -> None:
    """Goal: threads never get each other's bytes. Method: each fills and verifies its own."""
    errors: list[object] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(100):
            size = rng.randrange(1, 20_000)
            block = memory.allocate(size)
            block.buffer[:] = bytes([number]) * size
            if bytes(block.buffer) != bytes([number]) * size:
                errors.append(number)
            if rng.random() < 0.5:
                block.free()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_new_broker_has_what_the_last_one_had(path: Path) -> None:
    """Goal: a broker that is gone takes nothing away, and the next one has everything again.

    Method: end one while memory is mapped, and one while it is released; what was freed meanwhile
    is not adopted. Kill the process that holds what is released: the next one has it as well.
    """
    first = MemoryBroker(path)
    first.start()
    with make(path) as memory:
        block, other = memory.allocate(5000), memory.allocate(10 * MIB)
        block.buffer[:] = b"x" * 5000
        first.close()
        assert bytes(block.buffer) == b"x" * 5000
        other.free()
        with pytest.raises(BrokerUnreachable):
            memory.release()
        assert bytes(block.buffer) == b"x" * 5000
        with MemoryBroker(path) as second:
            memory.release()
            assert second.status()[0].size_bytes == REGION
            memory.resume(10)
            assert bytes(block.buffer) == b"x" * 5000
            memory.release()
        with pytest.raises(BrokerUnreachable):
            memory.resume(10)
        # What was released is in another process meanwhile.
        with MemoryBroker(path) as third:
            assert [one.state for one in third.status()] == ["released"]
            memory.resume(10)
            assert bytes(block.buffer) == b"x" * 5000
            memory.release()
            holder = third.holder_pid
            os.kill(holder, signal.SIGKILL)
            wait_until(lambda: third.has_holder and third.holder_pid != holder, "another holder")
        # It had all of that too.
        with MemoryBroker(path):
            memory.resume(10)
            assert bytes(block.buffer) == b"x" * 5000


@pytest.mark.slow
def test_lost_answers_to_a_release_change_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: who had no answer keeps its memory, and all goes on once the broker is awake.

    Method: stop the broker while it is asked, so that it does later what nobody waits for.
    """
    monkeypatch.setattr(external_memory, "_ANSWER_S_MAX", 0.3)
    with broker_process(path) as process, make(path) as memory:
        block = memory.allocate(5000)
        block.buffer[:] = b"x" * 5000
        for _ in range(2):
            stop_process(process.process.pid)
            with pytest.raises(BrokerUnreachable):
                memory.release()
            assert bytes(block.buffer) == b"x" * 5000
            process.process.send_signal(signal.SIGCONT)
            monkeypatch.setattr(external_memory, "_ANSWER_S_MAX", 10.0)
            other = memory.allocate(10 * MIB)
            memory.release()
            memory.resume(10)
            assert bytes(block.buffer) == b"x" * 5000
            other.free()
            monkeypatch.setattr(external_memory, "_ANSWER_S_MAX", 0.3)
            memory.release()
            memory.resume(10)


@pytest.mark.slow
def test_memory_is_lost_only_with_broker_and_holder(path: Path) -> None:
    """And that is said. Method: kill both while the memory is released."""
    with broker_process(path) as process:
        memory = make(path)
        memory.allocate(10).buffer[:] = b"x" * 10
        memory.release()
        process.kill()
        os.kill(process.holder_pid, signal.SIGKILL)
        wait_until(has_ended(process.holder_pid), "the holder is dead")
    with MemoryBroker(path):
        with pytest.raises(MemoryLost, match="both ended"):
            memory.resume(10)
        memory.close()


def test_what_is_refused_changes_nothing(memory: HostMemory, broker: MemoryBroker) -> None:
    block = memory.allocate(10)
    with pytest.raises(MemoryRefused, match="can have 67108864 bytes"):
        memory.allocate(100 * MIB)
    with pytest.raises(MemoryRefused, match="do not fit"):
        memory.allocate(300 * MIB)
    for size, alignment in ((0, 64), (-1, 64), (1, 3), (1, 4 * MIB)):
        with pytest.raises(ValueError, match=r"alignment|cannot allocate"):
            memory.allocate(size, alignment=alignment)
    block.buffer[:] = bytes(10)
    assert broker.status()[0].regions == 1
    memory.allocate(30 * MIB)


def test_closing_gives_everything_back(broker: MemoryBroker) -> None:
    memory = make(broker.path)
    block = memory.allocate(10)
    memory.close()
    memory.close()
    assert not broker.status()
    with pytest.raises(MemoryReleased, match="given back"):
        _ = block.buffer
    with make(broker.path) as other:
        assert other.allocate(10).address == block.address


def test_two_memories_of_a_process_do_not_meet(broker: MemoryBroker) -> None:
    with make(broker.path) as one, make(broker.path) as other:
        first, second = one.allocate(10), other.allocate(10)
        first.buffer[:] = b"a" * 10
        second.buffer[:] = b"b" * 10
        one.release()
        assert bytes(second.buffer) == b"b" * 10
        one.resume(10)
        assert bytes(first.buffer) == b"a" * 10


def test_large_pages_or_small_ones(broker: MemoryBroker) -> None:
    """Where no large pages are set aside, it is small ones."""
    with HostMemory(str(broker.path), reserve_bytes=64 * MIB, huge_pages=True) as memory:
        block = memory.allocate(MIB)
        block.buffer[:] = b"x" * MIB
        memory.release()
        memory.resume(10)
        assert bytes(block.buffer) == b"x" * MIB


def test_nobody_there(path: Path) -> None:
    with pytest.raises(BrokerUnreachable, match="SNAPAGENT_MEMORY_SOCKET"):
        HostMemory(str(path))


@pytest.mark.slow
def test_it_imports_nothing_but_the_standard_library() -> None:
    script = """
import sys
before = set(sys.modules)
from snapagent.workload import *
HostMemory, MemoryLost, Block
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - sys.stdlib_module_names))
mine = sorted(name for name in sys.modules if name.startswith("snapagent."))
print(all(name.startswith("snapagent.workload") for name in mine))
"""
    ended = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert ended.stdout.split("\n")[:2] == ["['snapagent']", "True"]
