"""Steps that update weights while later buckets travel, against steps that wait for the last; in turn in one run.

    python -m benchmarks.early_updates [--hosts 4] [--rate 1gbit] [--model emulated:alexnet:0.5] [--steps 8]

Needs root for hosts (tests/lab's); `--hosts 0 --ranks 2` measures ranks of this node, one core each. Both kinds of
steps train the same weights in the same processes, SGD with momentum, each with its own velocities. Prints medians
over the steps of the slowest rank, and the median of the ratios of neighbouring steps; and the same for the processor
time of the rank that used most, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from hpcdl.cluster.environment import placement
from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags
from hpcdl.comm.mpi.communicator import world
from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.table import find_strategy
from hpcdl.supervision import runtime

WARMUP = 1


def main() -> None:
    """Start the ranks and print their results, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--model", default="emulated:alexnet:0.5")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--strategy", default="ring")
    parser.add_argument("--optimizer", default="momentum")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        measure(given)
        return
    command = [sys.executable, "-m", "benchmarks.early_updates", *sys.argv[1:], "--inside"]
    answer = json.loads((on_hosts(given, command) if given.hosts else on_cores(given, command)).splitlines()[-1])
    where = f"{given.hosts} hosts, {given.rate}" if given.hosts else f"{given.ranks} ranks, a core each"
    print(f"{given.model}, batch {given.batch}, {given.strategy}, {given.optimizer}; {where}; {given.steps} steps")
    for name, seconds in answer.items():
        ratios = [new / old for new, old in zip(seconds["early"], seconds["late"], strict=True)]
        for kind, times in seconds.items():
            print(f"{name:10} {kind:6}{statistics.median(times):8.3f} s  ({min(times):.3f} to {max(times):.3f})")
        print(f"{name:10} early / late {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})")


def on_hosts(given: argparse.Namespace, command: list[str]) -> str:
    """Return what rank 0 prints, with a rank on each shaped host."""
    from benchmarks.shaped_hosts import run_ranks

    mpiexec = find_mpiexec()
    settings = {**environment_for(mpiexec.flavour), runtime.INTRA_OP_VARIABLE: "1", runtime.INTER_OP_VARIABLE: "2"}
    return run_ranks(given.hosts, given.rate, mpiexec.path, command, settings=settings)


def on_cores(given: argparse.Namespace, command: list[str]) -> str:
    """Return what rank 0 prints, with ranks of one core each on this node."""
    mpiexec = find_mpiexec()
    line = [str(mpiexec.path), *launch_flags(mpiexec.flavour), "-n", str(given.ranks), *command]
    settings = {**environment_for(mpiexec.flavour), runtime.INTRA_OP_VARIABLE: "1", runtime.INTER_OP_VARIABLE: "2"}
    return subprocess.run(line, env={**os.environ, **settings}, check=True, capture_output=True, text=True).stdout


def measure(given: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 prints the seconds of each step on the slowest rank."""
    place = placement()
    if not given.hosts and place is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[place.rank % len(cores)]})
    runtime.silence()
    everybody = world()
    runtime.import_tensorflow()
    from hpcdl.models.load import load_model
    from hpcdl.step.measure import made_up_batches
    from hpcdl.step.objective import Classification
    from hpcdl.step.optimizers import build_optimizer
    from hpcdl.step.step import build_step
    from hpcdl.strategies.allreduce.worker import AllReduceWorker

    class LateWorker(AllReduceWorker):
        """A worker that updates no weight before the last bucket has arrived."""

        def _moves_early(self, gradients: Any) -> bool:
            return False

    runtime.configure(deterministic=False, seed=1)
    model = load_model(given.model, classes=None, input_shape=None)
    optimizer = OptimizerConfig(optimizer=given.optimizer)
    context = Context(
        info=find_strategy(given.strategy),
        communicator=everybody,
        num_workers=everybody.size,
        num_servers=0,
        exchange=ExchangeConfig(strategy=given.strategy),
        optimizer=optimizer,
    )
    workers = {"late": LateWorker(context), "early": AllReduceWorker(context)}
    steps = {
        kind: build_step(model, build_optimizer(optimizer, model.trainable_variables), worker, Classification())
        for kind, worker in workers.items()
    }
    workers["late"].start(model.weights)
    images, labels = next(made_up_batches(model, given.batch, everybody.rank))
    found: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in steps} for name in ("step", "processor")}
    for number in range(WARMUP + given.steps):
        for kind in steps if number % 2 else reversed(steps):
            workers[kind].before_step(number)
            everybody.barrier()
            began = time.perf_counter(), time.process_time()
            float(steps[kind](images, labels)[0])
            own = time.perf_counter() - began[0], time.process_time() - began[1]
            most = [max(times) for times in zip(*everybody.allgather_json(own), strict=True)]
            if number >= WARMUP:
                for name, took in zip(found, most, strict=True):
                    found[name][kind].append(took)
    if everybody.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
