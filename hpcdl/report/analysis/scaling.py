"""Throughput, speed-up and efficiency along a curve (docs/metrics.md).

Repeats are averaged, different settings never.

A curve is what one strategy, model, data set, machine and version reach along n, at one batch size: per worker in
weak scaling, global in strong scaling. n counts workers; in scale-up it counts threads. With base b, the smallest n
present, speed-up is X_n / X_b and efficiency (X_n / X_b) / (n / b), which for weak scaling is (X_n / n) / (X_b / b).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.core.statistics import Estimate, Ratio, estimate, welch_log_ratio
from hpcdl.report.runs.run import MODES, Run

_FIXED = ("strategy", "model", "data", "variant", "machine", "processor", "version")
_BATCH: Mapping[str, tuple[str, ...]] = {
    "weak": ("batch_per_rank",),
    "strong": ("global_batch",),
    "scale-up": ("batch_per_rank", "workers", "nodes"),
}
_SPLIT: Mapping[str, tuple[str, ...]] = {
    "weak": ("servers", "ranks_per_node", "threads", "nodes", "global_batch"),
    "strong": ("servers", "ranks_per_node", "threads", "nodes", "batch_per_rank"),
    "scale-up": ("servers", "ranks_per_node", "global_batch"),
}
"""A curve that has two values of one of these at the same n is split by it: settings are never averaged."""
_SETTINGS = (
    "strategy", "model", "nodes", "ranks", "workers", "servers", "ranks_per_node", "threads", "batch_per_rank",
    "global_batch", "machine", "version",
)  # fmt: skip
_RATIOS = ("speedup", "efficiency", "efficiency_per_node")
_MEASURES = ("images_per_second", *_RATIOS)
COLUMNS = (
    "mode",
    *_SETTINGS,
    "n",
    "data",
    "variant",
    "base",
    *(f"images_per_second_{name}" for name in ("mean", "std", "ci95")),
    *(f"{measure}_{name}" for measure in _RATIOS for name in ("mean", "std", "ci95", "low", "high")),
)
"""The columns of scaling.csv."""
UNSTATED = "weak"
"""The mode of runs that say none and vary in nothing: `hpcdl train --batch-size` is per worker."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The repeats of one setting. `speedup` and the efficiencies are relative to the curve's base."""

    n: int
    runs: tuple[Run, ...]
    throughput: Estimate
    speedup: Ratio
    efficiency: Ratio
    efficiency_per_node: Ratio

    @property
    def first(self) -> Run:
        """Any of the repeats: their settings are equal."""
        return self.runs[0]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points by rising n; `split` names what sets this curve apart from its siblings, as ("servers", 2)."""

    mode: str
    split: tuple[tuple[str, Any], ...]
    points: tuple[Point, ...]

    @property
    def base(self) -> Point:
        """The point that the others are compared with."""
        return self.points[0]

    @property
    def first(self) -> Run:
        """Any run of the curve."""
        return self.points[0].runs[0]

    @property
    def axis(self) -> str:
        """What n counts."""
        return "threads" if self.mode == "scale-up" else "workers"

    @property
    def batch(self) -> str:
        """The batch size that is kept fixed, in words."""
        run = self.first
        return f"{run.global_batch} in all" if self.mode == "strong" else f"{run.batch_per_rank} per worker"


def build_curves(runs: Iterable[Run]) -> list[Curve]:
    """All curves of the usable runs. A run without a mode joins every curve that its settings make with others."""
    usable = [run for run in runs if run.usable]
    joined: set[int] = set()
    curves: list[Curve] = []
    for mode in MODES:
        candidates = [run for run in usable if run.mode in ("", mode) and axis_value(mode, run) is not None]
        for group in _grouped(candidates, _key(mode)):
            members = group if _varies(mode, group) else [run for run in group if run.mode]
            joined.update(id(run) for run in members)
            curves += _curves_of(mode, members)
    lonely = [run for run in usable if id(run) not in joined]
    for group in _grouped(lonely, _key(UNSTATED)):
        curves += _curves_of(UNSTATED, group)
    return sorted(curves, key=_order)


def axis_value(mode: str, run: Run) -> int | None:
    """n of a run: threads in scale-up, else workers."""
    return run.threads if mode == "scale-up" else run.workers


def _key(mode: str) -> Callable[[Run], Hashable]:
    names = (*_FIXED, *_BATCH[mode])
    return lambda run: tuple(getattr(run, name) for name in names)


def _grouped(runs: Iterable[Run], key: Callable[[Run], Hashable]) -> list[list[Run]]:
    groups: dict[Hashable, list[Run]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return list(groups.values())


def _varies(mode: str, group: Sequence[Run]) -> bool:
    return len({axis_value(mode, run) for run in group}) > 1


def _curves_of(mode: str, group: Sequence[Run]) -> list[Curve]:
    parts: list[tuple[tuple[tuple[str, Any], ...], Sequence[Run]]] = [((), group)] if group else []
    for name in _SPLIT[mode]:
        parts = [piece for split, runs in parts for piece in _split(mode, name, split, runs)]
    return [Curve(mode=mode, split=split, points=_points(mode, runs)) for split, runs in parts]


def _split(
    mode: str, name: str, split: tuple[tuple[str, Any], ...], runs: Sequence[Run]
) -> list[tuple[tuple[tuple[str, Any], ...], Sequence[Run]]]:
    values_at = defaultdict(set)
    for run in runs:
        values_at[axis_value(mode, run)].add(getattr(run, name))
    if all(len(values) == 1 for values in values_at.values()):
        return [(split, runs)]
    groups = _grouped(runs, lambda run: getattr(run, name))
    return [((*split, (name, getattr(group[0], name))), group) for group in groups]


def _points(mode: str, runs: Sequence[Run]) -> tuple[Point, ...]:
    groups: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        groups[axis_value(mode, run) or 0].append(run)
    base_n = min(groups)
    base = groups[base_n]
    return tuple(_point(n, groups[n], base_n, base) for n in sorted(groups))


def _point(n: int, runs: Sequence[Run], base_n: int, base: Sequence[Run]) -> Point:
    throughput = [run.images_per_second or 0.0 for run in runs]
    if runs is base:
        speedup = Ratio(value=1.0, low=1.0, high=1.0, p_value=None, std=0.0, n=len(runs), n_base=len(base))
    else:
        speedup = welch_log_ratio(throughput, [run.images_per_second or 0.0 for run in base])
    return Point(
        n=n,
        runs=tuple(runs),
        throughput=estimate(throughput),
        speedup=speedup,
        efficiency=speedup.scaled(base_n / n),
        efficiency_per_node=speedup.scaled(base[0].nodes / runs[0].nodes),
    )


def _order(curve: Curve) -> tuple[Any, ...]:
    run = curve.first
    fixed = tuple(str(getattr(run, name)) for name in ("model", "strategy", "variant", "data", "machine", "version"))
    batch = run.global_batch if curve.mode == "strong" else run.batch_per_rank
    return (MODES.index(curve.mode), *fixed, batch, [(name, str(value)) for name, value in curve.split])


def scaling_rows(curves: Iterable[Curve]) -> list[dict[str, Any]]:
    """One row for each point; `n` counts the runs behind it, `base` is the n of its curve's base."""
    return [_row(curve, point) for curve in curves for point in curve.points]


def flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its measures spread over columns: `efficiency_mean`, `efficiency_std`, `efficiency_ci95`."""
    flat = {name: value for name, value in row.items() if name not in _MEASURES}
    for measure in _MEASURES:
        flat |= {f"{measure}_{name}": value for name, value in row[measure].items()}
    return flat


def _row(curve: Curve, point: Point) -> dict[str, Any]:
    run = point.first
    return {
        "mode": curve.mode,
        **{name: getattr(run, name) for name in _SETTINGS},
        "n": len(point.runs),
        "images_per_second": _estimate(point.throughput),
        "speedup": _ratio(point.speedup),
        "efficiency": _ratio(point.efficiency),
        "efficiency_per_node": _ratio(point.efficiency_per_node),
        "data": run.data,
        "variant": run.variant,
        "base": curve.base.n,
    }


def _estimate(value: Estimate) -> dict[str, float | None]:
    return {"mean": value.mean, "std": value.std, "ci95": value.ci95}


def _ratio(value: Ratio) -> dict[str, float | None]:
    return {"mean": value.value, "std": value.std, "ci95": value.ci95, "low": value.low, "high": value.high}
