"""Names of runs, curves and points, as short as possible but distinct."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpcdl.core.units import counted
from hpcdl.report.analysis.scaling import Curve, Point
from hpcdl.report.analysis.settings import UNSTATED, default_of
from hpcdl.report.runs.run import Run

_WORDS = {
    "mpi": "with",
    "ranks_per_node": "ranks per node",
    "batch_per_rank": "batch per worker",
    "global_batch": "global batch",
}
_FIXED = ("model", "strategy", "data", "machine", "processor", "version")


def curve_names(curves: Sequence[Curve]) -> list[str]:
    """Return a name for each curve: its strategy, and what else differs among `curves`."""
    varying = [name for name in _FIXED if len({getattr(curve.first, name) for curve in curves}) > 1]
    named = [name for name in _FIXED if name == "strategy" or name in varying]
    # A batch per worker and a global batch cannot be compared, so only batches of one mode count.
    batches_vary = len({(curve.mode, curve.batch) for curve in curves}) > len({curve.mode for curve in curves})
    shown = telling_settings([curve.first for curve in curves])
    return [", ".join(_parts(curve, named, keys, batches_vary)) for curve, keys in zip(curves, shown, strict=True)]


def telling_settings(runs: Sequence[Run]) -> list[set[str]]:
    """Return for each run the settings for its name: runs of its strategy differ in them, or they are not default."""
    values: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for key, value in run.settings.items():
            values.setdefault((run.strategy, key), set()).add(value)
    return [
        {
            key
            for key, value in run.settings.items()
            if len(values[run.strategy, key]) > 1 or value not in (default_of(key), UNSTATED)
        }
        for run in runs
    ]


def _parts(curve: Curve, named: Iterable[str], shown: set[str], batches_vary: bool) -> list[str]:
    run, split = curve.first, dict(curve.split)
    parts = [label_of(run, name, getattr(run, name)) or f"unknown {name}" for name in named]
    parts += [setting_words(run, key, value) for key, value in curve.settings.items() if key in shown]
    if batches_vary:
        parts.append(f"batch {curve.batch}")
    # Here n counts threads, so nothing else in the name says how many workers there are.
    if curve.mode == "scale-up" and run.workers > 1:
        parts.append(counted(run.workers, "worker"))
    # A setting that splits curves is constant along each, so it is among the curve's settings already.
    return parts + [f"{_WORDS.get(name, name)} {value}" for name, value in split.items() if name not in run.settings]


def setting_words(run: Run, key: str, value: object) -> str:
    """Return a setting with its value, by the labels of the run's study: `learning-rate 0.1`."""
    return f"{run.labels.get(key, key)} {label_of(run, key, value)}".strip()


def label_of(run: Run, key: str, value: object) -> str:
    """Return the label of this value in the run's study, or the value itself without a label."""
    return run.labels.get(f"{key}={value}", str(value))


def point_name(curve: Curve, point: Point) -> str:
    """Return a point's name for warnings: `weak ring lenet at 4 workers`."""
    parts = [curve.mode, curve.first.strategy, curve.first.model]
    unit = curve.axis[:-1]
    split = [
        f"batch {curve.batch}",
        *([point.first.variant] if point.first.variant else []),
        *(f"{_WORDS.get(name, name)} {value}" for name, value in curve.split if name not in point.first.settings),
    ]
    return f"{' '.join(parts)} at {counted(point.n, unit)} ({', '.join(split)})"
