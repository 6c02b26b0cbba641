"""A network's steps under Horovod, with and without exchange, on each of its ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from steps import LEARNING_RATE, measured


def print_steps(variables: Sequence[Any], loss_of: Callable[[], Any], num_steps: int) -> None:
    """Print the times as JSON on rank 0; `loss_of()` is the loss of `variables`. Ends the initialised Horovod."""
    optimizer = tf.keras.optimizers.legacy.SGD(LEARNING_RATE)

    def step(exchange: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of()
        if exchange:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, variables)
        # autograph in TensorFlow 2.12 does not support zip(strict=True)
        optimizer.apply_gradients([(gradient, variables[place]) for place, gradient in enumerate(gradients)])
        return loss

    graphs = [tf.function(functools.partial(step, exchange)) for exchange in (True, False)]
    found = measured(
        {"step_seconds": lambda: graphs[0]().numpy(), "compute_seconds": lambda: graphs[1]().numpy()},
        num_steps,
        barrier=lambda: hvd.allreduce(tf.zeros(1), name="barrier"),
        slowest=lambda seconds: float(hvd.allreduce(tf.constant([seconds], tf.float64), op=hvd.Max, name="time")[0]),
    )
    if hvd.rank() == 0:
        parameters = sum(int(tf.size(variable)) for variable in variables)
        print(json.dumps({**found, "parameters": parameters, "ranks": hvd.size()}))
    hvd.shutdown()
