"""Judge the samples of criu.py: medians by size and way, and the table that people read."""

from collections.abc import Iterator

from tools.bench import measure
from tools.bench.measure import Report, median_of

# One step: its way (`peer`), the size of the process, its round, and its times.
Sample = dict[str, object]

TIMES = ("answer_s", "resumed_s", "filled_s", "dump_s", "capture_s")
HEADER = (
    "process MiB",
    "way",
    "answers s",
    "all memory there s",
    "GiB/s",
    "captured s",
    "of that the dump s",
)


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

        filled = median_of(own, "filled_s")
        rate = "-" if filled is None else f"{size / 1024 / filled:.2f}"
        times = [shown("answer_s"), shown("filled_s"), rate, shown("capture_s"), shown("dump_s")]
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
