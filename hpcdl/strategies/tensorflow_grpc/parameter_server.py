"""The strategy `grpc-ps`: TensorFlow's own parameter servers over gRPC, as in the Cori study; without MPI.

Graphs of tf.compat.v1: variables are on the servers (replica_device_setter), workers fetch them every step, and
SyncReplicasOptimizer averages the gradients there and applies TensorFlow's own optimizer. The Keras 3 model is called
with those variables through `stateless_call`. The servers run TensorFlow, unlike those of `ps`.

The graph of one `grpc-ps` worker: variables on the servers, the model's step here, SyncReplicasOptimizer between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.config.schema import OptimizerConfig
from hpcdl.core.errors import StoppedEarly, originals
from hpcdl.core.processes.wall import WALL
from hpcdl.strategies.base.graph import FiniteGuard, connected, timestamp
from hpcdl.strategies.base.strategy import Context, Server, Worker
from hpcdl.strategies.parameter_server.placement import ITEM_BYTES, imbalance
from hpcdl.strategies.tensorflow_grpc.cluster import start_server

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


v1 = tf.compat.v1
KERAS_EPSILON = 1e-7  # Keras's; v1's AdamOptimizer would take 1e-8

_OPTIMIZERS: dict[str, Callable[[OptimizerConfig, Any], Any]] = {
    "sgd": lambda config, rate: v1.train.GradientDescentOptimizer(rate),
    "momentum": lambda config, rate: v1.train.MomentumOptimizer(rate, config.momentum),
    "nesterov": lambda config, rate: v1.train.MomentumOptimizer(rate, config.momentum, use_nesterov=True),
    "adam": lambda config, rate: v1.train.AdamOptimizer(rate, epsilon=KERAS_EPSILON),
}
"""TensorFlow's own optimizers.

Their momentum accumulates gradients, Keras's accumulates steps. The updates are equal at a constant learning rate; a
change of the rate affects Keras's momentum later.
"""


class _RateAfterGradients:
    """An optimizer that reads its learning rate when all gradients of a step have arrived, not one step too early.

    SyncReplicasOptimizer's thread begins a step's update as soon as the previous one is done, and then waits for
    gradients. The leading worker sets the rate before it sends its own gradients.
    """

    def __init__(self, config: OptimizerConfig, rate: Any) -> None:
        self._rate = rate
        self._gradients: list[Any] = []
        self._optimizer = _OPTIMIZERS[config.optimizer](config, self._read)

    def apply_gradients(self, pairs: Any, *arguments: Any, **named: Any) -> Any:
        """Apply the update."""
        pairs = list(pairs)
        self._gradients = [gradient for gradient, _ in pairs]
        return self._optimizer.apply_gradients(pairs, *arguments, **named)

    def _read(self) -> Any:
        with tf.control_dependencies(self._gradients):
            return self._rate.read_value()


class StepGraph:
    """One worker's graph and session. Weights are on the servers, moving statistics and seeds in the Keras model."""

    def __init__(self, context: Context, model: Any, objective: Any, target: str, log: Callable[[str], None]) -> None:
        self._model, self._target = model, target
        self._names = [variable.path for variable in model.trainable_variables]
        self._rank, self._num_workers = context.communicator.rank, context.num_workers
        self.guard = FiniteGuard(self._rank)
        self._coordinator = v1.train.Coordinator()
        self._session: Any = None
        self._rate = 0.0
        self._graph = tf.Graph()
        with _constants_as_arrays(model), self._graph.as_default():
            self._build(context, objective, log)
        self.server_bytes = [
            sum(_bytes_of(weight) for weight in self._weights if tf.DeviceSpec.from_string(weight.device).task == task)
            for task in range(context.num_servers)
        ]

    def initialise(self, weights: Sequence[Array]) -> None:
        """Initialise the servers' variables; only the leading worker does this, before the others begin."""
        with self._graph.as_default():
            session = v1.Session(self._target, config=self._session_config())
            session.run(v1.global_variables_initializer())
            for variable, value in zip(self._weights, weights, strict=True):
                variable.load(value, session)
            session.close()

    def begin(self, *, leads: bool) -> None:
        """Open the session; the leading worker also runs the thread that applies averaged gradients."""
        with self._graph.as_default():
            self._session = v1.Session(self._target, config=self._session_config())
            self._session.run(self._optimizer.chief_init_op if leads else self._optimizer.local_step_init_op)
            if leads:
                runner = self._optimizer.get_chief_queue_runner()
                runner.create_threads(self._session, self._coordinator, daemon=True, start=True)

    def step(self, images: Any, labels: Any, learning_rate: float) -> tuple[Any, ...]:
        """Take one step. Return loss, metric sums, and the times of the last gradient and the end of the exchange."""
        if self._rank == 0 and learning_rate != self._rate:
            self._session.run(self._set_rate, {self._rate_in: learning_rate})
            self._rate = learning_rate
        # The order of `_state_in`, which the graph was built with.
        state = self._model.non_trainable_variables
        feed = dict(zip(tf.nest.flatten((self._images, self._labels)), tf.nest.flatten((images, labels)), strict=True))
        feed |= {placeholder: variable.numpy() for placeholder, variable in zip(self._state_in, state, strict=True)}
        with originals():
            fetched = self._session.run([self._results, self._state_out, self._train], feed)
        for variable, value in zip(state, fetched[1], strict=True):
            variable.assign(value)
        loss, sums, had_gradients = fetched[0]
        return loss, sums, had_gradients, WALL.now_s()

    def weights(self) -> list[Array]:
        """Return the servers' variables."""
        fetched: list[Array] = self._session.run(self._weights)
        return fetched

    def close(self) -> None:
        """Stop the thread and close the session."""
        self._coordinator.request_stop()
        self._session.close()

    def _build(self, context: Context, objective: Any, log: Callable[[str], None]) -> None:
        own_device = f"/job:worker/task:{self._rank}/cpu:0"
        setter = v1.train.replica_device_setter(
            worker_device=own_device,
            # The setter only counts the tasks; it needs no addresses.
            cluster={"ps": [""] * context.num_servers, "worker": [""] * context.num_workers},
            ps_strategy=_PS_STRATEGIES[context.exchange.placement or "round-robin"](context.num_servers),
        )
        model = self._model
        with v1.device(setter):
            self._weights = [
                v1.get_variable(f"weight_{number}", tensor.shape, tf.as_dtype(tensor.dtype), tf.zeros_initializer())
                for number, tensor in enumerate(model.trainable_variables)
            ]
            global_step = v1.train.get_or_create_global_step()
            rate = v1.get_variable("learning_rate", (), tf.float32, tf.zeros_initializer(), trainable=False)
            self._rate_in = v1.placeholder(tf.float32, ())
            self._set_rate = rate.assign(self._rate_in)
            inputs = {tensor.name: v1.placeholder(tf.float32, (None, *tensor.shape[1:])) for tensor in model.inputs}
            self._images = inputs if len(inputs) > 1 else next(iter(inputs.values()))
            self._labels = tf.nest.map_structure(lambda spec: v1.placeholder(spec.dtype, spec.shape), objective.labels)
            self._state_in = [
                v1.placeholder(tf.as_dtype(tensor.dtype), tensor.shape) for tensor in model.non_trainable_variables
            ]
            outputs, self._state_out, extra = model.stateless_call(
                [tf.convert_to_tensor(weight) for weight in self._weights],
                self._state_in,
                self._images,
                training=True,
                return_losses=True,
            )
            loss = objective.loss(self._labels, outputs)
            total = tf.add_n([loss, *extra]) if extra else loss
            gradients = connected(tf.gradients(total * context.weight, self._weights), self._weights, self._names, log)
            with tf.control_dependencies([self.guard.before_exchange(gradients, self._names)]):
                had_gradients = timestamp()
                # Identities, so that the update waits for the check.
                gradients = [tf.identity(gradient) for gradient in gradients]
            self._results = (loss, objective.sums(self._labels, outputs), had_gradients)
            self._optimizer = v1.train.SyncReplicasOptimizer(
                _RateAfterGradients(context.optimizer, rate),
                replicas_to_aggregate=self._num_workers,
                total_num_replicas=self._num_workers,
            )
            pairs = list(zip(gradients, self._weights, strict=True))
            self._train = self._optimizer.apply_gradients(pairs, global_step=global_step)

    def _session_config(self) -> Any:
        # Without the filter a worker would wait for all other workers' servers to answer.
        return v1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{self._rank}"])


@contextlib.contextmanager
def _constants_as_arrays(model: Any) -> Iterator[None]:
    """Let layers hold numpy arrays in place of eager tensors inside: a graph of TensorFlow 1 cannot capture those.

    Normalization holds its mean and variance so. Call it outside of the graph, where the tensors can be read.
    """
    held = [
        (layer, name, value)
        for layer in model._flatten_layers()  # also those of nested models
        for name, value in list(vars(layer).items())
        if isinstance(value, tf.Tensor)  # variables of Keras are none
    ]
    for layer, name, value in held:
        setattr(layer, name, value.numpy())
    try:
        yield
    finally:
        for layer, name, value in held:
            setattr(layer, name, value)


class _Greedy:
    """Picks the server with the fewest bytes so far, like GreedyLoadBalancingStrategy, which TensorFlow removed."""

    def __init__(self, num_servers: int) -> None:
        self._loads = [0] * num_servers

    def __call__(self, operation: Any) -> int:
        server = self._loads.index(min(self._loads))
        shape = tf.TensorShape(operation.get_attr("shape"))
        self._loads[server] += int(shape.num_elements()) * operation.get_attr("dtype").size
        return server


_PS_STRATEGIES: dict[str, Callable[[int], Any]] = {"round-robin": lambda num_servers: None, "greedy": _Greedy}
"""The function that replica_device_setter calls for each variable; None is its own round robin."""


def _bytes_of(variable: Any) -> int:
    return int(numpy.prod(variable.shape.as_list(), dtype=numpy.int64)) * ITEM_BYTES


_FINISHED, _STOPPED = "finished", "stopped"


class GrpcParameterServers:
    """The strategy `grpc-ps`."""

    def worker(self, context: Context) -> Worker:
        """Return the worker, a rank that trains."""
        return GrpcParameterServerWorker(context)

    def server(self, context: Context) -> Server:
        """Return the server, a rank whose TensorFlow server holds variables."""
        return GrpcParameterServer(context)


class GrpcParameterServer:
    """TensorFlow's server; this process only waits for the workers to leave."""

    def __init__(self, context: Context) -> None:
        self._communicator = context.communicator.duplicate()
        self._communicator.split(1)  # collective: the workers split off their group
        self._server = start_server(context.communicator, context.num_workers)

    def serve(self) -> dict[str, Any]:
        """Wait for the workers' final messages."""
        farewells = self._communicator.allgather_json(None)
        if _STOPPED in farewells:
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
        """Return a step that runs in TensorFlow's own session."""
        self._model = model
        self._graph = graph = StepGraph(self._context, model, objective, self._server.target, self.warnings.append)

        def step(images: Any, labels: Any) -> tuple[Any, ...]:
            inputs, targets = tf.nest.map_structure(lambda tensor: tensor.numpy(), (as_model_input(images), labels))
            return graph.step(inputs, targets, self.learning_rate)

        return step

    def start(self, variables: Sequence[Any]) -> None:
        """Send rank 0's weights to the servers, before any worker reads them."""
        graph = self._built()
        if self._communicator.rank == 0:
            graph.initialise([variable.numpy() for variable in self._model.trainable_variables])
        self._workers.barrier()
        graph.begin(leads=self._communicator.rank == 0)

    def before_step(self, step: int) -> None:
        """Store the step for error messages."""
        self._built().guard.step = step

    def center(self) -> Sequence[Array] | None:
        """Return the servers' variables."""
        return self._built().weights()

    def details(self) -> dict[str, Any]:
        """Return where TensorFlow placed the variables."""
        loads = self._built().server_bytes
        return {
            "placement": self._context.exchange.placement or "round-robin",
            "server_bytes": loads,
            "imbalance": imbalance(loads) if sum(loads) else 1.0,
        }

    def finish(self, *, early: bool = False) -> None:
        """Let the servers end."""
        self._built().close()
        self._communicator.allgather_json(_STOPPED if early else _FINISHED)

    def _built(self) -> StepGraph:
        assert self._graph is not None, "build_step comes first"
        return self._graph
