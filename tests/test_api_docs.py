"""The examples of `docs/api.md` run as they are printed."""

import os
import re
import shutil
from pathlib import Path

import fsspec
import pytest

import snapstore
from snapstore.units import MIB
from tests.support.samples import bf16, text

DOCS = Path(__file__).parents[1] / "docs" / "api.md"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[object]:
    """Give each block of code, named by the heading that it is under."""
    found = DOCS.read_text("utf-8")
    blocks: list[object] = []
    for match in FENCE.finditer(found):
        heading = found[: match.start()].rpartition("\n## ")[2].partition("\n")[0]
        line = found[: match.start()].count("\n") + 1
        blocks.append(pytest.param(match[1], line, id=f"{heading}, line {line}"))
    return blocks


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder that the document describes."""
    folder = tmp_path_factory.mktemp("api")
    for rank in range(2):
        (folder / "job-17" / f"rank-{rank}").mkdir(parents=True)
        weights = folder / "job-17" / f"rank-{rank}" / "weights.bin"
        weights.write_bytes(bf16(MIB, rank).tobytes())
    (folder / "job-17" / "config.json").write_text('{"tp": 2}\n')
    (folder / "job-17" / "log").write_bytes(text(100_000, 1).tobytes())
    with snapstore.init_store(str(folder / "snapshots")) as store:
        store.push(folder / "job-17", "team/qwen/vllm:v1")
        store.push(folder / "job-17", "team/qwen/vllm:latest")
    return folder


def test_there_are_examples() -> None:
    assert len(examples()) >= 7


@pytest.mark.parametrize(("code", "line"), examples())
def test_an_example_runs(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, line: int
) -> None:
    """Goal: whoever copies an example gets what the document says.

    Method: run it in a copy of the folder, with line numbers of the document in tracebacks.
    """
    shutil.copytree(prepared, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    program = compile("\n" * line + code, os.fspath(DOCS), "exec")
    exec(program, {"__name__": "__example__"})  # noqa: S102 - our own document


def test_the_exact_form_of_a_url(prepared: Path) -> None:
    """The row of the table that no example can spell out."""

    with snapstore.open_store(str(prepared / "snapshots")) as store:
        exact = store.snapshot("team/qwen/vllm:v1").id.hex
    url = f"snapstore://team/qwen/vllm@b3:{exact}/config.json"
    with fsspec.open(url, "rb", store=str(prepared / "snapshots")) as file:
        assert file.read() == b'{"tp": 2}\n'
