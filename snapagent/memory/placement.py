"""What a rank manifest says of external memory: `format_spec/04-manifests.md`, section 2.1."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from snapagent.errors import AgentError
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "DIRECTORY",
    "GPU_UUID",
    "HOST",
    "KEY",
    "Rank",
    "RegionPlace",
    "SessionPlace",
    "from_placement",
    "placement_of",
]

KEY: Final = "external"
DIRECTORY: Final = "external"
HOST: Final = "host"
GPU_UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_VERSION_HOST: Final = 1
_VERSION_GPUS: Final = 2
_ADDRESS_MAX: Final = (1 << 57) - 1
_SESSIONS_MAX: Final = 4096
_REGIONS_MAX: Final = 4096
_FILE = re.compile(rf"{DIRECTORY}/[0-9a-z][0-9a-z.-]{{0,127}}\Z")

Rank = Literal["host"] | int
"""As the store counts them."""

Count = Annotated[int, msgspec.Meta(ge=0, le=_ADDRESS_MAX)]


class RegionPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One region: which file of the snapshot belongs where.

    Attributes:
        region: Its number in the session, which its workload knows it by.
        order: Its place in the order of allocation, from 0.
        address: Where the workload had it mapped.
        length: Bytes; those of the file.
        huge: Whether it was made of large pages.
        file: Path in the snapshot.
        device: `host`, or the UUID of the GPU that had it.
    """

    region: Count
    order: Count
    address: Count
    length: Count
    huge: bool
    file: str
    device: str = HOST


class SessionPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All memory of one process.

    Attributes:
        session: SHA-256 of the token that the process proves itself with.
        regions: In the order of allocation.
    """

    session: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    regions: Annotated[tuple[RegionPlace, ...], msgspec.Meta(max_length=_REGIONS_MAX)]


class _External(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1, 2]
    sessions: Annotated[tuple[SessionPlace, ...], msgspec.Meta(max_length=_SESSIONS_MAX)] = ()


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int


def placement_of(sessions: Iterable[SessionPlace]) -> dict[str, object]:
    """Say where the memory of some processes was, as a placement of a rank."""
    found = tuple(sessions)
    is_host = all(region.device == HOST for one in found for region in one.regions)
    external = _External(version=_VERSION_HOST if is_host else _VERSION_GPUS, sessions=found)
    data = msgspec.json.encode(external)
    return {KEY: msgspec.json.decode(data)}


def from_placement(placement: Mapping[str, object], *, of: str) -> list[SessionPlace]:
    """Read what `placement_of` said; all that can be checked without the files is checked.

    Args:
        placement: Of a rank; hostile until checked.
        of: The snapshot and rank, for messages.

    Raises:
        AgentError: It is not what the format says, or of a later version.
    """
    if KEY not in placement:
        return []
    found = placement[KEY]
    # Compared and not looked up: whatever is there may have no hash.
    if isinstance(found, dict) and all(
        found.get("version") != one for one in (_VERSION_HOST, _VERSION_GPUS)
    ):
        raise AgentError(
            f"{of} has external memory of version {found.get('version')!r}",
            next_step="restore it with a newer agent",
        )
    try:
        external = msgspec.convert(found, _External)
    except msgspec.ValidationError as error:
        raise _wrong(of, str(error)) from error
    if len({one.session for one in external.sessions}) < len(external.sessions):
        raise _wrong(of, "a session is there twice")
    for session in external.sessions:
        _check(session, of, external.version)
    return list(external.sessions)


def _check(session: SessionPlace, of: str, version: int) -> None:
    orders = [region.order for region in session.regions]
    if orders != list(range(len(orders))):
        raise _wrong(of, "regions are not in their order")
    if len({region.region for region in session.regions}) < len(orders):
        raise _wrong(of, "a region is there twice")
    spans = []
    for region in session.regions:
        if region.length == 0 or (region.address | region.length) % PAGE_BYTES:
            raise _wrong(of, f"{region.length} bytes at {region.address:#x} are no pages")
        if not _FILE.match(region.file):
            raise _wrong(of, f"{region.file[:80]!r} is no file of a region")
        if region.device != HOST and (version < _VERSION_GPUS or not GPU_UUID.match(region.device)):
            raise _wrong(of, f"{region.device[:80]!r} is no device")
        spans.append(_Span(region.address, region.address + region.length))
    spans.sort(key=lambda span: span.start)
    for one, other in itertools.pairwise(spans):
        if other.start < one.end:
            raise _wrong(of, f"two regions are at {other.start:#x}")


def _wrong(of: str, why: str) -> AgentError:
    return AgentError(
        f"the external memory of {of} cannot be: {why}",
        next_step="the snapshot is damaged or hostile: restore another one",
    )
