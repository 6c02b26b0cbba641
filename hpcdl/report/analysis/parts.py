"""Where the time of a step goes, and which part of it the lost efficiency is (docs/metrics.md)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdl.core.records.run_record import PARTS
from hpcdl.report.analysis.scaling import Curve, Point
from hpcdl.report.runs.run import Run

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Mean seconds of a step at one point, by part, over the runs that measured them.

    `lost` says for each part how much of the lost efficiency it is: its seconds beyond those that ideal scaling from
    the base would take, as a share of the step. Their sum is 1 - efficiency by step times. Empty at the base, and
    where the base has no parts.
    """

    point: Point
    parts: Mapping[str, float]
    imbalance_seconds: float | None
    lost: Mapping[str, float]
    num_runs: int

    @property
    def step_seconds(self) -> float:
        """The parts' sum."""
        return sum(self.parts.values())


def breakdowns(curve: Curve) -> list[Breakdown]:
    """The breakdown of each point of a curve that measured its parts."""
    base = mean_parts(curve.base.runs)
    found = []
    for point in curve.points:
        parts = mean_parts(point.runs)
        if parts is None:
            continue
        factor = 1.0 if curve.mode == "weak" else curve.base.n / point.n
        lost = {} if base is None or point is curve.base else lost_efficiency(parts, base, factor)
        imbalances = [run.imbalance_seconds for run in point.runs if run.imbalance_seconds is not None]
        found.append(
            Breakdown(
                point=point,
                parts=parts,
                imbalance_seconds=statistics.fmean(imbalances) if imbalances else None,
                lost=lost,
                num_runs=len(_with_parts(point.runs)),
            )
        )
    return found


def lost_efficiency(parts: Mapping[str, float], base: Mapping[str, float], factor: float) -> dict[str, float]:
    """1 - efficiency, split by part: (part - ideal part) / step, ideal part = factor x the base's."""
    step = sum(parts.values())
    return {name: (parts.get(name, 0.0) - factor * base.get(name, 0.0)) / step for name in PARTS}


def _with_parts(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.parts and min(run.parts.values()) >= 0 and max(run.parts.values()) > 0]


def mean_parts(runs: Sequence[Run]) -> dict[str, float] | None:
    """Mean seconds of each part over the runs that measured them; None where none did."""
    measured = _with_parts(runs)
    if not measured:
        return None
    names = [name for name in PARTS if any(name in run.parts for run in measured)]
    found = {name: statistics.fmean([run.parts.get(name, 0.0) for run in measured]) for name in names}
    # What is left of a step when its other parts are taken off is a rounding error where there was nothing else.
    least = _ROUNDING * sum(found.values())
    return {name: value if value > least else 0.0 for name, value in found.items()}
