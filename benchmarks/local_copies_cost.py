"""Cost of copies of the state in the node's memory: steps with and without them, in turn in one run.

    python benchmarks/local_copies_cost.py [--ranks 2] [--every 10] [--pairs 8] [--model resnet50]

Ranks of one core each, `ring`, batch 8. A pair is a row of `--every` steps that begins with a copy, written by a thread
during the steps, and a row without. Prints the ratio of the two (median and quartiles over the pairs), and how long a
copy stalls training.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import time

from trainer_on_rank import DATA, build, run_on_ranks

from hpcdl.checkpoint.memory import LocalCopies, place
from hpcdl.core.processes.lifeline import SHARED_MEMORY
from hpcdl.core.storage.lock import writing
from hpcdl.core.units import format_bytes


def main() -> None:
    """Start the ranks, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--model", choices=DATA, default="resnet50")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        sys.exit(run_on_ranks(__file__, options.ranks, sys.argv[1:]))
    measure(options.every, options.pairs, options.model)


def measure(every: int, num_pairs: int, model: str) -> None:
    """Measure on one rank; rank 0 prints the results."""
    settings = {"model": model, "data": DATA[model], "batch-size": 8, "optimizer": "momentum"}
    parts, communicator, run_dir = build(settings)
    folder = place(SHARED_MEMORY, run_dir, "benchmark")
    parts.saver.copies = LocalCopies(folder, run_dir, communicator.rank, every, print)
    parts.start()
    batches, began = parts.batches(), time.monotonic()
    stalls = []

    def row(copied: bool) -> float:
        """Return the seconds of `every` steps; if `copied`, a copy begins before the first of them."""
        parts.saver.copies.wait()
        communicator.barrier()
        start_s = time.perf_counter()
        if copied:
            parts.saver.copies.resume(0)  # makes a copy due in any case
            parts.saver.copy()
            stalls.append(time.perf_counter() - start_s)
        for _ in range(every):
            parts.host.run_one(batches, began)
        return time.perf_counter() - start_s

    # Lock the folder as a run does: other runs on this node remove copies without a writer.
    held = writing(run_dir) if communicator.rank == 0 else contextlib.nullcontext()
    with held, parts.saver.copies.until_over():
        for _ in range(every):
            parts.host.run_one(batches, began)
        row(True)  # warms up the memory
        stalls.clear()
        pairs = [(row(True), row(False)) for _ in range(num_pairs)]
        size = sum(path.stat().st_size for path in folder.glob("*.npz")) if communicator.rank == 0 else 0
        parts.saver.copies.wait()
    communicator.barrier()
    if communicator.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        show([copied / plain for copied, plain in pairs], statistics.median(plain for _, plain in pairs), stalls, size)


def show(ratios: list[float], plain_s: float, stalls: list[float], num_bytes: int) -> None:
    """Print the ratios."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{format_bytes(num_bytes)} in memory; a row with a copy / without: {middle:.4f} [{low:.4f}, {high:.4f}]")
    stall_s = statistics.median(stalls)
    print(f"training is held up for {1e3 * stall_s:.1f} ms a copy, {100 * stall_s / plain_s:.3f} % of a row")


if __name__ == "__main__":
    main()
