"""A job tells of a state when it is written down, not before."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from typing_extensions import override

from snapagent import api
from snapagent.config import Settings
from snapagent.errors import AgentError
from snapagent.server.jobs import Job, JobTable
from snapagent.server.journal import Journal


def test_what_is_told_was_written_down_before() -> None:
    job = Job(api.RestoreDone, name="a/b:c", store="file:///s", uid=0)
    written: list[str] = []
    seen: list[str] = []

    def write_down(answer: api.CaptureJob | api.RestoreJob) -> None:
        written.append(answer.state)
        # Whoever asks now gets what was written before, as does who looks after a crash.
        seen.append(job.answer().state)

    job.on_step = write_down
    job.enter("preflight")
    job.enter("preparing")
    assert written == ["preflight", "preparing"]
    assert seen == ["queued", "preflight"]
    assert job.answer().version == 3
    assert [step.state for step in job.answer().steps] == ["queued", "preflight", "preparing"]


class Late(Journal):
    """A journal whose first writer of a state is held until others have gone on."""

    def __init__(self, directory: Path, held: str) -> None:
        super().__init__(directory)
        self._held = held
        self.reached = threading.Event()
        self.go_on = threading.Event()

    @override
    def write(self, answer: api.CaptureJob | api.RestoreJob) -> None:
        if answer.warnings and answer.state == self._held:
            self.reached.set()
            assert self.go_on.wait(30)
        super().write(answer)


@pytest.mark.parametrize("ends", [False, True])
def test_late_threads_write_nothing_old(tmp_path: Path, *, ends: bool) -> None:
    """Goal: the journal has the last state, or nothing of a job that ended.

    Method: a thread that keeps a warning is held while it writes down the state before.
    """
    journal = Late(tmp_path, "preflight")

    async def live() -> None:
        table = JobTable(Settings(), journal, lambda _: None)
        job = Job(api.RestoreDone, name="a/b:c", store="file:///s", uid=0)
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        go_on = threading.Event()

        def work() -> api.RestoreDone:
            warning = threading.Thread(target=job.warn, args=("slow",))
            warning.start()
            assert journal.reached.wait(30)
            # What comes after has to wait for that, or to be written after all.
            threading.Timer(0.05, journal.go_on.set).start()
            job.enter("preparing")
            warning.join()
            loop.call_soon_threadsafe(told.set)
            assert go_on.wait(30)
            raise AgentError("it fails", next_step="look")

        table.submit(job, work)
        await told.wait()
        assert states(tmp_path) == {job.id: "preparing"}
        go_on.set()
        if ends:
            while table.get(job.id).state != "failed":
                await table.await_change(job.id, 30)
            job.warn("too late")
            assert states(tmp_path) == {}
        await table.stop(30)

    asyncio.run(live())


def states(directory: Path) -> dict[str, str]:
    """What the journal says of each job."""
    return {path.stem: json.loads(path.read_bytes())["state"] for path in directory.glob("*.json")}
