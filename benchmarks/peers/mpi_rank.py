"""One rank of a usual hand-written loop: gradients, one MPI_Allreduce of them all, update; rank 0 prints JSON.

    mpiexec -n RANKS python benchmarks/peers/mpi_rank.py MODEL BATCH STEPS RANKS

MODEL is a value of --model; nothing else is hpcdl's. Also measured: an in-place MPI_Allreduce of the same bytes
alone, in one call and in slices that fit the cache; the faster one is the limit of every exchange.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steps import LEARNING_RATE, measured, take_own_cores

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
NUM_CORES = take_own_cores(int(sys.argv[4]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import keras  # noqa: E402  the cores are chosen before threads start
import numpy  # noqa: E402
import tensorflow as tf  # noqa: E402
from mpi4py import MPI  # noqa: E402

from hpcdl.models.load import load_model  # noqa: E402

tf.config.threading.set_intra_op_parallelism_threads(NUM_CORES)
tf.config.threading.set_inter_op_parallelism_threads(2)
SLICE = 4 * 2**20 // 4
"""Elements of a slice: 4 MiB of float32."""


def main() -> None:
    spec, batch, num_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ranks = MPI.COMM_WORLD
    keras.utils.set_random_seed(1)
    model = load_model(spec)
    buffer = numpy.empty(sum(variable.shape.num_elements() for variable in weights(model)), numpy.float32)
    together: dict[str, Any] = {
        "barrier": ranks.Barrier, "slowest": lambda seconds: ranks.allreduce(seconds, MPI.MAX),
    }  # fmt: skip
    steps = by_hand(model, batch, buffer, ranks)
    found = measured(steps, num_steps, **together)
    buffer.fill(1)
    raw = {
        "raw_seconds": lambda: ranks.Allreduce(MPI.IN_PLACE, buffer),
        "sliced_seconds": lambda: in_slices(ranks, buffer),
    }
    found |= measured(raw, max(10, num_steps), **together)
    if ranks.rank == 0:
        print(json.dumps({**found, "parameters": buffer.size, "ranks": ranks.size}))


def weights(model: Any) -> list[Any]:
    return [variable.value for variable in model.trainable_variables]


def by_hand(model: Any, batch: int, buffer: Any, ranks: MPI.Comm) -> dict[str, Callable[[], None]]:
    """Return a step with exchange, whose gradients leave the graph, and one without, which is one graph."""
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images = tf.random.uniform((batch, *model.input_shape[1:]))
    labels = tf.random.uniform((batch,), maxval=model.output_shape[-1], dtype=tf.int64)

    def gradients_of() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        return list(tape.gradient(loss, weights(model)))

    def update(gradients: list[tf.Tensor]) -> None:
        optimizer.apply(gradients, model.trainable_variables)

    computed, updated = tf.function(gradients_of), tf.function(update)
    alone = tf.function(lambda: update(gradients_of()))

    def with_exchange() -> None:
        place, parts = 0, []
        for gradient in computed():
            part = buffer[place : place + int(tf.size(gradient))].reshape(gradient.shape)
            part[...] = gradient.numpy()
            parts.append(part)
            place += part.size
        ranks.Allreduce(MPI.IN_PLACE, buffer)
        numpy.multiply(buffer, 1 / ranks.size, out=buffer)
        updated([tf.convert_to_tensor(part) for part in parts])

    return {"step_seconds": with_exchange, "compute_seconds": lambda: alone()}


def in_slices(ranks: MPI.Comm, buffer: Any) -> None:
    for first in range(0, buffer.size, SLICE):
        ranks.Allreduce(MPI.IN_PLACE, buffer[first : first + SLICE])


if __name__ == "__main__":
    main()
