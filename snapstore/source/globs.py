"""Globs over raw paths, as options take them.

The rule is that of `.gitignore`: a glob without `/`, a closing one aside, matches a name at any
depth; with `/` it is anchored at the root of the tree. What it matches stands for all below it.
`*` and `?` stop at `/`, `**` does not, `[...]` is a set, and a closing `/` asks for a directory.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Self

from snapstore.errors import UsageError

__all__ = ["NUMBER", "PathGlob"]

NUMBER = "{N}"
"""Stands for a decimal number, which `match` returns."""

_TOKEN = re.compile(
    rb"(?P<deep>\*\*/?)|(?P<star>\*)|(?P<any>\?)|(?P<number>\{N\})"
    rb"|\[(?P<set>!?\]?[^\]/]*)\]|(?P<literal>.)",
    re.DOTALL,
)
_DIGITS_MAX = 9


@dataclasses.dataclass(frozen=True, slots=True)
class PathGlob:
    """A compiled glob."""

    text: str
    regex: re.Pattern[bytes]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Compile a glob.

        Raises:
            UsageError: It is empty, has a set that is not closed, or `{N}` more than once.
        """
        glob = os.fsencode(text)
        body = glob.strip(b"/")
        if not body or text.count(NUMBER) > 1:
            raise UsageError(
                f"not a glob: {text[:120]!r}", next_step="write it like gpu-{N}/ or *.weights"
            )
        is_anchored = b"/" in glob.rstrip(b"/")
        prefix = b"" if is_anchored else b"(?:.*?/)??"
        suffix = b"/.*" if glob.endswith(b"/") else b"(?:/.*)?"
        try:
            regex = re.compile(prefix + _translate(body) + suffix, re.DOTALL)
        except re.error as error:
            raise UsageError(f"not a glob: {text[:120]!r}: {error}") from error
        return cls(text=text, regex=regex)

    def match(self, path: bytes, *, is_directory: bool = False) -> int | None:
        """Return the number at `{N}` (0 without one), or none where the glob does not match."""
        match = self.regex.fullmatch(path + b"/" if is_directory else path)
        if match is None:
            return None
        return int(match["N"]) if "N" in self.regex.groupindex else 0


def _translate(glob: bytes) -> bytes:
    parts = []
    for token in _TOKEN.finditer(glob):
        kind, text = token.lastgroup, token[0]
        if kind == "deep":
            parts.append(b"(?:.*/)?" if text.endswith(b"/") else b".*")
        elif kind == "star":
            parts.append(b"[^/]*")
        elif kind == "any":
            parts.append(b"[^/]")
        elif kind == "number":
            parts.append(b"(?P<N>[0-9]{1,%d})" % _DIGITS_MAX)
        elif kind == "set":
            inner = token["set"]
            is_negated = inner.startswith(b"!")
            inner = re.escape(inner[1:] if is_negated else inner)
            inner = inner.replace(b"\\-", b"-").replace(b"--", b"\\-\\-")
            parts.append((b"[^/" if is_negated else b"[") + inner + b"]")
        else:
            parts.append(re.escape(text))
    return b"".join(parts)
