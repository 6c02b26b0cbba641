"""Schedules against independent numpy formulas from their papers."""

import dataclasses

import numpy
import pytest

from hpcdl.config.schema import OptimizerConfig
from hpcdl.run.schedules import build_schedule, mistaken_warm_up

STEPS, PER_EPOCH = 100, 10


def rates(**settings: object) -> numpy.ndarray:
    config = OptimizerConfig(**{"learning_rate": 0.4, **settings})  # type: ignore[arg-type]
    schedule = build_schedule(config, global_batch=256, num_steps=STEPS, steps_per_epoch=PER_EPOCH)
    return numpy.array([schedule(step) for step in range(STEPS)])


def test_constant() -> None:
    numpy.testing.assert_allclose(rates(), 0.4)


def test_linear_scaling() -> None:
    numpy.testing.assert_allclose(rates(base_batch=64), 1.6)


def test_warmup_is_linear_and_reaches_the_peak() -> None:
    found = rates(warmup_epochs=2.0)
    numpy.testing.assert_allclose(found[:20], 0.4 * numpy.arange(1, 21) / 20)
    numpy.testing.assert_allclose(found[20:], 0.4)


def test_cosine_after_the_warmup() -> None:
    found = rates(schedule="cosine", warmup_epochs=2.0)
    t = numpy.arange(80) / 80
    numpy.testing.assert_allclose(found[20:], 0.5 * 0.4 * (1 + numpy.cos(numpy.pi * t)))


def test_polynomial() -> None:
    found = rates(schedule="polynomial", decay_power=2.0)
    numpy.testing.assert_allclose(found, 0.4 * (1 - numpy.arange(100) / 100) ** 2)


def test_step_decay_counts_epochs() -> None:
    found = rates(schedule="step", decay_epochs=3.0, decay_factor=0.1)
    numpy.testing.assert_allclose(found, 0.4 * 0.1 ** (numpy.arange(100) // 30))


@pytest.mark.parametrize("warmup", [0.0, 50.0])
def test_a_warmup_longer_than_the_run_is_cut(warmup: float) -> None:
    assert rates(warmup_epochs=warmup).max() <= 0.4 + 1e-12


def test_a_schedule_says_what_it_does() -> None:
    config = OptimizerConfig(learning_rate=0.1, base_batch=128, warmup_epochs=1.0, schedule="cosine")
    schedule = build_schedule(config, global_batch=256, num_steps=STEPS, steps_per_epoch=PER_EPOCH)
    assert schedule.describe() == (
        "learning rate 0.2 (= 0.1 scaled linearly from batch 128) after 10 warm-up steps, cosine decay"
    )
    longer = dataclasses.replace(config, base_batch=None, warmup_epochs=50.0, schedule="constant")
    schedule = build_schedule(longer, global_batch=256, num_steps=STEPS, steps_per_epoch=PER_EPOCH)
    assert schedule.describe() == (
        f"learning rate 0.1 after {STEPS} warm-up steps (the whole run: --warmup-epochs 50 would be {50 * PER_EPOCH:,})"
    )


@pytest.mark.parametrize(
    ("epochs", "said", "warned"),
    [(1.0, "learning rate 0.1, x 0.1 every epoch", False), (3.0, "learning rate 0.1, x 0.1 every 3 epochs", False),
     (10.0, "learning rate 0.1, x 0.1 every 10 epochs", True)],
)  # fmt: skip
def test_a_decay_that_comes_after_the_end_is_warned_of(epochs: float, said: str, warned: bool) -> None:
    config = OptimizerConfig(learning_rate=0.1, schedule="step", decay_epochs=epochs)
    schedule = build_schedule(config, global_batch=256, num_steps=STEPS, steps_per_epoch=PER_EPOCH)
    assert schedule.describe() == said
    assert any("before the first drop at --decay-epochs 10" in line for line in schedule.warnings) == warned


@pytest.mark.parametrize(("steps", "epochs", "warned"), [(500, 0.0, True), (500, 2.0, False), (50, 0.0, False)])
def test_steps_that_are_left_out_are_no_warm_up_of_the_rate(steps: int, epochs: float, warned: bool) -> None:
    lines = mistaken_warm_up(steps, OptimizerConfig(warmup_epochs=epochs))
    assert any("--warmup-epochs" in line for line in lines) is warned
