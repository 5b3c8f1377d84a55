"""What people see: results on stdout, everything else on stderr, nothing that steers a terminal."""

import contextlib
import importlib.metadata
import json
import os
import pty
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import snapstore
from tests.support.forked_program import ROOT
from tests.support.trees import same_trees
from tests.unit.cli.conftest import Shop
from tests.unit.cli.program import (
    ENVIRONMENT,
    PATIENCE_S,
    command_line,
    one_object,
    run,
    run_from_nothing,
)

pytestmark = pytest.mark.slow


def test_help_names_all_commands_and_exit_codes() -> None:
    ended = run("-h")
    assert ended.code == 0
    for command in ("init", "push", "pull", "ls", "show", "diff", "stats", "tag", "rm"):
        assert f"\n  {command} " in ended.out
    assert "130 interrupted" in " ".join(ended.out.split())


def test_version() -> None:
    ended = run("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"{snapstore.VERSION}\n", "")


def test_the_installed_scripts_are_these_programs() -> None:
    """All other tests run the modules of this checkout, whatever is installed."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    scripts = described["project"]["scripts"]
    assert sorted(scripts) == ["snapagent", "snapstore"]
    for name, place in scripts.items():
        (installed,) = importlib.metadata.entry_points(group="console_scripts", name=name)
        assert installed.value == place
        assert callable(installed.load())
        assert place.partition(":")[0] == f"{name}.__main__"
    ended = run_from_nothing("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"{snapstore.VERSION}\n", "")


def test_no_command_is_help() -> None:
    ended = run()
    assert "Usage: snapstore" in ended.out + ended.err


@pytest.mark.parametrize(
    "command", ["push", "pull", "ls", "show", "init", "diff", "stats", "tag", "rm"]
)
def test_quiet_says_nothing_on_stderr(command: str, shop: Shop, tmp_path: Path) -> None:
    """Goal: with --quiet a command that succeeds prints its result and nothing else."""
    arguments: dict[str, list[str | Path]] = {
        "push": ["push", shop.tree, "a"],
        "pull": ["pull", "team/model:v1", tmp_path / "out"],
        "ls": ["ls"],
        "show": ["show", "team/model:v1"],
        "init": ["init"],
        "diff": ["diff", "team/model:v1", "team/model:v1"],
        "stats": ["stats"],
        "tag": ["tag", "history", "team/model:v1"],
        "rm": ["rm", "team/model:v1", "--dry-run"],
    }
    store = shop.store
    if command in {"push", "init"}:
        store = tmp_path / "store"
        snapstore.init_store(f"file://{store}").close()
    ended = run(*arguments[command], "--quiet", store=store)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out


def test_progress_is_lines_where_there_is_no_terminal(shop: Shop, tmp_path: Path) -> None:
    """Goal: a log shows what is being done, without escape sequences; stdout has none of it."""
    snapstore.init_store(f"file://{tmp_path / 'store'}").close()
    pushed = run("push", shop.tree, "a", "--json", store=tmp_path / "store")
    assert [line.split(":")[0] for line in pushed.err.splitlines()] == ["scan", "store", "commit"]
    assert "store: 5.44 MB" in pushed.err
    assert len(pushed.out.splitlines()) == 1
    pulled = run("pull", "a", tmp_path / "out", store=tmp_path / "store")
    assert [line.split(":")[0] for line in pulled.err.splitlines()] == ["plan", "fetch", "finish"]
    assert "\x1b" not in pushed.err + pulled.err + pulled.out


def shell(
    command: str, *arguments: str | Path, name: str = "/bin/sh"
) -> subprocess.CompletedProcess[bytes]:
    """Run the program as `"$@"` of a shell, which redirects its streams."""
    return subprocess.run(  # noqa: S603 - our own program
        [name, "-c", command, "sh", *command_line(arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(
    "redirections", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full", "2>&1 | head -c 1"]
)
def test_streams_that_are_closed_or_full(shop: Shop, tmp_path: Path, redirections: str) -> None:
    """Goal: what nobody can read is lost, and the work is done; nothing is printed into files."""
    out = tmp_path / "out"
    command = f'"$@" {redirections}'
    ended = shell(command, "pull", "team/model:v1", out, "--store", shop.store)
    assert (ended.returncode, b"Traceback" in ended.stderr) == (0, False), ended.stderr
    same_trees(shop.tree, out)


@pytest.mark.parametrize("arguments", [("pull", "team/model:v1", "out"), ("push", ".", "a")])
def test_a_working_directory_that_was_removed(
    shop: Shop, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Goal: the cause is named, and not taken for a failure of the output."""
    (tmp_path / "gone").mkdir()
    command = f'cd {tmp_path}/gone && rmdir {tmp_path}/gone && "$@"'
    ended = shell(command, *arguments, "--store", f"file://{shop.store}", "--json")
    assert ended.returncode == 2, ended.stderr
    error = json.loads(ended.stdout)["error"]
    assert error["message"] == "the working directory was removed"
    assert error["next_step"]
    assert b"output" not in ended.stderr


def test_the_working_directory_is_not_replaced(shop: Shop, tmp_path: Path) -> None:
    """Goal: who pulls into the directory they are in is told how, and can do so."""
    ended = shell(f'cd {tmp_path} && "$@"', "pull", "team/model:v1", ".", "--store", shop.store)
    assert ended.returncode == 1, ended.stderr
    assert b"next: add --in-place" in ended.stderr
    assert list(tmp_path.iterdir()) == []
    command = f'cd {tmp_path} && "$@"'
    shell(command, "pull", "team/model:v1", ".", "--in-place", "--store", shop.store)
    assert {one.name for one in tmp_path.iterdir()} == {one.name for one in shop.tree.iterdir()}


def test_a_result_that_cannot_be_written_is_an_error(shop: Shop) -> None:
    ended = shell('"$@" >/dev/full', "show", "team/model:v1", "--store", shop.store)
    assert (ended.returncode, ended.stderr.count(b"No space left")) == (8, 1)


@pytest.mark.parametrize("output", [">/dev/full", "| true"])
def test_an_error_that_cannot_be_written_as_json_is_the_same(shop: Shop, output: str) -> None:
    """Goal: scripts can rely on the exit code, whatever becomes of the output."""
    command = f'set -o pipefail; "$@" {output}'
    ended = shell(command, "show", "none", "--store", shop.store, "--json", name="/bin/bash")
    assert (ended.returncode, b"Traceback" in ended.stderr) == (3, False), ended.stderr
    assert ended.stderr.count(b"error: ") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_loads(number: signal.Signals) -> None:
    """Goal: 130 and one line, where Python alone would show what it was importing."""
    code = f"import os; from snapstore.cli.startup import settle; settle(); os.kill(0, {number:d})"
    ended = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code], capture_output=True, start_new_session=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, b"error: interrupted\n")


def test_ignored_signals_stay_ignored() -> None:
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from snapstore.cli.startup import settle; settle(); os.kill(os.getpid(), signal.SIGINT)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)  # noqa: S603
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_no_threads_for_linear_algebra() -> None:
    """Goal: programs do not begin by making a thread for each processor of a machine."""
    code = (
        "from snapstore.cli.startup import settle; settle(); import numpy, os; "
        "print(len(os.listdir('/proc/self/task')))"
    )
    ended = subprocess.run(  # noqa: S603 - this interpreter
        ["env", "-u", "OPENBLAS_NUM_THREADS", sys.executable, "-c", code],  # noqa: S607
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"1\n", b"")


def test_paths_that_are_no_text(shop: Shop, tmp_path: Path) -> None:
    """Goal: bytes of a path that are not UTF-8 are shown as `\\xNN`, in JSON too."""
    out = Path(os.fsdecode(bytes(tmp_path) + b"/out\xff"))
    pulled = one_object(run("pull", "team/model:v1", out, "--json", store=shop.store))
    assert pulled["directory"] == f"{tmp_path}/out\\xff"
    same_trees(shop.tree, out)
    told = run("pull", "team/model:v1", f"{out}-again", store=shop.store)
    assert f"is in {tmp_path}/out\\xff-again" in told.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("push", "", "a"),
        ("pull", "team/model:v1", ""),
        ("pull", "team/model:v1", "{out}", "--cache", ""),
        ("mount", "team/model:v1", ""),
        ("umount", ""),
        ("cache", "init", ""),
        ("push", "{out}", "a", "--label", "key=\udcff"),
    ],
)
def test_arguments_that_nobody_can_mean(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Goal: an empty path, of a variable that is not set, is not the present directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    given = [argument.format(out=tmp_path / "out") for argument in arguments]
    environment = {"SNAPSTORE_URL": f"file://{shop.store}"}
    ended = run(*given, environment=environment)
    assert ended.code == 2, ended.err
    assert "empty" in ended.err or "UTF-8" in ended.err


def test_progress_is_a_bar_on_a_terminal(shop: Shop, tmp_path: Path) -> None:
    """Goal: on a terminal there is a bar, and it is gone at the end; stdout has none of it.

    Method: a pseudo-terminal as stderr, and a pipe as stdout.
    """
    terminal, its_other_end = pty.openpty()
    command = command_line(["pull", "team/model:v1", tmp_path / "out", "--store", shop.store])
    with subprocess.Popen(  # noqa: S603 - our own program
        command,
        env={**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=its_other_end,
        encoding="utf-8",
    ) as process:
        os.close(its_other_end)
        shown = b""
        # The kernel says EIO when the last other end is closed.
        with contextlib.suppress(OSError):
            while part := os.read(terminal, 65536):
                shown += part
        out = process.communicate()[0]
    os.close(terminal)
    assert process.returncode == 0
    assert b"fetch" in shown or b"finish" in shown
    assert b"\x1b[" in shown
    assert "\x1b" not in out
    assert len(out.splitlines()) == 1


def test_push_and_pull_tell_people_what_matters(shop: Shop, tmp_path: Path) -> None:
    snapstore.init_store(f"file://{tmp_path / 'store'}").close()
    pushed = run("push", shop.tree, "a/b:c", store=tmp_path / "store")
    assert pushed.out.startswith("a/b:c is snapshot ")
    assert "(directory, 2 ranks)" in pushed.out
    assert "the store grew by" in pushed.out
    pulled = run("pull", "a/b:c", tmp_path / "out", store=tmp_path / "store")
    assert f"is in {tmp_path / 'out'}: 4 files, 5.44 MB" in pulled.out


def test_ls_is_a_table(shop: Shop) -> None:
    ended = run("ls", store=shop.store)
    header, _, row = [line for line in ended.out.splitlines() if line.strip()][:3]
    assert header.split() == ["name", "snapshot", "created", "kind", "ranks", "size"]
    assert row.split()[0] == "team/model:v1"
    assert row.split()[1] == shop.snapshot[:12]
    assert ended.err == ""


def test_show_is_for_people_too(shop: Shop) -> None:
    """Goal: identity, labels, codecs, ranks and streams are all there, none cut off."""
    ended = run("show", "team/model:v1", store=shop.store)
    assert ended.code == 0
    for text in (shop.snapshot, "label         note=a=b", "codec         planes", "weights.bin"):
        assert text in ended.out
    for rank_id in shop.pushed.ranks.values():
        assert rank_id.short in ended.out


def test_the_environment_names_the_store(shop: Shop, tmp_path: Path) -> None:
    """Goal: SNAPSTORE_URL is the default, --store is above it, and an empty value is none."""
    url = {"SNAPSTORE_URL": f"file://{shop.store}"}
    assert "team/model:v1" in run("ls", environment=url).out
    wrong = {"SNAPSTORE_URL": f"file://{tmp_path}"}
    assert "team/model:v1" in run("ls", environment=wrong, store=shop.store).out
    assert run("ls", environment=wrong).code == 3
    assert run("ls", environment={"SNAPSTORE_URL": ""}).code == 2


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Goal: what trees and stores of others are called arrives as text and as nothing else.

    Method: escape sequences and line breaks in the names of a file, of a fifo that is left out,
    in a label, and in a path that cannot be read as a directory.
    """
    evil = "x\x1b[2J\x07\x9b31m\x85y"
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / f"{evil}\nfile.bin").write_bytes(os.urandom(100_000))
    os.mkfifo(tree / evil)
    store = tmp_path / "store"
    snapstore.init_store(f"file://{store}").close()
    arguments = ("push", tree, "a", "--skip-special", "--label", f"k={evil}")
    ended = [
        run(*arguments, store=store),
        run("show", "a", store=store),
        run("push", tree / evil, "a", store=store),
        run("show", evil, store=store),
    ]
    assert [one.code for one in ended] == [0, 0, 1, 2]
    for one in ended:
        assert not {*"\x1b\x07\x9b\x85"} & {*(one.out + one.err)}
    assert "left out x\\x1b[2J" in ended[0].err
    assert "x\\x1b[2J\\x07\\x9b31m\\x85y\\nfile.bin" in ended[1].out
    # Programs get the real names.
    shown = one_object(run("show", "a", "--json", store=store))
    assert shown["labels"] == {"k": evil}
