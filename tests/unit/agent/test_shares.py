"""How users share the daemon: none of them takes every place from the others."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapagent import api
from snapagent.config import Settings
from snapagent.errors import AgentError, DaemonBusy
from snapagent.server import shares
from snapagent.server.jobs import AnyAnswer, Job, JobTable
from snapagent.server.journal import Journal

ROOT, ONE, OTHER, THIRD = 0, 1001, 1002, 1003


@pytest.mark.parametrize("places", [1, 2, 3, 8, 72])
def test_one_user_leaves_places_for_others(places: int) -> None:
    """Goal: whoever has none gets a place, after users who each took what they could."""
    begun: list[int] = []
    for uid in range(1, places.bit_length() + 1):
        assert shares.may_join(uid, begun, places)
        while shares.may_join(uid, begun, places):
            begun.append(uid)
        assert begun.count(1) <= (places + 1) // 2
    assert shares.may_join(ROOT, [], 1)
    assert not shares.may_join(ROOT, begun[:1] * places, places)
    assert shares.may_join(ROOT, [ROOT] * (places - 1), places)


def test_who_has_the_fewest_at_work_starts_first() -> None:
    assert shares.next_to_start([], [], 8) is None
    assert shares.next_to_start([ONE], [ONE], 1) is None
    assert shares.next_to_start([ONE, ONE, OTHER], [ONE], 8) == 2
    assert shares.next_to_start([ONE, OTHER], [ONE, OTHER], 8) == 0
    assert shares.next_to_start([ONE, ROOT], [ONE], 2) == 1
    # The last place waits for somebody else; root takes it.
    assert shares.next_to_start([ONE], [ONE], 2) is None
    assert shares.next_to_start([ROOT], [ROOT], 2) == 0
    assert shares.next_to_start([ONE], [], 1) == 0


def test_who_has_the_most_loses_the_oldest() -> None:
    assert shares.excess([ONE, OTHER], 2) == []
    assert shares.excess([OTHER, ONE, ONE, ONE], 2) == [1, 2]
    assert shares.excess([OTHER, ONE], 1) == [0]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_user_that_asks_for_much_keeps_nobody_out(tmp_path: Path, gate: threading.Event) -> None:
    """Method: one user begins what it may, before others come; then all of it ends."""
    settings = Settings(jobs_at_once=3, jobs_queued=5, jobs_kept=3)

    def submit(table: JobTable, uid: int) -> AnyAnswer:
        job = Job(api.CaptureDone, name="a:b", store="file:///a", uid=uid)
        return table.submit(job, _waits_for(gate))

    async def run() -> list[AnyAnswer]:
        table = JobTable(settings, Journal(tmp_path / "jobs"), lambda _: None)
        for _ in range(4):
            submit(table, ONE)
        with pytest.raises(DaemonBusy, match=r"uid 1001 has 4 .* last 4 of 8 places are for other"):
            submit(table, ONE)
        others = [submit(table, uid) for uid in (OTHER, THIRD)]
        # Of the places at work the last one was kept.
        await _reached(table, others[0].id, "preflight")
        assert table.get(others[1].id).state == "queued"
        gate.set()
        await table.stop(20)
        return table.all()

    left = asyncio.run(run())
    assert sorted(one.uid for one in left) == [ONE, OTHER, THIRD]


def _waits_for(gate: threading.Event) -> Callable[[], api.CaptureDone]:
    def work() -> api.CaptureDone:
        assert gate.wait(20)
        raise AgentError("it was let go")

    return work


async def _reached(table: JobTable, job_id: str, state: str) -> None:
    while (now := table.get(job_id)).state != state:
        assert now.state == "queued"
        await table.wait(job_id, seen=now.version, timeout_s=20)
