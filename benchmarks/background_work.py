"""Steps while a checkpoint is written, in each way of `--background`, against steps without; all in turn in one run.

    python -m benchmarks.background_work [--ranks 2] [--every 20] [--rounds 4] [--model resnet50] [--strategy ring]

Ranks of one core each, batch 8, SGD with momentum. A row is `--every` steps that begin with a checkpoint, or as many
steps without one; rows with and without alternate, and each row with one is compared with the mean of its neighbours.
A row's time ends when its checkpoint is durable, so it includes work that found no gap. Prints median, mean and range
of the ratios over the rounds, how long a checkpoint stalls training, and how much of its work was done in gaps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field

from benchmarks.trainer_on_rank import DATA, build, run_on_ranks
from hpcdl.checkpoint.background import GAPS, OFF, THREAD, BackgroundWork

WAYS = (GAPS, THREAD, OFF)


@dataclass(kw_only=True)
class Rows:
    """Results of the rows with a checkpoint, for one way."""

    ratios: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)


def main() -> None:
    """Start the ranks, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--model", choices=DATA, default="resnet50")
    parser.add_argument("--strategy", default="ring")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        sys.exit(run_on_ranks("-m", options.ranks, ["benchmarks.background_work", *sys.argv[1:]]))
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 prints."""
    values = {"batch-size": 8, "optimizer": "momentum", "strategy": options.strategy}
    parts, communicator, run_dir = build({"model": options.model, "data": DATA[options.model], **values})
    from hpcdl.checkpoint.folders import CheckpointWriter
    from hpcdl.checkpoint.interval import CheckpointInterval

    works = {way: BackgroundWork(way, communicator.monitor, print) for way in WAYS}
    writers = {way: CheckpointWriter(run_dir, parts.together, 1, work=work) for way, work in works.items()}
    # However long a row lasts, a checkpoint may wait for gaps until its end.
    parts.saver.interval = CheckpointInterval(1e6, node_mtbf_s=1.0, num_nodes=1, most_patience_s=1e5)
    parts.start()
    batches, began = parts.batches(), time.monotonic()
    found = {way: Rows() for way in WAYS}

    def row(way: str = "") -> float:
        """Return the seconds of a row on the slowest rank."""
        communicator.barrier()
        start_s = time.perf_counter()
        if way:
            parts.saver.writer = writers[way]
            parts.saver.save()
            found[way].stalls_s.append(time.perf_counter() - start_s)
        for _ in range(options.every):
            parts.host.run_one(batches, began)
        parts.saver.writer.wait()
        return float(max(communicator.allgather_json(time.perf_counter() - start_s)))

    row()
    for way in WAYS:  # warms up the memory
        parts.saver.writer = writers[way]
        parts.saver.save()
        parts.saver.writer.wait()
        found[way].stalls_s.clear()
        works[way].spent.in_gaps_s = works[way].spent.outside_s = 0.0
    before_s, plain = row(), []
    for number in range(options.rounds):
        for place in range(len(WAYS)):  # each round begins with another way
            way = WAYS[(number + place) % len(WAYS)]
            with_s, after_s = row(way), row()
            found[way].ratios.append(with_s / ((before_s + after_s) / 2))
            plain.append(after_s)
            if communicator.rank == 0:
                print(f"{way} {with_s:.2f} s, without {before_s:.2f} and {after_s:.2f} s", file=sys.stderr, flush=True)
            before_s = after_s
    spent = {way: communicator.allgather_json(vars(work.spent)) for way, work in works.items()}
    if communicator.rank == 0:
        print(f"a step without: {statistics.median(plain) / options.every:.3f} s; rows of {options.every} steps")
        for way, rows in found.items():
            show(way, rows, spent[way])
        for warning in [text for writer in writers.values() for text in writer.warnings]:
            print(warning)
    communicator.barrier()


def show(way: str, rows: Rows, spent: list[dict[str, float]]) -> None:
    """Print one line."""
    inside, outside = (sum(one[name] for one in spent) for name in ("in_gaps_s", "outside_s"))
    ratios, total = rows.ratios, inside + outside
    print(
        f"{way:<8}ratio: median {statistics.median(ratios):.4f}, mean {statistics.fmean(ratios):.4f} "
        f"({min(ratios):.4f} to {max(ratios):.4f}); held up {1e3 * statistics.median(rows.stalls_s):.1f} ms; "
        f"work of {total / len(ratios):.3f} s, {inside / total:.0%} in gaps"
    )


if __name__ == "__main__":
    main()
