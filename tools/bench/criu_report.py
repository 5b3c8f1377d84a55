"""Judge the samples of criu.py: medians by size and way, and the table that people read."""

from collections.abc import Iterator

from tools.bench import measure
from tools.bench.measure import Report, Target, median_of

# One step: its way (`peer`), the size of the process, its round, and its times.
Sample = dict[str, object]

RAW, PACKED = "raw frames", "compressed frames"
BASELINE_RESTORE, BASELINE_CAPTURE = "criu lazy-pages", "criu dump, snapstore push"
CAPTURE = "snapagent capture"
ANSWER_S_MAX = 0.5
FILL_MIB = 4096
FILL_RATIOS = {RAW: 1.0, PACKED: 0.8}
CAPTURE_RATIOS = {300: 1.5, FILL_MIB: 1.2}

TIMES = (
    "answer_s",
    "resumed_s",
    "filled_s",
    "fill_s",
    "dump_s",
    "frozen_s",
    "capture_s",
    "cpu_s",
)
HEADER = (
    "process MiB",
    "way",
    "answers s",
    "all memory there s",
    "fill s (GiB/s)",
    "captured s",
    "frozen s",
    "cpu s",
)


def agent_way(frames: str, where: str) -> str:
    """Return the name of a restore by a resident agent."""
    return f"agent, {frames}, {where}"


def judge(report: Report) -> None:
    """Fill in the medians from the samples so far."""
    keys = dict.fromkeys((item["size_mib"], item["peer"]) for item in report.samples)
    report.summary = {
        f"{size} MiB, {peer}": {
            time: middle
            for time in TIMES
            if (middle := median_of(of(report, size, peer), time)) is not None
        }
        for size, peer in keys
    }
    report.targets = list(targets(report))


def targets(report: Report) -> Iterator[Target]:
    """Judge what was measured against what is to be reached."""
    for size in dict.fromkeys(item["size_mib"] for item in report.samples):
        assert isinstance(size, int)
        for frames in (RAW, PACKED):
            for where in ("here", "fresh"):
                way = agent_way(frames, where)
                answer = median_of(of(report, size, way), "answer_s")
                if answer is not None:
                    what = f"{size} MiB, {way}: answers"
                    bound = f"<= {ANSWER_S_MAX} s"
                    yield Target(what, bound, f"{answer:.2f} s", answer <= ANSWER_S_MAX)
            if size == FILL_MIB:
                yield from fill_target(report, frames)
        if size in CAPTURE_RATIOS:
            yield from capture_target(report, size)


def fill_target(report: Report, frames: str) -> Iterator[Target]:
    """Judge the rate of filling against that of CRIU's own daemon."""
    theirs = median_of(of(report, FILL_MIB, BASELINE_RESTORE), "fill_s")
    ours = median_of(of(report, FILL_MIB, agent_way(frames, "here")), "fill_s")
    if theirs and ours:
        ratio, least = theirs / ours, FILL_RATIOS[frames]
        bound = f">= {least} x the rate of {BASELINE_RESTORE}"
        yield Target(f"{FILL_MIB} MiB, fill from {frames}", bound, f"{ratio:.2f} x", ratio >= least)


def capture_target(report: Report, size: int) -> Iterator[Target]:
    """Judge a capture against CRIU's dump and a push of that."""
    theirs = median_of(of(report, size, BASELINE_CAPTURE), "capture_s")
    ours = median_of(of(report, size, CAPTURE), "capture_s")
    if theirs and ours:
        ratio, most = ours / theirs, CAPTURE_RATIOS[size]
        bound = f"<= {most} x {BASELINE_CAPTURE}"
        yield Target(f"{size} MiB, captured", bound, f"{ratio:.2f} x", ratio <= most)


def of(report: Report, size: object, peer: object) -> list[Sample]:
    """Return the samples of one way with one size."""
    return [item for item in report.samples if (item["size_mib"], item["peer"]) == (size, peer)]


def rows(report: Report) -> Iterator[list[str]]:
    """Format the medians."""
    for size, peer in dict.fromkeys((item["size_mib"], item["peer"]) for item in report.samples):
        assert isinstance(size, int)
        own = of(report, size, peer)

        def shown(key: str, own: list[Sample] = own) -> str:
            middle = median_of(own, key)
            return "-" if middle is None else f"{middle:.2f}"

        fill = median_of(own, "fill_s")
        rate = "-" if fill is None else f"{fill:.2f} ({size / 1024 / fill:.2f})"
        times = [shown("answer_s"), shown("filled_s"), rate]
        times += [shown("capture_s"), shown("frozen_s"), shown("cpu_s")]
        yield [str(size), str(peer), *times]


def markdown(report: Report) -> str:
    """Return the whole result as Markdown."""
    where = f"{report.machine['cpu_model']}, {report.machine['cores']} cores"
    title = (
        f"CRIU {report.versions['criu']}, {report.date}; {where}, {report.machine['filesystem']}"
    )
    rounds = f"Medians of {report.conditions['rounds']} rounds."
    parts = [f"{title}. {rounds}", measure.markdown_table(HEADER, rows(report))]
    if report.targets:
        parts.append(measure.targets_table(report.targets))
    return "\n\n".join(parts) + "\n"
