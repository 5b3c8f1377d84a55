#!/usr/bin/env python3
"""Compare snapstore with its peers on this machine: local store, push, second push, restore.

    local.py [--rounds 5] [--out RESULT.json] [--markdown RESULT.md] [--peers snapstore,restic,...]

In every round each peer gets a fresh store and does: push v1; push v2, which shares most of its
bytes with v1; restore v2 to a new directory of the same filesystem. Peers are interleaved, and each
round starts with another one. Beside them, a parallel raw write of the bytes of v2 that are not
zero shows what this machine can do at all.

Before each timed step: dirty pages are flushed, the source is read once (so it is in the page
cache, as the store's files are: just written), and memory is touched and freed (see
`measure.prefault`). `--drop-caches` empties the page cache instead, for cold numbers. What is
restored is compared with the source, byte for byte, outside the timed part.

Times are wall seconds of the whole command, its start included. The result holds every sample, the
medians, and the targets with the ratios that decide them.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tools.bench import measure
from tools.bench.local_report import RAW, Sample, judge, markdown
from tools.bench.measure import BenchError, Command, Report, Usage
from tools.bench.peers import Peer, all_peers, client_state

BENCH = Path(__file__).resolve().parent
V1, V2 = "bench/v1:a", "bench/v2:a"
TINY_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Setup:
    """Where things are, and in which state the caches are when a step starts."""

    v1: Path
    v2: Path
    work: Path
    is_cold: bool
    prefault_bytes: int

    @property
    def log(self) -> Path:
        """The output of the last command."""
        return self.work / "command.log"


def settle(setup: Setup, source: Path) -> None:
    """Bring the caches into the stated condition before a timed step."""
    measure.flush()
    if setup.is_cold:
        measure.drop_caches()
    else:
        measure.warm(source)
        measure.prefault(setup.prefault_bytes)


def timed(setup: Setup, source: Path, command: Command) -> Usage:
    """Run one step in the stated condition, and time the flush of what it left behind."""
    settle(setup, source)
    usage = measure.run_measured(command, setup.log)
    return Usage(usage.wall_s, usage.cpu_s, usage.peak_bytes, flush_s=measure.flush())


def step_sample(step: str, usage: Usage) -> Sample:
    """Name the numbers of a step: `push_v1_wall_s` and so on."""
    return {f"{step}_{key}": value for key, value in asdict(usage).items()}


def run_peer(setup: Setup, peer: Peer[Path]) -> Sample:
    """Do everything once with one peer and a fresh store; leave nothing behind.

    Raises:
        BenchError: A command failed, or what was restored is not what was pushed.
    """
    store, target = setup.work / "store", setup.work / "restored"
    sample: Sample = {"peer": peer.name}
    try:
        store.mkdir(parents=True)
        made = peer.init(store)
        if made is not None:
            measure.run_measured(made, setup.log)
        sample |= step_sample("push_v1", timed(setup, setup.v1, peer.push(setup.v1, store, V1)))
        first = measure.stored_size(store)
        sample |= step_sample("push_v2", timed(setup, setup.v2, peer.push(setup.v2, store, V2)))
        both = measure.stored_size(store)
        sample |= {"stored_v1": asdict(first), "stored_v1_v2": asdict(both)}
        sample["stored_v1_bytes"] = first.apparent_bytes
        sample["growth_v2_bytes"] = both.apparent_bytes - first.apparent_bytes
        restore = peer.restore(V2, store, target)
        sample |= step_sample("restore_v2", timed(setup, setup.v2, restore))
        measure.require_same(setup.v2, target)
    finally:
        for directory in (target, store, client_state(store)):
            shutil.rmtree(directory, ignore_errors=True)
    return sample


def run_raw(setup: Setup) -> Sample:
    """Write the bytes of v2 without any store; the program times itself."""
    target = setup.work / "restored"
    program = str(BENCH / "raw_write.py")
    try:
        settle(setup, setup.v2)
        command = Command((sys.executable, program, str(setup.v2), str(target)))
        measure.run_measured(command, setup.log)
        result = json.loads(setup.log.read_text())
        measure.require_same(setup.v2, target)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    return {
        "peer": RAW,
        "restore_v2_wall_s": result["wall_s"],
        "restore_v2_cpu_s": result["cpu_s"],
        "written_bytes": result["written_bytes"],
    }


def tiny_data(work: Path) -> tuple[Path, Path]:
    """Make two directories that are pushed in no time."""
    made = []
    for number, name in enumerate(("tiny-v1", "tiny-v2")):
        directory = work / name
        directory.mkdir(parents=True)
        content = bytes((number + byte * byte) % 251 for byte in range(4096))
        (directory / "pages-1.img").write_bytes(content * (TINY_FILE_BYTES // len(content)))
        made.append(directory)
    return made[0], made[1]


def usable(peers: Sequence[Peer[Path]], report: Report, work: Path) -> list[Peer[Path]]:
    """Try each peer on tiny data; return those that work, and report why the others do not.

    It also loads the programs into the page cache and lets Python compile what it imports.
    """
    v1, v2 = tiny_data(work)
    setup = Setup(v1, v2, work, is_cold=False, prefault_bytes=0)
    result = []
    for peer in peers:
        reason = peer.missing() or measure.attempt(partial(run_peer, setup, peer))
        if reason is None:
            report.versions[peer.name] = peer.version()
            result.append(peer)
        else:
            report.missing[peer.name] = reason
            print(f"missing: {peer.name}: {reason}", file=sys.stderr)
    return result


def interleaved(rounds: int, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield every name once a round, each round starting one further."""
    for number in range(rounds):
        first = number % len(names)
        yield from ((number, name) for name in [*names[first:], *names[:first]])


def measure_all(
    setup: Setup, peers: Sequence[Peer[Path]], rounds: int, save: Callable[[Sample], None]
) -> dict[str, str]:
    """Run all rounds and hand out each sample; return the peers that failed, with the reason.

    A peer that fails is left out from then on; the others go on.
    """
    by_name = {peer.name: peer for peer in peers}
    failed: dict[str, str] = {}
    for number, name in interleaved(rounds, [*by_name, RAW]):
        if name in failed:
            continue
        print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr)
        try:
            sample = run_raw(setup) if name == RAW else run_peer(setup, by_name[name])
        except BenchError as error:
            failed[name] = f"round {number + 1}: {measure.one_line(error)}"
            print(f"failed: {name}: {error}", file=sys.stderr)
        else:
            save({"round": number} | sample)
    return failed


# --- The command line


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--out", type=Path, default=measure.CACHE / "local.json", help="where the JSON goes")
    add("--markdown", type=Path, help="where to write the table too")
    add("--data", type=Path, help="directory with v1 and v2; generated when absent")
    add("--scale", type=float, default=1.0, help="of generated data")
    add("--work", type=Path, default=measure.CACHE / "work", help="scratch, on the measured disk")
    add("--prefix", type=Path, default=measure.CACHE, help="where install_peers.sh put the peers")
    add("--snapstore", type=Path, default=measure.ROOT / ".venv/bin/snapstore")
    add("--peers", help="comma-separated names of rows; default all")
    add("--drop-caches", action="store_true", help="empty the page cache before each step")
    add("--prefault-mib", type=int, default=4096, help="memory to touch before each step")
    return parser.parse_args()


def data_directories(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return v1 and v2, generated where they are absent."""
    data = options.data or measure.CACHE / f"data-{options.scale}"
    for variant in ("v1", "v2"):
        if not (data / variant / "meta.json").exists():
            print(f"generating {data / variant}", file=sys.stderr)
            generator = (sys.executable, str(BENCH / "gen.py"), "--out", str(data / variant))
            data.mkdir(parents=True, exist_ok=True)
            command = Command((*generator, "--variant", variant, "--scale", str(options.scale)))
            measure.run_measured(command, data / "gen.log")
    return (data / "v1").resolve(), (data / "v2").resolve()


def chosen(options: argparse.Namespace) -> list[Peer[Path]]:
    """Return the peers that the command line names.

    Raises:
        BenchError: It names one that does not exist.
    """
    peers = all_peers(options.prefix.resolve(), options.snapstore.absolute())
    if options.peers is None:
        return peers
    names = options.peers.split(",")
    found = [peer for peer in peers if peer.name in names]
    if len(found) < len(names):
        known = ", ".join(peer.name for peer in peers)
        raise BenchError(f"--peers {options.peers}: the known names are {known}")
    return found


def conditions(options: argparse.Namespace, v1: Path, v2: Path) -> dict[str, object]:
    """Say what a reader needs to judge the numbers."""
    caches = (
        "page cache emptied before each step"
        if options.drop_caches
        else "source in the page cache, store as just written, no dirty pages"
    )
    return {
        "rounds": options.rounds,
        "caches": caches,
        "prefault_mib": 0 if options.drop_caches else options.prefault_mib,
        "v1_bytes": measure.tree_bytes(v1),
        "v2_bytes": measure.tree_bytes(v2),
    }


def bench(options: argparse.Namespace) -> int:
    """Measure, judge and report; return the exit status."""
    wanted = chosen(options)
    v1, v2 = data_directories(options)
    work = options.work.resolve() / "local"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    report = Report("local", measure.machine(work), conditions(options, v1, v2))
    v1_bytes, v2_bytes = measure.tree_bytes(v1), measure.tree_bytes(v2)
    peers = usable(wanted, report, work)

    def save(sample: Sample) -> None:
        report.samples.append(sample)
        judge(report, v1_bytes)
        report.write(options.out)

    setup = Setup(v1, v2, work, options.drop_caches, options.prefault_mib << 20)
    failed = measure_all(setup, peers, options.rounds, save)
    report.missing |= failed
    shutil.rmtree(work, ignore_errors=True)
    judge(report, v1_bytes)
    report.write(options.out)
    text = markdown(report, v1_bytes, v2_bytes)
    print(text)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(text)
    return 1 if failed else 0


def main() -> None:
    """Run the benchmark; exit 1 when a peer failed on the way, or nothing could be measured."""
    try:
        sys.exit(bench(parse()))
    except BenchError as error:
        sys.exit(f"local.py: {error}")


if __name__ == "__main__":
    main()
