"""How long a checkpoint of ResNet-50 stalls training, against a copy of its weights in memory; all in one run.

    python benchmarks/checkpoint_stall.py [--ranks 2] [--repeats 5] [--model resnet50]

Ranks of one core each, `ring`, batch 8, SGD with momentum: a checkpoint holds weights and velocities, twice the
weights. The stall is the time from the end of a step until the next one may begin, on rank 0, which writes. Also
measured: the copy of the weights into new memory, and into memory used before; and the steps during the background
write, relative to those before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy
from trainer_on_rank import DATA, build, run_on_ranks

STEPS = 2
"""Steps before each checkpoint, and while it is written."""


def main() -> None:
    """Start the ranks, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", choices=DATA, default="resnet50")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        sys.exit(run_on_ranks(__file__, options.ranks, sys.argv[1:]))
    measure(options.repeats, options.model)


def measure(repeats: int, model: str) -> None:
    """Measure on one rank; rank 0 prints."""
    settings = {"model": model, "data": DATA[model], "batch-size": 8, "optimizer": "momentum"}
    parts, communicator, _ = build(settings)
    parts.start()
    batches, began = parts.batches(), time.monotonic()

    def step() -> float:
        start_s = time.perf_counter()
        parts.host.run_one(batches, began)
        return time.perf_counter() - start_s

    weights = parts.model.get_weights()
    warm = [weight.copy() for weight in weights]
    seconds: dict[str, list[float]] = {name: [] for name in ("stall", "fresh copy", "warm copy", "before", "writing")}
    step()
    for _ in range(repeats):
        seconds["before"] += [step() for _ in range(STEPS)]
        communicator.barrier()
        start_s = time.perf_counter()
        parts.saver.save()
        seconds["stall"].append(time.perf_counter() - start_s)
        seconds["writing"] += [step() for _ in range(STEPS)]
        parts.saver.writer.wait()
        start_s = time.perf_counter()
        fresh = [weight.copy() for weight in weights]
        seconds["fresh copy"].append(time.perf_counter() - start_s)
        del fresh
        start_s = time.perf_counter()
        for target, weight in zip(warm, weights, strict=True):
            numpy.copyto(target, weight)
        seconds["warm copy"].append(time.perf_counter() - start_s)
    if communicator.rank == 0:
        show(seconds, sum(weight.nbytes for weight in weights), parts.saver.writer.warnings)
    communicator.barrier()


def show(seconds: dict[str, list[float]], num_bytes: int, warnings: list[str]) -> None:
    """Print medians and every stall."""
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        f"weights {num_bytes / 1e6:.1f} MB; stalls {', '.join(f'{1e3 * value:.1f}' for value in seconds['stall'])} ms"
    )
    for name in ("stall", "fresh copy", "warm copy"):
        print(f"{name:<12}{1e3 * median[name]:9.1f} ms")
    print(f"stall / fresh copy {median['stall'] / median['fresh copy']:.2f}")
    print(f"step before {median['before']:.3f} s, while writing {median['writing']:.3f} s")
    for warning in warnings:
        print(warning)


if __name__ == "__main__":
    main()
