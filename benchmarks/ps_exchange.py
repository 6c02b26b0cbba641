"""All-reduces and parameter servers on hosts with a shaped network: the cost of algorithm, placement and servers.

    python -m benchmarks.ps_exchange [--workers 4] [--rate 1gbit] [--steps 5]

Needs root (tests/lab's hosts). Every worker and each of up to 4 servers has its own host. Exchanges gradients with the
sizes of LeNet's variables and of ResNet-50's at a quarter (25.6 MB), without computing anything; every configuration
in turn, in the same processes. Prints medians over the steps of the slowest worker, beside the bound of the busiest
link: a server receives `workers x its bytes`, a rank of an all-reduce sends what the algorithm's cost formula says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy

from hpcdl.cluster.launchers.mpiexec import find_mpiexec
from hpcdl.collectives import halving_doubling, ring, tree
from hpcdl.collectives.slices import Workspace
from hpcdl.comm.mpi.communicator import world
from hpcdl.core.protocols import Communicator
from hpcdl.strategies.parameter_server.placement import ITEM_BYTES, PLACEMENTS, held_bytes, imbalance, plan
from hpcdl.strategies.parameter_server.server import AveragingServer
from hpcdl.strategies.parameter_server.worker import MESSAGE_BYTES, ServerClient
from tests.strategies.test_placement import resnet50

BUCKET_BYTES = 25 * 1024**2
SERVERS = (1, 4)
ALGORITHMS = {"ring": ring, "tree": tree, "halving-doubling": halving_doubling}
MODELS = {
    "lenet": [500, 20, 25_000, 50, 400_000, 500, 5_000, 10],
    "resnet50/4": [-(-length // 4) for length in resnet50()],
}


def timed_steps(group: Communicator, num_steps: int, exchange: Callable[[], None]) -> list[float]:
    """Return the seconds of each step on the slowest rank of `group`, without the first, which warms up."""
    seconds = []
    for _ in range(num_steps + 1):
        group.barrier()
        began = time.perf_counter()
        exchange()
        seconds.append(max(group.allgather_json(time.perf_counter() - began)))
    return seconds[1:]


def allreduce_steps(name: str, group: Communicator, lengths: list[int], num_steps: int) -> list[float]:
    buffer, workspace = numpy.ones(sum(lengths), numpy.float32), Workspace()
    return timed_steps(group, num_steps, lambda: ALGORITHMS[name].allreduce(group, buffer, workspace))


def worker_steps(everybody: Communicator, workers: Communicator, lengths: list[int], servers: int, placement: str,
                 num_steps: int) -> list[float]:  # fmt: skip
    client = ServerClient(everybody, servers, placement, BUCKET_BYTES, MESSAGE_BYTES)
    numbers = iter(range(num_steps + 1))
    buffers: list[numpy.ndarray] = []

    def exchange() -> None:
        client.announce(next(numbers))
        client.lay_out(lengths)
        if not buffers:
            buffers.extend(numpy.ones(bucket.bounds[-1], numpy.float32) for bucket in client.buckets)
        for number, buffer in enumerate(buffers):
            client.exchange(number, buffer)
        client.take_answer()

    seconds = timed_steps(workers, num_steps, exchange)
    client.leave()
    return seconds


def measure(num_steps: int) -> list[dict[str, object]]:
    """Measure every configuration; the result is meaningful on rank 0."""
    everybody = world()
    workers = everybody.size - max(SERVERS)
    rows: list[dict[str, object]] = []
    for model, lengths in MODELS.items():
        num_bytes = ITEM_BYTES * sum(lengths)
        group = everybody.split(0 if everybody.rank < workers else 1)
        if everybody.rank < workers:
            for name, algorithm in ALGORITHMS.items():
                seconds = allreduce_steps(name, group, lengths, num_steps)
                busiest = algorithm.cost(workers, num_bytes).bytes
                rows.append({"model": model, "kind": name, "busiest": busiest, "seconds": seconds})
        for servers in SERVERS:
            for placement in PLACEMENTS if servers > 1 else ("split",):
                everybody.barrier()
                job = everybody.split(0 if everybody.rank < workers + servers else 1)
                if everybody.rank >= workers + servers:
                    continue
                roles = job.split(0 if job.rank < workers else 1)
                if job.rank >= workers:
                    AveragingServer(job, workers, answers=job.rank == workers).serve()
                    continue
                seconds = worker_steps(job, roles, lengths, servers, placement, num_steps)
                loads = held_bytes(plan(lengths, servers, placement, BUCKET_BYTES), servers)
                kind = f"ps {servers} {placement} (imbalance {imbalance(loads):.2f})"
                rows.append({"model": model, "kind": kind, "busiest": workers * max(loads), "seconds": seconds})
    return rows if everybody.rank == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        rows = measure(given.steps)
        if rows:
            print(json.dumps(rows))
        return
    from benchmarks.shaped_hosts import run_ranks

    command = [sys.executable, "-m", "benchmarks.ps_exchange", "--inside", "--steps", str(given.steps)]
    rows = json.loads(run_ranks(given.workers + max(SERVERS), given.rate, find_mpiexec().path, command))
    bytes_per_s = 1e9 / 8 if given.rate == "1gbit" else None
    print(f"{given.workers} workers, {given.rate}, medians of {given.steps} steps")
    for row in rows:
        median_s = statistics.median(row["seconds"])
        bound = f"{median_s / (row['busiest'] / bytes_per_s):6.2f} x bound" if bytes_per_s else ""
        print(f"{row['model']:12} {row['kind']:40} {1000 * median_s:9.1f} ms {row['busiest'] / 1e6:8.2f} MB {bound}")


if __name__ == "__main__":
    main()
