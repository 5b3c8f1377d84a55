"""What a snapshot says of GPUs: `format_spec/04-manifests.md`, section 2.1."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from snapagent.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from snapagent.gpu.driver import Driver

__all__ = [
    "KEY",
    "CudaFacts",
    "GpuFacts",
    "cuda_facts",
    "cuda_placement",
    "driver_build",
    "read_cuda_facts",
]

KEY: Final = "cuda"
_GPUS_MAX: Final = 256
_PROCESSES_MAX: Final = 65536
_SIZE_MAX: Final = (1 << 57) - 1
_BUILD = Path("/sys/module/nvidia/version")
_BUILD_FORM = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){1,3}\Z")

Name = Annotated[str, msgspec.Meta(max_length=256)]


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU of the machine of the capture.

    Attributes:
        uuid: As NVIDIA's tools spell it.
        name: The model.
        total_bytes: Of its memory.
    """

    uuid: Annotated[
        str,
        msgspec.Meta(pattern=r"\AGPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z"),
    ]
    name: Name
    total_bytes: Annotated[int, msgspec.Meta(ge=0, le=_SIZE_MAX)]


class CudaFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the processes of a snapshot had in the CUDA driver.

    Attributes:
        version: Of this description.
        cuda: Version of CUDA that the driver supports, 13000 for 13.0.
        driver: Version of the driver itself; empty if it was not known.
        gpus: Those of the machine, in the order of their numbers.
        processes: Those with something in the driver, by the numbers they see themselves.
    """

    version: Literal[1] = 1
    cuda: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    driver: Annotated[str, msgspec.Meta(max_length=64)]
    gpus: Annotated[tuple[GpuFacts, ...], msgspec.Meta(max_length=_GPUS_MAX)]
    processes: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=1 << 31)], ...],
        msgspec.Meta(max_length=_PROCESSES_MAX),
    ]


def driver_build() -> str:
    """Return the version of the kernel's part of the driver; empty where there is none."""
    try:
        found = _BUILD.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
    return found if _BUILD_FORM.match(found) else ""


def cuda_facts(driver: Driver, processes: Sequence[int]) -> CudaFacts:
    """Say what this machine has, and which processes use it."""
    return CudaFacts(
        cuda=driver.version,
        driver=driver_build(),
        gpus=tuple(
            GpuFacts(uuid=one.uuid, name=one.name, total_bytes=one.total_bytes)
            for one in driver.devices
        ),
        processes=tuple(sorted(processes)),
    )


def cuda_placement(facts: CudaFacts) -> dict[str, object]:
    """Return facts as a part of a placement."""
    return {KEY: msgspec.json.decode(msgspec.json.encode(facts))}


def read_cuda_facts(placement: Mapping[str, object], *, of: str) -> CudaFacts | None:
    """Read what `cuda_placement` said; none if there was no CUDA.

    Args:
        placement: Of the rank `host`; hostile until checked.
        of: The snapshot, for messages.

    Raises:
        AgentError: It is not what the format says, or of a later version.
    """
    if KEY not in placement:
        return None
    found = placement[KEY]
    if isinstance(found, dict) and found.get("version") != 1:
        raise AgentError(
            f"{of} has a CUDA state of version {found.get('version')!r}",
            next_step="restore it with a newer agent",
        )
    try:
        facts = msgspec.convert(found, CudaFacts)
    except msgspec.ValidationError as error:
        raise _wrong(of, str(error)) from error
    if len({one.uuid for one in facts.gpus}) < len(facts.gpus):
        raise _wrong(of, "a GPU is there twice")
    return facts


def _wrong(of: str, why: str) -> AgentError:
    return AgentError(
        f"the CUDA state of {of} cannot be: {why}",
        next_step="the snapshot is damaged or hostile: restore another one",
    )
