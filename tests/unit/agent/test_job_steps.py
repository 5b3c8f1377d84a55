"""A job tells of a state when it is written down, not before."""

from snapagent import api
from snapagent.server.jobs import Job


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
