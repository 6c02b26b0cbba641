"""Network traffic, and how evenly parameter servers are loaded."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.names import curve_names
from hpcdl.report.analysis.scaling import Curve, Point
from hpcdl.report.document import Cell, Column, Figure, Section, Series, Table
from hpcdl.report.runs.run import ServerLoad, positive

_Named = tuple[str, Point]


def build(analysis: Analysis) -> Section | None:
    """Bytes and bandwidth if ranks counted bytes; balance if servers did."""
    names = curve_names(analysis.curves)
    points = _distinct(analysis.curves, names)
    items: list[Figure | Table] = []
    lines = []
    moved = [(name, point) for name, point in points if any(positive(run.bytes_per_step) for run in point.runs)]
    if moved:
        items.append(_traffic(moved, analysis.link_bytes_per_second))
        lines.append(
            "Bytes are those that one rank sends in a step. The average rate spreads them over the whole step; the"
            " exposed rate over the exposed communication alone: an upper bound, since some of them moved hidden."
        )
    served = [(name, point) for name, point in points if any(run.server_loads for run in point.runs)]
    if served:
        loads = [(name, _mean_loads(point)) for name, point in served]
        items += [_figure(*loads[-1]), _balance(loads)]
        lines.append("Imbalance is the busiest server over the mean: the others wait while it works.")
        if any(load.computed for _, servers in loads for load in servers):
            lines.append(
                "TensorFlow's gRPC servers count no bytes: theirs are computed, the variables of a server"
                " times the workers, there and back."
            )
    if not items:
        return None
    return Section(name="network", title="Network and servers", lines=lines, items=items)


def _distinct(curves: Sequence[Curve], names: Sequence[str]) -> list[_Named]:
    """Return points by name. A point on both a weak and a strong curve is named once."""
    seen: set[frozenset[int]] = set()
    named = []
    for curve, name in zip(curves, names, strict=True):
        for point in curve.points:
            key = frozenset(id(run) for run in point.runs)
            if key not in seen:
                seen.add(key)
                named.append((f"{name}, {counted(point.n, curve.axis[:-1])}, {curve.mode}", point))
    return named


def _traffic(moved: Sequence[_Named], link: float | None) -> Table:
    columns = (
        Column(name="point"), Column(name="bytes per step and rank", kind="bytes"),
        Column(name="gradient bytes", kind="bytes"), Column(name="average rate /s", kind="bytes"),
        Column(name="exposed rate /s", kind="bytes"), Column(name="link /s", kind="bytes"),
        Column(name="average share of link", kind="percent"),
    )  # fmt: skip
    return Table(
        title="Traffic of a step",
        columns=columns,
        rows=[_traffic_row(name, point, link) for name, point in moved],
        note="The link's bandwidth is the record's, or that of --link; without either its columns are empty.",
    )


def _traffic_row(name: str, point: Point, link: float | None) -> tuple[Cell, ...]:
    sent = _mean([run.bytes_per_step for run in point.runs])
    step = _mean([run.step_seconds for run in point.runs])
    exposed = _mean([run.parts.get("exposed_communication") for run in point.runs])
    limit = link or _mean([run.link_bytes_per_second for run in point.runs])
    average = sent / step if sent and step else None
    gradient = _mean([float(run.gradient_bytes) if run.gradient_bytes else None for run in point.runs])
    return (
        name, sent, gradient, average, sent / exposed if sent and exposed else None, limit,
        average / limit if average and limit else None,
    )  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    usable = [value for value in values if value is not None and positive(value)]
    return statistics.fmean(usable) if usable else None


def _mean_loads(point: Point) -> list[ServerLoad]:
    loads: dict[int, list[ServerLoad]] = {}
    for run in point.runs:
        for load in run.server_loads:
            loads.setdefault(load.rank, []).append(load)
    return [
        ServerLoad(
            rank=rank,
            bytes_per_step=statistics.fmean(load.bytes_per_step for load in rank_loads),
            busy_seconds=_mean([load.busy_seconds for load in rank_loads]),
            computed=rank_loads[0].computed,
        )
        for rank, rank_loads in sorted(loads.items())
    ]


def imbalance(values: Sequence[float]) -> float | None:
    """Return the busiest over the mean; None if nothing was moved."""
    mean = statistics.fmean(values)
    return max(values) / mean if mean > 0 else None


def _balance(loads: Sequence[tuple[str, list[ServerLoad]]]) -> Table:
    columns = (
        Column(name="point"), Column(name="servers", kind="count"), Column(name="mean bytes per step", kind="bytes"),
        Column(name="busiest server's bytes", kind="bytes"), Column(name="imbalance of bytes", kind="number"),
        Column(name="busiest server's seconds", kind="seconds"), Column(name="imbalance of seconds", kind="number"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name, servers in loads:
        moved = [load.bytes_per_step for load in servers]
        busy = [load.busy_seconds for load in servers if load.busy_seconds is not None]
        rows.append(
            (
                name, len(servers), statistics.fmean(moved), max(moved), imbalance(moved),
                max(busy, default=None), imbalance(busy) if busy else None,
            )
        )  # fmt: skip
    return Table(title="Balance of the parameter servers", columns=columns, rows=rows)


def _figure(name: str, servers: Sequence[ServerLoad]) -> Figure:
    labels = [f"rank {load.rank}" for load in servers[:64]]
    megabytes = [load.bytes_per_step / 1e6 for load in servers[:64]]
    rows: list[tuple[Cell, ...]] = [(f"rank {load.rank}", load.bytes_per_step, load.busy_seconds) for load in servers]
    columns = (
        Column(name="server"), Column(name="bytes per step", kind="bytes"), Column(name="busy per step", kind="seconds")
    )  # fmt: skip
    labels_with_values = [f"{label} {value:.3g} MB" for label, value in zip(labels, megabytes, strict=True)]
    return Figure(
        name="server-balance",
        title=f"Bytes per server and step: {name}",
        alt=f"Megabytes that each parameter server moves in a step: {listed(labels_with_values, 8)}.",
        x_label="MB per step",
        y_label="",
        series=[Series(label="received and sent", x=labels, y=megabytes, style="stack", part="bucket")],
        table=Table(title=f"Each server: {name}", columns=columns, rows=rows),
    )
