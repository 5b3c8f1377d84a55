"""Chains: mutable things as numbered generations, decided by put-if-absent alone.

Implements C1 to C4 of `format_spec/SEMANTICS.md`. A chain is addressed by the kind and by its
name without the number, such as `team/model/@v1` for a ref.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from snapstore.errors import (
    LimitExceeded,
    Malformed,
    ObjectExists,
    ObjectNotFound,
    RefConflict,
)
from snapstore.format import limits
from snapstore.repository.objects import read_object

if TYPE_CHECKING:
    from snapstore.backend.base import Backend, ObjectKind
    from snapstore.units import BytesLike

__all__ = [
    "Generation",
    "append_generation",
    "generation_numbers",
    "head_number",
    "read_generation",
    "read_head",
    "read_history",
]

_NUMBER_MAX = 99_999_999


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """One number of a chain and what was written there."""

    number: int
    body: bytes


def head_number(backend: Backend, kind: ObjectKind, chain: str) -> int:
    """Find the newest generation's number; 0 if nobody ever wrote one."""
    return next(iter(generation_numbers(backend, kind, chain)), 0)


def generation_numbers(backend: Backend, kind: ObjectKind, chain: str) -> list[int]:
    """Find the numbers of all generations that are there, newest first.

    The listing may be stale, so numbers after the highest listed one are probed until absent (C3).
    """
    numbers = sorted(_listed(backend, kind, chain))
    number = numbers[-1] if numbers else 0
    while number < _NUMBER_MAX and _exists(backend, kind, f"{chain}/{number + 1:08d}"):
        number += 1
        numbers.append(number)
    return numbers[::-1]


def read_head(backend: Backend, kind: ObjectKind, chain: str) -> Generation | None:
    """Read the newest generation, or None if nobody ever wrote one."""
    number = head_number(backend, kind, chain)
    return read_generation(backend, kind, chain, number) if number else None


def read_generation(
    backend: Backend, kind: ObjectKind, chain: str, number: int
) -> Generation | None:
    """Read one generation, or None if it is not there.

    Raises:
        LimitExceeded: It is longer than any can be.
    """
    name = f"{chain}/{number:08d}"
    try:
        body = read_object(backend, kind, name, limit_bytes=limits.REF_BYTES_MAX)
        return Generation(number, bytes(body))
    except ObjectNotFound:
        return None


def read_history(backend: Backend, kind: ObjectKind, chain: str) -> list[Generation]:
    """Read all generations that are still there, oldest first."""
    numbers = reversed(generation_numbers(backend, kind, chain))
    found = (read_generation(backend, kind, chain, number) for number in numbers)
    return [generation for generation in found if generation is not None]


def append_generation(
    backend: Backend, kind: ObjectKind, chain: str, *body: BytesLike, after: int
) -> int:
    """Write generation `after` + 1, the concatenated `body`, and return its number.

    A reply that was lost is no conflict: the backend finds our own bytes, nonce included (C4).

    Raises:
        RefConflict: Somebody else wrote that number first. Read the chain again and decide anew.
        LimitExceeded: There are no more numbers.
    """
    number = after + 1
    if number > _NUMBER_MAX:
        raise LimitExceeded(
            f"{kind.value} {chain}: the chain is full at generation {_NUMBER_MAX}",
            next_step="use another name, or, if nobody can have written so many, move "
            f"{kind.value}/{chain}/{_NUMBER_MAX} away",
        )
    try:
        backend.put_new(kind, f"{chain}/{number:08d}", body)
    except ObjectExists as error:
        raise RefConflict(
            f"{kind.value} {chain}: generation {number} was written by somebody else"
        ) from error
    return number


def _listed(backend: Backend, kind: ObjectKind, chain: str) -> list[int]:
    numbers = []
    for info in backend.list(kind, f"{chain}/"):
        _, _, number = info.name.rpartition("/")
        if not number.isdecimal():
            raise Malformed(f"{kind.value} {info.name}: not a generation of a chain")
        numbers.append(int(number))
    return numbers


def _exists(backend: Backend, kind: ObjectKind, name: str) -> bool:
    try:
        backend.stat(kind, name)
    except ObjectNotFound:
        return False
    return True
