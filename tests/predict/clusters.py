"""Clusters with a known truth: steps are simulated worker by worker, with independent formulas.

Nothing here is taken from hpcdl/predict: all-reduces cost what the literature says, servers are simulated by events,
and clusters have effects that the timeline does not model: permanently slower nodes, and noise common to all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from hpcdl.collectives.slices import plan_buckets
from hpcdl.models.table import MODELS
from hpcdl.predict.jobs import lengths_of
from hpcdl.report.runs.run import Run
from tests.report.synthetic import make_record, make_run, write_run

STRATEGIES = ("ring", "halving-doubling", "ps", "sync-easgd")
NETWORKS = ("lenet", "cifar10-quick", "googlenet", "resnet50", "alexnet")
BUCKET_BYTES = 25 * 1024**2
STEPS = 60
SEED = 6
"""Seed of the cluster whose runs are written to files."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One true cluster: `noise` of a worker's step, `common` to all workers, of `nodes` (persistent), between `runs`.

    `seed` gives each cluster its own random numbers: with shared ones, many clusters would be one trial.
    """

    seed: int
    model: str
    batch: int
    image_s: float
    update_s: float
    latency_s: float
    byte_s: float
    sum_byte_s: float
    noise: float
    common: float
    nodes: float
    runs: float
    hidden: float
    contention: float
    server: float
    num_servers: int

    @property
    def num_bytes(self) -> int:
        return MODELS[self.model].gradient_bytes


def make_cluster(seed: int) -> Cluster:
    """Return a plausible cluster: slow to fast nodes, links from 1 Gbit/s to 100 Gbit/s."""
    random = numpy.random.default_rng(seed)

    def between(low: float, high: float) -> float:
        return float(math.exp(random.uniform(math.log(low), math.log(high))))

    model = NETWORKS[seed % len(NETWORKS)]
    step_s = between(0.05, 1.0)
    batch = int(random.choice([16, 32, 64]))
    return Cluster(
        seed=seed, model=model, batch=batch, image_s=step_s / batch, update_s=step_s * between(0.005, 0.05),
        latency_s=between(2e-6, 1e-4), byte_s=1 / between(1e8, 1e10), sum_byte_s=1 / between(3e9, 1e10),
        noise=between(0.005, 0.1), common=between(0.003, 0.03), nodes=between(0.002, 0.02), runs=between(0.003, 0.02),
        hidden=float(random.uniform(0.4, 1.0)), contention=float(random.uniform(0.0, 0.08)),
        server=between(1.0, 2.0), num_servers=int(random.choice([1, 2, 4])),
    )  # fmt: skip


def true_step(cluster: Cluster, strategy: str, workers: int, seed: int, steps: int = STEPS) -> dict[str, float]:
    """Return the mean parts of a step over one run: compute, wait, exposed_communication, update."""
    random = numpy.random.default_rng([cluster.seed, seed, workers, STRATEGIES.index(strategy)])
    mean = cluster.image_s * cluster.batch * math.exp(cluster.runs * random.standard_normal())
    slow = numpy.exp(cluster.nodes * random.standard_normal(workers))
    own = numpy.exp(cluster.noise * random.standard_normal((steps, workers)) - cluster.noise**2 / 2)
    shared = numpy.exp(cluster.common * random.standard_normal((steps, 1)))
    computes = mean * slow * own * shared
    slowest = computes.max(axis=1)
    exposed = 0.0 if workers == 1 and strategy != "ps" else _EXPOSED[strategy](cluster, computes)
    exposed *= math.exp(0.5 * cluster.runs * random.standard_normal())
    return {
        "compute": float(computes.mean()),
        "wait": float((slowest - computes.mean(axis=1)).mean()),
        "exposed_communication": exposed,
        "update": cluster.update_s,
    }


def _byte_s(cluster: Cluster, nodes: int) -> float:
    return cluster.byte_s * (max(2, nodes) / 2) ** cluster.contention


def _buckets(cluster: Cluster, *, small_first: bool) -> list[int]:
    """Cut the gradients into buckets as hpcdl does: the last layer first."""
    sizes = [4 * length for length in lengths_of(cluster.model, None)]
    plan = plan_buckets(sizes, BUCKET_BYTES, small_first=small_first)
    return [sum(sizes[index] for index in bucket) for bucket in plan]


def _ring_s(cluster: Cluster, n: float, p: int) -> float:
    moved = 2 * n * (p - 1) / p
    return 2 * (p - 1) * cluster.latency_s + moved * _byte_s(cluster, p) + n * (p - 1) / p * cluster.sum_byte_s


def _halving_s(cluster: Cluster, n: float, p: int) -> float:
    moved = 2 * n * (p - 1) / p
    return 2 * math.log2(p) * cluster.latency_s + moved * _byte_s(cluster, p) + n * (p - 1) / p * cluster.sum_byte_s


def _bucketed(price: Any) -> Any:
    def exposed(cluster: Cluster, computes: Any) -> float:
        slowest, p = computes.max(axis=1), computes.shape[1]
        buckets = _buckets(cluster, small_first=True)
        ends, total = numpy.zeros_like(slowest), 0.0
        for number, size in enumerate(buckets, start=1):
            ready = slowest * (1 / 3 + 2 / 3 * number / len(buckets))
            ends = numpy.maximum(ends, ready) + price(cluster, size, p)
            total += price(cluster, size, p)
        return float(numpy.maximum(ends - slowest, (1 - cluster.hidden) * total).mean())

    return exposed


def _servers(cluster: Cluster, computes: Any) -> float:
    """Split buckets over the servers; each server takes them as they arrive and sends the mean once it has all."""
    workers = computes.shape[1]
    byte_s = _byte_s(cluster, workers) * cluster.server
    buckets = _buckets(cluster, small_first=False)
    late = []
    for times in computes[:20]:
        free = gone = 0.0
        sent = numpy.zeros(workers)
        for number, size in enumerate(buckets, start=1):
            served = size / cluster.num_servers * byte_s
            own_link = size * _byte_s(cluster, workers)
            ready = numpy.sort(times) * (1 / 3 + 2 / 3 * number / len(buckets))
            begun = numpy.maximum(sent, ready)
            sent = begun + own_link
            for arrival in begun:
                free = max(free, arrival) + served
            free = max(free, sent.max())
            piece = min(served, (2 << 20) * byte_s)
            own_pieces = min(own_link, cluster.num_servers * (2 << 20) * _byte_s(cluster, workers))
            gone = max(gone + workers * served, gone + own_link, free + workers * piece, free + own_pieces)
        late.append(gone - times.max())
    return float(numpy.mean(late)) + 2 * cluster.latency_s


def _sync_easgd(cluster: Cluster, computes: Any) -> float:
    p, slowest = computes.shape[1], computes.max(axis=1)
    total = min(_ring_s(cluster, cluster.num_bytes, p), _halving_s(cluster, cluster.num_bytes, p))
    return float(numpy.maximum(total - slowest, (1 - cluster.hidden) * total).mean())


_EXPOSED = {
    "ring": _bucketed(_ring_s),
    "halving-doubling": _bucketed(_halving_s),
    "ps": _servers,
    "sync-easgd": _sync_easgd,
}


def measured(cluster: Cluster, strategy: str, workers: int, seed: int, *, parts: bool = True) -> Run:
    """Return one run of the cluster in the report's form; servers have their own nodes."""
    found = true_step(cluster, strategy, workers, seed)
    servers = cluster.num_servers if strategy == "ps" else 0
    step = sum(found.values())
    return make_run(
        workers, workers * cluster.batch / step, strategy=strategy, model=cluster.model, batch_per_rank=cluster.batch,
        gradient_bytes=cluster.num_bytes, servers=servers, nodes=workers + servers, step_seconds=step,
        parts=found if parts else {}, config={"bucket-size": str(BUCKET_BYTES)},
        seconds_per_epoch=60_000 * step / workers / cluster.batch,
    )  # fmt: skip


def study(cluster: Cluster, sizes: tuple[int, ...] = (1, 2, 4), repeats: int = 3, *, parts: bool = True) -> list[Run]:
    """Return the runs that a user would make first: every strategy at small sizes."""
    return [
        measured(cluster, strategy, workers, 100 * repeat + 7, parts=parts)
        for strategy in STRATEGIES
        for workers in sizes
        for repeat in range(repeats)
    ]


def write_study(folder: Path, sizes: tuple[int, ...] = (1, 2, 4), repeats: int = 3, **changes: Any) -> Path:
    """Write run directories of ring and ps on the cluster SEED."""
    cluster = make_cluster(SEED)
    for strategy in ("ring", "ps"):
        for workers in sizes:
            for repeat in range(repeats):
                parts = true_step(cluster, strategy, workers, 100 * repeat + 7)
                step = sum(parts.values())
                servers = cluster.num_servers if strategy == "ps" else 0
                record = make_record(
                    workers, workers * cluster.batch / step, strategy=strategy, model=cluster.model, parts=parts,
                    batch_per_rank=cluster.batch, global_batch=cluster.batch * workers, servers=servers,
                    ranks=workers + servers, nodes=workers + servers, gradient_bytes=cluster.num_bytes,
                    parameters=cluster.num_bytes // 4, repeat=repeat, **changes,
                )  # fmt: skip
                write_run(folder / f"{strategy}-{workers}-{repeat}", record)
    return folder
