"""Who may do what: rules by user and group with globs of names; root all, others nothing else.

Pure but for looking at processes in `/proc`. The rule that is missing is named, so that an
administrator can add it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from snapagent.errors import AgentError
from snapagent.linux import namespaces, processes
from snapagent.linux.peers import credentials_of
from snapstore import parse_snapshot_ref
from snapstore.errors import PolicyRefused, SnapError

if TYPE_CHECKING:
    import socket

    from snapagent.config import Action, Rule

__all__ = ["Peer", "Policy", "peer_of", "require_same_pids"]

_ID_LINES: Final = 4
"""Real, effective, saved and of the file system."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection, as the kernel says.

    Attributes:
        pid: Its process, when it connected.
        uid: Its effective user.
        gids: Its effective group and all others.
    """

    pid: int
    uid: int
    gids: frozenset[int]

    @property
    def is_root(self) -> bool:
        """Whether no rule is asked."""
        return self.uid == 0


def peer_of(connection: socket.socket) -> Peer:
    """Ask the kernel who connected."""
    return Peer(*credentials_of(connection))


class Policy:
    """The rules. Immutable."""

    def __init__(self, rules: tuple[Rule, ...], default_store: str) -> None:
        self._rules = rules
        self._default_store = default_store

    def require(self, peer: Peer, action: Action, name: str, store: str) -> None:
        """Go on only if the peer may do that with that name.

        Raises:
            PolicyRefused: No rule allows it; the message says which rule would.
            UsageError: It is no name.
        """
        full, exact = _full_name(name)
        if self.allows(peer, action, name, store):
            return
        what = f"{full} by its id" if exact else full
        needed = f'uid = {peer.uid}, may = ["{action}"], names = ["{"*" if exact else full}"]'
        if store != self._default_store:
            what += f" in {store}"
            needed += f', stores = ["{store}"]'
        raise PolicyRefused(
            f"uid {peer.uid} may not {action} {what}: no rule allows it",
            next_step=f"let the administrator add under [[rules]]: {needed}",
        )

    def allows(self, peer: Peer, action: Action, name: str, store: str) -> bool:
        """Tell whether the peer may do that with that name."""
        return peer.is_root or any(
            _fits(rule, peer)
            and action in rule.may
            and _fits_name(rule, name)
            and self._fits_store(rule, store)
            for rule in self._rules
        )

    def _fits_store(self, rule: Rule, store: str) -> bool:
        is_default = store == self._default_store
        return is_default or any(_fits_url(glob, store) for glob in rule.stores)

    def may_keep_memory(self, peer: Peer) -> bool:
        """Tell whether the peer may have external memory: whoever may capture anything."""
        return peer.is_root or any(
            _fits(rule, peer) and "capture" in rule.may for rule in self._rules
        )

    def require_processes(self, peer: Peer, pid: int, action: Action, name: str) -> None:
        """Go on only if all processes of a tree are the peer's own, or a rule says more.

        What the kernel would not let the peer look into is not its own, such as a program that
        was started with other rights than its user has.

        Raises:
            PolicyRefused: One is not.
        """
        if self._any_process(peer, action, name):
            return
        for one in (pid, *processes.descendants(pid)):
            if not _is_own(peer, one):
                raise PolicyRefused(
                    f"uid {peer.uid} may not {action} process {one}: it has not its user's rights",
                    next_step="let the administrator add to its rule: any_process = true",
                )

    def require_namespaces(self, peer: Peer, pid: int, name: str) -> None:
        """Go on only if the peer may have something restored into the namespaces of a process.

        Raises:
            PolicyRefused: It is not the peer's own, and no rule says more.
        """
        if not self._any_process(peer, "restore", name) and not _is_own(peer, pid):
            raise PolicyRefused(
                f"uid {peer.uid} may not enter the namespaces of process {pid}",
                next_step="let the administrator add to its rule: any_process = true",
            )

    def require_look(self, peer: Peer, pid: int) -> None:
        """Go on only if the peer may capture anything, and these processes.

        Raises:
            PolicyRefused: It may not.
        """
        rules = [rule for rule in self._rules if _fits(rule, peer) and "capture" in rule.may]
        if peer.is_root or any(rule.any_process for rule in rules):
            return
        if not rules:
            raise PolicyRefused(
                f"uid {peer.uid} may not capture anything: no rule allows it",
                next_step="let the administrator add under [[rules]]: "
                f'uid = {peer.uid}, may = ["capture"], names = [...]',
            )
        for one in (pid, *processes.descendants(pid)):
            if not _is_own(peer, one):
                raise PolicyRefused(
                    f"uid {peer.uid} may not look at process {one}: it has not its user's rights",
                    next_step="let the administrator add to its rule: any_process = true",
                )

    def allows_text(self, peer: Peer, action: Action, text: str, store: str) -> bool:
        """Tell the same as `allows` of a text that may be no name."""
        with contextlib.suppress(SnapError):
            return self.allows(peer, action, text, store)
        return False

    def _any_process(self, peer: Peer, action: Action, name: str) -> bool:
        return peer.is_root or any(
            rule.any_process and _fits(rule, peer) and action in rule.may and _fits_name(rule, name)
            for rule in self._rules
        )


def require_same_pids(peer: Peer) -> None:
    """Go on only if a process id means the same to the peer as to this process.

    Raises:
        AgentError: The peer is in another namespace of process ids.
    """
    theirs = namespaces.namespace_id(peer.pid, "pid")
    if theirs != namespaces.namespace_id(os.getpid(), "pid"):
        raise AgentError(
            "the caller is in another namespace of process ids, where they mean something else",
            next_step="call from where the agent runs, or add --no-daemon",
        )


def _fits(rule: Rule, peer: Peer) -> bool:
    return (rule.uid is None or rule.uid == peer.uid) and (
        rule.gid is None or rule.gid in peer.gids
    )


def _full_name(text: str) -> tuple[str, bool]:
    """Return `name:tag`, and whether one exact snapshot is meant, whatever its name."""
    ref = parse_snapshot_ref(text)
    return (str(ref.ref), ref.snapshot is not None)


def _fits_name(rule: Rule, text: str) -> bool:
    full, exact = _full_name(text)
    if exact:
        # The name before an id is only for people: the snapshot may be anybody's.
        return "*" in rule.names
    name = full.partition(":")[0]
    return any(fnmatch.fnmatchcase(full if ":" in glob else name, glob) for glob in rule.names)


def _fits_url(glob: str, url: str) -> bool:
    """Tell whether a glob allows a store, and nothing but that lies behind its URL.

    Parameters choose servers, credentials and files of the agent: `*` does not reach into them.
    """
    place, mark, parameters = url.partition("?")
    glob_place, glob_mark, glob_parameters = glob.partition("?")
    if not {".", ".."}.isdisjoint(urllib.parse.unquote(place).split("/")):
        return False  # It leads elsewhere than it looks.
    return (
        mark == glob_mark
        and fnmatch.fnmatchcase(place, glob_place)
        and fnmatch.fnmatchcase(parameters, glob_parameters)
    )


def _is_own(peer: Peer, pid: int) -> bool:
    """Tell whether the kernel would let the peer look into a process: user, groups, privilege."""
    try:
        directory = Path(f"/proc/{pid}")
        status = (directory / "status").read_text(encoding="utf-8", errors="replace")
        owner = directory.stat().st_uid
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    uids = {int(number) for number in fields["Uid"].split()[:_ID_LINES]}
    gids = {int(number) for number in fields["Gid"].split()[:_ID_LINES]}
    # What was started with more rights than its user has belongs to root there.
    return (
        uids == {peer.uid}
        and owner == peer.uid
        and gids <= peer.gids
        and int(fields["CapPrm"], 16) == 0
    )
