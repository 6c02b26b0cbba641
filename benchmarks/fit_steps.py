"""A step of `hpcdl train` on one rank beside one of Keras's `fit`, with several steps per call and with one.

    python benchmarks/fit_steps.py [--model lenet] [--batch-size 16] [--rounds 7] [--steps 200] [--cores 1]
        [--several 20] [--without-xla]

All kinds take turns in one process, on the same samples: hpcdl reads its shards, `fit` has them in memory. `bare` is
hpcdl's loop in the graph without time stamps, NaN check, heartbeat, journal and clock: the difference is their cost.
Prints medians of the rounds and their minimum; on a busy machine processor time is more reliable than wall time, and
many short rounds more than a few long ones. `--steps` is a multiple of `--several`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer_on_rank import FOLDER_VARIABLE, build

DATA = {"lenet": "28x28x1:10", "cifar10-quick": "32x32x3:10", "resnet50": "224x224x3:1000"}
"""Synthetic samples by model."""
RATE, MOMENTUM = 1e-4, 0.9
POOL = 256
"""Number of samples over which `fit` iterates."""


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DATA, default="lenet")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--several", type=int, default=20, help="steps an execution of `fit`, and a call of `bare`")
    parser.add_argument("--without-xla", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpcdl-benchmark-", dir=os.environ.get("TMPDIR", ".")) as folder:
        measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure rounds of steps of every kind in turn."""
    os.environ[FOLDER_VARIABLE] = str(folder)
    data = sharded(f"synthetic:{DATA[options.model]}@{options.samples}", folder / "data")
    settings = {
        "model": options.model, "data": str(data), "strategy": "single", "batch-size": options.batch_size,
        "steps": 10**9, "optimizer": "momentum", "momentum": MOMENTUM, "learning-rate": RATE,
    }  # fmt: skip
    made = {f"hpcdl, {told}": build({**settings, "steps-per-call": most})[0] for told, most in (
        ("one a call", 1), ("auto", "auto"),
    )}  # fmt: skip
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(1))[: options.cores])
    kinds = {name: of_train(parts) for name, parts in made.items()}
    kinds |= {"hpcdl, bare": bare(made["hpcdl, auto"], options.several)} | of_fit(made["hpcdl, auto"], options)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(options.rounds + 1):
        for name, steps in kinds.items():
            began_s, worked_s = time.perf_counter(), time.process_time()
            steps(options.steps)
            if number:  # the first one traces
                spent = (time.perf_counter() - began_s, time.process_time() - worked_s)
                taken[name].append((spent[0] / options.steps * 1e3, spent[1] / options.steps * 1e3))
    show(taken)


def sharded(source: str, folder: Path) -> Path:
    """Write the samples of `source` as shards."""
    line = [sys.executable, "-m", "hpcdl", "shard", source, str(folder)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def of_train(parts: Any) -> Callable[[int], None]:
    """Return steps of the training loop."""
    began, batches = parts.start(), parts.batches()

    def steps(num_steps: int) -> None:
        end = parts.host.position.step + num_steps
        while parts.host.position.step < end:
            parts.host.run(batches, began, end - parts.host.position.step)
        parts.outcome.clock.flush()

    return steps


def bare(parts: Any, most: int) -> Callable[[int], None]:
    """Return steps of the same model, optimizer and batches, `most` per call, without other work."""
    import tensorflow as tf

    from hpcdl.step.step import as_model_input

    model, objective, optimizer, batches = parts.model, parts.host.objective, parts.host.optimizer, parts.batches()

    def body(number: Any, iterator: Any, totals: Any) -> tuple[Any, Any]:
        images, labels = iterator.get_next()
        with tf.GradientTape() as tape:
            outputs = model(as_model_input(images), training=True)
            loss = objective.loss(labels, outputs)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return number + 1, totals + tf.concat([[tf.cast(loss, tf.float64)], objective.sums(labels, outputs)], 0)

    @tf.function(autograph=False)
    def several(iterator: Any) -> Any:
        totals = tf.zeros([1 + len(objective.names)], tf.float64)
        return tf.while_loop(
            lambda number, _: number < most,
            lambda number, totals: body(number, iterator, totals),
            (tf.constant(0), totals),
            parallel_iterations=1,
        )[1]

    def steps(num_steps: int) -> None:
        for _ in range(num_steps // most):
            several(batches.iterator).numpy()

    return steps


def of_fit(parts: Any, options: argparse.Namespace) -> Mapping[str, Callable[[int], None]]:
    """Return steps of `fit` on the same samples in memory, with and without XLA."""
    import keras
    import numpy
    import tensorflow as tf

    batches, batch_size = parts.batches(), options.batch_size
    pool = [next(batches) for _ in range(POOL // batch_size + 1)]
    batches.close()
    images = numpy.concatenate([numpy.asarray(batch[0]) for batch in pool]).astype(numpy.float32) / 255
    labels = numpy.concatenate([numpy.asarray(batch[1]) for batch in pool])

    def made(several: int, *, xla: bool) -> Callable[[int], None]:
        model = keras.models.clone_model(parts.model)
        model.compile(
            optimizer=keras.optimizers.SGD(RATE, momentum=MOMENTUM),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(5)],
            steps_per_execution=several,
            jit_compile=xla,
        )
        data = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(batch_size).prefetch(2)

        def steps(num_steps: int) -> None:
            model.fit(data, steps_per_epoch=num_steps, verbose=0, shuffle=False)

        return steps

    return {
        f"fit, {several} an execution{', XLA' if xla else ''}": made(several, xla=xla)
        for several in (1, options.several)
        for xla in ((False,) if options.without_xla else (False, True))
    }


def show(taken: Mapping[str, list[tuple[float, float]]]) -> None:
    """Print a line for each kind; the last column is the median of the ratios to `hpcdl, auto` in the same round."""
    ours = taken["hpcdl, auto"]
    for name, rounds in taken.items():
        clock, worked = (statistics.median(values) for values in zip(*rounds, strict=True))
        least = [min(values) for values in zip(*rounds, strict=True)]
        ratio, work_ratio = (
            statistics.median(own[column] / mine[column] for own, mine in zip(rounds, ours, strict=True))
            for column in (0, 1)
        )
        print(
            f"{name:<26} {clock:9.3f} ms by the clock (least {least[0]:.3f}), {worked:9.3f} of the processor "
            f"({least[1]:.3f}); {ratio:.3f}, {work_ratio:.3f}"
        )


if __name__ == "__main__":
    main()
