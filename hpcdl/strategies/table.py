"""The strategies by name. A new one is a file here, an entry in this table, and its text in docs/reference."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from hpcdl.collectives.table import COLLECTIVES
from hpcdl.core.errors import UnknownNameError, UsageError
from hpcdl.core.registry import Entry, Registry, added, load, refuse_two
from hpcdl.strategies.base.strategy import Features, Strategy, StrategyInfo
from hpcdl.strategies.elastic.methods import ELASTIC_FAMILY
from hpcdl.strategies.periodic.methods import PERIODIC_FAMILY

GRPC_WARNING = (
    "TensorFlow's gRPC servers authenticate nobody; hpcdl keeps them to this job's hosts, "
    "where other users' processes can still reach them"
)

_SYNCHRONOUS = Features(
    equals_single=True,
    deterministic=True,
    compression=True,
    error_feedback=True,
    accumulation=True,
    lars=True,
    exact_resume=True,
    keras_fit=True,
    several_steps=True,
    in_place=True,
    measured_buckets=True,
)

_TENSORFLOWS = Features(
    equals_single=True,
    deterministic=True,
    mpi=False,
    open_servers=True,
    accumulation=True,
    lars=True,
    exact_resume=True,
)

_OWN = (
    StrategyInfo(
        name="single",
        family="sequential",
        summary="One process without any exchange: the baseline for all others.",
        source="stochastic gradient descent",
        features=Features(
            equals_single=True,
            deterministic=True,
            mpi=False,
            accumulation=True,
            lars=True,
            exact_resume=True,
            several_steps=True,
        ),
        target="hpcdl.strategies.single:Single",
    ),
    StrategyInfo(
        name="ps",
        family="parameter servers",
        summary="Server ranks average the workers' gradients; variables may be split evenly over the servers.",
        source="Li et al. 2014; backup workers: Chen et al. 2016, section 3",
        features=Features(
            equals_single=True,
            deterministic=True,
            servers=True,
            backup_workers=True,
            placements=("round-robin", "greedy", "split"),
            accumulation=True,
            lars=True,
            exact_resume=True,
            keras_fit=True,
            in_place=True,
        ),
        target="hpcdl.strategies.parameter_server.strategy:ParameterServers",
    ),
    StrategyInfo(
        name="grpc-ps",
        family="TensorFlow's own",
        summary="TensorFlow's gRPC parameter servers with SyncReplicasOptimizer, without MPI; for comparison.",
        source="Mathuriya et al. 2017 (the Cori study)",
        features=Features(
            equals_single=True,
            servers=True,
            mpi=False,
            open_servers=True,
            placements=("round-robin", "greedy"),
            keras_optimizer=False,
        ),
        target="hpcdl.strategies.tensorflow_grpc.parameter_server:GrpcParameterServers",
        warning=GRPC_WARNING,
    ),
    StrategyInfo(
        name="grpc-ring",
        family="TensorFlow's own",
        summary="MultiWorkerMirroredStrategy's ring over gRPC, without MPI; for comparison.",
        source="TensorFlow, tf.distribute.MultiWorkerMirroredStrategy",
        features=_TENSORFLOWS,
        target="hpcdl.strategies.tensorflow_grpc.ring:GrpcRing",
        warning=GRPC_WARNING,
    ),
    StrategyInfo(
        name="nccl",
        family="TensorFlow's own",
        summary="NCCL between GPUs, through MultiWorkerMirroredStrategy's collectives, without MPI; one GPU per rank.",
        source="TensorFlow, tf.distribute.MultiWorkerMirroredStrategy",
        features=replace(_TENSORFLOWS, own_device=True),
        target="hpcdl.strategies.tensorflow_grpc.ring:Nccl",
        warning=GRPC_WARNING,
    ),
)


def _from_collective(collectives: Registry, name: str) -> StrategyInfo:
    return StrategyInfo(
        name=name,
        family="all-reduce",
        summary=collectives.entry(name).summary,
        source="docs/reference/collectives.md",
        features=_SYNCHRONOUS,
        target="hpcdl.strategies.allreduce.worker:AllReduce",
    )


_BY_NAME = {
    info.name: info
    for info in (
        *_OWN,
        *(_from_collective(COLLECTIVES, name) for name in COLLECTIVES),
        *ELASTIC_FAMILY,
        *PERIODIC_FAMILY,
    )
}
GROUP = "hpcdl.strategies"
"""The entry points by which other packages add strategies; each is a StrategyInfo."""


class _Strategies(Mapping[str, StrategyInfo]):
    """hpcdl's own strategies, then those of other packages, whose StrategyInfo is imported on demand."""

    def __getitem__(self, name: str) -> StrategyInfo:
        entries = added(GROUP).get(name, [])
        if name in _BY_NAME:
            refuse_two("strategy", name, ["hpcdl", *(entry.package for entry in entries)])
            return _BY_NAME[name]
        if not entries:
            raise KeyError(name)
        return _added(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**_BY_NAME, **added(GROUP)})

    def __len__(self) -> int:
        return len({**_BY_NAME, **added(GROUP)})


@functools.cache
def _added(name: str) -> StrategyInfo:
    """Return another package's strategy. Raises UsageError if it does not load, or is no strategy of this name."""
    entries = added(GROUP)[name]
    refuse_two("strategy", name, [entry.package for entry in entries])
    info = load("strategy", name, entries[0])
    if not isinstance(info, StrategyInfo) or info.name != name:
        raise UsageError(
            f"strategy {name!r} of {entries[0].package}: {entries[0].target} must be a StrategyInfo with this name"
        )
    return info


STRATEGIES: Mapping[str, StrategyInfo] = _Strategies()

ALIASES = {"sync-sgd": "auto"}


_ELSEWHERE = {
    **dict.fromkeys(("horovod", "hvd", "ddp", "allreduce", "mirrored", "multiworkermirrored"), "ring"),
    "distributeddataparallel": "ring",
    "parameterserver": "ps",
}
"""Strategies that do what other libraries call by these names, written without dashes and capitals."""


def listed_strategies() -> list[StrategyInfo]:
    """Return every name that find_strategy accepts: all entries, then the aliases."""
    aliases = [
        replace(STRATEGIES[target], name=alias, summary=f"Synchronous SGD: another name for {target!r}.")
        for alias, target in ALIASES.items()
    ]
    return [*STRATEGIES.values(), *aliases]


def load_strategy(info: StrategyInfo) -> Strategy:
    """Return the strategy of a table entry. Raises UsageError if another package's strategy does not load."""
    package = "" if info.name in _BY_NAME else info.target.partition(".")[0]
    strategy: Strategy = load("strategy", info.name, Entry(target=info.target, summary="", package=package))()
    return strategy


def find_strategy(name: str) -> StrategyInfo:
    """Return the entry of `name`. Raises UnknownNameError, which lists the known names, for an unknown one."""
    resolved = ALIASES.get(name, name)
    if resolved not in STRATEGIES:
        like = _ELSEWHERE.get(re.sub("[^a-z]|strategy$", "", name.casefold()), "")
        raise UnknownNameError("strategy", name, [*STRATEGIES, *ALIASES], like)
    return STRATEGIES[resolved]
