"""Learning rate by step: linear scaling and warm-up, then constant, step, cosine or polynomial decay.

Sources: linear scaling and gradual warm-up, Goyal et al. 2017 (arXiv 1706.02677) sections 2.1 and 2.2; cosine,
Loshchilov and Hutter 2017 (arXiv 1608.03983) equation 5 without restarts; polynomial, Caffe's `poly` policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hpcdl.config.schema import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of every step of a run."""

    peak: float
    warmup_steps: int
    num_steps: int
    steps_per_epoch: int
    config: OptimizerConfig

    def __call__(self, step: int) -> float:
        """Return the learning rate of `step` (from 0). Warm-up rises linearly to the peak at its end."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps  # step + 1: a first step with rate 0 would change nothing
        return self.peak * _DECAYS[self.config.schedule](self, step)

    def describe(self) -> str:
        """Return a phrase with peak, scaling, warm-up and decay."""
        phrases = [f"learning rate {self.peak:g}"]
        if self.config.base_batch:
            phrases.append(f"(= {self.config.learning_rate:g} scaled linearly from batch {self.config.base_batch})")
        text = " ".join(phrases)
        if self.warmup_steps:
            text += f" after {self.warmup_steps} warm-up steps"
            asked = round(self.config.warmup_epochs * self.steps_per_epoch)
            if asked > self.warmup_steps:
                text += f" (the whole run: --warmup-epochs {self.config.warmup_epochs:g} would be {asked:,})"
        if self.config.schedule == "step":
            every = f"{self.config.decay_epochs:g} epochs" if self.config.decay_epochs != 1 else "epoch"
            return f"{text}, x {self.config.decay_factor:g} every {every}"
        return text if self.config.schedule == "constant" else f"{text}, {self.config.schedule} decay"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user asked for and this run is too short for."""
        first, epochs = self.config.decay_epochs, self.num_steps / self.steps_per_epoch
        if self.config.schedule != "step" or first < epochs:
            return ()
        return (f"--schedule step: the run ends after {epochs:.3g} epochs, before the first drop at --decay-epochs "
                f"{first:g}; the learning rate stays the same",)  # fmt: skip


_WARM_UP_OF_A_RATE = 100
"""Steps from which `--warmup-steps` may be meant for the learning rate, as in other programs."""


def mistaken_warm_up(steps: int, config: OptimizerConfig) -> tuple[str, ...]:
    """Return a warning if throughput leaves out many `steps`, and the learning rate has no warm-up."""
    if steps < _WARM_UP_OF_A_RATE or config.warmup_epochs:
        return ()
    return (f"--warmup-steps {steps}: throughput leaves out these steps; the learning rate has no warm-up, which is "
            "--warmup-epochs",)  # fmt: skip


def build_schedule(config: OptimizerConfig, *, global_batch: int, num_steps: int, steps_per_epoch: int) -> Schedule:
    """Return the schedule of a run; with `base_batch` the peak is learning_rate x global_batch / base_batch."""
    scale = global_batch / config.base_batch if config.base_batch else 1.0
    return Schedule(
        peak=config.learning_rate * scale,
        warmup_steps=round(min(config.warmup_epochs * steps_per_epoch, num_steps)),
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        config=config,
    )


def _progress(schedule: Schedule, step: int) -> float:
    """Return the completed share of the steps after the warm-up, from 0 to 1."""
    total = max(schedule.num_steps - schedule.warmup_steps, 1)
    return min((step - schedule.warmup_steps) / total, 1.0)


def _step_decay(schedule: Schedule, step: int) -> float:
    drops = int(step / schedule.steps_per_epoch / schedule.config.decay_epochs)
    return schedule.config.decay_factor**drops


def _cosine(schedule: Schedule, step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * _progress(schedule, step)))


def _polynomial(schedule: Schedule, step: int) -> float:
    return float((1 - _progress(schedule, step)) ** schedule.config.decay_power)


_DECAYS: dict[str, Callable[[Schedule, int], float]] = {
    "constant": lambda schedule, step: 1.0,
    "step": _step_decay,
    "cosine": _cosine,
    "polynomial": _polynomial,
}
