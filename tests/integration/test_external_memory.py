"""External memory through captures and restores with CRIU: what is where, and what is left."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapstore
from snapagent.capture import CaptureRequest, CaptureResult, capture
from snapagent.errors import PreflightFailed
from snapagent.memory.broker import MemoryBroker
from snapagent.restore import Restoration, RestoreRequest, RestoreResult
from snapagent.supervision import Place
from snapstore import Compression, StoreOptions
from snapstore.errors import DigestMismatch
from tests.support.agent import Agent
from tests.support.external import SIZE_MIB, ExternalWorkload, broker, workload  # noqa: F401
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.criu, pytest.mark.slow]

NAME = "test/external:v1"
FRESH = Place(network="fresh", pids="fresh")
MIB = 1 << 20


def take(agent: Agent, broker: MemoryBroker, pid: int, name: str = NAME) -> CaptureResult:
    options = StoreOptions(compression=Compression.NONE)
    with snapstore.open_store(agent.url, options) as store:
        return capture(store, CaptureRequest(pid=pid, name=name, broker=broker), agent.config)


@contextlib.contextmanager
def restoring(
    agent: Agent, broker: MemoryBroker | None, name: str = NAME, *, eager: bool = False
) -> Iterator[Restoration]:
    request = RestoreRequest(name=name, place=FRESH, broker=broker, eager=eager)
    with (
        snapstore.open_store(agent.url) as store,
        Restoration(store, request, agent.config) as restoration,
    ):
        yield restoration


def bring_back(
    agent: Agent, broker: MemoryBroker, name: str = NAME, *, eager: bool = False
) -> RestoreResult:
    with restoring(agent, broker, name, eager=eager) as restoration:
        return restoration.run()


def test_the_source_goes_on_and_the_copy_is_the_same(
    agent: Agent, broker: MemoryBroker, workload: ExternalWorkload, tmp_path: Path
) -> None:
    """Goal: arrays are the same before and after, in the source and in what was restored.

    Method: capture a living process; its source gets its memory back. Kill it, restore it in fresh
    namespaces twice, the second time from a capture of the first copy, which has changed.
    """
    before = workload.ask("digest")
    assert workload.ask("release") == "released"
    result = take(agent, broker, workload.pid)
    assert workload.ask("resume") == "resumed"
    assert workload.ask("digest") == before
    assert result.external_bytes >= SIZE_MIB * MIB
    assert result.page_bytes < 40 * MIB
    assert_stored_as_files(agent, tmp_path)
    assert workload.ask("change") == "changed"
    workload.end()
    wait_until(lambda: not broker.status(), "the memory of the source is freed")

    restored = bring_back(agent, broker)
    assert restored.external_bytes >= (SIZE_MIB // 4 * 3) * MIB
    assert workload.ask("buffer").startswith("MemoryReleased")
    assert workload.ask("resume") == "resumed"
    assert workload.ask("digest") == before
    assert workload.ask("fork") == "child 0"
    assert workload.ask("change") == "changed"
    changed = workload.ask("digest")
    assert workload.ask("release") == "released"
    take(agent, broker, restored.root_pid, "test/external:v2")
    workload.end()

    bring_back(agent, broker, "test/external:v2", eager=True)
    assert workload.ask("resume") == "resumed"
    assert workload.ask("digest") == changed
    workload.end()
    wait_until(lambda: not broker.status(), "all memory is freed")


def assert_stored_as_files(agent: Agent, folder: Path) -> None:
    with snapstore.open_store(agent.url) as store:
        store.pull(NAME, folder / "pulled")
    sizes = [path.stat().st_size for path in (folder / "pulled" / "external").iterdir()]
    assert sum(sizes) >= SIZE_MIB * MIB
