"""Inside a step, from traced runs: gaps, hidden communication, the critical path and slow ranks."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.document import Column, Figure, Section, Series, Table
from hpcdl.report.runs.findings import HostNetwork, TracedRun

MOST_HOSTS = 8
"""Maximum number of hosts in the figure, which shows the busiest ones. The table has all."""
_MEBI = 2**20


def build(analysis: Analysis) -> Section | None:
    """Return the section, or None if no run left a trace."""
    traced = analysis.traced
    if not traced:
        return None
    path = _path_table(traced)
    items: list[Table | Figure] = [_steps_table(traced), _path_figure(traced, path), path]
    if any(run.slow_ranks for run in traced):
        items.append(_slow_table(traced))
    if any(run.network for run in traced):
        items.append(_network_figure(traced))
    return Section(name="trace", title="Inside a step", lines=_lines(traced), items=items)


def _lines(traced: Sequence[TracedRun]) -> list[str]:
    slow = [(run, rank) for run in traced for rank in run.slow_ranks[:1]]
    texts = [f"rank {rank.rank} of {run.name} ({rank.cause})" for run, rank in slow]
    all_kept_pace = f"All ranks kept pace in {counted(len(traced), 'traced run')}."
    return [
        f"Waited for step after step: {listed(texts)}." if texts else all_kept_pace,
        "From spans of every rank on one clock; `hpcdl trace RUN --html FILE` draws their steps.",
    ]


def _steps_table(traced: Sequence[TracedRun]) -> Table:
    columns = (
        Column(name="run"), Column(name="ranks", kind="count"), Column(name="steps", kind="count"),
        Column(name="step", kind="seconds"), Column(name="exchange hidden", kind="percent"),
        Column(name="gap between updates", kind="seconds"), Column(name="90 % of gaps", kind="seconds"),
        Column(name="idle in a step", kind="seconds"), Column(name="recording", kind="percent"),
    )  # fmt: skip
    rows = [
        (
            run.name, run.ranks, run.steps, run.step_s, run.hidden, run.gap_median_s, run.gap_p90_s, run.idle_s,
            run.recording,
        )
        for run in traced
    ]  # fmt: skip
    note = "Hidden is the share of the exchange before a rank's own last gradient; a gap lies between two updates."
    return Table(title="Traced steps", columns=columns, rows=rows, note=note)


def _path_table(traced: Sequence[TracedRun]) -> Table:
    columns = (
        Column(name="run"), Column(name="part"), Column(name="seconds", kind="seconds"),
        Column(name="share", kind="percent"), Column(name="shorter without it", kind="seconds"),
    )  # fmt: skip
    rows = [
        (run.name, part.replace("_", " "), seconds, seconds / run.step_s, max(run.gains_s[part], 0.0))
        for run in traced
        for part, seconds in run.critical_path.items()
        if seconds > 0
    ]
    note = "The parts on the rank that all others wait for; they sum to the mean step."
    return Table(title="Critical path of a step", columns=columns, rows=rows, note=note)


def _path_figure(traced: Sequence[TracedRun], table: Table) -> Figure:
    labels = [run.name for run in traced]
    parts = list(dict.fromkeys(part for run in traced for part in run.critical_path))
    series = [
        Series(
            label=part.replace("_", " "),
            x=labels,
            y=[run.critical_path.get(part, 0.0) / run.step_s for run in traced],
            style="stack",
            part=part,
        )
        for part in parts
    ]
    longest = [f"{run.name} {max(run.critical_path, key=lambda part: run.critical_path[part])}" for run in traced]
    return Figure(
        name="trace-path",
        title="Critical path of a step",
        alt=f"Shares of the critical path by part; the largest: {listed(longest, 8).replace('_', ' ')}.",
        x_label="share of the step",
        y_label="",
        series=[curve for curve in series if any(curve.y)],
        table=table,
        y_percent=True,
    )


def _slow_table(traced: Sequence[TracedRun]) -> Table:
    columns = (
        Column(name="run"), Column(name="rank", kind="count"), Column(name="host"), Column(name="likely cause"),
        Column(name="of each step", kind="seconds"), Column(name="because"),
    )  # fmt: skip
    rows = [
        (run.name, rank.rank, rank.host, rank.cause, rank.seconds_per_step, rank.evidence)
        for run in traced
        for rank in run.slow_ranks
    ]
    return Table(title="Ranks that the others wait for", columns=columns, rows=rows)


def _network_figure(traced: Sequence[TracedRun]) -> Figure:
    hosts = [(run.name, host) for run in traced for host in run.network]
    busy = sorted(hosts, key=lambda one: -one[1].mean)[:MOST_HOSTS]
    name, most = max(hosts, key=lambda one: one[1].busiest)
    return Figure(
        name="trace-network",
        title="Network over time",
        alt=f"What hosts carried in and out; the most, {most.busiest / _MEBI:.4g} MiB/s, by {most.host} in {name}.",
        x_label="seconds",
        y_label="MiB/s",
        series=[_over_time(color, *one) for color, one in enumerate(busy)],
        table=_network_table(hosts),
    )


def _over_time(color: int, name: str, host: HostNetwork) -> Series:
    return Series(
        label=f"{name}, {host.host}",
        x=[at_s for at_s, _ in host.samples],
        y=[rate / _MEBI for _, rate in host.samples],
        style="line",
        color=color,
    )


def _network_table(hosts: Sequence[tuple[str, HostNetwork]]) -> Table:
    columns = (
        Column(name="run"), Column(name="host"), Column(name="mean /s", kind="bytes"),
        Column(name="busiest second", kind="bytes"), Column(name="share of the link", kind="percent"),
    )  # fmt: skip
    rows = [(name, host.host, host.mean, host.busiest, host.link_share) for name, host in hosts]
    note = "In and out together, by the kernel's counts of all interfaces but the loopback; shares of both directions."
    return Table(title="Network of hosts", columns=columns, rows=rows, note=note)
