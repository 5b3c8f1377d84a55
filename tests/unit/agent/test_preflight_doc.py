"""`docs/preflight.md` lists every obstacle, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MADE_OF_PARTS = {"inotify-watch", "fanotify-watch"}


def documented() -> set[str]:
    rows = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "docs/preflight.md").read_text(), re.MULTILINE)
    return {code for row in rows for code in re.findall(r"`([a-z-]+)`", row)}


def used() -> set[str]:
    """Take the first argument of all calls of `block`, `warn` and `add`, or what it was set to."""
    found: set[str] = set()
    for path in (ROOT / "snapagent" / "preflight").glob("*.py"):
        tree = ast.parse(path.read_text())
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if call.func.attr not in ("block", "warn", "add") or len(call.args) < 2:
                continue
            code = call.args[0]
            if isinstance(code, ast.Constant):
                found.add(str(code.value))
            elif isinstance(code, ast.Name):
                found |= assigned(tree, code.id)
    return found


def assigned(tree: ast.Module, name: str) -> set[str]:
    return {
        str(constant.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        for constant in ast.walk(node.value)
        if isinstance(constant, ast.Constant)
    }


def test_every_obstacle_is_documented():
    assert used() | MADE_OF_PARTS == documented()
