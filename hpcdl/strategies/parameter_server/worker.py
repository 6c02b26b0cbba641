"""The worker's side of `ps`: gradients leave bucket by bucket while back-propagation goes on, means come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hpcdl.collectives.workspace import unseen
from hpcdl.comm.observed import recorder_of
from hpcdl.strategies.allreduce.worker import broadcast_variables, exchange_bucket
from hpcdl.strategies.base.graph import FiniteGuard, bucket_recorded, timestamp
from hpcdl.strategies.base.strategy import Context, Worker
from hpcdl.strategies.parameter_server.client import MESSAGE_BYTES, ServerClient

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator, Finished

DEFAULT_PLACEMENT = "split"


class ParameterServerWorker(Worker):
    """Exchanges gradients for their means on `communicator`, then applies them with the local optimizer.

    `workers` is the group of the workers alone.
    """

    def __init__(self, context: Context, communicator: Communicator, workers: Communicator) -> None:
        self._workers = workers
        placement = context.exchange.placement or DEFAULT_PLACEMENT
        self._client = ServerClient(
            communicator, context.num_servers, placement, context.exchange.bucket_bytes, MESSAGE_BYTES
        )
        self._guard = FiniteGuard(workers.rank, workers)

    def start(self, variables: Sequence[Any]) -> None:
        """Rank 0's weights become every worker's."""
        broadcast_variables(self._workers, variables)

    def before_step(self, step: int) -> None:
        """Announce the step to the servers."""
        self._guard.step = step
        self._client.announce(step)
        self.follows = self._client.follows

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Exchange gradients for their means bucket by bucket, then apply those."""
        lengths = [int(gradient.shape.num_elements()) for gradient in gradients]
        tf.autograph.experimental.do_not_convert(self._client.lay_out)(lengths)
        names = [variable.path for variable in variables]
        means: list[Any] = [None] * len(gradients)
        previous: list[Any] = []
        for number, bucket in enumerate(self._client.buckets):
            mine = [tf.cast(gradients[index], tf.float32) for index in bucket.variables]
            with tf.control_dependencies(previous):
                alone = names[bucket.variables[0]] if len(mine) == 1 else ""
                exchanged, suspicious = exchange_bucket(mine, self._exchanger(number, alone))
            previous = [suspicious]
            for index, tensor in zip(bucket.variables, exchanged, strict=True):
                means[index] = tf.cast(tensor, gradients[index].dtype)
        fine = self._guard.verdict(suspicious, gradients, names) if self.checks_finite else suspicious
        with tf.control_dependencies([fine]):
            end = timestamp()
        with tf.control_dependencies([end]):
            optimizer.apply(means, variables)
        return end

    def after_step(self, step: int) -> None:
        """Take the first server's answer."""
        self._client.take_answer()

    def wish(self, wishes: Array) -> None:
        """These go to the servers with the next step."""
        self._client.wish(wishes)

    def agreed(self) -> Array | None:
        """What all workers have been told about the step that is over."""
        return self._client.agreed()

    def details(self) -> dict[str, Any]:
        """Placement and its balance; how many steps were followed only."""
        return self._client.as_json()

    def finish(self, *, early: bool = False) -> None:
        """Let the servers go."""
        self._client.leave(early=early)

    def _exchanger(self, number: int, alone: str) -> Callable[[Array], tuple[Array, bool]]:
        def exchange(buffer: Array, finished: Finished) -> Array:
            self._client.exchange(number, buffer)
            finished(buffer)
            return buffer

        recorded = bucket_recorded(exchange, recorder_of(self._workers), number)
        if not self.checks_finite:
            return lambda buffer: (recorded(buffer, unseen), False)
        return self._guard.watched(recorded, first=number == 0, alone=alone)
