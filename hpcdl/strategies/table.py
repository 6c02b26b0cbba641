"""The strategies by name. A new one is a file here, an entry in this table, and its words in docs/reference."""

from __future__ import annotations

import importlib
from dataclasses import replace

from hpcdl.collectives.table import COLLECTIVES
from hpcdl.core.errors import UnknownNameError
from hpcdl.core.registry import Registry
from hpcdl.strategies.base.strategy import Features, Strategy, StrategyInfo
from hpcdl.strategies.elastic.methods import ELASTIC_FAMILY

GRPC_WARNING = (
    "TensorFlow's gRPC servers authenticate nobody; hpcdl keeps them to this job's hosts, "
    "where other users' processes can still reach them"
)

_SYNCHRONOUS = Features(
    equals_single=True,
    deterministic=True,
    compression=True,
    accumulation=True,
    lars=True,
    exact_resume=True,
    keras_fit=True,
    several_steps=True,
    in_place=True,
    measured_buckets=True,
)

_OWN = (
    StrategyInfo(
        name="single",
        family="sequential",
        summary="One process, no exchange; what all others are compared with.",
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
        summary="Some ranks average gradients for all others; variables may be split over them evenly.",
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
        summary="MultiWorkerMirroredStrategy's ring over gRPC (NCCL on GPUs), without MPI; for comparison.",
        source="TensorFlow, tf.distribute.MultiWorkerMirroredStrategy",
        features=Features(
            equals_single=True,
            deterministic=True,
            mpi=False,
            open_servers=True,
            accumulation=True,
            lars=True,
            exact_resume=True,
        ),
        target="hpcdl.strategies.tensorflow_grpc.ring:GrpcRing",
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


STRATEGIES: dict[str, StrategyInfo] = {
    info.name: info for info in (*_OWN, *(_from_collective(COLLECTIVES, name) for name in COLLECTIVES), *ELASTIC_FAMILY)
}

ALIASES = {"sync-sgd": "auto"}


def listed_strategies() -> list[StrategyInfo]:
    """Every name that find_strategy takes: all entries, then the aliases."""
    aliases = [
        replace(STRATEGIES[target], name=alias, summary=f"Synchronous SGD: another name for {target!r}.")
        for alias, target in ALIASES.items()
    ]
    return [*STRATEGIES.values(), *aliases]


def load_strategy(info: StrategyInfo) -> Strategy:
    """The strategy behind a table entry."""
    module, _, attribute = info.target.partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), attribute)()
    return strategy


def find_strategy(name: str) -> StrategyInfo:
    """The entry of `name`; UnknownNameError lists the known ones."""
    resolved = ALIASES.get(name, name)
    if resolved not in STRATEGIES:
        raise UnknownNameError("strategy", name, [*STRATEGIES, *ALIASES])
    return STRATEGIES[resolved]
