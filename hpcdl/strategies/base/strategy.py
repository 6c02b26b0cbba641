"""The interface of a strategy: its features, a role per rank, and the worker's part of a step. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import Communicator

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.strategies.base.salvage import Center, CenterPart


@dataclass(frozen=True, kw_only=True)
class Features:
    """What a strategy supports; the command line, the docs and the contract tests read the same declarations."""

    synchronous: bool = True
    equals_single: bool = False
    deterministic: bool = False
    servers: bool = False
    backup_workers: bool = False
    placements: tuple[str, ...] = ()
    keras_optimizer: bool = True
    lock_free: bool = False
    """Workers change the center themselves, without locks; there are no servers."""
    mpi: bool = True
    open_servers: bool = False
    """Starts servers without authentication: only on nodes without other users, or if that is allowed."""
    own_device: bool = False
    """Ranks must not share a GPU."""
    compression: bool = False
    error_feedback: bool = False
    """Part of the values may be sent: workers keep the rest and add it at the next step."""
    compression_by_block: bool = False
    """Changes of weights may be sent in few bits, with a scale for each block of values."""
    accumulation: bool = False
    lars: bool = False
    exact_resume: bool = False
    keras_fit: bool = False
    elastic: bool = False
    groups: bool = False
    several_steps: bool = False
    """A worker may take several steps in one call of the graph: nothing outside the graph is needed between them."""
    in_place: bool = False
    """Can continue in place after the loss of ranks, if MPI can: no part of its state is on one rank only."""
    measured_buckets: bool = False
    """Its bucket size may be found by timing steps: only workers depend on it."""
    periodic: tuple[str, ...] = ()
    """Flags of a strategy whose workers take many steps between exchanges, with any optimizer; empty for all others."""
    default_period: int = 1
    """Steps between two exchanges without --period."""
    optimizers: tuple[str, ...] = ()
    """The update rule of its own equations, which replaces --optimizer; empty: any optimizer."""


@dataclass(frozen=True, kw_only=True)
class StrategyInfo:
    """A strategy's entry in the table; `target` is "module:attribute" of its Strategy."""

    name: str
    family: str
    summary: str
    source: str
    features: Features
    target: str
    warning: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the output of `hpcdl strategies --json` for it."""
        return {
            "name": self.name,
            "family": self.family,
            "summary": self.summary,
            "source": self.source,
            "features": asdict(self.features),
        }


@dataclass(frozen=True, kw_only=True)
class Context:
    """The inputs of a strategy: the job's communicator, the numbers of workers and servers, and settings."""

    info: StrategyInfo
    communicator: Communicator
    num_workers: int
    num_servers: int
    exchange: ExchangeConfig
    optimizer: OptimizerConfig
    elastic: ElasticConfig = ElasticConfig()
    deterministic: bool = False
    num_steps: int = 0
    """Steps of the whole run; 0 if unknown. `steps_per_epoch` likewise."""
    steps_per_epoch: int = 0
    weight: float = 1.0
    """The weight of this worker's mean over its samples in the mean over the workers."""
    in_place: bool = False
    """Whether the survivors continue in place if a rank is lost.

    Then no weight is updated before the step's exchange is complete. A server does not continue without a dead worker,
    and workers keep the center as last received.
    """

    @property
    def is_worker(self) -> bool:
        """Workers are the lowest ranks, servers the highest."""
        return self.communicator.rank < self.num_workers


class Exchange:
    """How one step's gradients become new weights. Tensors are TensorFlow's, in the model's variable order."""

    loss_share: float = 1.0
    """The step multiplies the loss by it before back-propagation, so that summed gradients are averages."""
    learning_rate: float = 0.0
    """This step's learning rate; the loop sets it before `before_step`."""
    checks_finite: bool = True
    """Whether NaN in gradients ends the run; False if the optimizer skips such steps. `apply` is traced with it."""
    averaged: Sequence[Any] = ()
    """The gradients that `apply` uses, in variable order, if it updates each weight as soon as its own is available."""
    waited_s: float = 0.0
    """The last exchange's time beyond the fastest one's, for strategies whose workers do not step together."""
    exchanges_between_steps: bool = False
    """Whether an exchange may continue between steps; its messages then count for the next step."""
    moves_first: bool = False
    """Whether weights are updated before the exchange begins: then a step counts even if its exchange breaks."""

    def before_step(self, step: int) -> None:
        """Prepare for a step; called before each one, outside the graph."""

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Turn local gradients into new weights, while tracing the step.

        Returns the tensor of `graph.timestamp` at the end of the exchange. No weight is updated before all sums are
        known to be finite; weights whose gradients have arrived may be updated before the exchange is complete.
        """
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """Finish a step; called after each one, outside the graph."""

    def leaves_early(self, gradients: Sequence[Any]) -> bool:
        """Whether some of `gradients` may be sent before the last one is available."""
        return True

    def build_step(self, model: Any, objective: Any, as_model_input: Callable[[Any], Any]) -> Callable[..., Any] | None:
        """Return the whole step if the strategy builds its own instead of step/'s; `apply` is not called then.

        It takes images and labels and returns the same as step/'s step; `center` returns the weights.
        """
        return None


class Recoverable:
    """State that outlives the exchange: for a checkpoint, and for the survivors if a rank is lost.

    A strategy whose only state is weights and optimizer needs none of this.
    """

    def state(self) -> dict[str, Array]:
        """Return this worker's state for a checkpoint, besides weights and optimizer."""
        return {}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the result of `state`; called before `start`."""

    def abandon(self) -> None:
        """Stop using the revoked groups: another worker object continues among the survivors, with the `kept` state."""

    def kept(self) -> dict[str, Array]:
        """Return the state that this worker's successor gets by `restore`; without communication."""
        return self.state()

    def level(self, group: Communicator, done: int, take_steps: Callable[[int], None]) -> None:
        """Catch up with the other survivors in `group`; called before `kept`. Collective.

        For workers that may be several steps apart: `done` is this one's step, and `take_steps(n)` takes its next n.
        """

    def part(self) -> CenterPart | None:
        """Return a copy of the center that servers hold, as last received; None if servers hold none."""
        return None

    def take_center(self, center: Center) -> None:
        """Take the center recovered from the survivors, which was in the variables; called before `start`."""


class Worker(Exchange, Recoverable):
    """The strategy's part of a worker: its exchange, its recovery, and its information for the run."""

    warnings: Sequence[str] = ()
    """Warnings for the user about this worker's exchange."""
    follows: bool = False
    """Whether the others completed the announced step without this worker's gradient."""

    def start(self, variables: Sequence[Any]) -> None:
        """Agree on the initial state: all of the model's weights and the optimizer's variables."""

    def news(self) -> str:
        """Return a message for the user after this step; each only once, and almost always empty."""
        return ""

    def set_flags(self, flags: Array) -> None:
        """Set this worker's control flags for all (supervision/control.py), if `agreed` carries them."""

    def agreed(self) -> Array | None:
        """Return the combined flags of all workers after this step; None if the workers ask each other instead."""
        return None

    def details(self) -> dict[str, Any]:
        """Return this rank's details for the record, as JSON."""
        return {}

    def center(self) -> Sequence[Array] | None:
        """Return values to evaluate and save instead of this worker's own trainable weights, or None. Collective."""
        return None

    def finish(self, *, early: bool = False) -> None:
        """Leave in order; no exchange follows. `early`: the run stops and can be resumed."""


@runtime_checkable
class HoldsCenter(Protocol):
    """A server that holds a part of the center."""

    def part(self) -> CenterPart | None:
        """Return its part; None before it has received one."""


class Server(Protocol):
    """A rank that serves and never imports TensorFlow."""

    def serve(self) -> dict[str, Any]:
        """Serve until every worker has left; return this rank's details for the record, as JSON.

        Keys that are fields of RankRecord (such as `busy_seconds_per_step`) become those fields; `lost_workers` counts
        the dead workers that the run continued without. Raises StoppedEarly if the workers stopped before the end.
        """


class Strategy(Protocol):
    """The target of a table entry."""

    def worker(self, context: Context) -> Worker:
        """Return the worker's side."""

    def server(self, context: Context) -> Server:
        """Return the server's side; only called if the features say `servers`."""


def check_ranks(info: StrategyInfo, *, ranks: int, servers: int) -> int:
    """Return the number of workers of a run. Raises UsageError if ranks and servers do not fit the strategy."""
    if info.name == "single" and ranks != 1:
        raise UsageError(f"--ranks {ranks}: strategy 'single' is one process; use --ranks 1, or --strategy ring")
    if not info.features.servers:
        return ranks
    if ranks - servers < 1:
        raise UsageError(
            f"--ranks {ranks} --servers {servers}: strategy {info.name!r} needs at least one worker "
            f"beside its servers; use --ranks {servers + 1} or more"
        )
    return ranks - servers
