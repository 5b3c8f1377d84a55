"""Find CRIU, and know its version and what it says of this machine without asking each time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from snapagent.preflight.obstacles import Obstacles

__all__ = ["VERSION_MIN", "CriuFacts", "check_criu", "find_criu", "probe_criu"]

VERSION_MIN: Final = (4, 2)
"""Older ones dump no socket on kernels since 6.16, and write page counts in another field."""

CHECK_S_MAX: Final = 30
TEXT_MAX: Final = 2000
CACHE_BYTES_MAX: Final = 1 << 16

_VERSION = re.compile(r"Version: (\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")
_HOW_TO_INSTALL: Final = (
    "install CRIU 4.2 or newer (package `criu` of Debian testing; for older systems, "
    "tools/install_criu.sh puts one into a folder of its own), and name it in $SNAPAGENT_CRIU"
)

_known: dict[tuple[object, ...], CriuFacts] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class CriuFacts:
    """What is known of one CRIU on one running kernel.

    Attributes:
        version: Its parts; empty if the program does not run.
        problem: What `criu check` complains of, or why the program does not run.
        can_lock_by_nftables: Whether it can hold TCP connections with nftables; otherwise it needs
            the program iptables-restore.
    """

    version: tuple[int, ...]
    problem: str
    can_lock_by_nftables: bool

    @property
    def version_text(self) -> str:
        """The version as people write it."""
        return ".".join(map(str, self.version))


def find_criu(program: Path | None) -> Path | None:
    """Return the program that was named, or the one in the search path, if it is there."""
    found = shutil.which(program or "criu")
    return Path(found) if found else None


def probe_criu(program: Path, cache: Path | None = None) -> CriuFacts:
    """Ask CRIU for its version and to check the kernel; the answers are kept.

    They are kept in this process, and in a file if one is given, until the program changes or the
    machine is started anew. A file that cannot be read or written is done without.
    """
    key = _key(program)
    if key in _known:
        return _known[key]
    facts = _read_cache(cache, key) or _ask(program)
    _known[key] = facts
    if cache is not None:
        _write_cache(cache, key, facts)
    return facts


def check_criu(found: Obstacles, program: Path | None, cache: Path | None = None) -> None:
    """Say what is wrong with CRIU, if anything is."""
    path = find_criu(program)
    if path is None:
        name = program or "criu in the search path"
        found.block("criu-missing", f"there is no {name}", _HOW_TO_INSTALL)
        return
    facts = probe_criu(path, cache)
    if not facts.version:
        found.block("criu-broken", f"{path} does not run: {facts.problem}", _HOW_TO_INSTALL)
        return
    if facts.version < VERSION_MIN:
        subject = f"{path} is CRIU {facts.version_text}, at least 4.2 is needed"
        found.block("criu-old", subject, _HOW_TO_INSTALL)
    if facts.problem:
        found.block(
            "criu-check",
            f"`{path} check` says: {facts.problem}",
            "run it yourself; it needs root, and a kernel with CONFIG_CHECKPOINT_RESTORE",
        )


def _ask(program: Path) -> CriuFacts:
    version = _run(program, "--version")
    match = _VERSION.search(version.text)
    if match is None:
        return CriuFacts((), version.text or f"exit status {version.status}", False)  # noqa: FBT003
    check = _run(program, "check")
    nftables = _run(program, "check", "--feature", "network_lock_nftables")
    return CriuFacts(
        version=tuple(int(part) for part in match.groups() if part is not None),
        problem="" if check.status == 0 else check.text or f"exit status {check.status}",
        can_lock_by_nftables=nftables.status == 0,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    text: str


def _run(program: Path, *arguments: str) -> _Answer:
    try:
        done = subprocess.run(  # noqa: S603 - the program that the caller chose
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=CHECK_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _Answer(127, str(error))
    text = done.stdout.decode("utf-8", "backslashreplace").strip()
    # That it may not raise its own limits is said in every run, and harmless.
    lines = [line for line in text.splitlines() if "RLIMIT_NOFILE" not in line]
    return _Answer(done.returncode, "; ".join(lines)[:TEXT_MAX])


def _key(program: Path) -> tuple[object, ...]:
    stat = program.stat()
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return (str(program), stat.st_mtime_ns, stat.st_size, os.uname().release, boot, os.geteuid())


def _read_cache(cache: Path | None, key: tuple[object, ...]) -> CriuFacts | None:
    if cache is None:
        return None
    try:
        with cache.open("rb") as file:
            kept = json.loads(file.read(CACHE_BYTES_MAX))
        if kept["key"] != list(key):
            return None
        version = tuple(int(part) for part in kept["version"])
        return CriuFacts(version, str(kept["problem"]), kept["can_lock_by_nftables"] is True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(cache: Path, key: tuple[object, ...], facts: CriuFacts) -> None:
    # Only what went well: a problem may be gone as soon as somebody deals with it.
    if facts.problem or not facts.version:
        return
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=cache.parent, prefix=cache.name)
        try:
            with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123 - a descriptor
                json.dump({"key": key, **dataclasses.asdict(facts)}, file)
            Path(name).replace(cache)
        except OSError:
            Path(name).unlink(missing_ok=True)
