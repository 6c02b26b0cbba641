"""Exposed exchange of a small network, beside a raw MPI_Allreduce of its bytes: two ranks of one core each.

    python benchmarks/small_exchange.py [--models lenet,small] [--strategies ring,mpi] [--rounds 300] [--without-mpi]

`small` is a network of 50 tensors, 100 kB in all. Steps with each strategy's exchange, steps without and raw in-place
all-reduces take turns in the same processes, with all ranks beginning together; a step lasts until its slowest rank
ends. Prints medians; exposed is the median difference of a round's steps. In parentheses: the first decile, which
other work on the machine disturbs least. With --without-mpi: processor time in one process whose messages do nothing,
which is the cost of the exchange without MPI and changes little on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from observed_cost import Nothing
from trainer_on_rank import run_on_ranks

RATE = 1e-5
WARM = 20
SILENT = {"ring", "mpi", "recursive-doubling", "halving-doubling"}
LAYERS, WIDTH = 25, 31
"""Layers and their width in `small`."""


def main() -> None:
    """Start the ranks, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="lenet,small")
    parser.add_argument("--strategies", help="by default ring,auto; without MPI ring,mpi")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--without-mpi", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.strategies = (options.strategies or ("ring,mpi" if options.without_mpi else "ring,auto")).split(",")
    if options.without_mpi and not set(options.strategies) <= SILENT:
        parser.error(f"--without-mpi goes with {', '.join(sorted(SILENT))}: the others need ranks that answer")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if options.without_mpi:
        measure_alone(options)
    elif not options.rank:
        sys.exit(run_on_ranks(__file__, 2, sys.argv[1:]))
    else:
        measure(options)


class Silent(Nothing):
    """The silent communicator with the operations that an exchange needs."""

    def duplicate(self) -> Silent:
        return self

    def allgather_json(self, value: Any, *, patient: bool = False) -> list[Any]:
        return [value, value]


def measure_alone(options: argparse.Namespace) -> None:
    """Measure the processor time of steps without messages."""
    from hpcdl.comm.observed import observe

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    one_thread()
    silent: Any = Silent()
    for name in options.models.split(","):
        kinds = kinds_for(name, options.strategies, options.batch_size, observe(silent))
        del kinds["raw"]
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds + WARM):
            for kind, run in kinds.items():
                began_s = time.process_time()
                run()
                seconds[kind].append(time.process_time() - began_s)
        show(name, {kind: taken[WARM:] for kind, taken in seconds.items()})


def one_thread() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)


def measure(options: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 prints."""
    import hpcdl

    cores = sorted(os.sched_getaffinity(0))
    hpcdl.init()
    os.sched_setaffinity(0, {cores[hpcdl.rank() % len(cores)]})
    from hpcdl.scripts.process.session import communicator

    one_thread()
    for name in options.models.split(","):
        kinds = kinds_for(name, options.strategies, options.batch_size, communicator())
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds + WARM):
            for kind, run in kinds.items():
                hpcdl.barrier()
                began_s = time.perf_counter()
                run()
                seconds[kind].append(time.perf_counter() - began_s)
        told = hpcdl.allgather_object({kind: taken[WARM:] for kind, taken in seconds.items()})
        if hpcdl.rank() == 0:
            slowest = {kind: [max(both) for both in zip(*(row[kind] for row in told), strict=True)] for kind in kinds}
            show(name, slowest)


def network(name: str) -> Any:
    import keras

    from hpcdl.models.load import load_model

    if name != "small":
        return load_model(name)
    layers = [keras.layers.Dense(WIDTH) for _ in range(LAYERS)]
    return keras.Sequential([keras.layers.Input((WIDTH,)), *layers])


def kinds_for(name: str, strategies: list[str], batch_size: int, group: Any) -> dict[str, Callable[[], Any]]:
    """Return steps by strategy, the one without exchange as `single`, and the raw all-reduce."""
    import keras
    import numpy

    from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
    from hpcdl.step.measure import made_up_batches
    from hpcdl.step.objective import Classification
    from hpcdl.step.step import build_step
    from hpcdl.strategies.base.strategy import Context
    from hpcdl.strategies.table import find_strategy, load_strategy

    model = network(name)
    images, labels = next(made_up_batches(model, batch_size, group.rank))
    buffer = numpy.ones(model.count_params(), numpy.float32)

    def step_of(strategy: str) -> Callable[[], Any]:
        info = find_strategy(strategy)
        context = Context(
            info=info, communicator=group, num_workers=group.size, num_servers=0,
            exchange=ExchangeConfig(strategy=strategy), optimizer=OptimizerConfig(),
        )  # fmt: skip
        worker = load_strategy(info).worker(context)
        step = build_step(model, keras.optimizers.SGD(RATE), worker, Classification())
        return lambda: float(step(images, labels)[0])

    steps = {strategy: step_of(strategy) for strategy in ["single", *strategies]}
    return {**steps, "raw": lambda: group.allreduce(buffer)}


def show(name: str, seconds: dict[str, list[float]]) -> None:
    """Print a line for each strategy."""
    without = middle_and_tenth(seconds["single"])
    print(f"{name}: without exchange {told(without)} ms")
    for kind in [kind for kind in seconds if kind != "single"]:
        middle, tenth = middle_and_tenth(seconds[kind])
        if kind == "raw":
            print(f"  one raw MPI_Allreduce {told((middle, tenth))} ms")
            continue
        pairs = zip(seconds[kind], seconds["single"], strict=True)
        exposed = statistics.median(with_s - without_s for with_s, without_s in pairs), tenth - without[1]
        print(f"  {kind:<20} with {told((middle, tenth))} ms, exposed {told(exposed)} ms{of_raw(exposed, seconds)}")


def of_raw(exposed: tuple[float, float], seconds: dict[str, list[float]]) -> str:
    """Return the ratio, if a raw all-reduce was timed."""
    if "raw" not in seconds:
        return ""
    raw = middle_and_tenth(seconds["raw"])
    return f", of raw {exposed[0] / raw[0]:.2f} ({exposed[1] / raw[1]:.2f})"


def middle_and_tenth(values: list[float]) -> tuple[float, float]:
    """Return the median and the first decile."""
    return statistics.median(values), statistics.quantiles(values, n=10)[0]


def told(values: tuple[float, float]) -> str:
    """Return both in milliseconds."""
    return f"{values[0] * 1e3:.3f} ({values[1] * 1e3:.3f})"


if __name__ == "__main__":
    main()
