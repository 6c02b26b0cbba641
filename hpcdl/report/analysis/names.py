"""What runs, curves and points are called, in as few words as tell them apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from hpcdl.config.load import all_settings
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import Matters
from hpcdl.report.analysis.scaling import Curve, Point
from hpcdl.report.runs.run import Run

_WORDS = {"ranks_per_node": "ranks per node", "batch_per_rank": "batch per worker", "global_batch": "global batch"}
_FIXED = ("model", "strategy", "variant", "data", "machine", "processor", "version")
_IDENTITY = (
    "model", "data", "strategy", "batch-size", "ranks", "servers", "nodes", "ranks-per-node", "seed", "run-dir",
    "resume", "profile", "config",
)  # fmt: skip
"""Settings that a record holds elsewhere, or that name a run."""
_SETTINGS = {item.key: item for item in all_settings(TrainConfig)}
COSTLY = tuple(
    key
    for key, item in _SETTINGS.items()
    if item.matters and Matters.TIME in item.matters and item.kind != "Path" and key not in _IDENTITY
)
"""Settings that change what a step does or sends: runs that differ in one are never averaged. Paths differ by job."""


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs with `variant` naming the costly settings in which those of one network and data set differ."""
    jobs: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        jobs.setdefault((run.model, run.data), []).append(run)
    varying = {job: _varying(members, COSTLY) for job, members in jobs.items()}
    return [
        dataclasses.replace(run, variant=_told(run, names)) if (names := varying[run.model, run.data]) else run
        for run in runs
    ]


def other_differences(runs: Sequence[Run]) -> Iterable[str]:
    """A line for the settings that differ, were not kept apart, and may matter to accuracy."""
    trifles = {key for key, item in _SETTINGS.items() if item.matters is Matters.NOTHING}
    names = sorted({name for run in runs for name in run.config} - {*COSTLY, *_IDENTITY} - trifles)
    varying = _varying(runs, names)
    if varying:
        yield f"runs differ in settings that do not keep them apart: {listed(varying, 6)}"


def _varying(runs: Sequence[Run], names: Iterable[str]) -> list[str]:
    return [name for name in names if len({run.config[name] for run in runs if name in run.config}) > 1]


def _told(run: Run, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {run.config[name]}" for name in names if name in run.config)


def curve_names(curves: Sequence[Curve]) -> list[str]:
    """A name for each curve: its strategy, and what else differs among `curves`."""
    varying = [name for name in _FIXED if len({getattr(curve.first, name) for curve in curves}) > 1]
    named = [name for name in _FIXED if name == "strategy" or name in varying]
    batches_vary = len({(curve.mode, curve.batch) for curve in curves}) > len({curve.mode for curve in curves})
    return [", ".join(_parts(curve, named, batches_vary)) for curve in curves]


def _parts(curve: Curve, named: Iterable[str], batches_vary: bool) -> list[str]:
    parts = [str(getattr(curve.first, name)) or f"unknown {name}" for name in named if name != "variant"]
    parts += [curve.first.variant] if curve.first.variant else []
    if batches_vary:
        parts.append(f"batch {curve.batch}")
    if curve.mode == "scale-up" and curve.first.workers > 1:
        parts.append(counted(curve.first.workers, "worker"))
    return parts + [f"{_WORDS.get(name, name)} {value}" for name, value in curve.split]


def point_name(curve: Curve, point: Point) -> str:
    """One point in words, for warnings: `weak ring lenet at 4 workers`."""
    parts = [curve.mode, curve.first.strategy, curve.first.model]
    unit = curve.axis[:-1]
    split = [
        f"batch {curve.batch}",
        *([curve.first.variant] if curve.first.variant else []),
        *(f"{_WORDS.get(name, name)} {value}" for name, value in curve.split),
    ]
    return f"{' '.join(parts)} at {counted(point.n, unit)} ({', '.join(split)})"


def counted(count: int, unit: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{count:,} {unit}" if count == 1 else f"{count:,} {unit}s"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Some names of many: `a, b, c and 9 more`."""
    shown = list(names[:most])
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more" if rest else "")
