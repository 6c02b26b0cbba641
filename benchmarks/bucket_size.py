"""The size that `--bucket-size auto` finds, against fixed sizes; all of them in turn in one run.

    python -m benchmarks.bucket_size [--model lenet] [--batch 16] [--rounds 20] [--hosts 4 --rate 1gbit]

By default on ranks of this node, one core each; `--hosts` needs root (tests/lab's). First the ranks find a size as a
run does at its start, without the results of earlier runs. Then they take steps with each size that divides the
gradients differently, all on the same weights.
Prints medians over the steps of the slowest rank, and that of the found size relative to the best.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks.early_updates import on_cores, on_hosts
from hpcdl.cluster.environment import placement
from hpcdl.comm.mpi.communicator import world
from hpcdl.config.schema import ExchangeConfig, ModelConfig, OptimizerConfig
from hpcdl.config.settings import AUTO
from hpcdl.core.units import format_bytes
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.table import find_strategy
from hpcdl.supervision import runtime

WARMUP = 2
FIXED = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 25 << 20, 64 << 20)


def main() -> None:
    """Start the ranks and print their results, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--strategy", default="ring")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cache:
        measure(given)
        return
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.bucket_size", *sys.argv[1:], "--cache", cache]
        answer = json.loads((on_hosts(given, command) if given.hosts else on_cores(given, command)).splitlines()[-1])
    where = f"{given.hosts} hosts, {given.rate}" if given.hosts else f"{given.ranks} ranks, a core each"
    print(f"{given.model}, batch {given.batch}, {given.strategy}; {where}; {given.rounds} rounds")
    print(f"found in {answer['found_s']:.1f} s: {answer['told']}")
    medians = {int(size): statistics.median(seconds) for size, seconds in answer["seconds"].items()}
    for size, median in medians.items():
        print(f"{format_bytes(size):>9}{median * 1e3:10.2f} ms{'  <- auto' if size == answer['chosen'] else ''}")
    print(f"auto / best fixed {medians[answer['chosen']] / min(medians.values()):.3f}")


def measure(given: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 prints the seconds of each step on the slowest rank."""
    os.environ["XDG_CACHE_HOME"] = given.cache
    place = placement()
    if not given.hosts and place is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[place.rank % len(cores)]})
    runtime.silence()
    everybody = world()
    runtime.import_tensorflow()
    from hpcdl.models.load import load_model
    from hpcdl.step.bucket_size import TrialStep, choose_buckets
    from hpcdl.step.measure import made_up_batches
    from hpcdl.step.objective import Classification
    from hpcdl.step.optimizers import build_optimizer
    from hpcdl.step.step import build_step
    from hpcdl.strategies.allreduce.worker import AllReduceWorker

    runtime.configure(deterministic=False, seed=1)
    model = load_model(given.model, classes=None, input_shape=None)
    rule, exchange = OptimizerConfig(optimizer=given.optimizer), ExchangeConfig(
        strategy=given.strategy, bucket_size=AUTO
    )  # fmt: skip
    info = find_strategy(given.strategy)
    worker = AllReduceWorker(
        Context(info=info, communicator=everybody, num_workers=everybody.size, num_servers=0,
                exchange=exchange, optimizer=rule)
    )  # fmt: skip
    worker.start(model.weights)
    batch = next(made_up_batches(model, given.batch, everybody.rank))

    def build(optimizer: Any) -> Any:
        return build_step(model, optimizer, worker, Classification())

    settings = ModelConfig(model=given.model), exchange, rule
    began = time.perf_counter()
    trial = TrialStep(model, settings, build, lambda: batch, [given.batch])
    choice = choose_buckets(worker, everybody, trial, deterministic=False)
    found_s = time.perf_counter() - began
    optimizer = build_optimizer(rule, model.trainable_variables)
    total = sum(4 * weight.value.shape.num_elements() for weight in model.trainable_variables)
    gradients = [weight.value for weight in model.trainable_variables]
    ways: dict[Any, int] = {}  # sizes that divide the gradients alike count once
    for size in (choice.bucket_bytes, total, *FIXED):
        ways.setdefault(worker.buckets(gradients, size), size)
    sizes = sorted(ways.values())
    steps = {size: build(optimizer) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(WARMUP + given.rounds):
        for size in sizes if number % 2 else reversed(sizes):
            worker.bucket_bytes = size
            everybody.barrier()
            step_began = time.perf_counter()
            float(steps[size](*batch)[0])
            took = max(everybody.allgather_json(time.perf_counter() - step_began))
            if number >= WARMUP:
                seconds[size].append(took)
    if everybody.rank == 0:
        print(json.dumps(
            {"found_s": found_s, "told": str(choice), "chosen": choice.bucket_bytes, "seconds": seconds}
        ))  # fmt: skip


if __name__ == "__main__":
    main()
