"""What a strategy is: declared features, a role for each rank, and the worker's part of a step. No TensorFlow here."""

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
    """What goes with a strategy; the command line, the docs and the contract tests read the same declarations."""

    synchronous: bool = True
    equals_single: bool = False
    deterministic: bool = False
    servers: bool = False
    backup_workers: bool = False
    placements: tuple[str, ...] = ()
    keras_optimizer: bool = True
    lock_free: bool = False
    """Workers change the center themselves, without locks; nobody serves."""
    mpi: bool = True
    open_servers: bool = False
    """Starts servers that authenticate nobody: only on nodes without other users, or where that is allowed."""
    own_device: bool = False
    """Ranks must not share a GPU."""
    compression: bool = False
    error_feedback: bool = False
    """Less than all values may travel: workers keep what did not, and take it along at the next step."""
    compression_by_block: bool = False
    """Changes of weights may travel in few bits, with a scale for each block of them."""
    accumulation: bool = False
    lars: bool = False
    exact_resume: bool = False
    keras_fit: bool = False
    elastic: bool = False
    groups: bool = False
    several_steps: bool = False
    """A worker may take several steps in one call of the graph: nothing outside of it is asked between them."""
    in_place: bool = False
    """Goes on with the ranks that are left where others are lost, if MPI can: no rank alone knows part of its state."""
    measured_buckets: bool = False
    """The size of its buckets may be found by timing steps: no rank but the workers knows it."""
    periodic: tuple[str, ...] = ()
    """Flags of a strategy whose workers take many steps by themselves, whatever the optimizer; empty for all others."""
    default_period: int = 1
    """Steps from one exchange to the next where nobody says --period."""
    optimizers: tuple[str, ...] = ()
    """The rule that its own equations follow, in place of --optimizer; empty: any optimizer."""


@dataclass(frozen=True, kw_only=True)
class StrategyInfo:
    """A strategy as the table knows it; `target` is "module:attribute" of its Strategy."""

    name: str
    family: str
    summary: str
    source: str
    features: Features
    target: str
    warning: str = ""

    def as_json(self) -> dict[str, Any]:
        """What `hpcdl strategies --json` prints."""
        return {
            "name": self.name,
            "family": self.family,
            "summary": self.summary,
            "source": self.source,
            "features": asdict(self.features),
        }


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a strategy gets: the job's communicator, who works and serves, and the settings it may read."""

    info: StrategyInfo
    communicator: Communicator
    num_workers: int
    num_servers: int
    exchange: ExchangeConfig
    optimizer: OptimizerConfig
    elastic: ElasticConfig = ElasticConfig()
    deterministic: bool = False
    num_steps: int = 0
    """Steps of the whole run; 0 where nobody knows. `steps_per_epoch` likewise."""
    steps_per_epoch: int = 0
    weight: float = 1.0
    """What this worker's mean over its samples counts in the mean over the workers."""
    in_place: bool = False
    """Whether those that are left go on in place where a rank is lost.

    Then no weight moves before the step's exchange is over, a server does not go on without a worker that is dead, and
    workers keep the center as it last came to them.
    """

    @property
    def is_worker(self) -> bool:
        """Workers are the lowest ranks, servers the highest."""
        return self.communicator.rank < self.num_workers


class Exchange:
    """How one step's gradients become new weights. Tensors are TensorFlow's, in the model's variable order."""

    loss_share: float = 1.0
    """What the step multiplies the loss by before back-propagation: gradients that are summed come out averaged."""
    learning_rate: float = 0.0
    """This step's learning rate; the loop sets it before `before_step`."""
    checks_finite: bool = True
    """Whether NaN in gradients ends the run; False where the optimizer skips such steps. `apply` is traced with it."""
    averaged: Sequence[Any] = ()
    """What `apply` moves weights by, in the order of the variables, where each moves as soon as its own is there."""
    waited_s: float = 0.0
    """What the last exchange took longer than the quickest one, in strategies whose workers do not step together."""
    exchanges_between_steps: bool = False
    """Whether an exchange may go on while no step does: its messages are then those of the next step."""
    moves_first: bool = False
    """Whether weights have moved when the exchange begins: a step counts then whose exchange breaks."""

    def before_step(self, step: int) -> None:
        """Called before each step, outside the graph."""

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Turn local gradients into new weights, while tracing the step.

        Returns the tensor of `graph.timestamp` at the end of the exchange. No weight moves before it is known that all
        will be finite; those whose gradients have come may move before the exchange is over.
        """
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """Called after each step, outside the graph."""

    def leaves_early(self, gradients: Sequence[Any]) -> bool:
        """Whether some of `gradients` may leave before the last one is there."""
        return True

    def build_step(self, model: Any, objective: Any, as_model_input: Callable[[Any], Any]) -> Callable[..., Any] | None:
        """The whole step, in place of step/'s, where a strategy brings its own; `apply` is not called then.

        It takes images and labels and returns what step/'s does; `center` says what the weights are.
        """
        return None


class Recoverable:
    """What outlives the exchange: for a checkpoint, and for those that are left where a rank is lost.

    A strategy that keeps nothing beside weights and optimizer needs none of it.
    """

    def state(self) -> dict[str, Array]:
        """What a checkpoint must keep of this worker beside weights and optimizer."""
        return {}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take back what `state` gave; called before `start`."""

    def abandon(self) -> None:
        """The groups that it exchanges in are revoked: another worker goes on among those left, with what it keeps."""

    def kept(self) -> dict[str, Array]:
        """What another worker in this one's place `restore`s, without asking anybody."""
        return self.state()

    def level(self, group: Communicator, done: int, take_steps: Callable[[int], None]) -> None:
        """Come level with the others of `group`, those that are left; called before `kept`. Collective.

        For workers that may be several steps apart: `done` is this one's, and `take_steps(n)` takes its next n.
        """

    def part(self) -> CenterPart | None:
        """A copy of the center that servers hold, as it last came here; None where they hold none."""
        return None

    def take_center(self, center: Center) -> None:
        """What those that are left have of the center, which was in the variables; called before `start`."""


class Worker(Exchange, Recoverable):
    """The strategy's part of a worker: its exchange, what it recovers from, and what it has to tell the run."""

    warnings: Sequence[str] = ()
    """What the user should know about how this worker exchanges here."""
    follows: bool = False
    """Whether the step that was just announced goes on without this worker's gradient."""

    def start(self, variables: Sequence[Any]) -> None:
        """Agree on the initial state: all of the model's weights and the optimizer's variables."""

    def news(self) -> str:
        """What the user should hear after this step; once, and empty nearly always."""
        return ""

    def wish(self, wishes: Array) -> None:
        """What this worker wishes of all (supervision/control.py), where `agreed` carries it."""

    def agreed(self) -> Array | None:
        """The sum of all workers' wishes after this step; None where the workers ask each other instead."""
        return None

    def details(self) -> dict[str, Any]:
        """What the record keeps about this rank, as JSON."""
        return {}

    def center(self) -> Sequence[Array] | None:
        """Values to evaluate and keep in place of this worker's own trainable weights; None: its own. Collective."""
        return None

    def finish(self, *, early: bool = False) -> None:
        """Leave in order; no exchange follows. `early`: the run stops with something to resume."""


@runtime_checkable
class HoldsCenter(Protocol):
    """A server that holds a part of the center."""

    def part(self) -> CenterPart | None:
        """That part; None before it has come."""


class Server(Protocol):
    """A rank that serves and never imports TensorFlow."""

    def serve(self) -> dict[str, Any]:
        """Serve until every worker has left; returns what the record keeps about this rank, as JSON.

        Keys that RankRecord has as fields (`busy_seconds_per_step` and its like) become those; `lost_workers` counts
        the dead that the run went on without. StoppedEarly where the workers stopped before the end.
        """


class Strategy(Protocol):
    """What a table entry's target is."""

    def worker(self, context: Context) -> Worker:
        """The worker's side."""

    def server(self, context: Context) -> Server:
        """The server's side; only called where the features say `servers`."""


def check_ranks(info: StrategyInfo, *, ranks: int, servers: int) -> int:
    """Number of workers of a run; UsageError where ranks and servers do not fit the strategy."""
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
