"""Steps with and without the exchange, in turn in the same process: what an exchange costs a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.protocols import Communicator
from hpcdl.strategies.base import Worker
from hpcdl.strategies.single import SingleWorker
from hpcdl.training.loop.step import build_step
from hpcdl.training.optimization.objective import Classification


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Seconds of each measured step on this rank, and the loss of the first one (of the initial weights)."""

    with_exchange: list[float]
    without_exchange: list[float]
    first_loss: float


def measure_steps(
    model: keras.Model,
    make_optimizer: Callable[[], Any],
    worker: Worker,
    batches: Iterator[Any],
    group: Communicator,
    *,
    num_steps: int,
    warmup_steps: int,
    accumulate: int = 1,
    exchange_only: bool = False,
) -> MeasuredSteps:
    """Time `num_steps` steps of each kind after `warmup_steps` of each; collective.

    Ranks start every step together. Each kind has an optimizer of its own on the same weights, so both do all of
    their work; with a `worker` that has nothing to exchange the two are alike. With `exchange_only` the second kind is
    left out, with its graph and its memory.
    """
    objective = Classification()
    workers: dict[str, Worker] = {"with": worker} if exchange_only else {"with": worker, "without": SingleWorker()}
    kinds = {kind: build_step(model, make_optimizer(), own, objective, accumulate) for kind, own in workers.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    first_loss: float | None = None
    for step in range(warmup_steps + num_steps):
        for kind, function in kinds.items():
            images, labels = next(batches)
            group.barrier()
            began = time.perf_counter()
            workers[kind].before_step(step)
            loss = float(function(images, labels)[0])
            workers[kind].after_step(step)
            took = time.perf_counter() - began
            first_loss = loss if first_loss is None else first_loss
            if step >= warmup_steps:
                seconds[kind].append(took)
    assert first_loss is not None
    without = seconds.get("without", [])
    return MeasuredSteps(with_exchange=seconds["with"], without_exchange=without, first_loss=first_loss)


def made_up_batches(model: keras.Model, batch_size: int, seed: int) -> Iterator[Any]:
    """The same batch for ever, in the model's input shape, made from `seed`."""
    generator = numpy.random.default_rng(seed)
    output = model.outputs[0]
    images = tf.constant(generator.random((batch_size, *model.input_shape[1:]), numpy.float32))
    labels = tf.constant(generator.integers(0, output.shape[-1], batch_size))
    while True:
        yield images, labels
