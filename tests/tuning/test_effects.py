from __future__ import annotations

import dataclasses
import itertools
import random

from hpcdl.core.statistics import estimate
from hpcdl.node.profile import TrialSummary
from hpcdl.tuning.findings import main_effects, thread_curve


def trials() -> list[TrialSummary]:
    """NUMA binding gains 20 %, oneDNN 50 %; good engines were tried with bad bindings more often."""
    dice = random.Random(1)
    found = []
    for threads, binding, onednn in itertools.product((1, 2, 4), ("none", "numa"), (False, True)):
        if onednn and binding == "numa" and threads < 4:
            continue
        speed = 100 * threads**0.5 * (1.2 if binding == "numa" else 1.0) * (1.5 if onednn else 1.0)
        settings = {"ranks_per_node": 2, "intra_op_threads": threads, "binding": binding, "onednn": onednn}
        samples = [speed * dice.gauss(1, 0.01) for _ in range(20)]
        summary = estimate(samples)
        found.append(
            TrialSummary(settings=settings, status="ok", n=20, images_per_second=summary.mean, ci95=summary.ci95)
        )
    return [*found, TrialSummary(settings={"intra_op_threads": 8}, status="failed")]


def test_effects_are_distinguished_and_ranked() -> None:
    effects = {(e.setting, e.value): e.ratio for e in main_effects(trials())}
    assert abs(effects["binding", "numa"] / effects["binding", "none"] - 1.2) < 0.03
    assert abs(effects["onednn", "true"] / effects["onednn", "false"] - 1.5) < 0.05
    assert main_effects(trials())[0].setting == "intra_op_threads"
    assert not any(setting == "ranks_per_node" for setting, _ in effects)  # ranks_per_node never varied


def test_no_effects_without_trials_enough_for_intervals() -> None:
    assert main_effects([]) == []
    assert main_effects(trials()[:3]) == []


def test_effects_have_intervals_that_hold_none_where_there_is_none() -> None:
    dice = random.Random(2)
    found = [
        dataclasses.replace(trial, settings={**trial.settings, "xla": dice.random() < 0.5}, n=1, ci95=None)
        for trial in [*trials(), *trials()]
        if trial.images_per_second
    ]
    effects = {(e.setting, e.value): e for e in main_effects(found)}
    assert all(effect.low < effect.ratio < effect.high for effect in effects.values())
    assert effects["xla", "true"].low < 1 < effects["xla", "true"].high
    assert effects["onednn", "true"].low > 1 > effects["onednn", "false"].high
    assert abs(effects["onednn", "true"].ratio * effects["onednn", "false"].ratio - 1) < 1e-9, "beside their mean"


def test_the_curve_has_the_best_trial_of_each_thread_count() -> None:
    curve = thread_curve(trials())
    assert [point.threads for point in curve] == [2, 4, 8]
    assert all(point.settings["onednn"] == "true" for point in curve)
    assert curve[0].ci95 is not None
