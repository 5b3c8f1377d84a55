"""Ratchets on the shape of the tree: what no linter checks, and what may only get better.

    python -m tools.tidy

Prints one line for each finding and exits with 1 if there are any. Limits: functions of 70 lines,
files of 800, lines of 100 characters, files of 1 MiB. What was larger when a limit came is listed
with its size: it may shrink, and then its entry has to shrink with it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["TODAY", "UNFINISHED", "WORDS", "Exceptions", "Tree", "findings", "main"]

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 800
LINE_CHARS_MAX = 100
FILE_BYTES_MAX = 1 << 20

ROOT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = ("snapstore", "tools", "tests")
ENTRY_NAMES = frozenset({"__init__", "__main__", "conftest"})
# Ruff checks the lines of Python, and knows comments that cannot be shorter.
CODE_SUFFIXES = frozenset({".sh"})

# Joined here so that this file passes its own check.
UNFINISHED = ("FIX" + "ME", "TO" + "DO", "XX" + "X")
WORDS = {
    "blob": "chunk, frame or object",
    "tombstone": "mark",
    "white" + "list": "allow list",
    "black" + "list": "refused list",
    "sanity": "say what is checked",
    "hack": "say why it is so",
}
"""Words that have a better one here (`format_spec/00-terms.md`), with what to say instead."""

_HOME = re.compile(r"(?<![\w.~-])/(?:home|root|Users|work)/\w")
_LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"#+ +(.*?) *#*")


@dataclasses.dataclass(frozen=True)
class Exceptions:
    """What is larger than a limit, with its size of today."""

    functions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict)


TODAY = Exceptions(lines={"tools/install_criu.sh": 112, "tools/setup.sh": 104})
"""Entries of the other two look like `"tools/x.py:name": 75` and `"tools/x.py": 812`."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """The files of a checkout that belong to it, by path from the root."""

    root: Path
    paths: tuple[str, ...]

    @classmethod
    def of_checkout(cls, root: Path = ROOT) -> Tree:
        """Ask git which files there are, those not yet added included."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
            cwd=root,
            capture_output=True,
            check=True,
        ).stdout
        names = sorted(set(listed.decode().split("\0")) - {""})
        return cls(root, tuple(name for name in names if (root / name).is_file()))

    @cached_property
    def texts(self) -> dict[str, str]:
        """The contents of all files that are text."""
        found = {}
        for path in self.paths:
            raw = (self.root / path).read_bytes()
            if len(raw) <= FILE_BYTES_MAX and b"\0" not in raw:
                found[path] = raw.decode("utf-8", "replace")
        return found

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """All Python files, parsed."""
        return {path: ast.parse(text, path) for path, text in self.texts.items() if is_python(path)}


def findings(tree: Tree, today: Exceptions | None = None) -> list[str]:
    """Check everything; one sentence for each thing that is wrong."""
    today = today or Exceptions()
    return [
        *_long_functions(tree, today.functions),
        *_long_files(tree, today.files),
        *_long_lines(tree, today.lines),
        *_words(tree),
        *_dead_modules(tree),
        *_broken_links(tree),
        *_large_files(tree),
    ]


def main() -> int:
    """Check the checkout that this file is in."""
    found = findings(Tree.of_checkout(), TODAY)
    for line in found:
        print(line)
    return 1 if found else 0


def is_python(path: str) -> bool:
    """Whether a path is one of a Python file."""
    return path.endswith(".py")


# -- sizes ----------------------------------------------------------------------------------------


def _long_functions(tree: Tree, today: Mapping[str, int]) -> Iterator[str]:
    sizes: dict[str, int] = {}
    for path, module in tree.modules.items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                key = f"{path}:{node.name}"
                sizes[key] = max(sizes.get(key, 0), lines)
    yield from _ratchet(sizes, today, FUNCTION_LINES_MAX, "lines")


def _long_files(tree: Tree, today: Mapping[str, int]) -> Iterator[str]:
    sizes = {path: len(tree.texts[path].splitlines()) for path in tree.modules}
    yield from _ratchet(sizes, today, FILE_LINES_MAX, "lines")


def _long_lines(tree: Tree, today: Mapping[str, int]) -> Iterator[str]:
    sizes = {
        path: max(map(len, text.splitlines()), default=0)
        for path, text in tree.texts.items()
        if Path(path).suffix in CODE_SUFFIXES
    }
    yield from _ratchet(sizes, today, LINE_CHARS_MAX, "characters in a line")


def _ratchet(
    sizes: Mapping[str, int], today: Mapping[str, int], limit: int, unit: str
) -> Iterator[str]:
    for where, size in sizes.items():
        allowed = today.get(where)
        if allowed is None:
            if size > limit:
                yield f"{where} has {size} {unit}, more than {limit}: divide it"
        elif size > allowed:
            yield f"{where} has {size} {unit} and may have {allowed}: it must not grow"
        elif size < allowed:
            yield f"{where} has only {size} {unit} now: lower its exception, {allowed}"
    for where in sorted(set(today) - set(sizes)):
        yield f"{where} is gone: remove its exception"


def _large_files(tree: Tree) -> Iterator[str]:
    for path in tree.paths:
        size = (tree.root / path).stat().st_size
        if size > FILE_BYTES_MAX:
            yield f"{path} has {size} bytes, more than {FILE_BYTES_MAX}: make it when it is needed"


# -- words ----------------------------------------------------------------------------------------


def _words(tree: Tree) -> Iterator[str]:
    own = Path(__file__).resolve()
    unfinished = re.compile(rf"\b(?:{'|'.join(UNFINISHED)})\b")
    refused = re.compile(rf"\b({'|'.join(WORDS)})s?\b", re.IGNORECASE)
    for path, text in tree.texts.items():
        if (tree.root / path).resolve() == own:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if unfinished.search(line):
                yield f"{path}:{number}: unfinished: do it, or write down elsewhere what is left"
            for match in refused.finditer(line):
                better = WORDS[match[1].lower()]
                yield f"{path}:{number}: {match[0]!r}: say {better}"
            if _HOME.search(line):
                yield f"{path}:{number}: a path of somebody's own machine"


# -- dead modules ---------------------------------------------------------------------------------


def _dead_modules(tree: Tree) -> Iterator[str]:
    imported = set(_entry_points(tree))
    for path, module in tree.modules.items():
        folder = _module_name(path).rpartition(".")[0]
        for name in _imports(module):
            # A program that is run by its path imports its neighbours by their bare names.
            imported |= {name, f"{folder}.{name}"}
    for path, module in tree.modules.items():
        if not path.startswith(tuple(f"{folder}/" for folder in CODE_FOLDERS)):
            continue
        stem = Path(path).stem
        if stem in ENTRY_NAMES or stem.startswith("test_") or _is_program(module):
            continue
        if _module_name(path) not in imported:
            yield f"{path}: nothing imports it: remove it"


def _entry_points(tree: Tree) -> Iterator[str]:
    """Modules that the packaging and pytest name."""
    text = tree.texts.get("pyproject.toml", "")
    for target in tomllib.loads(text).get("project", {}).get("scripts", {}).values():
        yield target.partition(":")[0]
    for module in tree.modules.values():
        for node in module.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytest_plugins":
                yield from ast.literal_eval(node.value)


def _imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_program(module: ast.Module) -> bool:
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for node in module.body
    )


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# -- links ----------------------------------------------------------------------------------------


def _broken_links(tree: Tree) -> Iterator[str]:
    for path, text in tree.texts.items():
        if not path.endswith(".md"):
            continue
        for number, line in _prose(text):
            for target in _LINK.findall(re.sub(r"`[^`]*`", "", line)):
                if reason := _why_broken(tree, path, target):
                    yield f"{path}:{number}: {target}: {reason}"


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Give the lines outside of blocks of code, with their numbers."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def _why_broken(tree: Tree, path: str, target: str) -> str:
    if re.match(r"[a-z]+:", target):
        return ""
    name, _, anchor = target.partition("#")
    file = (tree.root / path).parent / name if name else tree.root / path
    if not file.exists():
        return "no such file"
    if anchor and file.suffix == ".md" and anchor not in _anchors(file.read_text("utf-8")):
        return "no such heading"
    return ""


def _anchors(text: str) -> set[str]:
    """The names that headings get on the usual forges."""
    headings = (_HEADING.fullmatch(line) for _, line in _prose(text))
    return {
        re.sub(r"[^\w\- ]", "", match[1].lower()).replace(" ", "-") for match in headings if match
    }


if __name__ == "__main__":
    sys.exit(main())
