"""Fuzz one parser, guided by coverage: only errors of the library may come out of it.

    python -m tools.fuzz --list
    python -m tools.fuzz layout --seconds 3600 --corpus /tmp/corpus
    python -m tools.fuzz layout index rank

Needs atheris. Starts from the vectors of the format and from small images of CRIU, and goes on in
`--corpus` if one is given, a folder for each parser. Ends with 1 and the input, also as a file,
when a parser crashes, hangs or takes more than a gigabyte.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import sys
import tempfile
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["IS_AVAILABLE", "main", "seeds", "target_names"]

IS_AVAILABLE = importlib.util.find_spec("atheris") is not None
"""Whether there is an atheris for this interpreter."""

ROOT = Path(__file__).resolve().parents[1]
VECTORS = ROOT / "format_spec" / "vectors"
INPUT_BYTES_MAX = 64 * 1024
MEMORY_MIB_MAX = 1024
HANG_S = 10


def target_names() -> list[str]:
    """All that can be fuzzed."""
    from tools.fuzz_targets import TARGETS

    return sorted(TARGETS)


def seeds(name: str) -> list[bytes]:
    """The inputs to start from: vectors of that kind, and what the target brings itself."""
    from tools.fuzz_targets import TARGETS

    target = TARGETS[name]
    files = [
        VECTORS / target.vectors / "valid.json",
        VECTORS / "hostile" / f"{target.vectors}.json",
    ]
    found = list(target.seeds)
    for file in files:
        if target.vectors and file.exists():
            cases = [_input(case) for case in json.loads(file.read_text("utf-8"))["cases"]]
            found += [made for data in cases if (made := target.from_vector(data)) is not None]
    return [data for data in found if len(data) <= INPUT_BYTES_MAX]


def _input(case: dict[str, list[dict[str, str]]]) -> bytes:
    """Put the input of a vector together; see `format_spec/vectors/PROVENANCE.md`."""
    parts = []
    for piece in case["input"]:
        raw = piece["text"].encode() if "text" in piece else b64decode(piece["base64"])
        parts.append(raw * int(piece.get("times", 1)))
    return b"".join(parts)


def fuzz_each(names: Sequence[str], *, seconds: int, corpus: Path, seed: int) -> bool:
    """Fuzz one parser after the other, so many seconds each; return whether all held.

    The fuzzer ends its process without coming back. So each has one, forked from this one, which
    has loaded and instrumented everything: that takes longer than a short run.
    """
    import atheris

    with atheris.instrument_imports(include=["snapstore", "snapagent", "tools.fuzz_targets"]):
        import tools.fuzz_targets  # noqa: F401

    failed = []
    for name in names:
        (corpus / name).mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            fuzz(name, seconds=seconds, corpus=corpus / name, seed=seed)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return not failed


def fuzz(name: str, *, seconds: int, corpus: Path, seed: int) -> NoReturn:
    """Run the fuzzer, which ends the process."""
    import atheris

    from tools.fuzz_targets import TARGETS

    for number, data in enumerate(seeds(name)):
        (corpus / f"seed-{number:03d}").write_bytes(data)
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-rss_limit_mb={_peak_mib() + MEMORY_MIB_MAX}",
        f"-timeout={HANG_S}",
        f"-seed={seed}",
        f"-artifact_prefix={tempfile.gettempdir()}/snapstore-fuzz-{name}-",
        "-verbosity=0",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], TARGETS[name].run_caught)
    atheris.Fuzz()
    os._exit(1)


def _peak_mib() -> int:
    """The peak so far, which a process takes over from the one that started it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Fuzz parsers.")
    parser.add_argument("parsers", nargs="*", help="which; --list tells")
    parser.add_argument("--seconds", type=int, default=60, help="for each")
    parser.add_argument("--seed", type=int, default=0, help="0: a new one")
    parser.add_argument("--corpus", type=Path, default=None, help="kept from run to run")
    parser.add_argument("--list", action="store_true", help="name all parsers")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(target_names()))
        return 0
    if not IS_AVAILABLE:
        parser.error("atheris is not installed")
    if not given.parsers:
        parser.error("which parsers? --list names them")
    with tempfile.TemporaryDirectory(prefix="snapstore-fuzz-") as folder:
        held = fuzz_each(
            given.parsers,
            seconds=given.seconds,
            corpus=given.corpus or Path(folder),
            seed=given.seed,
        )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
