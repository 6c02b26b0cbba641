"""Cost of being able to recover in place while nothing fails: repeatable steps and others, in turn in one run.

    python benchmarks/elastic_cost.py [--ranks 2] [--pairs 12] [--model resnet50]

Ranks of one core each, `ring`, batch 8, the same weights. A repeatable step first copies what the forward pass changes,
and updates its weights once all buckets have arrived, not while they travel. Prints the ratio of the two kinds of
steps, median and quartiles over the pairs, on the slowest rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time

from trainer_on_rank import DATA, build, run_on_ranks

from hpcdl.rank.job import context_of
from hpcdl.strategies.table import load_strategy


def main() -> None:
    """Start the ranks, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--model", choices=DATA, default="resnet50")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        sys.exit(run_on_ranks(__file__, options.ranks, sys.argv[1:]))
    measure(options.pairs, options.model)


def measure(num_pairs: int, model: str) -> None:
    """Measure on one rank; rank 0 prints the results."""
    settings = {"model": model, "data": DATA[model], "batch-size": 8, "optimizer": "momentum"}
    parts, communicator, _ = build(settings)
    context = context_of(parts.run_plan, communicator)
    plain, step = parts.worker, parts.host._step
    again = load_strategy(parts.run_plan.info).worker(dataclasses.replace(context, in_place=True))
    parts.join(parts.run_plan, again, communicator, parts.journal, parts.saver.copies)
    parts.host.may_repeat()
    copy = parts.host._read_moved_by_forward
    kinds = {"as ever": (plain, step, None), "can be repeated": (again, parts.host._step, copy)}
    parts.start()
    batches, began = parts.batches(), time.monotonic()

    def one_step(kind: str) -> float:
        host = parts.host
        host.worker, host._step, host._read_moved_by_forward = kinds[kind]
        communicator.barrier()
        start_s = time.perf_counter()
        parts.host.run_one(batches, began)
        return max(communicator.allgather_json(time.perf_counter() - start_s))

    for kind in kinds:
        one_step(kind)
    pairs = []
    for number in range(num_pairs):
        took = {kind: one_step(kind) for kind in sorted(kinds, reverse=bool(number % 2))}
        pairs.append(tuple(took[kind] for kind in kinds))
    if communicator.rank == 0:
        low, middle, high = statistics.quantiles([repeated / plain_s for plain_s, repeated in pairs], n=4)
        print(f"{model}: a step of {statistics.median(plain_s for plain_s, _ in pairs):.3f} s")
        print(f"steps that can be repeated / as ever: {middle:.4f} [{low:.4f}, {high:.4f}]")


if __name__ == "__main__":
    main()
