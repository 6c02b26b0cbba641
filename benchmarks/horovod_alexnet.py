"""One Horovod rank for exchange_peers.py: AlexNet's step with and without exchange in turn, on TensorFlow 2.12.

Runs in an environment of its own (Horovod 0.28.1 builds against no newer TensorFlow); prints one JSON line on rank 0.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
cores = sorted(os.sched_getaffinity(0))
rank = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("MPI_LOCALRANKID", "0")))
os.sched_setaffinity(0, {cores[rank % len(cores)]})

import horovod.tensorflow as hvd  # noqa: E402  the core is chosen before threads start
import tensorflow as tf  # noqa: E402

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


def alexnet() -> tf.keras.Model:
    """The layers of hpcdl/models/alexnet.py in Keras 2; 62.4 M parameters."""
    layers = tf.keras.layers
    normalise = lambda x: tf.nn.local_response_normalization(x, 2, 1.0, 2e-5, 0.75)  # noqa: E731
    images = tf.keras.Input((227, 227, 3))
    x = layers.Lambda(normalise)(layers.Conv2D(96, 11, 4, activation="relu")(images))
    x = layers.MaxPooling2D(3, 2)(x)
    x = layers.Lambda(normalise)(layers.Conv2D(256, 5, padding="same", activation="relu")(x))
    x = layers.MaxPooling2D(3, 2)(x)
    x = layers.Conv2D(384, 3, padding="same", activation="relu")(x)
    x = layers.Conv2D(384, 3, padding="same", activation="relu")(x)
    x = layers.Conv2D(256, 3, padding="same", activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D(3, 2)(x))
    for _ in range(2):
        x = layers.Dropout(0.5)(layers.Dense(4096, activation="relu")(x))
    return tf.keras.Model(images, layers.Dense(1000)(x))


def main() -> None:
    batch, steps = int(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    tf.random.set_seed(1)
    model = alexnet()
    optimizer = tf.keras.optimizers.legacy.SGD(0.001, momentum=0.9)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images, labels = tf.random.normal((batch, 227, 227, 3)), tf.zeros((batch,), tf.int64)

    def step(exchange: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        if exchange:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        variables = model.trainable_variables  # autograph knows no zip(strict=True)
        optimizer.apply_gradients([(gradient, variables[place]) for place, gradient in enumerate(gradients)])
        return loss

    kinds = {"with": tf.function(functools.partial(step, True)), "without": tf.function(functools.partial(step, False))}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(steps + 2):
        for kind, run in kinds.items():
            hvd.allreduce(tf.zeros(1), name=f"barrier.{kind}.{number}")
            began = time.perf_counter()
            run().numpy()
            slowest = hvd.allreduce(tf.constant([time.perf_counter() - began]), op=hvd.Max, name=f"t.{kind}.{number}")
            if number >= 2:
                seconds[kind].append(float(slowest[0]))
    if hvd.rank() == 0:
        print(json.dumps({
            "step_seconds": statistics.median(seconds["with"]),
            "compute_seconds": statistics.median(seconds["without"]),
            "parameters": model.count_params(), "tensorflow": tf.__version__,
        }))  # fmt: skip
    hvd.shutdown()


if __name__ == "__main__":
    main()
