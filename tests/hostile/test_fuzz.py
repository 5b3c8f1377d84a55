"""Every parser under a fuzzer for a bounded time: errors of the library come out, nothing else.

`python -m tools.fuzz PARSER --seconds 3600` goes on for longer.
"""

import ast
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
PATIENCE_S = 60
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
@pytest.mark.parametrize("name", target_names())
def test_fuzzed_for_a_moment(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Proves: H1."""
    seed = request.config.option.seed % (1 << 31) or 1
    options = ["--seconds", str(SECONDS), "--seed", str(seed)]
    options += ["--corpus", str(tmp_path / "corpus")]
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-m", "tools.fuzz", name, *options],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stderr[-4000:]}"
