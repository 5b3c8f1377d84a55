"""The lease of a push: *I am about to need what I write* (`format_spec/05-names-refs.md`, 3 and 4).

Implements R3 and R4 of `format_spec/SEMANTICS.md` for the pusher's side.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING

from snapstore.backend.base import Backend, ObjectKind
from snapstore.clock import Clock, format_utc
from snapstore.errors import FormatError, LeaseLost, RefConflict
from snapstore.format.lease import Lease, LeaseState, encode_lease
from snapstore.format.mark import Mark, MarkState, decode_mark, encode_mark
from snapstore.repository.chains import append_generation, read_head
from snapstore.repository.objects import about

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapstore.ids import SnapshotId

__all__ = ["PushLease", "deleting_names", "revive"]

_TTL_S = 3600
_UNUSABLE = frozenset({MarkState.DELETING, MarkState.DELETED})


class PushLease:
    """A lease held by one push. Used by one thread."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        """Acquire a new lease.

        Raises:
            AccessDenied: The store cannot be written.
        """
        self._backend = backend
        self._clock = clock
        self._id = secrets.token_hex(16)
        self._nonce = secrets.token_hex(16)
        self._number = 0
        self._ended = False
        self._write(LeaseState.ACQUIRED, None)
        self._renewed_s = clock.monotonic_s()

    def renew_if_due(self) -> None:
        """Renew when a third of the time is gone; cheap otherwise.

        Raises:
            LeaseLost: A pruner revoked it: start the push over.
        """
        if self._clock.monotonic_s() - self._renewed_s > _TTL_S / 3:
            self._write(LeaseState.RENEWED, None)
            self._renewed_s = self._clock.monotonic_s()

    def commit(self, snapshot: SnapshotId) -> None:
        """Say that the snapshot is complete: from now on it is kept.

        Raises:
            LeaseLost: A pruner revoked the lease: start the push over.
        """
        self._write(LeaseState.COMMITTED, snapshot)
        self._ended = True

    def release(self) -> None:
        """Give up what was not committed. Idempotent."""
        if not self._ended:
            self._ended = True
            self._write(LeaseState.RELEASED, None)

    def _write(self, state: LeaseState, snapshot: SnapshotId | None) -> None:
        body = encode_lease(
            Lease(
                created=format_utc(self._clock.now_ns()),
                holder=f"{socket.gethostname()} pid {os.getpid()}",
                nonce=self._nonce,
                snapshot=None if snapshot is None else snapshot.hex,
                state=state,
                ttl_s=_TTL_S,
            )
        )
        try:
            self._number = append_generation(
                self._backend, ObjectKind.LEASE, self._id, body, after=self._number
            )
        except RefConflict as error:
            self._ended = True
            raise LeaseLost(
                f"lease {self._id[:12]} was revoked while the push was under way",
                next_step="push again; what was sent already is found and not sent twice",
            ) from error


def deleting_names(backend: Backend, kind: ObjectKind) -> frozenset[str]:
    """Names of a kind that are being removed or are gone, so that nothing may rely on them.

    Where nobody can read the mark any more, it may have said so.
    """
    return frozenset(
        name for name in _marked(backend, kind) if _state(backend, kind, name) in _UNUSABLE
    )


def revive(backend: Backend, clock: Clock, kind: ObjectKind, names: Iterable[str]) -> None:
    """Claim condemned objects that a snapshot is about to depend on (R2, R3).

    Raises:
        LeaseLost: One of them is being removed already: the push must start over.
    """
    marked = _marked(backend, kind)
    for name in sorted(marked.intersection(names)):
        chain = f"{kind.value}/{name}"
        while True:
            with about(f"mark {chain}", next_step=f"move marks/{chain} away and push again"):
                head = read_head(backend, ObjectKind.MARK, chain)
                state = decode_mark(head.body).state if head is not None else MarkState.REVIVED
            if head is None or state is MarkState.REVIVED:
                break
            if state is MarkState.DELETING:
                raise LeaseLost(
                    f"{kind.value} {name[:12]} is being removed", next_step="push again"
                )
            mark = Mark(
                created=format_utc(clock.now_ns()),
                nonce=secrets.token_hex(16),
                state=MarkState.REVIVED,
            )
            try:
                append_generation(
                    backend, ObjectKind.MARK, chain, encode_mark(mark), after=head.number
                )
            except RefConflict:
                continue
            break


def _marked(backend: Backend, kind: ObjectKind) -> set[str]:
    infos = backend.list(ObjectKind.MARK, f"{kind.value}/")
    return {info.name.split("/")[1] for info in infos}


def _state(backend: Backend, kind: ObjectKind, name: str) -> MarkState | None:
    try:
        head = read_head(backend, ObjectKind.MARK, f"{kind.value}/{name}")
        return decode_mark(head.body).state if head is not None else None
    except FormatError:
        return MarkState.DELETING
