"""One Horovod rank: a network's step with and without exchange in turn, on TensorFlow 2.12; rank 0 prints JSON.

mpiexec -n 2 PYTHON benchmarks/peers/horovod_rank.py NETWORK BATCH STEPS
"""

from __future__ import annotations

import functools
import json
import os
import sys

from steps import LEARNING_RATE, measured, take_own_cores

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
NUM_CORES = take_own_cores(2)

import horovod.tensorflow as hvd  # noqa: E402  the cores are chosen before threads start
import tensorflow as tf  # noqa: E402
from networks import NETWORKS  # noqa: E402

tf.config.threading.set_intra_op_parallelism_threads(NUM_CORES)
tf.config.threading.set_inter_op_parallelism_threads(2)


def main() -> None:
    network, batch, num_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    if hvd.size() != 2:
        raise SystemExit(f"{hvd.size()} rank: this mpiexec is not of the MPI that Horovod was built with")
    tf.random.set_seed(1)
    model = NETWORKS[network]()
    optimizer = tf.keras.optimizers.legacy.SGD(LEARNING_RATE)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images = tf.random.uniform((batch, *model.input_shape[1:]))
    labels = tf.random.uniform((batch,), maxval=model.output_shape[-1], dtype=tf.int64)

    def step(exchange: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        if exchange:
            tape = hvd.DistributedGradientTape(tape)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        # autograph in TensorFlow 2.12 knows no zip(strict=True)
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
        parameters = sum(int(tf.size(variable)) for variable in model.trainable_variables)
        print(json.dumps({**found, "parameters": parameters}))
    hvd.shutdown()


if __name__ == "__main__":
    main()
