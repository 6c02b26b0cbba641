"""`hogwild-*` in shared memory against the bandwidth of that memory: workers that only exchange.

    python benchmarks/hogwild_bandwidth.py [--workers 4] [--mib 1.64,25,95] [--steps 40]

Each worker's step is the strategy's own, with a given gradient. The bound is the time in which as many concurrent
processes move the fewest bytes that the method's equations need, at the rate of a loop that only reads and writes
(a + b -> c, in blocks as the strategies use) on arrays of the same size. The gradient, or the weights that go to the
center, are read once more, because all of it must be finite before any of it reaches the center.
All take turns in one run; medians of the slowest worker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags
from hpcdl.comm.mpi.communicator import world
from hpcdl.comm.observed import EXCHANGE, observe
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.core.protocols import Communicator
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.elastic.replica import blocks
from hpcdl.strategies.table import find_strategy, load_strategy

PASSES = {
    # reads: gradient twice, center; writes: center, weights
    "hogwild-sgd": 5,
    # Before the gradient: weights read twice, center once; center and its old values written. Then gradient twice,
    # weights, old center; weights written.
    "hogwild-easgd": 10,
}
"""The fewest reads and writes of an array as large as the weights in one exchange, with each array fetched once."""
STREAM = "reading and writing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mib", default="1.64,25,95")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        for part in options.mib.split(","):
            measure(world(), round(float(part) * 2**18), options.steps)
        return
    mpiexec = find_mpiexec()
    line = [str(mpiexec.path), *launch_flags(mpiexec.flavour), "-n", str(options.workers), sys.executable, __file__]
    environment = {**os.environ, **environment_for(mpiexec.flavour)}
    sys.exit(subprocess.run([*line, *sys.argv[1:], "--rank"], env=environment, check=False).returncode)


def measure(everybody: Communicator, num_weights: int, num_steps: int) -> None:
    """Measure one size; rank 0 prints a line of JSON."""
    gradient = numpy.full(num_weights, 1e-9, numpy.float32)
    replicas = {name: replica_of(name, everybody, num_weights) for name in PASSES}
    arrays = [numpy.ones(num_weights, numpy.float32) for _ in range(3)]
    runs: dict[str, Callable[[int], Any]] = {
        STREAM: lambda step: stream(*arrays),
        **{name: lambda step, own=replica: one_step(own, step, gradient) for name, replica in replicas.items()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(num_steps + 2):
        for name, run in runs.items():
            everybody.barrier()
            began = time.perf_counter()
            run(step)
            taken = max(everybody.allgather_json(time.perf_counter() - began))
            if step > 1:
                seconds[name].append(taken)
    for replica in replicas.values():
        replica.finish()
    if everybody.rank == 0:
        num_bytes = 4 * num_weights
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        pass_s = medians[STREAM] / 3
        rows = {
            name: {"ms": round(1e3 * medians[name], 2), "over_bound": round(medians[name] / (passes * pass_s), 2)}
            for name, passes in PASSES.items()
        }
        rate = round(everybody.size * num_bytes / pass_s / 1e9, 1)
        told = {"workers": everybody.size, "mib": round(num_bytes / 2**20, 2), "gigabytes_per_second_of_all": rate}
        print(json.dumps({**told, **rows}), flush=True)


def replica_of(name: str, everybody: Communicator, num_weights: int) -> Any:
    """Return one worker's part of a strategy whose workers are these ranks."""
    info = find_strategy(name)
    context = Context(
        info=info,
        communicator=observe(everybody.duplicate()).for_purpose(EXCHANGE),
        num_workers=everybody.size,
        num_servers=0,
        exchange=ExchangeConfig(),
        optimizer=OptimizerConfig(),
        elastic=ElasticConfig(),
    )
    strategy: Any = load_strategy(info)
    replica = strategy.replica(context)
    replica.start(numpy.ones(num_weights, numpy.float32), [num_weights])
    return replica


def one_step(replica: Any, step: int, gradient: Any) -> None:
    replica.before_step(step)
    replica.step(gradient)


def stream(first: Any, second: Any, total: Any) -> None:
    """Read two arrays, write a third."""
    for part in blocks(total.size):
        numpy.add(first[part], second[part], out=total[part])


if __name__ == "__main__":
    main()
