"""Where the time goes: the parts of a step, the parts of the lost efficiency, and the node-hours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from hpcdl.core.records.run_record import PARTS
from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.comparisons import seconds_to
from hpcdl.report.analysis.names import curve_names
from hpcdl.report.analysis.scaling import Breakdown, Curve, Point
from hpcdl.report.document import Cell, Column, Figure, Interval, Section, Series, Table
from hpcdl.report.runs.run import Run, learned_apart, positive

MOST_BARS = 24
"""Maximum number of points in one figure."""


def build(analysis: Analysis) -> Section | None:
    """Parts of a step at every point that measured them."""
    names, modes = curve_names(analysis.curves), {curve.mode for curve in analysis.curves}
    labelled = [
        (_label(modes, curve.mode, name, breakdown), breakdown)
        for curve, name, curve_breakdowns in zip(analysis.curves, names, analysis.breakdowns, strict=True)
        for breakdown in curve_breakdowns
    ]
    if not labelled:
        return None
    table = _table(labelled)
    lost = _lost_table(labelled)
    items: list[Figure | Table] = [_shares_figure(labelled[-MOST_BARS:], table), table]
    if lost is not None:
        # Bars show losses only, so a point that lost nothing would have none.
        losing = [pair for pair in labelled if max(pair[1].lost.values(), default=0.0) > 0]
        items += [*([_lost_figure(losing[-MOST_BARS:], lost)] if losing else []), lost]
    lines = [
        "The parts are means over workers and steps after warm-up, and sum to the step. Wait is for the slowest rank;"
        " exposed communication is what computing did not hide. Imbalance is slowest minus mean compute."
    ]
    if len(labelled) > MOST_BARS:
        lines.append(f"The figures show the last {MOST_BARS} of {len(labelled)} points.")
    return Section(name="time", title="Where the time goes", lines=lines, items=items)


def _label(modes: Collection[str], mode: str, name: str, breakdown: Breakdown) -> str:
    axis = "thread" if mode == "scale-up" else "worker"
    return f"{name}, {counted(breakdown.point.n, axis)}" + (f", {mode}" if len(modes) > 1 else "")


def _table(breakdowns: Sequence[tuple[str, Breakdown]]) -> Table:
    shown = [name for name in PARTS if any(name in breakdown.parts for _, breakdown in breakdowns)]
    columns = (
        Column(name="point"), Column(name="runs", kind="count"), Column(name="step", kind="seconds"),
        *(Column(name=name.replace("_", " "), kind="seconds") for name in shown),
        Column(name="imbalance", kind="seconds"), Column(name="communication share", kind="percent"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (
            label, breakdown.num_runs, breakdown.step_seconds, *(breakdown.parts.get(name) for name in shown),
            breakdown.imbalance_seconds, _share(breakdown),
        )
        for label, breakdown in breakdowns
    ]  # fmt: skip
    note = "Communication share is (exposed communication + wait) / step."
    return Table(title="Seconds of a step", columns=columns, rows=rows, note=note)


def _share(breakdown: Breakdown) -> float | None:
    if "exposed_communication" not in breakdown.parts:
        return None
    return (breakdown.parts["exposed_communication"] + breakdown.parts.get("wait", 0.0)) / breakdown.step_seconds


def _lost_table(breakdowns: Sequence[tuple[str, Breakdown]]) -> Table | None:
    losing = [(label, breakdown) for label, breakdown in breakdowns if breakdown.lost]
    if not losing:
        return None
    columns = (
        Column(name="point"), Column(name="efficiency by step time", kind="percent"),
        *(Column(name=name.replace("_", " "), kind="percent") for name in PARTS),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (label, 1 - sum(breakdown.lost.values()), *(breakdown.lost[name] for name in PARTS))
        for label, breakdown in losing
    ]
    note = "Each part's seconds beyond ideal scaling from the base, as a share of the step; they sum to 1 - efficiency."
    return Table(title="Lost efficiency by part", columns=columns, rows=rows, note=note)


def _shares_figure(breakdowns: Sequence[tuple[str, Breakdown]], table: Table) -> Figure:
    shares = {
        name: [breakdown.parts.get(name, 0.0) / breakdown.step_seconds for _, breakdown in breakdowns] for name in PARTS
    }
    texts = [f"{label} {100 * (_share(breakdown) or 0):.0f} %" for label, breakdown in breakdowns]
    return Figure(
        name="time-parts",
        title="Parts of a step",
        alt=f"Shares of a step by part; communication share: {listed(texts, 8)}.",
        x_label="share of the step",
        y_label="",
        series=_stack(breakdowns, shares),
        table=table,
        y_percent=True,
    )


def _lost_figure(losing: Sequence[tuple[str, Breakdown]], table: Table) -> Figure:
    shares = {name: [max(0.0, breakdown.lost[name]) for _, breakdown in losing] for name in PARTS}
    texts = [f"{label} {100 * sum(breakdown.lost.values()):.0f} %" for label, breakdown in losing]
    return Figure(
        name="time-lost",
        title="Lost efficiency by part (parts that got faster are in the table only)",
        alt=f"Lost efficiency by part; in all: {listed(texts, 8)}.",
        x_label="lost efficiency, share of the step",
        y_label="",
        series=_stack(losing, shares),
        table=table,
        y_percent=True,
    )


def _stack(breakdowns: Sequence[tuple[str, Breakdown]], shares: Mapping[str, Sequence[float]]) -> list[Series]:
    labels = [label for label, _ in breakdowns]
    return [
        Series(label=name.replace("_", " "), x=labels, y=shares[name], style="stack", part=name)
        for name in PARTS
        if any(shares[name])
    ]


_HOUR_S = 3600.0


def build_cost(analysis: Analysis) -> Section | None:
    """Node-hours per run, per epoch, per million images and to the accuracy that all runs of a network reached."""
    if not analysis.curves:
        return None
    targets = _targets(analysis)
    # A point may be on a weak and a strong curve, and costs once.
    seen: set[frozenset[int]] = set()
    rows = []
    for curve, name in zip(analysis.curves, curve_names(analysis.curves), strict=True):
        for point in curve.points:
            key = frozenset(id(run) for run in point.runs)
            if key not in seen:
                seen.add(key)
                rows.append(_row(curve, name, point, targets.get(point.first.model)))
    columns = (
        Column(name="point"), Column(name="nodes", kind="count"), Column(name="node-hours per run", kind="number"),
        Column(name="per epoch", kind="number"), Column(name=f"per million {analysis.counted}", kind="number"),
        Column(name="accuracy", kind="percent"), Column(name="to accuracy", kind="number"),
    )  # fmt: skip
    note = "Node-hours: nodes x hours of training. Accuracy: the highest whole percentage that all settings reached."
    table = Table(title="Node-hours", columns=columns, rows=rows, note=note)
    return Section(name="cost", title="Cost", items=(table,))


def _targets(analysis: Analysis) -> dict[str, float]:
    """Return for each network the lowest target of its contests, which all of them reached."""
    targets: dict[str, float] = {}
    for contest in analysis.contests:
        if contest.target is not None:
            model = contest.contenders[0].first.model
            targets[model] = min(contest.target, targets.get(model, 1.0))
    return targets


def _row(curve: Curve, name: str, point: Point, target: float | None) -> tuple[Cell, ...]:
    def hours(seconds: Callable[[Run], float | None]) -> Interval | None:
        return Interval.of(_node_hours(run, seconds(run)) for run in point.runs)

    times = {} if target is None else {id(run): seconds_to(run, target) for run in point.runs}
    return (
        f"{name}, {counted(point.n, curve.axis[:-1])}, {curve.mode}",
        point.first.nodes,
        hours(lambda run: run.seconds_total),
        hours(lambda run: run.seconds_per_epoch),
        hours(lambda run: 1e6 / run.images_per_second if run.images_per_second else None),
        target,
        # Without the repeats that never reached it, the mean would be that of the lucky ones.
        Interval.of(_node_hours(run, times[id(run)]) for run in learned_apart(point.runs))
        if times and None not in times.values()
        else None,
    )


def _node_hours(run: Run, seconds: float | None) -> float | None:
    return run.nodes * seconds / _HOUR_S if seconds is not None and positive(seconds) else None
