"""Read small YAML documents that nobody vouches for.

A subset: mappings with text keys, lists, and scalars that are null, true, false, decimal integers
or text. Everything by which YAML documents attack their readers is refused or never interpreted:
aliases, which multiply; depth; tags, which construct objects; exotic numbers, which take quadratic
time.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import yaml

from snapstore.errors import LimitExceeded, Malformed
from snapstore.units import MIB

__all__ = ["YAML_BYTES_MAX", "YamlValue", "parse_yaml"]

YamlValue = None | bool | int | str | list["YamlValue"] | dict[str, "YamlValue"]

YAML_BYTES_MAX = 1 * MIB
YAML_DEPTH_MAX = 24
YAML_NODES_MAX = 100_000

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
# The C parser where PyYAML was built with it: ten times as fast.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(data: bytes, name: str) -> YamlValue:
    """Read the first document of a file.

    Raises:
        Malformed: It is no YAML, uses an alias, or a key is not text or comes twice.
        LimitExceeded: It is too large, too deep, or has too many values.
    """
    if len(data) > YAML_BYTES_MAX:
        raise LimitExceeded(f"{name}: {len(data)} bytes, at most {YAML_BYTES_MAX} are read")
    builder = _Builder(name)
    try:
        for event in yaml.parse(data.decode("utf-8"), Loader=_LOADER):
            builder.take(event)
            if isinstance(event, yaml.DocumentEndEvent):
                break
    except UnicodeDecodeError as error:
        raise Malformed(f"{name}: not UTF-8 at byte {error.start}") from error
    except yaml.YAMLError as error:
        raise Malformed(f"{name}: not YAML: {str(error)[:200]}") from error
    return builder.result


class _Builder:
    """Builds values out of parser events; never recursive, so that depth costs no stack."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[list[YamlValue] | dict[str, YamlValue]] = []
        self._keys: list[str | None] = []
        self._count = 0
        self.result: YamlValue = None

    def take(self, event: yaml.Event) -> None:
        """Take the next event of the document."""
        if isinstance(event, yaml.AliasEvent):
            self._fail(event, "an alias")
        if isinstance(event, yaml.ScalarEvent):
            self._add(event, _scalar(event))
        elif isinstance(event, yaml.SequenceStartEvent):
            self._enter(event, [])
        elif isinstance(event, yaml.MappingStartEvent):
            self._enter(event, {})
        elif isinstance(event, yaml.CollectionEndEvent):
            self._open.pop()
            self._keys.pop()

    def _enter(self, event: yaml.Event, value: list[YamlValue] | dict[str, YamlValue]) -> None:
        self._add(event, value)
        self._open.append(value)
        self._keys.append(None)
        if len(self._open) > YAML_DEPTH_MAX:
            raise LimitExceeded(f"{self._name}: deeper than {YAML_DEPTH_MAX} levels")

    def _add(self, event: yaml.Event, value: YamlValue) -> None:
        self._count += 1
        if self._count > YAML_NODES_MAX:
            raise LimitExceeded(f"{self._name}: more than {YAML_NODES_MAX} values")
        if not self._open:
            self.result = value
            return
        holder, key = self._open[-1], self._keys[-1]
        if isinstance(holder, list):
            holder.append(value)
        elif key is not None:
            holder[key] = value
            self._keys[-1] = None
        else:
            self._keys[-1] = self._new_key(event, holder)

    def _new_key(self, event: yaml.Event, holder: dict[str, YamlValue]) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            self._fail(event, "a key that is not text")
        key = _plain_text(event.value)
        if key in holder:
            self._fail(event, f"the key {key[:80]!r} twice")
        return key

    def _fail(self, event: yaml.Event, reason: str) -> NoReturn:
        where = f" in line {event.start_mark.line + 1}" if event.start_mark else ""
        raise Malformed(f"{self._name}: {reason}{where}")


def _scalar(event: yaml.ScalarEvent) -> YamlValue:
    text: str = event.value
    if not event.style and event.tag is None:  # plain: neither quoted nor a block
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            return int(text)
    return _plain_text(text)


def _plain_text(text: str) -> str:
    """Replace the halves of surrogate pairs that escapes may bring in: no encoding has them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
