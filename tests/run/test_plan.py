"""What a run says of itself before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from hpcdl.config.load import Layer, load
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import HpcdlError
from hpcdl.run.plan import prepare, rule_in_force

MANY = {"batch-size": 20_000, "ranks": 2, "epochs": 2}


@pytest.mark.parametrize(("settings", "ends"), [
    (MANY, "2 steps, 1 an epoch, which leaves out 20000 of the 60000 samples, others in each epoch"),
    ({**MANY, "batch-size": 15_000}, "4 steps, 2 an epoch"),
    ({**MANY, "batch-size": 28_000}, "2 steps, 1 an epoch"),
    ({**MANY, "strategy": "async-sgd", "ranks": 3}, "2 steps, 1 an epoch"),
])  # fmt: skip
def test_samples_that_fill_no_whole_step_are_reported_if_they_are_many(settings: dict[str, Any], ends: str) -> None:
    values = {"model": "lenet", "data": "synthetic:mnist", "strategy": "ring", **settings}
    assert rule_in_force(prepare(load(TrainConfig, [Layer(origin="flag", values=values)]))).endswith(ends)


def planned(settings: dict[str, Any], origin: str) -> str:
    """Return how the run updates its weights, or the refusal."""
    values = {"model": "lenet", "data": "synthetic:mnist", "epochs": 2}
    given = Layer(origin=origin, values=settings)
    try:
        return rule_in_force(prepare(load(TrainConfig, [Layer(origin="file", values=values), given])))
    except HpcdlError as error:
        return str(error)


@pytest.mark.parametrize(("settings", "reported"), [
    ({"momentum": 0.5}, "--momentum: --optimizer sgd does not use it; leave it out, or choose one that does: mom"),
    ({"momentum": 0.5, "optimizer": "lars"}, ""),
    ({"lars-trust": 0.1, "optimizer": "adam"}, "--lars-trust: --optimizer adam does not use it"),
    ({"decay-epochs": 1}, "--decay-epochs: --schedule constant does not use it"),
    ({"decay-factor": 0.5, "schedule": "cosine"}, "--decay-factor: --schedule cosine does not use it"),
    ({"decay-power": 2.0, "schedule": "step"}, "--decay-power: --schedule step does not use it"),
    ({"decay-power": 2.0, "schedule": "polynomial"}, ""),
    ({"momentum": 0.5, "strategy": "async-msgd", "ranks": 3}, ""),
    ({"mtbf": 3600.0}, "--mtbf: --checkpoint-every 600.0 does not use it"),
    ({"mtbf": 3600.0, "checkpoint-every": "auto"}, ""),
    ({"local-checkpoint-folder": "/tmp/near"}, "--local-checkpoint-folder: it is for copies in the nodes' memory"),
    ({"stage": "/tmp/near"}, "--stage /tmp/near: synthetic:mnist has no files to copy"),
])  # fmt: skip
def test_flags_that_nothing_uses_are_refused(settings: dict[str, Any], reported: str) -> None:
    assert (reported in planned(settings, "flag")) if reported else ("samples a step" in planned(settings, "flag"))
    assert "samples a step" in planned(settings, "file"), "a file may serve several optimizers"


def test_a_target_that_nothing_measures_is_refused() -> None:
    assert "has no held-out samples to measure it on" in planned({"target-accuracy": 0.9}, "flag")
    assert "samples a step" in planned({"target-accuracy": 0.9}, "file"), "a study may be tried on other data"
