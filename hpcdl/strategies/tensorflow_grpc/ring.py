"""The strategies `grpc-ring` and `nccl`: TensorFlow's own collectives average the gradients, without MPI.

The engine is tf.distribute.MultiWorkerMirroredStrategy, with its ring over gRPC or with NCCL between GPUs. Only the
exchange runs inside the strategy, in a `run` of its own, because Keras 3's `fit` does not work with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.strategies.base.graph import FiniteGuard, timestamp
from hpcdl.strategies.base.strategy import Context, Server, Worker
from hpcdl.strategies.tensorflow_grpc.cluster import rendezvous

_KNOWN = tf.distribute.experimental.CommunicationImplementation
WITHOUT_GPUS = "nccl: TensorFlow sees no GPU on any rank: its ring over gRPC takes NCCL's place"


class GrpcRing:
    """The strategy `grpc-ring`."""

    def worker(self, context: Context) -> Worker:
        """Return the worker: all ranks are workers."""
        return CollectiveWorker(context, _KNOWN.RING)

    def server(self, context: Context) -> Server:
        """Fail: there are no servers."""
        raise AssertionError("TensorFlow's collectives have no servers")


class Nccl(GrpcRing):
    """The strategy `nccl`."""

    def worker(self, context: Context) -> Worker:
        """Return the worker, with one GPU per rank; without any GPU the ring replaces NCCL, with a warning.

        Raises UsageError if only some ranks have a GPU. Collective.
        """
        gpus_seen = context.communicator.allgather_json(bool(tf.config.list_physical_devices("GPU")))
        without = [str(rank) for rank, has_gpu in enumerate(gpus_seen) if not has_gpu]
        if 0 < len(without) < len(gpus_seen):
            raise UsageError(
                f"--strategy nccl: TensorFlow sees no GPU on rank {', '.join(without)} of {len(gpus_seen)}; "
                "see `hpcdl doctor --only gpus`, or use --strategy ring"
            )
        worker = CollectiveWorker(context, _KNOWN.RING if without else _KNOWN.NCCL)
        worker.warnings = [WITHOUT_GPUS] if without else []
        return worker


class CollectiveWorker(Worker):
    """Averages gradients with collective operations of TensorFlow, then applies them with the local optimizer."""

    def __init__(self, context: Context, implementation: Any) -> None:
        self._rank = context.communicator.rank
        self._guard = FiniteGuard(self._rank)
        self._options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=context.exchange.bucket_bytes, implementation=implementation
        )
        # TensorFlow sets collectives up before its first tensor, and only once.
        with rendezvous(context.communicator) as cluster:
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=tf.distribute.cluster_resolver.SimpleClusterResolver(
                    tf.train.ClusterSpec({"worker": list(cluster.endpoints)}),
                    task_type="worker",
                    task_id=cluster.rank,
                    rpc_layer="grpc",
                ),
                communication_options=self._options,
            )

    def start(self, variables: Sequence[Any]) -> None:
        """Broadcast rank 0's weights, as a sum to which the others contribute zeros."""

        @tf.function(autograph=False)
        def from_first() -> list[Any]:
            own_values = [tf.convert_to_tensor(variable) for variable in variables]
            return self._reduce([value if self._rank == 0 else tf.zeros_like(value) for value in own_values], "SUM")

        for variable, value in zip(variables, from_first(), strict=True):
            variable.assign(value)

    def before_step(self, step: int) -> None:
        """Store the step for error messages."""
        self._guard.step = step

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Average, then apply."""
        if self.checks_finite:
            # TensorFlow's collectives take minutes to fail if one rank is missing: this error ends the job earlier.
            with tf.control_dependencies(
                [self._guard.before_exchange(gradients, [variable.path for variable in variables])]
            ):
                gradients = [tf.identity(gradient) for gradient in gradients]
        averaged = self._reduce(gradients, "MEAN")
        with tf.control_dependencies(averaged):
            exchanged = timestamp()
        with tf.control_dependencies([exchanged]):
            optimizer.apply(averaged, variables)
        return exchanged

    def details(self) -> dict[str, Any]:
        """Return which collective TensorFlow used."""
        return {"collective": self._options.implementation.name}

    def _reduce(self, tensors: Sequence[Any], operation: str) -> list[Any]:
        def body(*mine: Any) -> list[Any]:
            # The engine needs tensors created in here, on a device that it can name; packed tensors must have one type.
            placed = [tf.identity(tensor) for tensor in mine]
            reduced = list(placed)
            # In order of appearance, not a set: every rank must run the same collectives in the same order.
            for dtype in dict.fromkeys(tensor.dtype for tensor in placed):
                members = [index for index, tensor in enumerate(placed) if tensor.dtype == dtype]
                summed = tf.distribute.get_replica_context().all_reduce(
                    getattr(tf.distribute.ReduceOp, operation), [placed[index] for index in members], self._options
                )
                for index, tensor in zip(members, summed, strict=True):
                    reduced[index] = tensor
            return reduced

        return list(self._strategy.run(tf.autograph.experimental.do_not_convert(body), args=tuple(tensors)))
