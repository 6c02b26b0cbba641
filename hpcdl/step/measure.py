"""Steps measured in turn in one process: with and without the exchange, and in float32 and lower precision.

The cost of an exchange is time. The effect of lower precision is measured against float32 on one batch, and by the
accuracy on the digits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import HpcdlError
from hpcdl.core.paths import share_folder
from hpcdl.core.protocols import Communicator
from hpcdl.data.sources.layouts.images import decode
from hpcdl.models.load import load_model
from hpcdl.step.objective import Classification
from hpcdl.step.step import as_model_input, build_follow, build_step
from hpcdl.strategies.base.strategy import Worker
from hpcdl.strategies.single import SingleWorker

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


TOGETHER, APART = 1, 5
"""Consecutive steps of a kind: for workers that step together, and for workers that do not."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Seconds of each measured step on this rank, and the loss of the first one (of the initial weights)."""

    with_exchange: list[float]
    without_exchange: list[float]
    first_loss: float


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """How many steps of each kind are measured and how many warm up, with `in_a_row` consecutive steps of a kind."""

    steps: int
    warmup_steps: int
    in_a_row: int = TOGETHER
    accumulate: int = 1
    exchange_only: bool = False
    xla: bool = False


@dataclass(kw_only=True)
class StepKind:
    """Steps of one worker, and the time of each; the loss of the first one is that of the initial weights."""

    worker: Worker
    step_of: Callable[..., Any]
    follow: Callable[[], Any]
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    seconds: list[float] = field(default_factory=list)
    first_loss: float | None = None

    def run(self, step: int, images: Any, labels: Any) -> None:
        """Take one step. A late backup worker follows the others' step, as in training."""
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
    """Return steps with `worker`'s exchange, which run `inside`, and steps without. Collective; workers begin alike.

    Each kind has an optimizer of its own on the same weights, so both do all of their work. If `worker` has nothing to
    exchange, both kinds are equal. With `count.exchange_only` the second kind is omitted, with its graph and memory.
    """
    objective, optimizer = Classification(), make_optimizer()
    own_step = worker.build_step(model, objective, as_model_input)
    step_of = own_step or build_step(model, optimizer, worker, objective, count.accumulate, xla=count.xla)
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
        # In turn, so that changes of the machine's speed affect all kinds alike.
        for kind in kinds:
            for step in range(first, min(first + count.in_a_row, total)):
                images, labels = next(batches)
                if step == first:
                    group.barrier()  # after reading, which may take ranks different times
                kind.run(step, images, labels)
    with_exchange, without = [*(kind.seconds[count.warmup_steps :] for kind in kinds), []][:2]
    first_loss = kinds[0].first_loss
    assert first_loss is not None
    return MeasuredSteps(with_exchange=with_exchange, without_exchange=without, first_loss=first_loss)


def made_up_batches(model: keras.Model, batch_size: int, seed: int) -> Iterator[Any]:
    """Yield the same batch forever, in the model's input shape, generated from `seed`."""
    generator = numpy.random.default_rng(seed)
    output = model.outputs[0]
    images = tf.constant(generator.random((batch_size, *model.input_shape[1:]), numpy.float32))
    labels = tf.constant(generator.integers(0, output.shape[-1], batch_size))
    while True:
        yield images, labels


DIGITS_NETWORK, DIGITS_PIXELS, DIGITS_BATCH, DIGITS_RATE = "lenet", 28, 32, 0.01
HELD_OUT = 5
"""One digit in this many is held out from training."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Largest difference from float32 on one batch, relative to the largest float32 value of its kind.

    `outputs` and `gradients` (of all trainable variables); `variable` is the one that differs most.
    """

    outputs: float
    gradients: float
    variable: str


def compare(build: Callable[[], keras.Model], batch: tuple[Any, Any], precision: str) -> Differences:
    """Compare float32 with `precision` on the same weights and the same `batch` (images, labels).

    Layers run as in evaluation, so that dropout makes no difference.
    """
    keras.mixed_precision.set_global_policy("float32")
    reference = build()
    try:
        keras.mixed_precision.set_global_policy(precision)
        lower = build()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    lower.set_weights(reference.get_weights())
    outputs, gradients = _pass(reference, batch)
    its_outputs, its_gradients = _pass(lower, batch)
    if not all(numpy.isfinite(array).all() for array in (its_outputs, *its_gradients)):
        raise HpcdlError(f"{precision}: outputs or gradients of the first batch are not finite; stay with float32")
    apart = [
        float(numpy.abs(gradient - its_gradient).max(initial=0.0))
        for gradient, its_gradient in zip(gradients, its_gradients, strict=True)
    ]
    worst = int(numpy.argmax(apart))
    return Differences(
        outputs=float(numpy.abs(outputs - its_outputs).max()) / _largest([outputs]),
        gradients=apart[worst] / _largest(gradients),
        variable=reference.trainable_variables[worst].path,
    )


def _pass(model: keras.Model, batch: tuple[Any, Any]) -> tuple[Array, list[Array]]:
    objective = Classification()

    @tf.function(autograph=False)
    def outputs_and_gradients(images: Any, labels: Any) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            outputs = model(as_model_input(images), training=False)
            loss = objective.loss(labels, outputs)
        raw_gradients = tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")
        return outputs, [tf.convert_to_tensor(gradient) for gradient in raw_gradients]

    outputs, gradients = outputs_and_gradients(*batch)
    first = tf.nest.flatten(outputs)[0]
    return tf.cast(first, tf.float32).numpy(), [tf.cast(gradient, tf.float32).numpy() for gradient in gradients]


def _largest(arrays: Sequence[Array]) -> float:
    return max(max(float(numpy.abs(array).max(initial=0.0)) for array in arrays), float(numpy.finfo("float32").tiny))


def digits_accuracy(precision: str, *, epochs: int, seed: int) -> float:
    """Return LeNet's accuracy on the held-out bundled digits, after `epochs` with momentum under `precision`."""
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(precision)
    try:
        model = load_model(DIGITS_NETWORK, classes=10, input_shape=(DIGITS_PIXELS, DIGITS_PIXELS, 1))
        optimizer = keras.optimizers.SGD(DIGITS_RATE, momentum=0.9)
        optimizer.build(model.trainable_variables)
        step = build_step(model, optimizer, SingleWorker(), Classification())
        images, labels = _digits()
        held_out = numpy.arange(len(labels)) % HELD_OUT == 0
        train = numpy.flatnonzero(~held_out)
        order = numpy.random.default_rng(seed)
        for _ in range(epochs):
            for start in range(0, len(train) - DIGITS_BATCH + 1, DIGITS_BATCH):
                if start == 0:
                    order.shuffle(train)
                chosen = train[start : start + DIGITS_BATCH]
                step(tf.constant(images[chosen]), tf.constant(labels[chosen]))
        logits = model(as_model_input(tf.constant(images[held_out])), training=False)
        right = tf.argmax(tf.cast(logits, tf.float32), -1).numpy() == labels[held_out]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return float(right.mean())


def _digits() -> tuple[Array, Array]:
    """Return the bundled digits, pixels (N, 28, 28, 1) and labels (N,)."""
    folder = share_folder() / "examples" / "digits"
    files = sorted(folder.glob("[0-9]/*.png"))
    pixels = [decode(path.read_bytes(), size=(DIGITS_PIXELS, DIGITS_PIXELS), channels=1) for path in files]
    return numpy.stack(pixels), numpy.array([int(path.parent.name) for path in files], numpy.int64)
