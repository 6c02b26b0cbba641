"""What an exchange sends, bucket by bucket: the rounds and bytes that collectives and strategies state themselves.

Here these are divided over the levels of the network: memory within a node, the way between nodes.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpcdl.collectives.auto import choose_by_model
from hpcdl.collectives.slices import plan_buckets
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.collectives.workspace import Cost
from hpcdl.predict.jobs import DEFAULT_PLACEMENTS, ITEM_BYTES, StepJob
from hpcdl.predict.network import Network
from hpcdl.strategies.parameter_server.placement import plan
from hpcdl.strategies.table import ALIASES


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Rounds and bytes that follow one another, by level; `summed` bytes are added up on the way."""

    memory_rounds: float = 0.0
    memory_bytes: float = 0.0
    rounds: float = 0.0
    bytes: float = 0.0
    summed: float = 0.0


NOTHING = Messages()


@dataclass(frozen=True, kw_only=True)
class BucketLoad:
    """What one worker sends the busiest server in one bucket, in bytes, and what it sends all servers together."""

    busiest: float
    all_servers: float


@functools.lru_cache(maxsize=4096)
def cost_of(name: str, num_ranks: int, num_bytes: int, num_nodes: int = 1) -> Cost:
    """What the all-reduce itself says."""
    module = importlib.import_module(COLLECTIVES.entry(name).target.partition(":")[0])
    whole = max(ITEM_BYTES, num_bytes // ITEM_BYTES * ITEM_BYTES)
    extra = {"num_nodes": num_nodes} if name == "hierarchical" else {}
    found: Cost = module.cost(num_ranks, whole, **extra)
    return found


def allreduce_messages(strategy: str, job: StepJob, num_bytes: int, network: Network) -> Messages:
    """The messages of one all-reduce of `num_bytes` by `strategy` over the workers."""
    name = ALIASES.get(strategy, strategy)
    name = _SAME_MESSAGES.get(name, name)
    if name == "auto":
        name = choose_by_model(job.workers, num_bytes)
    if job.workers == 1 or num_bytes == 0:
        return NOTHING
    if name == "hierarchical":
        return _hierarchical(job, num_bytes)
    cost = cost_of(name, job.workers, num_bytes)
    summed = cost.bytes_in_turn / 2
    if job.local:
        return Messages(memory_rounds=cost.rounds, memory_bytes=cost.bytes_in_turn, summed=summed)
    share = _SHARES_ABROAD[name](job) if job.workers_per_node > 1 else ShareAbroad(rounds=1.0, bytes=1.0, flows=1.0)
    far = 1.0 if name in ("ring", "tree") else network.oversubscription(job.nodes)
    return Messages(
        rounds=cost.rounds * share.rounds,
        bytes=cost.bytes_in_turn * share.bytes * share.flows * far,
        memory_rounds=cost.rounds * (1 - share.rounds),
        memory_bytes=cost.bytes_in_turn * (1 - share.bytes),
        summed=summed,
    )


_SAME_MESSAGES = {"grpc-ring": "ring", "nccl": "ring"}


def _hierarchical(job: StepJob, num_bytes: int) -> Messages:
    """Copies into and out of the window, and a share of the sums, in memory; a ring of lanes between nodes."""
    per_node = max(1, math.ceil(job.workers / job.nodes))
    in_memory = 0.0 if per_node == 1 else 2.0 * num_bytes
    if job.local:
        return Messages(memory_rounds=3, memory_bytes=in_memory, summed=in_memory / 2)
    cost = cost_of("hierarchical", job.workers, num_bytes, job.nodes)
    lanes = min(4, per_node)
    return Messages(
        rounds=cost.rounds, bytes=cost.bytes_in_turn * lanes, memory_rounds=0 if per_node == 1 else 4,
        memory_bytes=in_memory, summed=cost.bytes_in_turn / 2 + in_memory / 2,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShareAbroad:
    """Of an all-reduce: shares of rounds and bytes that leave the node, and ranks that share its link then."""

    rounds: float
    bytes: float
    flows: float


def _by_distance(job: StepJob) -> ShareAbroad:
    """Partners at power-of-two distances: far ones swap the long messages, all ranks of a node at once."""
    total = max(1.0, math.log2(job.workers))
    abroad = math.log2(job.nodes) / total
    share = (1 - 1 / job.nodes) / (1 - 1 / job.workers)
    return ShareAbroad(rounds=min(1.0, abroad), bytes=min(1.0, share), flows=float(job.workers_per_node))


def _doubling(job: StepJob) -> ShareAbroad:
    abroad = min(1.0, math.log2(job.nodes) / max(1.0, math.log2(job.workers)))
    return ShareAbroad(rounds=abroad, bytes=abroad, flows=float(job.workers_per_node))


def _tree(job: StepJob) -> ShareAbroad:
    abroad = min(1.0, math.log2(job.nodes) / max(1.0, math.log2(job.workers)))
    return ShareAbroad(rounds=abroad, bytes=abroad, flows=1.0)


_SHARES_ABROAD: Mapping[str, Callable[[StepJob], ShareAbroad]] = {
    "ring": lambda job: ShareAbroad(
        rounds=1.0, bytes=1.0, flows=1.0
    ),  # every round waits for the link between two nodes
    "mpi": lambda job: ShareAbroad(rounds=1.0, bytes=1.0, flows=1.0),
    "tree": _tree,
    "recursive-doubling": _doubling,
    "halving-doubling": _by_distance,
}


@functools.lru_cache(maxsize=4096)
def buckets_of(job: StepJob) -> tuple[int, ...]:
    """Bytes of each bucket, in the order in which they leave."""
    sizes = [ITEM_BYTES * length // job.shrunk for length in job.lengths]
    plan_of_buckets = plan_buckets(sizes, job.bucket_bytes, small_first=True)
    return tuple(sum(sizes[index] for index in bucket) for bucket in plan_of_buckets)


@functools.lru_cache(maxsize=4096)
def server_loads(job: StepJob) -> tuple[BucketLoad, ...]:
    """What each bucket puts on the servers, by the placement's true bytes."""
    placement = job.placement or DEFAULT_PLACEMENTS.get(job.strategy, "split")
    # TensorFlow sends every variable by itself, as it comes: one bucket, whose busiest server bounds it.
    bucket_bytes = job.bucket_bytes if job.strategy == "ps" else ITEM_BYTES * sum(job.lengths) + 1
    found = []
    for bucket in plan(job.lengths, job.servers, placement, bucket_bytes):
        parts = [ITEM_BYTES * (stop - start) / job.shrunk for start, stop in itertools.pairwise(bucket.bounds)]
        found.append(BucketLoad(busiest=max(parts), all_servers=sum(parts)))
    return tuple(found)
