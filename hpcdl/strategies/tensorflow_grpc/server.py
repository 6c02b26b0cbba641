"""Starts TensorFlow's gRPC server on a rank, fenced in."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hpcdl.core.protocols import Communicator
from hpcdl.strategies.tensorflow_grpc.cluster import rendezvous


def start_server(communicator: Communicator, num_workers: int) -> Any:
    """This rank's server: a `worker` on the first `num_workers` ranks, a `ps` on the others; collective over all."""
    with rendezvous(communicator) as cluster:
        jobs = {"worker": list(cluster.places[:num_workers]), "ps": list(cluster.places[num_workers:])}
        serves = cluster.rank >= num_workers
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
            inter_op_parallelism_threads=tf.config.threading.get_inter_op_parallelism_threads(),
        )
        return tf.distribute.Server(
            tf.train.ClusterSpec({job: places for job, places in jobs.items() if places}),
            job_name="ps" if serves else "worker",
            task_index=cluster.rank - num_workers if serves else cluster.rank,
            config=config,
        )
