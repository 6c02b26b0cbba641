"""Laws fitted to the curves, the size at which efficiency falls below 80 %, and alpha and beta of communication.

Exposed communication: seconds = alpha x rounds + beta x bytes + constant, none below 0, as comm/observed counted them
on the busiest rank, with whatever variant, period, packing or number of ranks a run had. What computing hides is not in
the seconds, so that alpha and beta are those that training feels, at most the network's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.report.analysis.laws import (
    LAWS,
    Crossing,
    LinearFit,
    Parameter,
    ScalingFit,
    crossing,
    fit_relative,
    fit_scaling,
)
from hpcdl.report.analysis.scaling import Curve
from hpcdl.report.runs.run import Run, positive

_LAWS_OF_MODE: Mapping[str, tuple[str, ...]] = {
    "weak": ("gustafson", "usl"),
    "strong": ("amdahl", "usl"),
    "scale-up": ("amdahl", "usl"),
}
TARGET = 0.8


@dataclass(frozen=True, kw_only=True)
class CurveFit:
    """One law fitted to the single runs of one curve."""

    curve: Curve
    fit: ScalingFit
    below: Crossing

    @property
    def nodes_per_n(self) -> float | None:
        """Nodes for each worker where that is the same along the curve, else None."""
        shares = {point.first.nodes / point.n for point in self.curve.points}
        return shares.pop() if len(shares) == 1 and self.curve.axis == "workers" else None

    def as_json(self) -> dict[str, Any]:
        """One entry of `fits` in report.json."""
        run = self.curve.first
        return {
            "law": self.fit.law.name,
            "mode": self.curve.mode,
            "strategy": run.strategy,
            "model": run.model,
            "machine": run.machine,
            "version": run.version,
            "batch_per_rank": None if self.curve.mode == "strong" else run.batch_per_rank,
            "global_batch": run.global_batch if self.curve.mode == "strong" else None,
            "variant": self.curve.variant,
            "split": dict(self.curve.split),
            "axis": self.curve.axis,
            "base": self.curve.points[0].n,
            "parameters": {name: dataclasses.asdict(value) for name, value in self.fit.parameters.items()},
            "r2": self.fit.r2,
            "spread": self.fit.spread,
            "runs": self.fit.num_runs,
            "saturated": self.fit.saturated,
            "below_80_percent": {**dataclasses.asdict(self.below), "nodes": self.nodes_at(self.below.n)},
        }

    def nodes_at(self, n: float | None) -> float | None:
        """Nodes that `n` workers take, where a worker takes the same share of a node everywhere."""
        share = self.nodes_per_n
        return None if n is None or share is None else n * share


def fit_curves(curves: Sequence[Curve]) -> list[CurveFit]:
    """Every law that belongs to a curve's mode and has runs at enough different n."""
    found = []
    for curve in curves:
        n = [float(point.n) for point in curve.points for _ in point.runs]
        throughput = [run.images_per_second or 0.0 for point in curve.points for run in point.runs]
        for name in _LAWS_OF_MODE[curve.mode]:
            fit = fit_scaling(LAWS[name], n, throughput)
            if fit is not None:
                found.append(CurveFit(curve=curve, fit=fit, below=crossing(fit, float(curve.points[0].n), TARGET)))
    return found


CANNOT_TELL = (
    "rounds and bytes rise together in these runs, so that α and β cannot be told apart; runs with another"
    " --bucket-size, --variant or model change one without the other"
)

EXPLAINS_NOTHING = "seconds do not follow rounds and bytes in these runs: the fit is worse than their mean"


@dataclass(frozen=True, kw_only=True)
class CommunicationFit:
    """Alpha (seconds per round), beta (seconds per byte) and a constant of one strategy on one machine.

    The constant is None where the runs are too few to have one. `fit` is None where `left_out` says why there is none.
    """

    strategy: str
    machine: str
    fit: LinearFit | None
    left_out: str = ""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The coefficients by name."""
        return {} if self.fit is None else dict(zip(_COEFFICIENTS, self.fit.coefficients, strict=False))

    def as_json(self) -> dict[str, Any]:
        """One entry of `fits` in report.json."""
        assert self.fit is not None
        return {
            "law": "alpha-beta",
            "strategy": self.strategy,
            "machine": self.machine,
            "parameters": {name: dataclasses.asdict(value) for name, value in self.parameters.items()},
            "r2": self.fit.r2,
            "spread": self.fit.spread,
            "runs": self.fit.num_runs,
        }


_COEFFICIENTS = ("alpha_seconds", "beta_seconds_per_byte", "constant_seconds")
_ENOUGH_FOR_A_CONSTANT = 4


def fit_communication(runs: Sequence[Run]) -> list[CommunicationFit]:
    """A fit for each strategy and machine whose runs differ in rounds or bytes, or why they tell no alpha and beta.

    None is negative. With a constant where four different exchanges or more allow it: what every exchange costs.
    """
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if _measured(run):
            groups.setdefault((run.strategy, run.machine, run.processor), []).append(run)
    found = []
    for (strategy, machine, processor), members in sorted(groups.items()):
        design = [(run.rounds_per_step or 0.0, run.round_bytes_per_step or 0.0) for run in members]
        if len(set(design)) < 2:
            continue
        seconds = [run.parts["exposed_communication"] for run in members]
        fit = None
        if len(set(design)) >= _ENOUGH_FOR_A_CONSTANT:
            fit = fit_relative([(*row, 1.0) for row in design], seconds)
        fit = fit or fit_relative(design, seconds)
        left_out = "" if fit else CANNOT_TELL
        if fit is not None and (fit.r2 or 0.0) < 0:
            fit, left_out = None, EXPLAINS_NOTHING
        found.append(CommunicationFit(strategy=strategy, machine=machine or processor, fit=fit, left_out=left_out))
    return found


def _measured(run: Run) -> bool:
    counted = positive(run.rounds_per_step) and positive(run.round_bytes_per_step)
    return run.usable and counted and positive(run.parts.get("exposed_communication"))
