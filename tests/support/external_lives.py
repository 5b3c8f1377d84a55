"""Captures of workloads with external memory, and restores of them into fresh namespaces."""

import contextlib
from collections.abc import Iterator

import snapstore
from snapagent.capture import CaptureRequest, CaptureResult, capture
from snapagent.memory.broker import MemoryBroker
from snapagent.restore import Restoration, RestoreRequest, RestoreResult
from snapagent.supervision import Place
from snapstore import Compression, StoreOptions
from tests.support.agent import Agent

__all__ = ["FRESH", "NAME", "bring_back", "restoring", "take"]

NAME = "test/external:v1"
FRESH = Place(network="fresh", pids="fresh")


def take(
    agent: Agent, broker: MemoryBroker, pid: int, name: str = NAME, *, stop: bool = False
) -> CaptureResult:
    options = StoreOptions(compression=Compression.NONE)
    request = CaptureRequest(pid=pid, name=name, broker=broker, stop=stop)
    with snapstore.open_store(agent.url, options) as store:
        return capture(store, request, agent.config)


@contextlib.contextmanager
def restoring(
    agent: Agent,
    broker: MemoryBroker | None,
    name: str = NAME,
    *,
    eager: bool = False,
    allow_driver_change: bool = False,
) -> Iterator[Restoration]:
    request = RestoreRequest(
        name=name,
        place=FRESH,
        broker=broker,
        eager=eager,
        allow_driver_change=allow_driver_change,
    )
    with (
        snapstore.open_store(agent.url) as store,
        Restoration(store, request, agent.config) as restoration,
    ):
        yield restoration


def bring_back(
    agent: Agent, broker: MemoryBroker | None, name: str = NAME, *, eager: bool = False
) -> RestoreResult:
    with restoring(agent, broker, name, eager=eager) as restoration:
        return restoration.run()
