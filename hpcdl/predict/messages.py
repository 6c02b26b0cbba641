"""Messages of an exchange, bucket by bucket: the rounds and bytes that collectives and strategies state themselves.

The time for packing and unpacking is an unknown of the timeline for each form, which only runs with it show.

This module divides messages over the levels of the network: memory within a node, links between nodes.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcdl.collectives.auto import choose_by_model
from hpcdl.collectives.slices import Cost, plan_buckets
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.config.forms import parse_compression
from hpcdl.predict.jobs import DEFAULT_PLACEMENTS, ITEM_BYTES, StepJob, is_coded, kind_of, layers_known, lengths_of
from hpcdl.predict.network import Network
from hpcdl.report.runs.run import Run, positive
from hpcdl.strategies.allreduce.few_bits import BLOCK
from hpcdl.strategies.parameter_server.placement import plan
from hpcdl.strategies.table import ALIASES

_ROUNDS = 2
"""Rounds: to all others at once, and back; for topk first the number of values."""
_UNIT = 1 << 30
"""Bytes of an all-reduce that are enough for its cost to be proportional to them."""
_SCALE_BYTES = 4


def coded_messages(job: StepJob, share: float, network: Network) -> Messages:
    """Return the messages for a `share` of all gradients of a job with a coded form.

    Powersgd sums two thin matrices by the strategy's own all-reduce. The others send each rank its part directly.
    """
    kind = parse_compression(job.compress).kind
    if job.workers == 1:
        return NOTHING
    if kind == "powersgd":
        # PowerSGD (Vogels et al., NeurIPS 2019) sums its two thin matrices one after the other.
        once = allreduce_messages(job.strategy, job, round(job.coded_bytes * share / 2), network)
        return Messages(**{name: 2 * value for name, value in vars(once).items()})
    sent = job.coded_bytes * share * _directly_sent(kind, job.workers)
    if job.local:
        return Messages(memory_rounds=_ROUNDS, memory_bytes=sent)
    per_node = min(job.workers_per_node, job.workers)
    # Each rank sends to all others alike, and the ranks of a node share its link.
    abroad = (job.workers - per_node) / (job.workers - 1)
    return Messages(
        rounds=_ROUNDS,
        bytes=sent * abroad * per_node * network.oversubscription(job.nodes),
        memory_bytes=sent * (1 - abroad),
    )


def _directly_sent(kind: str, workers: int) -> float:
    """Return bytes sent by a rank per coded byte: all of them to each other rank, or a part there and a sum back."""
    return workers - 1.0 if kind == "topk" else (workers - 1) / workers


def coded_bytes_of(runs: Sequence[Run]) -> dict[str, float]:
    """Return `StepJob.coded_bytes` for each form that `runs` of one network have.

    It is the median of the counts in runs of several workers. If none has counted, or workers do not exchange in each
    step, it is the form's own size. Forms without either are missing.
    """
    counted: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        form = run.config.get("compress", "")
        if not is_coded(form or "none") or run.workers < 2 or not run.usable:
            continue
        counted[form] += _counted(run, form)
    bytes_by_form: dict[str, float] = {}
    for form, values in counted.items():
        size = statistics.median(values) if values else _own_size(form, _num_values(runs))
        if size is not None:
            bytes_by_form[form] = size
    return bytes_by_form


def _counted(run: Run, form: str) -> list[float]:
    strategy = ALIASES.get(run.strategy, run.strategy)
    if not positive(run.bytes_per_step) or run.bytes_per_step is None or kind_of(strategy) != "all-reduce":
        return []
    kind = _kind(form)
    if kind == "":
        return []
    if kind == "powersgd":
        # Their algorithm is unknown: a ring sends the fewest bytes that any all-reduce can.
        name = "ring" if strategy in ("auto", "mpi") else strategy
        sent = cost_of(name, run.workers, _UNIT, run.nodes).bytes
        return [run.bytes_per_step * _UNIT / sent] if sent else []
    return [run.bytes_per_step / _directly_sent(kind, run.workers)]


def _kind(form: str) -> str:
    try:
        return parse_compression(form).kind
    except ValueError:  # a form of a later version, or a damaged record
        return ""


def _num_values(runs: Sequence[Run]) -> int:
    """Return the number of values of all gradients; 0 if unknown."""
    recorded = (sum(run.gradient_elements) or (run.gradient_bytes or 0) // ITEM_BYTES for run in runs)
    num_recorded = next(filter(None, recorded), 0)
    return num_recorded or (sum(lengths_of(runs[0].model, None)) if layers_known(runs[0].model) else 0)


def _own_size(form: str, num_values: int) -> float | None:
    """Return the form's own size for `num_values` values; None for thin matrices, whose sides are unknown."""
    kind = _kind(form)
    if not num_values:
        return None
    if kind == "topk":
        # A value is sent with its index, which is as long.
        return 2 * ITEM_BYTES * num_values * parse_compression(form).percent / 100
    bytes_a_value = {"int8": 1.0, "fp4": 0.5}.get(kind)
    # Twice: each value is sent to the rank that sums it, and its sum comes back.
    return None if bytes_a_value is None else 2 * num_values * (bytes_a_value + _SCALE_BYTES / BLOCK)


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Consecutive rounds and bytes, by level of the network. `summed` bytes are added up on the way."""

    memory_rounds: float = 0.0
    memory_bytes: float = 0.0
    rounds: float = 0.0
    bytes: float = 0.0
    summed: float = 0.0


NOTHING = Messages()


@dataclass(frozen=True, kw_only=True)
class BucketLoad:
    """Bytes that one worker sends in one bucket to the busiest server, and to all servers together."""

    busiest: float
    all_servers: float


@functools.lru_cache(maxsize=4096)
def cost_of(name: str, num_ranks: int, num_bytes: int, num_nodes: int = 1) -> Cost:
    """Return the cost that the all-reduce itself states."""
    module = importlib.import_module(COLLECTIVES.entry(name).target.partition(":")[0])
    whole_bytes = max(ITEM_BYTES, num_bytes // ITEM_BYTES * ITEM_BYTES)
    extra = {"num_nodes": num_nodes} if name == "hierarchical" else {}
    cost: Cost = module.cost(num_ranks, whole_bytes, **extra)
    return cost


def allreduce_messages(strategy: str, job: StepJob, num_bytes: int, network: Network) -> Messages:
    """Return the messages of one all-reduce of `num_bytes` by `strategy` over the workers."""
    name = ALIASES.get(strategy, strategy)
    name = _SAME_MESSAGES.get(name, name)
    if name == "auto":
        name = choose_by_model(job.workers, num_bytes)
    if job.workers == 1 or num_bytes == 0:
        return NOTHING
    if name == "hierarchical":
        return _hierarchical(job, num_bytes)
    cost = cost_of(name, job.workers, num_bytes)
    # Most algorithms add up half of what they receive; the other half is only copied.
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
    """Count copies into and out of the window and a share of the sums in memory, and a ring of lanes between nodes."""
    per_node = max(1, math.ceil(job.workers / job.nodes))
    in_memory = 0.0 if per_node == 1 else 2.0 * num_bytes
    if job.local:
        # Stages of a slice: three within a node, a fourth for the lanes between nodes.
        return Messages(memory_rounds=3, memory_bytes=in_memory, summed=in_memory / 2)
    cost = cost_of("hierarchical", job.workers, num_bytes, job.nodes)
    # LANES of collectives/hierarchical.py: their rings share the node's link.
    lanes = min(4, per_node)
    return Messages(
        rounds=cost.rounds, bytes=cost.bytes_in_turn * lanes, memory_rounds=0 if per_node == 1 else 4,
        memory_bytes=in_memory, summed=cost.bytes_in_turn / 2 + in_memory / 2,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShareAbroad:
    """Shares of an all-reduce's rounds and bytes that leave the node, and the ranks that share its link then."""

    rounds: float
    bytes: float
    flows: float


def _by_distance(job: StepJob) -> ShareAbroad:
    """Partners at power-of-two distances: distant ones swap long messages, all ranks of a node at once."""
    total = max(1.0, math.log2(job.workers))
    abroad = math.log2(job.nodes) / total
    # Halving sends n/2, n/4, ...: the first log2(nodes) messages, n (1 - 1/nodes) bytes, leave the node.
    share = (1 - 1 / job.nodes) / (1 - 1 / job.workers)
    return ShareAbroad(rounds=min(1.0, abroad), bytes=min(1.0, share), flows=float(job.workers_per_node))


def _doubling(job: StepJob) -> ShareAbroad:
    abroad = min(1.0, math.log2(job.nodes) / max(1.0, math.log2(job.workers)))
    # Every round sends all bytes, so both have the same share.
    return ShareAbroad(rounds=abroad, bytes=abroad, flows=float(job.workers_per_node))


def _tree(job: StepJob) -> ShareAbroad:
    abroad = min(1.0, math.log2(job.nodes) / max(1.0, math.log2(job.workers)))
    return ShareAbroad(rounds=abroad, bytes=abroad, flows=1.0)


_SHARES_ABROAD: Mapping[str, Callable[[StepJob], ShareAbroad]] = {
    "ring": lambda job: ShareAbroad(
        rounds=1.0, bytes=1.0, flows=1.0
    ),  # every round waits for the link between two nodes
    # A library's algorithm is unknown, so it counts as a ring with an error of its own (UNKNOWN_EXCHANGE_ERROR).
    "mpi": lambda job: ShareAbroad(rounds=1.0, bytes=1.0, flows=1.0),
    "tree": _tree,
    "recursive-doubling": _doubling,
    "halving-doubling": _by_distance,
}


@functools.lru_cache(maxsize=4096)
def buckets_of(job: StepJob) -> tuple[int, ...]:
    """Return the bytes of each bucket, in sending order."""
    sizes = [ITEM_BYTES * length // job.shrunk for length in job.lengths]
    # As in training (strategies/allreduce/worker.py), where a small first bucket starts the network early.
    plan_of_buckets = plan_buckets(sizes, job.bucket_bytes, small_first=True)
    return tuple(sum(sizes[index] for index in bucket) for bucket in plan_of_buckets)


@functools.lru_cache(maxsize=4096)
def server_loads(job: StepJob) -> tuple[BucketLoad, ...]:
    """Return each bucket's load on the servers, by the exact bytes of the placement."""
    placement = job.placement or DEFAULT_PLACEMENTS.get(job.strategy, "split")
    # TensorFlow sends every variable separately, as it comes: one bucket, limited by its busiest server.
    bucket_bytes = job.bucket_bytes if job.strategy == "ps" else ITEM_BYTES * sum(job.lengths) + 1
    loads = []
    for bucket in plan(job.lengths, job.servers, placement, bucket_bytes):
        parts = [ITEM_BYTES * (stop - start) / job.shrunk for start, stop in itertools.pairwise(bucket.bounds)]
        loads.append(BucketLoad(busiest=max(parts), all_servers=sum(parts)))
    return tuple(loads)
