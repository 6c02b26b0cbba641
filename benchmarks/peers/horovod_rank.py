"""One Horovod rank: a network's step with and without exchange in turn, on TensorFlow 2.12; rank 0 prints JSON.

mpiexec -n RANKS PYTHON benchmarks/peers/horovod_rank.py NETWORK BATCH STEPS RANKS
"""

from __future__ import annotations

import os
import sys

from steps import take_own_cores

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
NUM_CORES = take_own_cores(int(sys.argv[4]))

import horovod.tensorflow as hvd  # noqa: E402  the cores are chosen before threads start
import tensorflow as tf  # noqa: E402
from horovod_steps import print_steps  # noqa: E402
from networks import NETWORKS  # noqa: E402

tf.config.threading.set_intra_op_parallelism_threads(NUM_CORES)
tf.config.threading.set_inter_op_parallelism_threads(2)


def main() -> None:
    network, batch, num_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    if hvd.size() != int(sys.argv[4]):
        raise SystemExit(f"{hvd.size()} rank: this mpiexec is not of the MPI that Horovod was built with")
    tf.random.set_seed(1)
    model = NETWORKS[network]()
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images = tf.random.uniform((batch, *model.input_shape[1:]))
    labels = tf.random.uniform((batch,), maxval=model.output_shape[-1], dtype=tf.int64)
    print_steps(model.trainable_variables, lambda: loss_of(labels, model(images, training=True)), num_steps)


if __name__ == "__main__":
    main()
