"""What the trials of a search show: the effect of each setting, and speed against threads. Data; report/ draws it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.core.statistics import Estimate
from hpcdl.node.settings import show
from hpcdl.tuning.factors import number_of


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One candidate: its settings and its images/s, None where no sample succeeded."""

    settings: Mapping[str, Any]
    images_per_second: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One level of a setting: `ratio` is its trials' speed against all trials', others held as equal as they were."""

    setting: str
    value: str
    ratio: float
    num_trials: int


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The best trial with `threads` threads on the node in all: its estimate in images/s."""

    threads: int
    images_per_second: Estimate
    settings: Mapping[str, Any]


def main_effects(trials: Sequence[Trial], *, ridge: float = 0.5) -> list[Effect]:
    """Effects of every setting's levels on the logarithm of speed, fitted together by ridge regression.

    A search measures good corners more often than bad ones; fitting all settings at once keeps the company that a
    level was in from being counted as its own merit. The settings that matter most come first.
    """
    import numpy as np

    measured = [(trial, trial.images_per_second) for trial in trials if trial.images_per_second is not None]
    names = list(dict.fromkeys(name for trial, _ in measured for name in trial.settings))
    columns = [
        (name, value)
        for name in names
        if len(levels := _levels([trial for trial, _ in measured], name)) > 1
        for value in levels
    ]  # fmt: skip
    if not columns:
        return []
    speed = np.array([math.log(speed.mean) for _, speed in measured])
    weight = np.sqrt(np.array([speed.n for _, speed in measured], dtype=float))
    design = np.array(
        [[show(trial.settings.get(name)) == value for name, value in columns] for trial, _ in measured], dtype=float
    )
    scaled = design * weight[:, None]
    centred = (speed - np.average(speed, weights=weight**2)) * weight
    fitted = np.linalg.solve(scaled.T @ scaled + ridge * np.eye(len(columns)), scaled.T @ centred)
    counts = design.sum(axis=0).astype(int)
    effects = [
        Effect(setting=name, value=value, ratio=math.exp(float(size)), num_trials=int(count))
        for (name, value), size, count in zip(columns, fitted, counts, strict=True)
    ]
    spans: dict[str, list[float]] = defaultdict(list)
    for effect in effects:
        spans[effect.setting].append(effect.ratio)
    return sorted(effects, key=lambda e: (-max(spans[e.setting]) / min(spans[e.setting]), e.setting, -e.ratio))


def thread_curve(trials: Sequence[Trial]) -> list[CurvePoint]:
    """Images/s of the node against its threads in all (ranks x intra-op), the best trial of each count, ascending."""
    best: dict[int, CurvePoint] = {}
    for trial in trials:
        threads = number_of(trial.settings.get("intra_op_threads"))
        ranks = number_of(trial.settings.get("ranks_per_node")) or 1
        if threads is None or trial.images_per_second is None:
            continue
        point = CurvePoint(
            threads=int(threads * ranks), images_per_second=trial.images_per_second, settings=trial.settings
        )
        known = best.get(point.threads)
        if known is None or point.images_per_second.mean > known.images_per_second.mean:
            best[point.threads] = point
    return [best[threads] for threads in sorted(best)]


def _levels(trials: Sequence[Trial], name: str) -> list[str]:
    return sorted({show(trial.settings.get(name)) for trial in trials})
