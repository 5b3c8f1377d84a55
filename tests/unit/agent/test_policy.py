"""Rules: who may do what with which names, and with which processes. Real users and processes."""

import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from snapagent.config import Rule
from snapagent.server.policy import Peer, Policy, peer_of
from snapstore.errors import PolicyRefused
from tests.support.users import NOBODY, as_nobody

STORE = "file:///store"
OTHER = "file:///other"
GROUP = 4242
USER = Peer(1, 1000, frozenset({1000, GROUP}))
RULE = Rule(uid=1000, may=("restore", "read"), names=("team/a/*", "one:v1"))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="other users need root")


def allows(rule: Rule, name: str, *, action: str = "restore", store: str = STORE) -> bool:
    return Policy((rule,), STORE).allows(USER, action, name, store)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("team/a/x", True),
        ("team/a/x/y:v3", True),
        ("team/ab", False),
        ("team/b/x", False),
        ("one:v1", True),
        ("one", False),
        ("one:v2", False),
        (f"team/a/x@b3:{'0' * 64}", False),
    ],
)
def test_names(name: str, *, allowed: bool) -> None:
    assert allows(RULE, name) == allowed


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("team/qwen:v1", True),
        ("team/pods/a/b", True),
        ("team", False),
        ("teams/qwen", False),
        ("other/team/qwen", False),
        ("other/team:v1", False),
        (f"team/qwen@b3:{'0' * 64}", False),
    ],
)
def test_namespaces(name: str, *, allowed: bool) -> None:
    """A rule for a namespace, the first component of names, is for nothing beside it."""
    rule = Rule(uid=1000, may=("restore",), names=("team/*",))
    assert allows(rule, name) == allowed


def test_memory_is_for_those_who_capture() -> None:
    names = ("team/*",)
    rules = (
        Rule(gid=GROUP, may=("capture", "restore"), names=names),
        Rule(uid=7, may=("read", "restore"), names=names),
    )
    policy = Policy(rules, STORE)
    assert policy.may_keep_memory(USER)
    assert policy.may_keep_memory(Peer(0, 0, frozenset()))
    assert not policy.may_keep_memory(Peer(0, 7, frozenset({7})))
    assert not policy.may_keep_memory(Peer(0, 1000, frozenset({1000})))


def test_exact_snapshots_need_all_names() -> None:
    assert allows(Rule(uid=1000, may=("restore",), names=("*",)), f"x@b3:{'0' * 64}")


def test_actions_and_stores() -> None:
    assert not allows(RULE, "team/a/x", action="capture")
    assert not allows(RULE, "team/a/x", store=OTHER)
    wide = Rule(uid=1000, may=("restore",), names=("*",), stores=("file:///o*",))
    assert allows(wide, "x", store=OTHER)


@pytest.mark.parametrize(
    ("glob", "store", "fits"),
    [
        ("file:///mnt/a/*", "file:///mnt/a/b/c", True),
        ("file:///mnt/a/*", "file:///mnt/a/..b", True),
        ("file:///mnt/a/*", "file:///mnt/a/../b", False),
        ("file:///mnt/a/*", "file:///mnt/a/%2e%2E/b", False),
        ("file:///mnt/a/*", "file:///mnt/a/x%2F..%2f../b", False),
        ("/mnt/a/*", "/mnt/a/./../b", False),
        ("s3://bucket/*", "s3://bucket/team", True),
        ("s3://bucket/*", "s3://bucket/team?profile=admin", False),
        ("s3://bucket/*", "s3://bucket/team?endpoint=https://elsewhere.example", False),
        ("s3://bucket/*?profile=team", "s3://bucket/x?profile=team", True),
        ("s3://bucket/*?profile=team", "s3://bucket/x?profile=admin", False),
        ("s3://bucket/*?profile=team", "s3://bucket/x", False),
        ("s3://bucket/*?*", "s3://bucket/x?region=eu-1", True),
    ],
)
def test_stores_are_what_they_look_like(glob: str, store: str, *, fits: bool) -> None:
    """Goal: a glob of stores leads nowhere else, and lends nobody other credentials."""
    rule = Rule(uid=1000, may=("restore",), names=("*",), stores=(glob,))
    assert allows(rule, "x", store=store) == fits


@pytest.mark.parametrize(
    ("uid", "gid", "fits"),
    [(1000, None, True), (None, GROUP, True), (1000, GROUP, True), (1000, 7, False)],
)
def test_users_and_groups(uid: int | None, gid: int | None, *, fits: bool) -> None:
    assert allows(Rule(uid=uid, gid=gid, may=("restore",), names=("*",)), "x") == fits


def test_root_may_all_and_others_nothing() -> None:
    policy = Policy((), STORE)
    policy.require(Peer(1, 0, frozenset()), "capture", "x", OTHER)
    with pytest.raises(PolicyRefused, match="uid 1000 may not capture x:latest") as caught:
        policy.require(USER, "capture", "x", STORE)
    assert 'uid = 1000, may = ["capture"], names = ["x:latest"]' in caught.value.next_step
    assert caught.value.exit_code == 7


@needs_root
def test_kernel_tells_who_it_is() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_of(ours) == Peer(os.getpid(), 0, frozenset({os.getegid(), *os.getgroups()}))
    with as_nobody():
        ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_of(ours) == Peer(os.getpid(), NOBODY, frozenset({NOBODY}))


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Start a process of nobody's."""
    command = ["/bin/sleep", "1000"]
    with subprocess.Popen(command, user=NOBODY, group=NOBODY, extra_groups=[]) as process:  # noqa: S603
        yield process.pid
        process.kill()


@needs_root
def test_processes_have_to_be_own(sleeper: int) -> None:
    policy = Policy((Rule(uid=NOBODY, may=("capture",), names=("*",)),), STORE)
    nobody = Peer(1, NOBODY, frozenset({NOBODY}))
    policy.require_processes(nobody, sleeper, "capture", "x")
    policy.require_look(nobody, sleeper)
    policy.require_namespaces(nobody, sleeper, "x")
    for pid in (1, os.getpid()):
        with pytest.raises(PolicyRefused, match="may not capture process"):
            policy.require_processes(nobody, pid, "capture", "x")
        with pytest.raises(PolicyRefused, match="may not enter"):
            policy.require_namespaces(nobody, pid, "x")
    with pytest.raises(PolicyRefused, match="may not capture process"):
        policy.require_processes(USER, sleeper, "capture", "x")


@needs_root
@pytest.mark.parametrize(
    "options",
    [
        {"user": NOBODY, "group": 0, "extra_groups": []},
        {"user": 0, "group": NOBODY, "extra_groups": []},
    ],
)
def test_more_rights_than_the_users_own(options: dict[str, int]) -> None:
    """Goal: a process of the user with a foreign group or root's rights is not its own."""
    policy = Policy((Rule(uid=NOBODY, may=("capture",), names=("*",)),), STORE)
    nobody = Peer(1, NOBODY, frozenset({NOBODY}))
    with subprocess.Popen(["/bin/sleep", "1000"], **options) as process:  # type: ignore[call-overload]
        try:
            with pytest.raises(PolicyRefused):
                policy.require_processes(nobody, process.pid, "capture", "x")
            wide = Policy(
                (Rule(uid=NOBODY, may=("capture",), names=("*",), any_process=True),), STORE
            )
            wide.require_processes(nobody, process.pid, "capture", "x")
        finally:
            process.kill()
