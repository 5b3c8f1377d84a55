"""Action scripts: what the agent answers decides, and no answer is no."""

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from snapagent.criu.hooks import ScriptHooks
from snapagent.errors import AgentError, ProtocolError
from tests.support.peers import SECONDS_MAX, on_thread, until


def start(hooks: ScriptHooks, action: str) -> subprocess.Popen[bytes]:
    """Run the script the way CRIU does."""
    return subprocess.Popen(  # noqa: S603 - the script under test
        [hooks.path], env={"CRTOOLS_SCRIPT_ACTION": action}, stdin=subprocess.DEVNULL
    )


def run(hooks: ScriptHooks, action: str) -> int:
    with start(hooks, action) as script:
        return script.wait(SECONDS_MAX)


def test_answers_decide(tmp_path: Path) -> None:
    seen: list[str] = []

    def note(name: str, *, answer: bool) -> Callable[[], bool]:
        def call() -> bool:
            seen.append(name)
            return answer

        return call

    def fail() -> bool:
        raise AgentError("the store is full")

    actions = {
        "post-dump": note("post-dump", answer=True),
        "pre-resume": note("pre-resume", answer=False),
        "pre-dump": fail,
    }
    with ScriptHooks(tmp_path, actions) as hooks:
        assert run(hooks, "post-dump") == 0
        assert run(hooks, "network-lock") == 0
        assert run(hooks, "pre-resume") == 1
        assert hooks.error is None
        assert run(hooks, "pre-dump") == 1
        with pytest.raises(AgentError, match="the store is full"):
            raise hooks.error
        assert run(hooks, "post-dump") == 0
    assert seen == ["post-dump", "pre-resume", "post-dump"]
    assert list(tmp_path.iterdir()) == []


def test_actions_that_criu_does_not_have(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    with ScriptHooks(tmp_path, {}, errors.append) as hooks:
        assert run(hooks, "post-dump; rm") == 1
        assert run(hooks, "x" * 100) == 1
        assert run(hooks, "") == 1
    assert errors == [hooks.error]
    with pytest.raises(ProtocolError, match="post-dump; rm"):
        raise errors[0]


def test_answer_that_nobody_read_is_not_for_the_next(tmp_path: Path) -> None:
    """Goal: a script that was killed while it waited leaves no answer behind for another.

    Method: the first answer is yes and comes after the script's death; the second is no.
    """
    asked, answer = threading.Event(), threading.Event()
    answers = iter([True, False])

    def slowly() -> bool:
        asked.set()
        assert answer.wait(SECONDS_MAX)
        return next(answers)

    with ScriptHooks(tmp_path, {"post-dump": slowly}) as hooks:
        with start(hooks, "post-dump") as script:
            assert asked.wait(SECONDS_MAX)
            script.kill()
        answer.set()
        assert run(hooks, "post-dump") == 1


def test_scripts_fail_when_the_agent_closes(tmp_path: Path) -> None:
    """A script that waits when the hooks close gets no answer, and fails."""
    asked = threading.Event()
    hooks = ScriptHooks(tmp_path, {"post-dump": lambda: bool(asked.set())})
    with start(hooks, "post-dump") as script:
        # Nobody answers, since the hooks were not started.
        until(lambda: is_asleep(script.pid))
        hooks.close()
        assert script.wait(SECONDS_MAX) == 1
    assert not asked.is_set()
    assert list(tmp_path.iterdir()) == []
    hooks.close()


def is_asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").startswith(("pipe", "anon_pipe"))


def test_close_waits_for_an_action(tmp_path: Path) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slowly() -> bool:
        asked.set()
        return answer.wait(SECONDS_MAX)

    hooks = ScriptHooks(tmp_path, {"post-dump": slowly})
    with hooks, start(hooks, "post-dump") as script:
        assert asked.wait(SECONDS_MAX)
        closing = on_thread(hooks.close)
        answer.set()
        closing.result(SECONDS_MAX)
        # It was answered before the hooks were gone.
        assert script.wait(SECONDS_MAX) == 0


def test_directories_that_do_not_do(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="cannot make a hook"):
        ScriptHooks(tmp_path / "absent", {})
    (tmp_path / "hook").touch()
    with pytest.raises(AgentError, match="cannot make a hook"):
        ScriptHooks(tmp_path, {})
