"""What can be wrong with a study is found before anything runs, all of it at once."""

from __future__ import annotations

from typing import Any

from hpcdl.config.load import Layer, load, standard_layers
from hpcdl.config.schema import TrainConfig
from hpcdl.config.study import Study
from hpcdl.core.errors import ConfigError, CorruptError, UsageError
from hpcdl.study.plan import Plan, Point
from hpcdl.training.launch.prepare import Prepared, prepare

OWN = {
    **dict.fromkeys(("model", "data", "strategy", "servers", "batch-size"), "list it in [matrix]"),
    "ranks": "list nodes or workers in [matrix]",
    "run-dir": "the study names the folders; choose theirs with --out",
    "resume": "runs of a study start anew",
}
"""Settings of a run that a study chooses, and where to say it."""


def prepare_points(study: Study, plan: Plan) -> tuple[Plan, dict[int, Prepared]]:
    """Every point as `hpcdl train` would prepare it, by number, and the plan without those that it would refuse.

    ConfigError tells all that is wrong. A strategy that takes some points of a network and data set and refuses others
    (too few workers, more samples a step than there are) is not wrong: what it refuses is left out, and said.
    """
    problems = [f"{study.origin}: [train] {key}: {OWN[key]}" for key in study.train if key in OWN]
    if any(point.threads for point in plan.points) and "profile" in study.train:
        problems.append(f"{study.origin}: [train] profile: threads in [matrix] make profiles of their own; drop one")
    shared = {key: value for key, value in study.train.items() if key not in OWN}
    layers = [*standard_layers("train"), Layer(origin=f"{study.origin}: [train]", values=shared)]
    found: dict[int, Prepared] = {}
    refused: dict[int, str] = {}
    for point in plan.points:
        own = Layer(origin=f"point {point.number}", values=settings_of_point(point))
        try:
            effective = load(TrainConfig, [*layers, own])
        except ConfigError as error:
            problems += error.problems
            continue
        try:
            found[point.number] = prepare(effective)
        except (UsageError, CorruptError) as error:
            refused[point.number] = str(error)
    able = {_job(point) for point in plan.points if point.number in found}
    wrong = [point for point in plan.points if point.number in refused and _job(point) not in able]
    problems += [f"{study.origin}: {line}" for point in wrong for line in refused[point.number].splitlines()]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return plan.without(refused), found


def _job(point: Point) -> tuple[str, str, str]:
    return point.model, point.data, point.strategy


def settings_of_point(point: Point) -> dict[str, Any]:
    """The point as settings of `hpcdl train`, by key."""
    values: dict[str, Any] = {
        "model": point.model,
        "data": point.data,
        "strategy": point.strategy,
        "ranks": point.ranks,
        "batch-size": point.batch_size,
    }
    return values | ({"servers": point.servers} if point.servers else {})
