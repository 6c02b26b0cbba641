"""One training step as a graph: forward, backward, the strategy's exchange, the update, with time stamps between.

Several steps in one call are a loop in the graph: take a batch, step, ask Python whether to continue.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.comm.observed import NOTHING, RankMonitor, Recorder
from hpcdl.core.errors import UsageError, originals
from hpcdl.step.layers import layers_of
from hpcdl.step.objective import Objective
from hpcdl.strategies.base.graph import call_python, connected, timestamp, timestamp_beside
from hpcdl.strategies.base.strategy import Exchange

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


def as_model_input(images: Any) -> Any:
    """Return images as the networks take them: float32, uint8 scaled from 0..255 to 0..1; also several by name."""
    return tf.nest.map_structure(_as_float, images)


def num_samples(batch: Any) -> int:
    """Return the number of samples in a batch of labels, of which there may be several by name."""
    return int(tf.nest.flatten(batch)[0].shape[0])


def _as_float(images: Any) -> Any:
    if images.dtype == tf.uint8:
        return tf.cast(images, tf.float32) * (1 / 255)
    return tf.cast(images, tf.float32)


def build_step(
    model: keras.Model,
    optimizer: Any,
    worker: Exchange,
    objective: Objective,
    accumulate: int = 1,
    log: Callable[[str], None] = lambda _: None,
    *,
    slices: Sequence[int] = (),
    weight: float = 1.0,
    recorder: Recorder = NOTHING,
    xla: bool = False,
) -> Callable[..., Any]:
    """Return a compiled function of (images, labels), the batch of one optimizer step on this worker.

    It returns the loss (mean over the local batch), the objective's sums, and the times (`timestamp` of base/graph.py)
    of the last local gradient and of the end of the exchange. With `accumulate` the batch is divided into that many
    slices, of `slices` samples if given. `weight` is the weight of this worker's mean in the mean over the workers.
    `log` gets the names of variables without a gradient, `recorder` the times of layers, if it wants them. With `xla`
    forward and backward pass are one operation: no gradient is available before the last one.
    """
    variables = model.trainable_variables
    names = [variable.path for variable in variables]
    worker.checks_finite = not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    layers = layers_of(NOTHING if xla else recorder, names)
    scale_loss = getattr(optimizer, "scale_loss", lambda loss: loss)

    def slice_gradients(images: Any, labels: Any) -> tuple[Any, Any, list[Any]]:
        with tf.GradientTape() as tape:
            with layers.called(model):
                outputs = model(as_model_input(images), training=True)
            loss = objective.loss(labels, outputs)
            total = tf.add_n([loss, *model.losses]) if model.losses else loss
            scaled = scale_loss(total * (worker.loss_share * weight))
        gradients = connected(tape.gradient(scaled, variables), variables, names, log)
        return loss, objective.sums(labels, outputs), gradients

    if xla:  # not the whole step: XLA cannot compile an exchange
        slice_gradients = tf.function(slice_gradients, autograph=False, jit_compile=True)

    @tf.function(autograph=False, reduce_retracing=True)
    def step(images: Any, labels: Any) -> tuple[Any, ...]:
        if accumulate == 1:
            loss, sums, gradients = slice_gradients(images, labels)
        else:
            parts = list(slices) or accumulate
            loss, sums, gradients = _accumulated(slice_gradients, images, labels, parts, objective, variables)
        if worker.leaves_early(gradients):
            had_gradients = timestamp_beside(loss, gradients)
        else:
            with tf.control_dependencies([loss, *gradients]):
                had_gradients = timestamp()
        with tf.control_dependencies([had_gradients]):  # the end of the exchange must not be stamped earlier
            gradients = [tf.identity(gradients[0]), *gradients[1:]]  # the first one comes last: no bucket is delayed
        exchanged = worker.apply(gradients, variables, optimizer)
        noted = layers.recorded(exchanged, loss, gradients, worker.averaged, variables)
        return loss, sums, had_gradients, exchanged, *noted

    compiled: Callable[..., Any] = _naming_xla(originals()(step)) if xla else originals()(step)
    return layers.keeping(compiled)


def _naming_xla(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return `step` that raises a one-line UsageError if XLA cannot compile an operation of the model."""

    def call(*batch: Any) -> Any:
        try:
            return step(*batch)
        except tf.errors.OpError as error:
            text = error.message or ""
            # TensorFlow: `Detected unsupported operations when trying to compile graph NAME on XLA_CPU_JIT: OP (...)`.
            if match := re.search(r"unsupported operations.*?on \S+: (.*?)(?:\n|$)", text, re.DOTALL):
                reason = f"--xla: XLA cannot compile {match[1].strip()} of this model; leave --xla out"
            elif match := re.search(r"^.* deterministic XLA implementation", text, re.MULTILINE):
                reason = f"--xla with --deterministic: {match[0].strip()}; leave one of them out"
            else:
                raise
            raise UsageError(reason) from error

    return call


def inside_engine(seen: RankMonitor, *, mpi: bool, num_workers: int) -> AbstractContextManager[None]:
    """Return the context of a step: TensorFlow's own engines exchange inside it, where waiting is not visible."""
    if mpi or num_workers == 1:
        return nullcontext()
    return seen.waiting_for("a step of TensorFlow's engine", hidden=True)


def build_follow(model: keras.Model, optimizer: Any, worker: Exchange) -> Callable[[], Any]:
    """Return a compiled function that takes a step without a gradient of this worker; traced when first needed.

    It returns the time of the end of the exchange, as a `timestamp`.
    """
    variables = model.trainable_variables

    @tf.function(autograph=False)
    def follow() -> Any:
        return worker.apply([tf.zeros(variable.shape, variable.dtype) for variable in variables], variables, optimizer)

    compiled: Callable[[], Any] = originals()(follow)
    return compiled


def _accumulated(
    slice_gradients: Callable[..., Any],
    images: Any,
    labels: Any,
    parts: int | list[int],
    objective: Objective,
    variables: Any,
) -> tuple[Any, Any, list[Any]]:
    """Return means over slices of the batch: `parts` equal slices, or slices of the given sizes.

    Only the last slice's back-propagation overlaps the exchange.
    """
    num_slices = parts if isinstance(parts, int) else len(parts)
    shares = [1 / num_slices] * num_slices if isinstance(parts, int) else [part / sum(parts) for part in parts]
    image_slices, label_slices = _split(images, parts), _split(labels, parts)
    loss = tf.zeros([])
    sums = tf.zeros([len(objective.names)], tf.float64)
    gradients = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
    previous: list[Any] = []
    for image_slice, label_slice, share in zip(image_slices, label_slices, shares, strict=True):
        # One slice after the other; in parallel they would need the memory that accumulation is meant to save.
        with tf.control_dependencies(previous):
            part_loss, part_sums, part = slice_gradients(tf.nest.map_structure(tf.identity, image_slice), label_slice)
        gradients = [total + gradient * share for total, gradient in zip(gradients, part, strict=True)]
        loss, sums = loss + part_loss * share, sums + part_sums
        previous = gradients
    return loss, sums, gradients


def _split(batch: Any, parts: int | list[int]) -> list[Any]:
    """Split a tensor, or several by name, into slices."""
    slices = [tf.split(tensor, parts) for tensor in tf.nest.flatten(batch)]
    return [tf.nest.pack_sequence_as(batch, list(tensors)) for tensors in zip(*slices, strict=True)]


CALL_S = 0.1
"""No step begins in a call that has taken this long, because signals are handled between calls."""


def build_several(
    step: Callable[..., Any],
    optimizer: Any,
    got_batch: Callable[[], float],
    step_over: Callable[[Array, Array], tuple[bool, float]],
    *,
    xla: bool = False,
) -> Callable[[Any, Any], Any]:
    """Return a compiled function of an iterator of batches and the first step's learning rate.

    It takes any number of steps like `step` (of build_step), with bitwise equal results. `got_batch` is called when a
    step has its batch and returns the time. `step_over` gets a step's results, float64: loss, number of samples, the
    times of its batch, of its gradients and of the end of the exchange; and the objective's sums. It returns whether
    another step follows, and the learning rate of that step.
    """

    def asked(facts: Array, sums: Array) -> tuple[Any, Any]:
        continues, rate = step_over(facts, sums)
        return numpy.bool_(continues), numpy.float32(rate)

    @tf.function(autograph=False, reduce_retracing=True)
    def several(iterator: Any, rate: Any) -> Any:
        def body(_: Any, rate: Any) -> tuple[Any, Any]:
            optimizer.learning_rate = rate
            images, labels = iterator.get_next()
            tensors = tf.nest.flatten((images, labels))
            with tf.control_dependencies(tensors):
                began = tf.ensure_shape(call_python(got_batch, [], tf.float64), [])
            with tf.control_dependencies([began]):
                loss, sums, had_gradients, exchanged = step(images, labels)
            samples = tf.shape(tf.nest.flatten(labels)[0])[0]
            facts = tf.stack([tf.cast(value, tf.float64) for value in (loss, samples, began, had_gradients, exchanged)])
            continues, next_rate = call_python(asked, [facts, sums], [tf.bool, tf.float32])
            return tf.ensure_shape(continues, []), tf.ensure_shape(next_rate, [])

        # One step at a time: parts of the next one must not run before this one has ended.
        continues, _ = tf.while_loop(
            lambda continues, _: continues, body, (tf.constant(True), rate), parallel_iterations=1
        )
        return continues

    compiled: Callable[[Any, Any], Any] = _naming_xla(originals()(several)) if xla else originals()(several)
    return compiled
