"""What computing in fewer bits does to results: against float32 on one batch, and to the accuracy on the digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import HpcdlError
from hpcdl.core.paths import share_folder
from hpcdl.data.sources.base.images import decode
from hpcdl.models.load import load_model
from hpcdl.step.objective import Classification
from hpcdl.step.step import as_model_input, build_step
from hpcdl.strategies.single import SingleWorker

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

DIGITS_NETWORK, DIGITS_PIXELS, DIGITS_BATCH, DIGITS_RATE = "lenet", 28, 32, 0.01
HELD_OUT = 5
"""Every so many-th digit is not trained on."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Largest difference from float32 on one batch, over the largest float32 value of its kind.

    Of the outputs, and of the gradients of all trainable variables; `variable` has the one that differs most.
    """

    outputs: float
    gradients: float
    variable: str


def compare(build: Callable[[], keras.Model], batch: tuple[Any, Any], precision: str) -> Differences:
    """The same weights and the same `batch` (images, labels) under float32 and under `precision`.

    Layers work as in evaluation, so that no dropout differs.
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
    others, its_gradients = _pass(lower, batch)
    if not all(numpy.isfinite(array).all() for array in (others, *its_gradients)):
        raise HpcdlError(f"{precision}: outputs or gradients of the first batch are not finite; stay with float32")
    apart = [
        float(numpy.abs(own - other).max(initial=0.0)) for own, other in zip(gradients, its_gradients, strict=True)
    ]
    worst = int(numpy.argmax(apart))
    return Differences(
        outputs=float(numpy.abs(outputs - others).max()) / _largest([outputs]),
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
        found = tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")
        return outputs, [tf.convert_to_tensor(gradient) for gradient in found]

    outputs, gradients = outputs_and_gradients(*batch)
    first = tf.nest.flatten(outputs)[0]
    return tf.cast(first, tf.float32).numpy(), [tf.cast(gradient, tf.float32).numpy() for gradient in gradients]


def _largest(arrays: Sequence[Array]) -> float:
    return max(max(float(numpy.abs(array).max(initial=0.0)) for array in arrays), float(numpy.finfo("float32").tiny))


def digits_accuracy(precision: str, *, epochs: int, seed: int) -> float:
    """Accuracy of LeNet on the bundled digits that were held out, after `epochs` with momentum under `precision`."""
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
    """The bundled digits, pixels (N, 28, 28, 1) and labels (N,)."""
    folder = share_folder() / "examples" / "digits"
    files = sorted(folder.glob("[0-9]/*.png"))
    pixels = [decode(path.read_bytes(), size=(DIGITS_PIXELS, DIGITS_PIXELS), channels=1) for path in files]
    return numpy.stack(pixels), numpy.array([int(path.parent.name) for path in files], numpy.int64)
