"""What the runs cost in node-hours."""

from __future__ import annotations

from collections.abc import Callable

from hpcdl.core.units import counted
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.comparisons import seconds_to
from hpcdl.report.analysis.names import curve_names
from hpcdl.report.analysis.scaling import Curve, Point
from hpcdl.report.document.document import Cell, Column, Interval, Section, Table
from hpcdl.report.runs.run import Run, positive

_HOUR_S = 3600.0


def build(analysis: Analysis) -> Section | None:
    """Node-hours per run, per epoch, per million images and to the accuracy that all runs of a network reached."""
    if not analysis.curves:
        return None
    targets = _targets(analysis)
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
    """For each network the lowest target of its contests: all of them reached it."""
    targets: dict[str, float] = {}
    for contest in analysis.contests:
        if contest.target is not None:
            model = contest.contenders[0].first.model
            targets[model] = min(contest.target, targets.get(model, 1.0))
    return targets


def _row(curve: Curve, name: str, point: Point, target: float | None) -> tuple[Cell, ...]:
    def hours(seconds: Callable[[Run], float | None]) -> Interval | None:
        return Interval.of(_node_hours(run, seconds(run)) for run in point.runs)

    return (
        f"{name}, {counted(point.n, curve.axis[:-1])}, {curve.mode}",
        point.first.nodes,
        hours(lambda run: run.seconds_total),
        hours(lambda run: run.seconds_per_epoch),
        hours(lambda run: 1e6 / run.images_per_second if run.images_per_second else None),
        target,
        None if target is None else hours(lambda run: seconds_to(run, target)),
    )


def _node_hours(run: Run, seconds: float | None) -> float | None:
    return run.nodes * seconds / _HOUR_S if seconds is not None and positive(seconds) else None
