"""Chip partitioning (SC17, section on KNL): a node's cores are split in groups, each with its own weights and data.

A group is a rank, bound to its share of the cores and to the memory near them. Gradients are averaged over the
groups. All copies together must fit in the node's fast memory, or in its memory if it has no fast one.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcdl.config.schema import StepBenchConfig, TrainConfig
from hpcdl.core.errors import ConfigError
from hpcdl.core.units import format_bytes
from hpcdl.data.format.dataset import Dataset
from hpcdl.models.table import MODELS
from hpcdl.node.profile import Settings
from hpcdl.node.topology import Topology
from hpcdl.strategies.base.strategy import StrategyInfo

FLOAT_BYTES = 4


def check_groups(info: StrategyInfo, config: TrainConfig | StepBenchConfig) -> None:
    """Raise ConfigError if --groups does not fit the strategy or the number of ranks."""
    problems = [*_problems(info, config)]
    if problems:
        raise ConfigError(problems)


def _problems(info: StrategyInfo, config: TrainConfig | StepBenchConfig) -> Iterator[str]:
    groups, ranks = config.elastic.groups, config.run.ranks
    if groups == 1:
        return
    features = info.features
    averages_gradients = features.synchronous and not (features.optimizers or features.servers or features.periodic)
    if info.name == "single" or not (info.features.groups or averages_gradients):
        yield f"--groups {groups}: strategy {info.name!r} does not sum gradients over groups; use ring or sync-easgd"
    elif ranks % groups:
        yield f"--groups {groups} --ranks {ranks}: each group is a rank, so --ranks must be a multiple of --groups"
    elif info.features.groups and ranks == groups:
        yield (
            f"--groups {groups} --ranks {ranks}: {info.name} averages over chips of {groups} groups, and this is one "
            f"chip; use --ranks {2 * groups}, or --strategy ring"
        )


def check_memory(copies: int, weights_bytes: int, data_bytes: int, topology: Topology) -> None:
    """Raise ConfigError, with the arithmetic, if `copies` of weights and data do not fit in one node's fast memory."""
    fast = topology.fast_nodes
    available = sum(node.memory_bytes for node in fast) or topology.memory_bytes
    needed = copies * (weights_bytes + data_bytes)
    if needed <= available:
        return
    fitting = available // (weights_bytes + data_bytes)
    raise ConfigError(
        [
            f"--groups: {copies} groups on this node x ({format_bytes(weights_bytes)} weights + "
            f"{format_bytes(data_bytes)} data) "
            f"= {format_bytes(needed)}, but this node has {format_bytes(available)} of "
            f"{'fast ' if fast else ''}memory; at most {fitting} groups fit"
        ]
    )


def data_bytes(dataset: Dataset) -> int:
    """Return the bytes of training data that each group holds (data/read/staging.py); 0 if compressed or generated."""
    entry, manifest = dataset.train_split.entry, dataset.manifest
    held = entry is not None and manifest is not None and not manifest.compression
    return sum(shard.num_bytes for shard in entry.shards) if entry is not None and held else 0


def weights_bytes(model: str) -> int:
    """Return the bytes of a known network's weights; 0 for a network of the user, whose size is not known yet."""
    info = MODELS.get(model)
    return FLOAT_BYTES * (info.parameters + info.moving_statistics) if info else 0


def near_memory(groups: int, ranks: int, topology: Topology) -> Settings | None:
    """Return settings for `ranks` groups on a node without a node profile: bound to cores and nearby memory."""
    if groups == 1:
        return None
    bound = ranks <= len(topology.usable_cores)
    policy = (
        "membind-fast" if topology.fast_nodes else "membind" if len(topology.numa_nodes) > 1 and bound else "default"
    )
    return Settings(binding="balanced" if bound else "none", memory_policy=policy)
