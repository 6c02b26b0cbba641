"""Steps with and without the exchange, in turn in the same process: what an exchange costs a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.protocols import Communicator
from hpcdl.step.objective import Classification
from hpcdl.step.step import as_model_input, build_follow, build_step
from hpcdl.strategies.base.strategy import Worker
from hpcdl.strategies.single import SingleWorker

TOGETHER, APART = 1, 5
"""Steps of a kind in a row: of workers that step together, and of workers that nobody waits for."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Seconds of each measured step on this rank, and the loss of the first one (of the initial weights)."""

    with_exchange: list[float]
    without_exchange: list[float]
    first_loss: float


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """How many steps of each kind are measured, after how many that are not, and how many of a kind `in_a_row`."""

    steps: int
    warmup_steps: int
    in_a_row: int = TOGETHER
    accumulate: int = 1
    exchange_only: bool = False
    xla: bool = False


@dataclass(kw_only=True)
class StepKind:
    """Steps of one worker, and how long each took; the loss of the first one is that of the initial weights."""

    worker: Worker
    step_of: Callable[..., Any]
    follow: Callable[[], Any]
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    seconds: list[float] = field(default_factory=list)
    first_loss: float | None = None

    def run(self, step: int, images: Any, labels: Any) -> None:
        """One step. A backup worker that the others went on without follows them, as in training."""
        began = time.perf_counter()
        self.worker.before_step(step)
        with self.inside():
            if self.worker.follows:
                float(self.follow())
            else:
                loss = float(self.step_of(images, labels)[0])
                self.first_loss = loss if self.first_loss is None else self.first_loss
        self.worker.after_step(step)
        self.seconds.append(time.perf_counter() - began)


def kinds_of_steps(
    model: keras.Model,
    make_optimizer: Callable[[], Any],
    worker: Worker,
    count: StepCount,
    inside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[StepKind]:
    """Steps with `worker`'s exchange, which run `inside`, and steps without, all workers beginning alike; collective.

    Each kind has an optimizer of its own on the same weights, so both do all of their work; with a `worker` that has
    nothing to exchange the two are alike. With `count.exchange_only` the second kind is left out, with its graph and
    its memory.
    """
    objective, optimizer = Classification(), make_optimizer()
    own = worker.build_step(model, objective, as_model_input)
    step_of = own or build_step(model, optimizer, worker, objective, count.accumulate, xla=count.xla)
    kinds = [StepKind(worker=worker, step_of=step_of, follow=build_follow(model, optimizer, worker), inside=inside)]
    if not count.exchange_only:
        alone, its_optimizer = SingleWorker(), make_optimizer()
        step_of = build_step(model, its_optimizer, alone, objective, count.accumulate, xla=count.xla)
        kinds.append(StepKind(worker=alone, step_of=step_of, follow=build_follow(model, its_optimizer, alone)))
    worker.start([*model.weights, *optimizer.variables])
    return kinds


def measure_steps(
    kinds: Sequence[StepKind], batches: Iterator[Any], group: Communicator, count: StepCount
) -> MeasuredSteps:
    """Time steps of all kinds in turn; collective. Ranks start every row of steps together."""
    total = count.warmup_steps + count.steps
    for first in range(0, total, count.in_a_row):
        for kind in kinds:
            for step in range(first, min(first + count.in_a_row, total)):
                images, labels = next(batches)
                if step == first:
                    group.barrier()
                kind.run(step, images, labels)
    with_exchange, without = [*(kind.seconds[count.warmup_steps :] for kind in kinds), []][:2]
    first_loss = kinds[0].first_loss
    assert first_loss is not None
    return MeasuredSteps(with_exchange=with_exchange, without_exchange=without, first_loss=first_loss)


def made_up_batches(model: keras.Model, batch_size: int, seed: int) -> Iterator[Any]:
    """The same batch for ever, in the model's input shape, made from `seed`."""
    generator = numpy.random.default_rng(seed)
    output = model.outputs[0]
    images = tf.constant(generator.random((batch_size, *model.input_shape[1:]), numpy.float32))
    labels = tf.constant(generator.integers(0, output.shape[-1], batch_size))
    while True:
        yield images, labels
