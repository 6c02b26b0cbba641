"""What the trials of a search show: the effect of each setting, and speed against threads, as a report shows them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from hpcdl.node.profile import TrialSummary
from hpcdl.node.settings import show, spelt
from hpcdl.report.runs.tunings import SettingEffect, ThreadPoint
from hpcdl.tuning.factors import number_of


def main_effects(trials: Sequence[TrialSummary], *, ridge: float = 0.5) -> list[SettingEffect]:
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
    speed = np.array([math.log(speed) for _, speed in measured])
    weight = np.sqrt(np.array([trial.n for trial, _ in measured], dtype=float))
    design = np.array(
        [[show(trial.settings.get(name)) == value for name, value in columns] for trial, _ in measured], dtype=float
    )
    scaled = design * weight[:, None]
    centred = (speed - np.average(speed, weights=weight**2)) * weight
    fitted = np.linalg.solve(scaled.T @ scaled + ridge * np.eye(len(columns)), scaled.T @ centred)
    counts = design.sum(axis=0).astype(int)
    effects = [
        SettingEffect(setting=name, value=value, ratio=math.exp(float(size)), num_trials=int(count))
        for (name, value), size, count in zip(columns, fitted, counts, strict=True)
    ]
    spans: dict[str, list[float]] = defaultdict(list)
    for effect in effects:
        spans[effect.setting].append(effect.ratio)
    return sorted(effects, key=lambda e: (-max(spans[e.setting]) / min(spans[e.setting]), e.setting, -e.ratio))


def thread_curve(trials: Sequence[TrialSummary]) -> list[ThreadPoint]:
    """Images/s of the node against its threads in all (ranks x intra-op), the best trial of each count, ascending."""
    best: dict[int, ThreadPoint] = {}
    for trial in trials:
        threads = number_of(trial.settings.get("intra_op_threads"))
        ranks = number_of(trial.settings.get("ranks_per_node")) or 1
        if threads is None or trial.images_per_second is None:
            continue
        point = ThreadPoint(
            threads=int(threads * ranks), images_per_second=trial.images_per_second, ci95=trial.ci95, n=trial.n,
            settings=spelt(trial.settings),
        )  # fmt: skip
        known = best.get(point.threads)
        if known is None or point.images_per_second > known.images_per_second:
            best[point.threads] = point
    return [best[threads] for threads in sorted(best)]


def _levels(trials: Sequence[TrialSummary], name: str) -> list[str]:
    return sorted({show(trial.settings.get(name)) for trial in trials})
