"""The strategy `grpc-ps`: TensorFlow's own parameter servers over gRPC, as in the Cori study; without MPI.

Graphs of tf.compat.v1: variables lie on the servers (replica_device_setter), workers fetch them every step, and
SyncReplicasOptimizer averages the gradients there and applies TensorFlow's own optimizer. The Keras 3 model is called
with those variables through `stateless_call`. The servers run TensorFlow, unlike those of `ps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hpcdl.core.errors import StoppedEarly
from hpcdl.strategies.base.strategy import Context, Server, Worker
from hpcdl.strategies.parameter_server.placement import imbalance
from hpcdl.strategies.tensorflow_grpc.cluster import start_server
from hpcdl.strategies.tensorflow_grpc.graph import StepGraph

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

_FINISHED, _STOPPED = "finished", "stopped"


class GrpcParameterServers:
    """The strategy `grpc-ps`."""

    def worker(self, context: Context) -> Worker:
        """A rank that trains."""
        return GrpcParameterServerWorker(context)

    def server(self, context: Context) -> Server:
        """A rank whose TensorFlow server holds variables."""
        return GrpcParameterServer(context)


class GrpcParameterServer:
    """TensorFlow's server; this process only waits for the workers to leave."""

    def __init__(self, context: Context) -> None:
        self._communicator = context.communicator.duplicate()
        self._communicator.split(1)
        self._server = start_server(context.communicator, context.num_workers)

    def serve(self) -> dict[str, Any]:
        """Wait for the workers' last word."""
        words = self._communicator.allgather_json(None)
        if _STOPPED in words:
            raise StoppedEarly("stopped with the workers")
        return {}


class GrpcParameterServerWorker(Worker):
    """Computes gradients against the servers' variables."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._communicator = context.communicator.duplicate()
        self._workers = self._communicator.split(0)
        self._server = start_server(context.communicator, context.num_workers)
        self._graph: StepGraph | None = None
        self._model: Any = None
        self.warnings: list[str] = []

    def build_step(self, model: Any, objective: Any, as_model_input: Callable[[Any], Any]) -> Callable[..., Any]:
        """A step that runs in TensorFlow's own session."""
        self._model = model
        self._graph = graph = StepGraph(self._context, model, objective, self._server.target, self.warnings.append)

        def step(images: Any, labels: Any) -> tuple[Any, ...]:
            given, wanted = tf.nest.map_structure(lambda tensor: tensor.numpy(), (as_model_input(images), labels))
            return graph.step(given, wanted, self.learning_rate)

        return step

    def start(self, variables: Sequence[Any]) -> None:
        """Rank 0's weights go to the servers; then every worker may read them."""
        graph = self._built()
        if self._communicator.rank == 0:
            graph.initialise([variable.numpy() for variable in self._model.trainable_variables])
        self._workers.barrier()
        graph.begin(leads=self._communicator.rank == 0)

    def before_step(self, step: int) -> None:
        """Errors name the step."""
        self._built().guard.step = step

    def center(self) -> Sequence[Array] | None:
        """The servers' variables."""
        return self._built().weights()

    def details(self) -> dict[str, Any]:
        """Where TensorFlow has put the variables."""
        loads = self._built().server_bytes
        return {
            "placement": self._context.exchange.placement or "round-robin",
            "server_bytes": loads,
            "imbalance": imbalance(loads) if sum(loads) else 1.0,
        }

    def finish(self, *, early: bool = False) -> None:
        """Let the servers go."""
        self._built().close()
        self._communicator.allgather_json(_STOPPED if early else _FINISHED)

    def _built(self) -> StepGraph:
        assert self._graph is not None, "build_step comes first"
        return self._graph
