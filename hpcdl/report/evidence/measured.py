"""What a study shows by numbers of nodes: wall time, speed-up and efficiency, with intervals.

A centre counts nodes, where the rest of the report counts workers. Of several points on the same number of nodes the
fastest counts: a base that left half a node idle would make every other point look better.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdl.core.errors import UnknownNameError, UsageError
from hpcdl.core.paths import quoted
from hpcdl.core.records.run_record import RunRecord
from hpcdl.core.statistics import Ratio, welch_log_ratio
from hpcdl.core.units import listed
from hpcdl.report.analysis.names import curve_names
from hpcdl.report.analysis.scaling import Curve, Point
from hpcdl.report.document.document import Interval
from hpcdl.report.runs.run import EMULATED, Run, positive


@dataclass(frozen=True, kw_only=True)
class NodePoint:
    """The repeats at one number of nodes.

    `wall` are their wall times in seconds, empty where one is not known. `speedup` and `efficiency` are relative to
    the smallest number of nodes, by the time that the template names; None where that time is not known.
    """

    nodes: int
    runs: Sequence[Run]
    wall: Sequence[float]
    throughput: Interval | None
    speedup: Ratio | None
    efficiency: Ratio | None

    @property
    def first(self) -> Run:
        """Any of the repeats."""
        return self.runs[0]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One curve by nodes; `records` are those of its runs, by name, as far as there are any."""

    name: str
    curve: Curve
    points: Sequence[NodePoint]
    records: Mapping[str, RunRecord]

    @property
    def runs(self) -> list[Run]:
        """All runs behind the points."""
        return [run for point in self.points for run in point.runs]

    @property
    def emulated(self) -> bool:
        """Whether computing was a wait, so that nothing here is a measurement of an application."""
        return any(run.model.startswith(EMULATED) for run in self.runs)


def choose_curve(curves: Sequence[Curve], wanted: str = "") -> tuple[str, Curve]:
    """The curve of a document: the one that there is, or that called `wanted`, with its name.

    UsageError where there are several and none is named, or none that goes over workers.
    """
    able = [curve for curve in curves if curve.mode != "scale-up"]
    if not able:
        raise UsageError("no finished run over workers, so nothing to show a centre; hpcdl sweep --for makes a study")
    named: dict[str, Curve] = {}
    for name, curve in zip(curve_names(able), able, strict=True):
        named[f"{name}, {curve.mode}" if name in named else name] = curve
    if wanted:
        if wanted not in named:
            raise UnknownNameError("curve", wanted, named)
        return wanted, named[wanted]
    if len(named) > 1:
        raise UsageError(
            f"these runs are {len(named)} curves, and a centre asks for one: {listed(list(named), 6)}; "
            f"choose with --curve {quoted(next(iter(named)))}"
        )
    return next(iter(named.items()))


def measure(name: str, curve: Curve, records: Mapping[str, RunRecord], time: str) -> Measured:
    """The curve by nodes; `time` is `total` or `steps` (template.py)."""
    groups: dict[int, list[Point]] = defaultdict(list)
    for point in curve.points:
        groups[point.first.nodes].append(point)
    fastest = {
        nodes: max(points, key=lambda point: point.throughput.mean).runs for nodes, points in sorted(groups.items())
    }
    base = next(iter(fastest))
    rates = {nodes: [_rate(run, records, time) for run in runs] for nodes, runs in fastest.items()}
    points = [_point(nodes, runs, records, rates[nodes], base, rates[base]) for nodes, runs in fastest.items()]
    own = {run.name: records[run.name] for runs in fastest.values() for run in runs if run.name in records}
    return Measured(name=name, curve=curve, points=points, records=own)


def _point(
    nodes: int,
    runs: Sequence[Run],
    records: Mapping[str, RunRecord],
    rates: Sequence[float | None],
    base: int,
    base_rates: Sequence[float | None],
) -> NodePoint:
    wall = [seconds for run in runs if (seconds := wall_seconds(run, records)) is not None]
    own, other = [rate for rate in rates if rate], [rate for rate in base_rates if rate]
    known = len(own) == len(rates) and len(other) == len(base_rates)
    speedup = welch_log_ratio(own, other) if known and nodes != base else _one(own) if known else None
    return NodePoint(
        nodes=nodes,
        runs=runs,
        wall=wall if len(wall) == len(runs) else (),
        throughput=Interval.of([run.images_per_second for run in runs]),
        speedup=speedup,
        efficiency=None if speedup is None else speedup.scaled(base / nodes),
    )


def _one(rates: Sequence[float]) -> Ratio:
    """The base relative to itself."""
    return Ratio(value=1.0, low=1.0, high=1.0, p_value=None, std=0.0, n=len(rates), n_base=len(rates))


def wall_seconds(run: Run, records: Mapping[str, RunRecord]) -> float | None:
    """Seconds of the whole training, from the beginning of its first step to its end.

    None where they are not known, and of a run that was resumed: its record has those of its last part alone.
    """
    record = records.get(run.name)
    if not positive(run.seconds_total) or record is None or record.resumed_from_steps:
        return None
    return run.seconds_total


def _rate(run: Run, records: Mapping[str, RunRecord], time: str) -> float | None:
    """Samples in a second, by the steps alone or by the whole training; None where it is not known."""
    if time == "steps":
        return run.images_per_second
    seconds, record = wall_seconds(run, records), records.get(run.name)
    if seconds is None or record is None or not record.steps or not record.global_batch:
        return None
    return record.steps * record.global_batch / seconds


def mean_wall(point: NodePoint) -> float | None:
    """Mean wall time of the repeats in seconds."""
    return statistics.fmean(point.wall) if point.wall else None
