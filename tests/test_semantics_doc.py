"""Every numbered promise of the format, and of the node's cache, is named by a test of it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "format_spec" / "SEMANTICS.md", ROOT / "docs" / "node-cache.md")
PLACES = ("tests", "snapstore/testing")

LATER = {
    "R1": "nothing removes anything yet: to be proven with the first program that does",
}
"""Invariants of parts that are yet to be written, each with the reason."""

IDS = r"[A-Z][0-9]+(?:, [A-Z][0-9]+)*"
DEFINED = re.compile(r"^- \*\*([A-Z][0-9]+)\*\* ", re.MULTILINE)
# The second form is that of the contract suite, whose docstrings are short.
NAMED = re.compile(rf"Proves: ({IDS})|\(({IDS})\)")


def defined() -> list[str]:
    return [one for path in DOCUMENTS for one in DEFINED.findall(path.read_text("utf-8"))]


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Give the docstrings of a file's tests, and of the file and its classes."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", path.stem), " ".join(text.split())


def named() -> dict[str, list[str]]:
    """Which tests name each id."""
    found: dict[str, list[str]] = {}
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            if path == Path(__file__):
                continue
            for name, text in docstrings(path):
                for groups in NAMED.findall(text):
                    for one in "".join(groups).split(", "):
                        where = f"{path.relative_to(ROOT)}:{name}"
                        found.setdefault(one, []).append(where)
    return found


def test_the_documents_number_their_promises_without_gaps() -> None:
    ids = defined()
    assert len(ids) == len(set(ids))
    for letter in {one[0] for one in ids}:
        numbers = [int(one[1:]) for one in ids if one[0] == letter]
        assert numbers == list(range(1, len(numbers) + 1)), letter
    assert {one[0] for one in ids} == set("SCIRHN")


def test_every_promise_is_proven_by_a_test() -> None:
    missing = set(defined()) - set(named()) - set(LATER)
    assert not missing, f"no test says `Proves:` one of {sorted(missing)}"


def test_no_test_proves_what_is_not_promised() -> None:
    """A promise that was renumbered or dropped must not live on in the tests."""
    unknown = {one: places for one, places in named().items() if one not in defined()}
    assert not unknown


def test_what_is_left_for_later_exists() -> None:
    assert set(LATER) <= set(defined())
    assert all(LATER.values())
