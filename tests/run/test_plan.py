"""What a run says of itself before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from hpcdl.config.load import Layer, load
from hpcdl.config.schema import TrainConfig
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
