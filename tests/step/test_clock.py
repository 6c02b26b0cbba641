"""Step times: the same means and quantiles as of all steps, in constant memory."""

from __future__ import annotations

import numpy
import pytest

from hpcdl.comm.threads import alone
from hpcdl.core.records.run_record import ALL_STEPS_UP_TO, PARTS
from hpcdl.step.clock import StepClock, StepTimes


def fed(num_steps: int, warmup_steps: int) -> tuple[StepClock, numpy.ndarray]:
    """Return a clock after steps with random parts, and those parts."""
    parts = numpy.random.default_rng(3).random((num_steps, len(PARTS)))
    clock = StepClock(alone(), synchronous=True, warmup_steps=warmup_steps)
    for number, row in enumerate(parts):
        borders = numpy.concatenate([[0.0], numpy.cumsum(row)])
        clock.add(
            StepTimes(
                began=borders[0], got_batch=borders[1], had_gradients=borders[2], waited_s=borders[3] - borders[2],
                exchanged=borders[4], updated=borders[5], ended=borders[6],
            )
        )  # fmt: skip
        if number % 7 == 0:
            clock.flush()
    clock.flush()
    return clock, parts


@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(50, 10), (50, 0), (5, 10), (ALL_STEPS_UP_TO + 500, 10)])
def test_means_are_those_of_all_steps_after_the_warm_up(num_steps: int, warmup_steps: int) -> None:
    clock, parts = fed(num_steps, warmup_steps)
    warm = parts[warmup_steps:] if num_steps > warmup_steps else parts
    assert [*clock.mean_parts().values()] == pytest.approx(warm.mean(axis=0).tolist())
    assert clock.is_warm == (num_steps > warmup_steps)
    assert clock.steps.mean == pytest.approx(warm.sum(axis=1).mean())
    assert clock.steps.quantiles([0.0, 1.0]) == pytest.approx([warm.sum(axis=1).min(), warm.sum(axis=1).max()])
    assert clock.num_steps == num_steps and len(clock.first_steps) == min(num_steps, ALL_STEPS_UP_TO)
    assert clock.first_steps.tolist() == pytest.approx(parts.sum(axis=1)[:ALL_STEPS_UP_TO].tolist())
    assert not clock._pending


def test_a_clock_without_steps_says_nothing() -> None:
    clock = StepClock(alone(), synchronous=True)
    clock.flush()
    assert clock.mean_parts() == {} and clock.num_steps == 0
