"""What manifests say of external memory: written, read, and refused where it cannot be."""

import copy
import json
from typing import Any

import jsonschema
import msgspec
import pytest

from snapagent.errors import AgentError
from snapagent.memory.placement import (
    RegionPlace,
    SessionPlace,
    from_placement,
    placement_of,
)
from tests.support.schemas import validator

PAGE = 4096


def region(number: int) -> RegionPlace:
    return RegionPlace(
        region=number + 5,
        order=number,
        address=(number + 1) * 16 * PAGE,
        length=PAGE,
        huge=False,
        file=f"external/0-{number}.mem",
    )


SESSION = SessionPlace(session="a" * 64, regions=(region(0), region(1)))
DOCUMENT: dict[str, Any] = {
    "external": {
        "version": 1,
        "sessions": [
            {
                "session": "a" * 64,
                "regions": [
                    {
                        "region": number + 5,
                        "order": number,
                        "device": "host",
                        "address": (number + 1) * 65536,
                        "length": 4096,
                        "huge": False,
                        "file": f"external/0-{number}.mem",
                    }
                    for number in range(2)
                ],
            }
        ],
    }
}


def is_in_schema(placement: object) -> bool:
    schema = validator("rank-meta").schema["$defs"]["external"]
    checker = jsonschema.Draft202012Validator(schema)
    assert isinstance(placement, dict)
    return checker.is_valid(placement["external"])


def test_what_was_written_is_read() -> None:
    written = placement_of([SESSION])
    assert written == DOCUMENT
    assert from_placement(written, of="rank host") == [SESSION]
    assert from_placement(json.loads(json.dumps(written)), of="rank host") == [SESSION]
    assert is_in_schema(written)
    assert from_placement({}, of="rank host") == []
    assert from_placement({"gpu": 3}, of="rank host") == []


def test_memory_of_gpus_needs_a_reader_that_knows_them() -> None:
    on_gpu = msgspec.structs.replace(region(1), device=GPU)
    session = SessionPlace(session="a" * 64, regions=(region(0), on_gpu))
    written = placement_of([session])
    assert written["external"]["version"] == 2  # type: ignore[index]
    assert from_placement(written, of="rank host") == [session]
    assert is_in_schema(written)


def changed(path: str, value: object) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    *above, last = path.split("/")
    at: Any = document["external"]
    for name in above:
        at = at[int(name) if name.isdecimal() else name]
    at[int(last) if last.isdecimal() else last] = value
    return document


GPU = "GPU-00000007-0000-0000-0000-000000000001"
REGION = "sessions/0/regions/1"
OTHER = msgspec.to_builtins(SESSION)
BY_SCHEMA = [
    ("version", 3),
    ("version", None),
    ("version", {"no": "hash"}),
    ("more", 1),
    ("sessions", {}),
    ("sessions/0/session", "a" * 63),
    ("sessions/0/session", "A" * 64),
    ("sessions/0/more", 1),
    (f"{REGION}/device", "gpu"),
    (f"{REGION}/device", "GPU-0"),
    (f"{REGION}/huge", 0),
    (f"{REGION}/more", 0),
    (f"{REGION}/address", -PAGE),
    (f"{REGION}/address", 1 << 57),
    (f"{REGION}/address", "0x1000"),
    (f"{REGION}/address", PAGE + 1),
    (f"{REGION}/length", 0),
    (f"{REGION}/length", 100),
    (f"{REGION}/file", "/etc/shadow"),
    (f"{REGION}/file", "external/../pages-1.img"),
    (f"{REGION}/file", "external/a/b"),
    (f"{REGION}/file", "external/x\n"),
]
BY_RULE = [
    (f"{REGION}/device", GPU),
    (f"{REGION}/order", 0),
    (f"{REGION}/order", 2),
    (f"{REGION}/region", 5),
    (f"{REGION}/address", 16 * PAGE),
    ("sessions", [OTHER, OTHER]),
]


@pytest.mark.parametrize(("path", "value"), BY_SCHEMA + BY_RULE, ids=lambda part: repr(part)[:40])
def test_what_cannot_be_is_refused(path: str, value: object) -> None:
    with pytest.raises(AgentError):
        from_placement(changed(path, value), of="rank host of snapshot x")


@pytest.mark.parametrize(("path", "value"), BY_SCHEMA, ids=lambda part: repr(part)[:40])
def test_the_schema_refuses_what_it_can(path: str, value: object) -> None:
    assert not is_in_schema(changed(path, value))


def test_external_memory_that_is_no_object_is_refused() -> None:
    for value in (None, [], 7, {}):
        with pytest.raises(AgentError):
            from_placement({"external": value}, of="rank host")
