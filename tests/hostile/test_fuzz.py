"""Every parser under a fuzzer for a bounded time: errors of the library come out, nothing else.

`python -m tools.fuzz PARSER --seconds 3600` goes on for longer.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from snapstore.errors import SnapError
from tools.fuzz import IS_AVAILABLE, seeds, target_names
from tools.fuzz_targets import TARGETS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = 1
PARTS = 6
"""Parsers are fuzzed by so many processes, each of which loads and instruments them once."""
PATIENCE_S = 100
WITHOUT_TARGET = {
    "decode_columns": "`criu-mm` and `criu-pagemap`",
    "parse_header": "`envelope-header`, which tries all magics",
    "parse_whole": "`envelope`",
    "parse_bytes": "of the command line, not of the store",
    "parse_class_override": "of the command line",
    "parse_rank_glob": "of the command line",
    "decode": "every document",
    "decode_typed": "`tree`",
    "decode_document": "every document",
    "decode_head": "`config`",
    "decode_section": "`envelope-section`",
    "parse_tree": "`tree`",
    "parse_streams": "`rank`",
    "parse_extents": "`rank`",
}
"""Functions that parse and have no target of their own name, with what covers them."""


@pytest.mark.parametrize("name", target_names())
def test_a_target_begins_with_what_it_accepts(name: str) -> None:
    """A fuzzer that starts from refused inputs alone would stay outside of the parser."""
    accepted = 0
    for data in seeds(name):
        try:
            TARGETS[name].run(data)
        except SnapError:
            continue
        accepted += 1
    assert accepted


def test_every_parser_has_a_target() -> None:
    """Goal: whoever writes a parser is reminded of its target.

    Method: functions of the format and the sources that are called parse or decode are mentioned
    by the targets, or by the list above.
    """
    mentioned = (ROOT / "tools" / "fuzz_targets.py").read_text("utf-8")
    for folder in ("format", "source"):
        for path in sorted((ROOT / "snapstore" / folder).glob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith(("parse_", "decode")):
                    assert (
                        node.name in WITHOUT_TARGET
                        or f".{node.name}" in mentioned
                        or (f"import {node.name}" in mentioned)
                    ), f"{path.name}: {node.name}"


@pytest.mark.skipif(not IS_AVAILABLE, reason="atheris has no wheel for this interpreter")
@pytest.mark.parametrize("part", range(PARTS))
def test_fuzzed_for_a_moment(part: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Proves: H1."""
    names = target_names()[part::PARTS]
    seed = request.config.option.seed % (1 << 31) or 1
    options = ["--seconds", str(SECONDS), "--seed", str(seed)]
    options += ["--corpus", str(tmp_path / "corpus")]
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-m", "tools.fuzz", *names, *options],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stderr[-4000:]}"
    assert sorted(path.name for path in (tmp_path / "corpus").iterdir()) == names


@pytest.mark.skipif(not IS_AVAILABLE, reason="atheris has no wheel for this interpreter")
def test_a_parser_that_fails_is_named(tmp_path: Path) -> None:
    """Goal: one bad parser among others is told, and the others are fuzzed all the same.

    Method: the real program, in which one parser raises what is no error of the library.
    """
    names = target_names()[:3]
    script = f"""
import sys
from tools import fuzz, fuzz_targets
def bad(data):
    raise ZeroDivisionError
whole = fuzz_targets.TARGETS[{names[1]!r}]
fuzz_targets.TARGETS[{names[1]!r}] = fuzz_targets.dataclasses.replace(whole, run=bad)
sys.exit(fuzz.main([*{names!r}, "--seconds", "1", "--corpus", {str(tmp_path)!r}]))
"""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # noqa: TID251 - handed on
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert f"failed: {names[1]}\n" in done.stderr
    assert "ZeroDivisionError" in done.stderr + done.stdout
    assert set(names) < {path.name for path in tmp_path.iterdir()}
