"""Throughput, speed-up and efficiency along a curve, and where the time of a step goes (docs/metrics.md).

Repeats are averaged, different settings never.

A curve is what one strategy, model, data set, machine and version reach along n, at one batch size (per worker in weak
scaling, global in strong scaling) and with the same settings that affect time. n counts workers; in scale-up it counts
threads. With base b, the smallest n present, speed-up is X_n / X_b and efficiency (X_n / X_b) / (n / b), which for weak
scaling is (X_n / n) / (X_b / b). If a method has no point of one worker, another strategy's point may be the base.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from hpcdl.core.records.run_record import PARTS
from hpcdl.core.statistics import Estimate, Ratio, estimate, welch_log_ratio
from hpcdl.report.analysis.settings import COSTLY, OF_STRATEGY, settings_row
from hpcdl.report.runs.run import MODES, Run

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Mean seconds of a step at one point, by part, over the runs that measured them.

    `lost` is each part's share of the lost efficiency: its seconds beyond those that ideal scaling from the base would
    take, as a share of the step. The sum is 1 - efficiency by step times. It is empty at the base, and if the base has
    no parts.
    """

    point: Point
    parts: Mapping[str, float]
    imbalance_seconds: float | None
    lost: Mapping[str, float]
    num_runs: int

    @property
    def step_seconds(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())


def breakdowns(curve: Curve) -> list[Breakdown]:
    """Return the breakdown of each point of a curve that measured its parts."""
    base = mean_parts(curve.base.runs)
    by_point = []
    for point in curve.points:
        parts = mean_parts(point.runs)
        if parts is None:
            continue
        # Ideally a step takes as long as at the base in weak scaling, and 1/n of it where the work is shared.
        factor = 1.0 if curve.mode == "weak" else curve.base.n / point.n
        lost = {} if base is None or point is curve.base else lost_efficiency(parts, base, factor)
        imbalances = [run.imbalance_seconds for run in point.runs if run.imbalance_seconds is not None]
        by_point.append(
            Breakdown(
                point=point,
                parts=parts,
                imbalance_seconds=statistics.fmean(imbalances) if imbalances else None,
                lost=lost,
                num_runs=len(_with_parts(point.runs)),
            )
        )
    return by_point


def lost_efficiency(parts: Mapping[str, float], base: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return 1 - efficiency, split by part: (part - ideal part) / step, ideal part = factor x the base's."""
    step = sum(parts.values())
    return {name: (parts.get(name, 0.0) - factor * base.get(name, 0.0)) / step for name in PARTS}


def _with_parts(runs: Sequence[Run]) -> list[Run]:
    # An imported table may have negative parts, which the caveats name.
    return [run for run in runs if run.parts and min(run.parts.values()) >= 0 and max(run.parts.values()) > 0]


def mean_parts(runs: Sequence[Run]) -> dict[str, float] | None:
    """Return mean seconds of each part over the runs that measured them; None if none did."""
    measured = _with_parts(runs)
    if not measured:
        return None
    names = [name for name in PARTS if any(name in run.parts for run in measured)]
    seconds = {name: statistics.fmean([run.parts.get(name, 0.0) for run in measured]) for name in names}
    # The rest of a step after subtracting its parts is a rounding error if there is nothing else.
    least = _ROUNDING * sum(seconds.values())
    return {name: value if value > least else 0.0 for name, value in seconds.items()}


_FIXED = ("strategy", "model", "data", "machine", "processor", "version")
_BATCH: Mapping[str, tuple[str, ...]] = {
    "weak": ("batch_per_rank",),
    "strong": ("global_batch",),
    "scale-up": ("batch_per_rank", "workers", "nodes"),
}
_SPLIT: Mapping[str, tuple[str, ...]] = {
    "weak": ("mpi", "servers", "ranks_per_node", "threads", "profile", "nodes", "global_batch"),
    "strong": ("mpi", "servers", "ranks_per_node", "threads", "profile", "nodes", "batch_per_rank"),
    "scale-up": ("servers", "ranks_per_node", "profile", "global_batch"),
}
"""A curve with two values of one of these at the same n is split by it: settings are never averaged.

The same holds for settings that do not affect time, such as the learning rate: they may change along n, as servers do.
"""
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
    "settings",
    "base",
    "base_strategy",
    *(f"images_per_second_{name}" for name in ("mean", "std", "ci95")),
    *(f"{measure}_{name}" for measure in _RATIOS for name in ("mean", "std", "ci95", "low", "high")),
)
"""The columns of scaling.csv."""
UNSTATED = "weak"
"""The mode of runs that state none and vary in nothing: `hpcdl train --batch-size` is per worker."""


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
    """Points by ascending n. `split` distinguishes this curve from its siblings, as ("servers", 2).

    `base` is the point to which all are compared: the first, or one of another strategy.
    """

    mode: str
    split: tuple[tuple[str, Any], ...]
    points: tuple[Point, ...]
    base: Point

    @property
    def borrowed(self) -> bool:
        """Whether the base belongs to another strategy."""
        return self.base is not self.points[0]

    @property
    def alone(self) -> bool:
        """Whether nothing else is measured to compare its one point with."""
        return len(self.points) == 1 and not self.borrowed

    @functools.cached_property
    def settings(self) -> Mapping[str, str]:
        """Those distinguishing settings that are the same along the whole curve."""
        common = set.intersection(*(set(point.first.settings.items()) for point in self.points))
        return {key: value for key, value in self.first.settings.items() if (key, value) in common}

    @functools.cached_property
    def variant(self) -> str:
        """The settings as text."""
        return ", ".join(f"{key} {value}" for key, value in self.settings.items())

    @property
    def first(self) -> Run:
        """Any run of the curve."""
        return self.points[0].runs[0]

    @property
    def axis(self) -> str:
        """The unit of n."""
        return "threads" if self.mode == "scale-up" else "workers"

    @property
    def batch(self) -> str:
        """The fixed batch size as text."""
        run = self.first
        return f"{run.global_batch} in all" if self.mode == "strong" else f"{run.batch_per_rank} per worker"


def build_curves(runs: Iterable[Run]) -> list[Curve]:
    """Return all curves of the usable runs. A run without a mode joins every curve that its settings allow."""
    usable = [run for run in runs if run.usable]
    joined: set[int] = set()
    curves: list[Curve] = []
    for mode in MODES:
        candidates = [run for run in usable if run.mode in ("", mode) and axis_value(mode, run) is not None]
        for group in _grouped(candidates, _key(mode)):
            # Runs of one size are a curve only if their study states a mode.
            members = group if _varies(mode, group) else [run for run in group if run.mode]
            joined.update(id(run) for run in members)
            curves += _curves_of(mode, members)
    # A run without a mode may be on a weak and a strong curve; one that is on none still has its throughput shown.
    lonely = [run for run in usable if id(run) not in joined]
    for group in _grouped(lonely, _key(UNSTATED)):
        curves += _curves_of(UNSTATED, group)
    return sorted(curves, key=_order)


def axis_value(mode: str, run: Run) -> int | None:
    """Return n of a run: threads in scale-up, else workers."""
    return run.threads if mode == "scale-up" else run.workers


def _key(mode: str) -> Callable[[Run], Hashable]:
    fixed = attrgetter(*_FIXED, *_BATCH[mode])
    return lambda run: (*fixed(run), *_costly(run))


def _costly(run: Run) -> tuple[tuple[str, str], ...]:
    return tuple(item for item in run.settings.items() if item[0] in COSTLY)


def _grouped(runs: Iterable[Run], key: Callable[[Run], Hashable]) -> list[list[Run]]:
    groups: dict[Hashable, list[Run]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return list(groups.values())


def _varies(mode: str, group: Sequence[Run]) -> bool:
    return len({axis_value(mode, run) for run in group}) > 1


def _curves_of(mode: str, group: Sequence[Run]) -> list[Curve]:
    parts: list[_Part] = [((), group)] if group else []
    free = [key for key in (group[0].settings if group else ()) if key not in COSTLY]
    # Settings first: servers that grow with the workers must not split a curve because two learning rates were tried.
    ways: list[tuple[str, Callable[[Run], Any]]] = [(key, _setting(key)) for key in free]
    ways += [(name, attrgetter(name)) for name in _SPLIT[mode]]
    for name, value in ways:
        parts = [piece for split, runs in parts for piece in _split(mode, name, value, split, runs)]
    return [_curve(mode, split, _by_n(mode, runs)) for split, runs in parts]


def _setting(key: str) -> Callable[[Run], str | None]:
    return lambda run: run.settings.get(key)


_Part = tuple[tuple[tuple[str, Any], ...], Sequence[Run]]


def _split(
    mode: str, name: str, value: Callable[[Run], Any], split: tuple[tuple[str, Any], ...], runs: Sequence[Run]
) -> list[_Part]:
    values_at = defaultdict(set)
    for run in runs:
        values_at[axis_value(mode, run)].add(value(run))
    # A value that grows with n, such as servers, belongs to the curve; two values at one n make two curves.
    if all(len(values) == 1 for values in values_at.values()):
        return [(split, runs)]
    if name != "mpi":
        return [((*split, (name, value(group[0]))), group) for group in _grouped(runs, value)]
    # One process has no MPI: it is the base of the curves of all.
    libraries = {value(run) for run in runs if value(run)}
    if len(libraries) < 2:
        return [(split, runs)]
    return [((*split, (name, one)), [run for run in runs if value(run) in ("", one)]) for one in sorted(libraries)]


def _by_n(mode: str, runs: Sequence[Run]) -> dict[int, list[Run]]:
    groups: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        groups[axis_value(mode, run) or 0].append(run)
    return {n: groups[n] for n in sorted(groups)}


def _curve(
    mode: str, split: tuple[tuple[str, Any], ...], groups: Mapping[int, Sequence[Run]], base: Point | None = None
) -> Curve:
    """Return the curve of runs by n, relative to `base`, by default its own first point."""
    first, *later_groups = groups.items()
    start = _point(*first, base)
    base = base or start
    return Curve(
        mode=mode, split=split, points=(start, *(_point(n, runs, base) for n, runs in later_groups)), base=base
    )


def _point(n: int, runs: Sequence[Run], base: Point | None = None) -> Point:
    """Return the repeats of one setting at n, relative to `base`; without it the point is a base itself."""
    throughput = [run.images_per_second or 0.0 for run in runs]
    if base is None:
        speedup = Ratio(value=1.0, low=1.0, high=1.0, p_value=None, std=0.0, n=len(runs), n_base=len(runs))
    else:
        speedup = welch_log_ratio(throughput, [run.images_per_second or 0.0 for run in base.runs])
    base_n, base_nodes = (n, runs[0].nodes) if base is None else (base.n, base.first.nodes)
    return Point(
        n=n,
        runs=tuple(runs),
        throughput=estimate(throughput),
        speedup=speedup,
        efficiency=speedup.scaled(base_n / n),
        efficiency_per_node=speedup.scaled(base_nodes / runs[0].nodes),
    )


def with_base_of(curves: Sequence[Curve], runs: Sequence[Run], strategy: str) -> list[Curve]:
    """Use the one-worker runs of `strategy` as base of curves that have no point of one worker.

    A curve keeps its own base if no run of `strategy` has its settings, apart from those of the exchange.
    """
    candidates = [run for run in runs if run.usable and run.strategy == strategy and run.workers == 1]
    return [_rebased(curve, candidates) if curve.mode != "scale-up" and curve.base.n > 1 else curve for curve in curves]


def _rebased(curve: Curve, candidates: Sequence[Run]) -> Curve:
    names = [name for name in (*_FIXED, *_BATCH[curve.mode]) if name != "strategy"]

    def job(run: Run) -> tuple[Hashable, ...]:
        shared = [item for item in run.settings.items() if item[0] not in OF_STRATEGY and item[0] in curve.settings]
        return (*(getattr(run, name) for name in names), *shared)

    able = [run for run in candidates if run.mode in ("", curve.mode) and job(run) == job(curve.first)]
    alike = _grouped(able, lambda run: (run.threads, run.profile, run.variant))
    # A worker alone may have had a whole node's threads: one with the curve's is the better base.
    close = [group for group in alike if group[0].threads == curve.first.threads] or alike
    # Several possible bases give different efficiencies, and nothing says which is meant.
    if len(close) != 1:
        return curve
    base = _point(1, close[0])
    return _curve(curve.mode, curve.split, {point.n: point.runs for point in curve.points}, base)


def _order(curve: Curve) -> tuple[Any, ...]:
    run = curve.first
    fixed = tuple(str(getattr(run, name)) for name in ("model", "strategy", "data", "machine", "version"))
    batch = run.global_batch if curve.mode == "strong" else run.batch_per_rank
    # As text, because values of a split may be None.
    return (MODES.index(curve.mode), *fixed, curve.variant, batch, [(name, str(value)) for name, value in curve.split])


def scaling_rows(curves: Iterable[Curve], varying: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return one row for each point. `n` counts its runs; `base` is the n of its curve's base.

    `settings` holds the values of the `varying` keys of `hpcdl train`.
    """
    return [_row(curve, point, varying) for curve in curves for point in curve.points]


def flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with one column per measure: `efficiency_mean`, `efficiency_std`, `efficiency_ci95`."""
    flat = {name: value for name, value in row.items() if name not in _MEASURES}
    flat["settings"] = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
    for measure in _MEASURES:
        flat |= {f"{measure}_{name}": value for name, value in row[measure].items()}
    return flat


def _row(curve: Curve, point: Point, varying: Sequence[str]) -> dict[str, Any]:
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
        "settings": settings_row(run, varying),
        "base": curve.base.n,
        "base_strategy": curve.base.first.strategy,
    }


def _estimate(value: Estimate) -> dict[str, float | None]:
    return {"mean": value.mean, "std": value.std, "ci95": value.ci95}


def _ratio(value: Ratio) -> dict[str, float | None]:
    return {"mean": value.value, "std": value.std, "ci95": value.ci95, "low": value.low, "high": value.high}
