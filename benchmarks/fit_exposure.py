"""Exposed exchange of AlexNet's steps in `model.fit`, beside `hpcdl train`: two ranks of one core each.

    python benchmarks/fit_exposure.py [--rounds 2] [--steps 5] [--model alexnet] [--batch-size 16]

Steps of four kinds in turn, in the same processes on the same weights: the training loop's and fit's, each with the
exchange (`ring`) and without. Medians of each step's slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from trainer_on_rank import run_on_ranks

RATE = 1e-5


def main() -> None:
    """Start the ranks, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        sys.exit(run_on_ranks(__file__, 2, sys.argv[1:]))
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 prints."""
    import hpcdl

    cores = sorted(os.sched_getaffinity(0))
    hpcdl.init()
    os.sched_setaffinity(0, {cores[hpcdl.rank() % len(cores)]})
    from hpcdl.models.load import load_model
    from hpcdl.step.measure import made_up_batches

    model = load_model(options.model)
    images, labels = next(made_up_batches(model, options.batch_size, hpcdl.rank()))
    kinds = {**of_the_loop(model, images, labels), **of_fit(model, images, labels)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(options.rounds + 1):
        for kind, steps in kinds.items():
            taken = steps(1 + (options.steps if number else 1))[1:]  # the first step follows another kind of work
            if number:
                seconds[kind] += taken
    told = hpcdl.allgather_object(seconds)
    if hpcdl.rank() == 0:
        show({kind: [max(both) for both in zip(*(row[kind] for row in told), strict=True)] for kind in kinds})


def of_the_loop(model: Any, images: Any, labels: Any) -> dict[str, Callable[[int], list[float]]]:
    """Return steps of `hpcdl train`."""
    import keras

    from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
    from hpcdl.scripts.process.session import communicator
    from hpcdl.step.objective import Classification
    from hpcdl.step.step import build_step
    from hpcdl.strategies.base.strategy import Context
    from hpcdl.strategies.single import SingleWorker
    from hpcdl.strategies.table import find_strategy, load_strategy

    info, group = find_strategy("ring"), communicator()
    context = Context(
        info=info, communicator=group, num_workers=group.size, num_servers=0,
        exchange=ExchangeConfig(strategy="ring"), optimizer=OptimizerConfig(),
    )  # fmt: skip

    def made(worker: Any) -> Callable[[int], list[float]]:
        step = build_step(model, keras.optimizers.SGD(RATE, momentum=0.9), worker, Classification())

        def taken(num_steps: int) -> list[float]:
            found = []
            for _ in range(num_steps):
                group.barrier()
                began_s = time.perf_counter()
                float(step(images, labels)[0])
                found.append(time.perf_counter() - began_s)
            return found

        return taken

    return {"train, with": made(load_strategy(info).worker(context)), "train, without": made(SingleWorker())}


def of_fit(model: Any, images: Any, labels: Any) -> dict[str, Callable[[int], list[float]]]:
    """Return steps of `model.fit`."""
    import keras
    import tensorflow as tf

    import hpcdl

    class Timed(keras.callbacks.Callback):
        """A callback by which ranks begin each step together."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.seconds: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            hpcdl.barrier()
            self._began_s = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seconds.append(time.perf_counter() - self._began_s)

    data = tf.data.Dataset.from_tensors((images, labels)).repeat()

    def made(optimizer: Any) -> Callable[[int], list[float]]:
        own = keras.Model(model.inputs, model.outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        own.compile(optimizer=optimizer, loss=loss, jit_compile=False)
        timed = Timed()

        def taken(num_steps: int) -> list[float]:
            own.fit(data, steps_per_epoch=num_steps, verbose=0, shuffle=False, callbacks=[timed])
            return timed.seconds

        return taken

    def optimizer() -> Any:
        return keras.optimizers.SGD(RATE, momentum=0.9)

    return {"fit, with": made(hpcdl.DistributedOptimizer(optimizer())), "fit, without": made(optimizer())}


def show(seconds: dict[str, list[float]]) -> None:
    """Print one line of the exposed time for each way to train."""
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    for kind in ("train", "fit"):
        step_s, compute_s = medians[f"{kind}, with"], medians[f"{kind}, without"]
        print(
            f"{kind:<6} with {step_s:.3f} s, without {compute_s:.3f} s, exposed {step_s - compute_s:.3f} s, "
            f"efficiency {compute_s / step_s:.3f} ({len(seconds[f'{kind}, with'])} steps)"
        )


if __name__ == "__main__":
    main()
