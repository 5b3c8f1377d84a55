"""Judge the samples of local.py: medians, targets, and the table that people read."""

from collections.abc import Iterator, Sequence

from tools.bench import measure
from tools.bench.measure import GB, MB, Report, Target, median_of

RAW = "raw write, 2 threads"
OURS, OURS_MAX = "snapstore", "snapstore max"
# The peers that the speed targets name; for borg the faster setting counts.
RIVALS = ("restic", "borg", "borg zstd-1", "casync", "hf-xet")
PUSH_RATIO, PULL_RATIO, RAW_RATIO = 1.5, 2.0, 0.9
STORED_RATIO, STORED_MAX_SHARE = 1.02, 0.55
GROWTH_BYTES, PEAK_BYTES = 300 * MB, 400 * MB
PEAKS = ("push_v1_peak_bytes", "push_v2_peak_bytes", "restore_v2_peak_bytes")
HEADER = (
    "peer",
    "push v1 s (GB/s)",
    "cpu s",
    "flush s",
    "push v2 s (GB/s)",
    "cpu s",
    "stored/raw",
    "growth MB",
    "restore v2 s (GB/s)",
    "cpu s",
    "peak MB",
)

# One run of one peer: its name, its round, and every number of every step.
Sample = dict[str, object]
# Medians by peer and by number.
Table = dict[str, dict[str, float]]


def medians(samples: Sequence[Sample]) -> Table:
    """Return the median of every number of every peer."""
    result: Table = {}
    for name in dict.fromkeys(str(sample["peer"]) for sample in samples):
        own = [sample for sample in samples if sample["peer"] == name]
        cells = {key: median_of(own, key) for key in own[0] if key != "round"}
        result[name] = {key: value for key, value in cells.items() if value is not None}
    return result


def fastest(table: Table, key: str) -> tuple[str, float] | None:
    """Return the rival with the least time of a step."""
    times = [(table[name][key], name) for name in RIVALS if name in table]
    return (min(times)[1], min(times)[0]) if times else None


def durable(table: Table, step: str) -> Table:
    """Add to each peer the time after which what it stored survives a power cut."""
    key = f"{step}_wall_s"
    return {
        name: {**row, f"{step}_durable_s": row[key] + row.get(f"{step}_flush_s", 0.0)}
        for name, row in table.items()
        if key in row
    }


def push_target(table: Table, step: str, what: str) -> Target:
    """Judge a push against the fastest rival."""
    bound = f">= {PUSH_RATIO} x the fastest of restic, borg, casync, hf-xet"
    table = durable(table, step)
    rival = fastest(table, f"{step}_durable_s")
    if OURS not in table or rival is None:
        return Target(what, bound, "", None)
    ours = table[OURS][f"{step}_durable_s"]
    ratio = rival[1] / ours
    return Target(
        what,
        bound,
        f"{ratio:.2f} x ({ours:.2f} s; {rival[0]} {rival[1]:.2f} s)",
        ratio >= PUSH_RATIO,
    )


def pull_target(table: Table) -> Target:
    """Judge the pull against the fastest rival, or else against the raw write."""
    bound = f">= {PULL_RATIO} x the fastest, or >= {RAW_RATIO} x the raw write"
    rival = fastest(table, "restore_v2_wall_s")
    if OURS not in table or rival is None or RAW not in table:
        return Target("pull v2", bound, "", None)
    ours = table[OURS]["restore_v2_wall_s"]
    ratio, raw = rival[1] / ours, table[RAW]["restore_v2_wall_s"] / ours
    measured = f"{ratio:.2f} x ({ours:.2f} s; {rival[0]} {rival[1]:.2f} s), {raw:.2f} x raw"
    return Target("pull v2", bound, measured, ratio >= PULL_RATIO or raw >= RAW_RATIO)


def size_targets(table: Table, raw_bytes: int) -> Iterator[Target]:
    """Judge what is stored."""
    bound = f"<= {STORED_RATIO} x the smallest peer"
    sizes = [
        (row["stored_v1_bytes"], name)
        for name, row in table.items()
        if not name.startswith(OURS) and "stored_v1_bytes" in row
    ]
    if OURS in table and sizes:
        ours, (least, name) = table[OURS]["stored_v1_bytes"], min(sizes)
        measured = f"{ours / least:.3f} x ({ours / raw_bytes:.3f}; {name} {least / raw_bytes:.3f})"
        yield Target("stored v1", bound, measured, ours <= STORED_RATIO * least)
    else:
        yield Target("stored v1", bound, "", None)
    yield bounded(table, OURS, "growth_v2_bytes", ("growth of v2", GROWTH_BYTES, MB, "MB"))
    limit = int(STORED_MAX_SHARE * raw_bytes)
    what = ("stored v1, --compression max", limit, raw_bytes, "of raw")
    yield bounded(table, OURS_MAX, "stored_v1_bytes", what)


def bounded(table: Table, name: str, key: str, what: tuple[str, int, int, str]) -> Target:
    """Judge one number against an upper limit: (title, limit, unit, name of the unit)."""
    title, limit, unit, unit_name = what
    bound = f"<= {limit / unit:.4g} {unit_name}"
    if key not in table.get(name, {}):
        return Target(title, bound, "", None)
    value = table[name][key]
    return Target(title, bound, f"{value / unit:.4g} {unit_name}", value <= limit)


def memory_target(samples: Sequence[Sample]) -> Target:
    """Judge the highest peak of any step of any round: memory is a limit, not an average."""
    bound = f"<= {PEAK_BYTES // MB} MB"
    peaks = [
        (value, key)
        for sample in samples
        if sample["peer"] == OURS
        for key, value in sample.items()
        if key.endswith("_peak_bytes") and isinstance(value, int)
    ]
    if not peaks:
        return Target("peak memory", bound, "", None)
    peak, key = max(peaks)
    return Target("peak memory", bound, f"{peak / MB:.0f} MB ({key})", peak <= PEAK_BYTES)


def judge(report: Report, raw_bytes: int) -> None:
    """Fill in the medians and the targets from the samples so far."""
    table = medians(report.samples)
    report.summary = {"medians": table}
    report.targets = [
        push_target(table, "push_v1", "push v1"),
        push_target(table, "push_v2", "push v2, incremental"),
        pull_target(table),
        *size_targets(table, raw_bytes),
        memory_target(report.samples),
    ]


def table_row(name: str, row: dict[str, float], v1_bytes: int, v2_bytes: int) -> list[str]:
    """Format the medians of one peer."""

    def seconds(key: str, size_bytes: int) -> str:
        wall = row.get(f"{key}_wall_s")
        return "-" if wall is None else f"{wall:.2f} ({size_bytes / wall / GB:.2f})"

    def number(key: str, unit: float, form: str) -> str:
        return format(row[key] / unit, form) if key in row else "-"

    peaks = [f"{row[key] / MB:.0f}" for key in PEAKS if key in row]
    return [
        name,
        seconds("push_v1", v1_bytes),
        number("push_v1_cpu_s", 1, ".1f"),
        number("push_v1_flush_s", 1, ".2f"),
        seconds("push_v2", v2_bytes),
        number("push_v2_cpu_s", 1, ".1f"),
        number("stored_v1_bytes", v1_bytes, ".3f"),
        number("growth_v2_bytes", MB, ".0f"),
        seconds("restore_v2", v2_bytes),
        number("restore_v2_cpu_s", 1, ".1f"),
        "/".join(peaks) or "-",
    ]


def markdown(report: Report, v1_bytes: int, v2_bytes: int) -> str:
    """Return the whole result as Markdown."""
    table = medians(report.samples)
    rows = [table_row(name, row, v1_bytes, v2_bytes) for name, row in table.items()]
    machine, conditions = report.machine, report.conditions
    title = f"Local store, {report.date}, medians of {conditions['rounds']} rounds"
    sizes = f"v1 {v1_bytes / MB:.1f} MB, v2 {v2_bytes / MB:.1f} MB"
    where = f"{machine['cpu_model']}, {machine['cores']} cores, Linux {machine['kernel']}"
    parts = [
        f"{title}; {sizes}.",
        f"{where}, {machine['filesystem']}.",
        f"Caches: {conditions['caches']}.",
        measure.markdown_table(HEADER, rows),
        measure.targets_table(report.targets),
    ]
    gone = [f"- {name}: {reason}" for name, reason in report.missing.items()]
    if gone:
        parts.append("Not measured:\n" + "\n".join(gone))
    return "\n\n".join(parts) + "\n"
