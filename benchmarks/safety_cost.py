"""Cost of the safety checks in a step of ResNet-50: each is timed inside real steps, in one run.

    python benchmarks/safety_cost.py [--ranks 2] [--steps 12] [--model resnet50]

Ranks of one core each, `ring`, batch 8. Timed on every rank: the check of the loss, the check of the averaged
gradients, the agreement on stopping and saving (including the wait for other ranks), the notes of the rank's progress,
the processor time of the watchdog's thread, and the comparison of all weights over the ranks, of which a step carries
one part in --divergence-check-steps (1000). Differences between runs with and without them would be lost in the noise
of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from trainer_on_rank import DATA, build, run_on_ranks

from hpcdl.comm.observed import RankMonitor
from hpcdl.step import host
from hpcdl.strategies.base import graph
from hpcdl.supervision.control import Control, check_same_weights
from hpcdl.supervision.watchdog import Actions, Watchdog

PARTS = ("loss", "gradients", "agreement", "notes", "watch", "weights")


class Stopwatch:
    """Add up the time of wrapped calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time added up."""

        def timed(*arguments: Any, **named: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[name] += time.perf_counter() - start_s

        return timed


class TimedWatch(Watchdog):
    """A watchdog that records the processor time of its thread."""

    cpu_s = 0.0

    def _run(self) -> None:
        super()._run()
        self.cpu_s = time.thread_time()


def main() -> None:
    """Start the ranks, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", choices=DATA, default="resnet50")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        sys.exit(run_on_ranks(__file__, options.ranks, sys.argv[1:]))
    measure(options.steps, options.model)


def measure(num_steps: int, model: str) -> None:
    """Measure on one rank; rank 0 prints the means over the ranks."""
    settings = {"model": model, "data": DATA[model], "batch-size": 8, "optimizer": "momentum"}
    parts, communicator, folder = build(settings)
    config = parts.config
    stopwatch = Stopwatch()
    parts.start()
    graph.all_finite = stopwatch.wrap("gradients", graph.all_finite)  # as the exchange calls it
    host.check_loss = stopwatch.wrap("loss", host.check_loss)  # as the loop calls it
    RankMonitor.doing = stopwatch.wrap("notes", RankMonitor.doing)  # type: ignore[method-assign]
    control = Control(communicator, parts.stop, parts.worker, interval=parts.saver.interval, time_limit_s=3600)
    agree = stopwatch.wrap("agreement", control.after_step)
    watch = TimedWatch(monitor=parts.seen, folder=folder / "watch", actions=Actions(end=print))
    watch.start()
    batches, began = parts.batches(), time.monotonic()
    for _ in range(2):
        parts.host.run_one(batches, began)
    stopwatch.seconds.clear()
    steps = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        parts.host.run_one(batches, began)
        agree()
        steps.append(time.perf_counter() - start_s)
    watch.stop()
    checks = []
    named = {variable.path: variable for variable in parts.model.trainable_variables}
    for _ in range(3):
        communicator.barrier()
        start_s = time.perf_counter()
        check_same_weights(named, communicator, "between steps", "")
        checks.append(time.perf_counter() - start_s)
    per_step = {name: seconds / num_steps for name, seconds in stopwatch.seconds.items()}
    per_step["watch"] = watch.cpu_s / num_steps
    per_step["weights"] = statistics.median(checks) / config.safety.divergence_check_steps
    gathered = communicator.allgather_json([per_step, statistics.median(steps), statistics.median(checks)])
    if communicator.rank == 0:
        show(gathered)


def show(gathered: list[Any]) -> None:
    """Print the parts of a step's time."""
    step_s = statistics.fmean(row[1] for row in gathered)
    check_s = statistics.fmean(row[2] for row in gathered)
    print(f"step {step_s:.3f} s; one comparison of all weights {1e3 * check_s:.0f} ms")
    total = 0.0
    for name in PARTS:
        seconds = statistics.fmean(row[0].get(name, 0.0) for row in gathered)
        total += seconds
        print(f"{name:<12}{1e6 * seconds:10.1f} us a step {100 * seconds / step_s:8.4f} %")
    print(f"{'all':<12}{1e6 * total:10.1f} us a step {100 * total / step_s:8.4f} %")


if __name__ == "__main__":
    main()
