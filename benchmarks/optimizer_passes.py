"""One update of all variables by hpcdl's optimizers, beside Keras's own operations, in turn in one process.

    python -m benchmarks.optimizer_passes [--network resnet50] [--cores 1] [--tries 9] [--rules adam,lars]

A rule with `+decay` has weight decay 0.01: adam+decay is AdamW. LARS, which Keras lacks, is written here with Keras's
operations. Gradients are given, and nothing else is computed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.fast_kernels import engine_on

RULES = (
    "sgd", "momentum", "nesterov", "adam", "sgd+decay", "momentum+decay", "nesterov+decay", "adam+decay", "lars+decay",
)  # fmt: skip
DECAY = 0.01


def main() -> None:
    """Print a row for each rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--tries", type=int, default=9)
    parser.add_argument("--rules", default=",".join(RULES))
    options = parser.parse_args()
    unknown = sorted(set(options.rules.split(",")) - set(RULES))
    if unknown:
        parser.error(f"unknown rule {unknown[0]}; there are {', '.join(RULES)}")
    engine_on(options.cores)

    import keras
    import numpy
    import tensorflow as tf

    from hpcdl.models.load import load_model

    generator = numpy.random.default_rng(0)
    model = load_model(options.network)
    start = [numpy.asarray(one) for one in model.trainable_variables]
    gradients = [tf.constant(generator.standard_normal(one.shape, numpy.float32)) for one in start]
    count = sum(one.size for one in start)
    print(f"{options.network}, {len(start)} variables of {count:,} numbers, {options.cores} core(s), medians")
    print(f"{'':16s}{'Keras ms':>10s}{'hpcdl ms':>10s}{'ratio':>8s}{'processor':>11s}")
    for rule in options.rules.split(","):
        pair = []
        for make in (of_keras, of_hpcdl):
            variables = [keras.Variable(value) for value in start]
            pair.append(update(make(rule, variables), variables, gradients))
        show(rule, pair, options.tries)


def update(optimizer: Any, variables: list[Any], gradients: list[Any]) -> Callable[[], Any]:
    """Return one update as a graph, called once already."""
    import tensorflow as tf

    apply = tf.function(lambda given: optimizer.apply(given, variables), autograph=False)
    apply(gradients)
    return lambda: apply(gradients)


def of_hpcdl(rule: str, variables: list[Any]) -> Any:
    """Return the optimizer that `train` uses."""
    from hpcdl.config.schema import OptimizerConfig
    from hpcdl.step.optimizers import build_optimizer

    name, _, decay = rule.partition("+")
    return build_optimizer(OptimizerConfig(optimizer=name, weight_decay=DECAY if decay else 0.0), variables)


def of_keras(rule: str, variables: list[Any]) -> Any:
    """Return the same rule with Keras's operations."""
    import keras

    name, _, decay = rule.partition("+")
    weight_decay = DECAY if decay else None
    if name == "lars":
        optimizer = plain_lars(0.01, momentum=0.9, trust=0.001, decay=weight_decay or 0.0)
    elif name == "adam":
        optimizer = keras.optimizers.Adam(0.01, weight_decay=weight_decay)
    else:
        momentum = 0.0 if name == "sgd" else 0.9
        optimizer = keras.optimizers.SGD(
            0.01, momentum=momentum, nesterov=name == "nesterov", weight_decay=weight_decay
        )
    if name != "lars" and weight_decay:
        optimizer.exclude_from_weight_decay(var_list=[one for one in variables if len(one.shape) <= 1])
    optimizer.build(variables)
    return optimizer


def plain_lars(learning_rate: float, **settings: float) -> Any:
    """hpcdl's LARS with one Keras operation for each product and sum."""
    from keras import ops

    from hpcdl.step.optimizers import Lars

    class PlainLars(Lars):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            rate = ops.cast(learning_rate, variable.dtype)
            velocity = self.velocities[self._get_variable_index(variable)]
            if len(variable.shape) > 1:
                weight_norm, gradient_norm = (ops.norm(ops.reshape(one, [-1])) for one in (variable, gradient))
                local = self.trust * weight_norm / (gradient_norm + self.decay * weight_norm)
                usable = ops.logical_and(weight_norm > 0, gradient_norm > 0)
                rate = rate * ops.where(usable, local, 1.0)
                gradient = gradient + self.decay * variable
            moved = self.momentum * velocity + rate * gradient
            self.assign(velocity, moved)
            self.assign_sub(variable, moved)

    return PlainLars(learning_rate, **settings)


def show(rule: str, pair: list[Callable[[], Any]], tries: int) -> None:
    """Time both in turn, and print one row."""
    taken: list[list[tuple[float, float]]] = [[], []]
    for number in range(tries):
        for index in (0, 1) if number % 2 else (1, 0):
            began, worked = time.perf_counter(), time.process_time()
            pair[index]()
            taken[index].append((time.perf_counter() - began, time.process_time() - worked))
    keras_ms, own_ms = (statistics.median(clock for clock, _ in own) * 1e3 for own in taken)
    ratio, work = (statistics.median(b[kind] / a[kind] for a, b in zip(*taken, strict=True)) for kind in (0, 1))
    print(f"{rule:16s}{keras_ms:10.2f}{own_ms:10.2f}{ratio:8.3f}{work:11.3f}", flush=True)


if __name__ == "__main__":
    main()
