"""The configuration: what is read from where, and how what is wrong is told."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from snapagent import config
from snapagent.cli.main import app
from snapagent.config import Rule, Settings, load_settings, settings_table, unknown_variables
from snapagent.errors import ConfigInvalid
from snapagent.workload.host_memory import SOCKET_DEFAULT, SOCKET_VARIABLE

DOCUMENT = Path(__file__).parents[3] / "docs" / "agent.md"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of the environment count but what a test sets."""
    for _, variable, _, _ in settings_table():
        if variable:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv(config.CONFIG_VARIABLE, raising=False)
    monkeypatch.setattr(config, "CONFIG_PATH", Path("/nonexistent/snapagent.toml"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_document_has_every_key() -> None:
    """Goal: the table in the documentation is what the code says."""
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("<!-- settings -->\n")[2].partition("<!-- end of settings -->")[0]
    rows = ["| key | variable | default | |", "|---|---|---|---|"]
    for key, variable, default, meaning in settings_table():
        shown = [f"`{cell}`" if cell else "" for cell in (key, variable, default)]
        rows.append(f"| {' | '.join(shown)} | {meaning} |")
    assert table.splitlines() == rows, "\n".join(rows)


def test_defaults() -> None:
    settings = load_settings()
    assert settings == Settings()
    assert settings.socket_path == Path("/run/snapagent/agent.sock")
    assert settings.agent.state_directory == Path("/var/lib/snapagent")


def test_environment_before_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, 'threads = 3\njobs_at_once = 2\nstore = "file:///a"\n')
    monkeypatch.setenv("SNAPAGENT_THREADS", "5")
    monkeypatch.setenv("SNAPSTORE_URL", "file:///b")
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(path))
    settings = load_settings()
    assert (settings.threads, settings.jobs_at_once, settings.store) == (5, 2, "file:///b")


def test_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is beside the daemon's, or where workloads look for it as well."""
    settings = load_settings(written(tmp_path, 'run_directory = "/run/a"\nbroker_bytes = "1GiB"\n'))
    assert settings.broker
    assert settings.broker_path == settings.agent.broker_path == Path("/run/a/memory.sock")
    assert str(Settings().broker_path) == SOCKET_DEFAULT
    monkeypatch.setenv(SOCKET_VARIABLE, "/run/b/sock")
    monkeypatch.setenv("SNAPAGENT_BROKER", "false")
    settings = load_settings()
    assert not settings.broker
    assert settings.broker_path == settings.agent.broker_path == Path("/run/b/sock")


def test_rules(tmp_path: Path) -> None:
    path = written(tmp_path, '[[rules]]\nuid = 7\nmay = ["read"]\nnames = ["a/*"]\n')
    assert load_settings(path).rules == (Rule(uid=7, may=("read",), names=("a/*",)),)


@pytest.mark.parametrize(
    ("text", "said", "step"),
    [
        ("threads = 'two'", "threads: Expected `int`", "threads means"),
        ("jobs_at_once = 0", "jobs_at_once: Expected `int` >= 1", "at once"),
        ("thread = 2", "thread: there is no such key", "threads"),
        ("memory = 'much'", "memory: not a size", "memory means"),
        ("run_directory = 'run'", "run_directory: Expected `str` matching", "means"),
        (f"socket = '/{'x' * 200}'", "socket: too long", "socket means"),
        ("[[rules]]\nmay=['read']\nnames=['a']", "rules[0]: neither uid nor gid", "rules means"),
        ("[[rules]]\nuid=1\nmay=['fly']\nnames=['a']", "rules[0].may[0]", "rules means"),
        ("[[rules]]\nuid=1\nmay=['read']\nname=['a']", "no such key", "names"),
        ("threads = ", "is no TOML", "key = value"),
        ("broker = 1", "broker: Expected `bool`", "broker means"),
        ("socket = 'here'", "socket: Expected `str` matching", "socket means"),
        ("socket = '/a'\nbroker_socket = '/a'", "socket: the memory broker's", "socket means"),
        ("socket = '/a.held'\nbroker_socket = '/a'", "socket: the memory broker's", "means"),
        ('socket = "/a\\u0000b"', "socket: a NUL is in it", "socket means"),
        ('store = "file:///a\\u0000"', "store: a NUL is in it", "store means"),
        ("broker_socket = 'here'", "broker_socket: Expected `str` matching", "means"),
        (f"broker_socket = '/{'x' * 102}'", "broker_socket: too long", "broker_socket means"),
        ("broker_users = 'some'", "broker_users: Invalid enum value", "broker_users means"),
        ("broker_bytes = 'much'", "broker_bytes: not a size", "broker_bytes means"),
        ("broker_regions = 0", "broker_regions: Expected `int` >= 1", "broker_regions means"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str, step: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigInvalid) as caught:
        load_settings(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert step in caught.value.next_step
    assert caught.value.exit_code == 2


def test_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPAGENT_JOBS_KEPT", "many")
    with pytest.raises(ConfigInvalid, match=r"\$SNAPAGENT_JOBS_KEPT: jobs_kept"):
        load_settings()


def test_missing_file_is_an_error_only_if_it_was_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="there is no"):
        load_settings(tmp_path / "none.toml")


@pytest.fixture
def check(tmp_path: Path) -> Iterator[Callable[..., Result]]:
    """Run `snapagent run --check` with a configuration file that says this."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(text: str, *options: str) -> Result:
        arguments = ["run", "--check", "--config", str(written(tmp_path, text)), *options]
        return CliRunner().invoke(app, arguments)

    yield run
    signal.signal(signal.SIGTERM, handler)


def test_a_store_that_cannot_be_is_found_before_the_start(check: Callable[..., Result]) -> None:
    done = check('store = "fiel:///x"')
    assert done.exit_code == 2
    assert "store: no storage of scheme 'fiel' is known" in done.stderr
    for url in ("file:///nowhere", "s3://bucket/prefix", "snapshots", ""):
        assert check(f'store = "{url}"').exit_code == 0


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("SNAPAGENT_THREADS", "5", "threads = -1"),
        ("SNAPAGENT_MEMORY", "1GiB", 'memory = "lots"'),
        ("SNAPAGENT_JOBS_AT_ONCE", "2", 'jobs_at_once = "2"'),
        ("SNAPSTORE_URL", "file:///b", 'store = "fiel:///x"'),
        ("SNAPAGENT_SOCKET_GROUP", "0", 'socket_group = "no such group"'),
    ],
)
def test_what_a_variable_hides_is_checked(
    check: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    text: str,
) -> None:
    """Goal: a file that is right only in this environment is no file that is right."""
    monkeypatch.setenv(variable, value)
    assert check("").exit_code == 0
    done = check(text)
    assert done.exit_code == 2, done.output
    assert text.partition(" ")[0] in done.output or "no such group" in done.output


def test_quiet_checks_say_nothing(check: Callable[..., Result]) -> None:
    assert "threads = 3" in check("threads = 3").stdout
    assert not check("threads = 3", "--quiet").output
    assert json.loads(check("threads = 3", "--quiet", "--json").stdout)["threads"] == 3
    assert check("threads = -1", "--quiet").exit_code == 2


def test_unknown_variables_are_named(
    check: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not unknown_variables()
    monkeypatch.setenv("SNAPAGENT_JOBS_KEP", "3")
    monkeypatch.setenv("SNAPAGENT_RUN_DIR_\n\udc80", "/x")
    monkeypatch.setenv("SNAPAGENT_THREAD", "")
    assert unknown_variables() == [
        "there is no variable SNAPAGENT_JOBS_KEP, the nearest one is SNAPAGENT_JOBS_KEPT",
        r"there is no variable SNAPAGENT_RUN_DIR_\n\udc80, the nearest one is SNAPAGENT_RUN_DIR",
        "there is no variable SNAPAGENT_THREAD, the nearest one is SNAPAGENT_THREADS",
    ]
    done = check("")
    assert done.exit_code == 2
    assert "no variable SNAPAGENT_JOBS_KEP," in done.stderr
    for number in range(100):
        monkeypatch.setenv(f"SNAPAGENT_{number}_{'x' * 1000}", "")
    assert len("".join(unknown_variables())) < 4000
