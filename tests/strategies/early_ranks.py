"""Ranks that train the same steps twice: with updates while buckets are being sent, and with updates after all buckets.

`python early_ranks.py CASES.json OUT.json` under mpiexec, one TensorFlow for all cases. For each case rank 0 writes
which arrays of weights and optimizer differ between the two, over all ranks, and whether weights had changed while the
last bucket was held back.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from hpcdl.supervision import runtime

runtime.silence()
runtime.import_tensorflow()

import keras  # noqa: E402  TensorFlow must find its environment set
import numpy  # noqa: E402
import tensorflow as tf  # noqa: E402

from hpcdl.comm.mpi.communicator import world  # noqa: E402
from hpcdl.config.schema import ExchangeConfig, OptimizerConfig  # noqa: E402
from hpcdl.core.errors import NotFiniteError  # noqa: E402
from hpcdl.step.objective import Classification  # noqa: E402
from hpcdl.step.optimizers import build_optimizer  # noqa: E402
from hpcdl.step.step import build_step  # noqa: E402
from hpcdl.strategies.base.strategy import Context  # noqa: E402
from hpcdl.strategies.table import find_strategy, load_strategy  # noqa: E402

STEPS, BATCH = 4, 6
HELD_S = 60.0
"""Seconds, longer than any update takes: a weight that has not changed by then is not updated early."""


class HoldingBack:
    """The all-reduce of a strategy whose last call waits until `variable` changes, and records in `moved` if it did."""

    def __init__(self, inner: Any, num_buckets: int, variable: Any) -> None:
        self.inner, self.left, self.variable = inner, num_buckets, variable
        self.before = numpy.array(variable)
        self.moved = False

    def allreduce(self, *arguments: Any) -> None:
        self.left -= 1
        began = time.monotonic()
        while self.left == 0 and not self.moved and time.monotonic() - began < HELD_S:
            self.moved = bool((numpy.array(self.variable) != self.before).any())
        self.inner.allreduce(*arguments)


def network() -> keras.Model:
    """Build a classifier of five layers with normalisation, in which each layer fills at least one bucket."""
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(40, activation="tanh")(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    for _ in range(2):
        hidden = keras.layers.Dense(40, activation="tanh")(hidden)
    return keras.Model(inputs, keras.layers.Dense(10)(hidden))


def optimizer_of(case: dict[str, Any], variables: Any) -> Any:
    """Return the case's optimizer: hpcdl's by name with weight decay, or Keras's SGD with the arguments in `keras`."""
    if case["keras"]:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **case["keras"])
        optimizer.build(variables)
        return optimizer
    config = OptimizerConfig(optimizer=case["optimizer"], weight_decay=1e-3)
    return build_optimizer(config, variables, loss_scaling=case["skips"])


def trained(case: dict[str, Any], group: Any, early: bool) -> list[Any]:
    """Return weights and optimizer state after some steps with a changing learning rate."""
    keras.utils.set_random_seed(5)
    model = network()
    optimizer = optimizer_of(case, model.trainable_variables)
    worker = load_strategy(find_strategy(case["strategy"])).worker(context_of(case, group))
    if not early:
        worker._moves_early = lambda gradients: False
    step = build_step(model, optimizer, worker, Classification(), case["accumulate"])
    worker.start([*model.weights, *optimizer.variables])
    generator = numpy.random.default_rng(group.rank)
    for number in range(STEPS):
        optimizer.learning_rate = numpy.float32(0.1 / (1 + number))
        worker.before_step(number)
        images = tf.constant(generator.random((BATCH, 8), numpy.float32))
        step(images, tf.constant(generator.integers(0, 10, BATCH)))
        worker.after_step(number)
    worker.finish()
    assert int(optimizer.iterations) == STEPS
    return [numpy.array(variable) for variable in (*model.trainable_variables, *optimizer.variables)]


def moves_early(case: dict[str, Any], group: Any) -> bool:
    """Return whether the last layer's weights change before the last bucket arrives."""
    model = network()
    optimizer = optimizer_of(case, model.trainable_variables)
    worker = load_strategy(find_strategy(case["strategy"])).worker(context_of(case, group))
    step = build_step(model, optimizer, worker, Classification())
    worker.start([*model.weights, *optimizer.variables])
    plan = list(worker._plan([one.value for one in model.trainable_variables], case["exchange"]["bucket_size"]))
    held = worker._collective = HoldingBack(worker._collective, len(plan), model.trainable_variables[-2])
    step(tf.ones((BATCH, 8)), tf.zeros((BATCH,), tf.int64))
    worker.finish()
    return held.moved


class Spoiling:
    """The all-reduce of a strategy that puts NaN into the sums of its last bucket before they are checked."""

    def __init__(self, inner: Any, num_buckets: int) -> None:
        self.inner, self.left = inner, num_buckets

    def allreduce(self, group: Any, buffer: Any, workspace: Any, add: Any, finished: Any) -> None:
        self.left -= 1

        def spoilt(part: Any) -> None:
            if self.left == 0:
                part[-1] = numpy.nan
            finished(part)

        self.inner.allreduce(group, buffer, workspace, add, spoilt)


def ends_where_a_sum_is_spoilt(case: dict[str, Any], group: Any) -> bool:
    """Return whether a step in which the exchange produces NaN raises NotFiniteError."""
    model = network()
    optimizer = optimizer_of(case, model.trainable_variables)
    worker = load_strategy(find_strategy(case["strategy"])).worker(context_of(case, group))
    step = build_step(model, optimizer, worker, Classification())
    worker.start([*model.weights, *optimizer.variables])
    plan = list(worker._plan([one.value for one in model.trainable_variables], case["exchange"]["bucket_size"]))
    worker._collective = Spoiling(worker._collective, len(plan))
    try:
        step(tf.ones((BATCH, 8)), tf.zeros((BATCH,), tf.int64))
    except NotFiniteError:
        return True
    finally:
        worker.finish()
    return False


def context_of(case: dict[str, Any], group: Any) -> Context:
    return Context(
        info=find_strategy(case["strategy"]),
        communicator=group,
        num_workers=group.size,
        num_servers=0,
        exchange=ExchangeConfig(**{"strategy": case["strategy"], **case["exchange"]}),
        optimizer=OptimizerConfig(),
        deterministic=True,
    )


def main() -> None:
    """Run the cases of a file."""
    runtime.configure(deterministic=True, seed=7)
    everybody = world()
    results = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        if case["spoilt"]:
            found: dict[str, Any] = {"ends": ends_where_a_sum_is_spoilt(case, everybody)}
        elif case["held"]:
            found = {"moved": moves_early(case, everybody)}
        else:
            early, late = trained(case, everybody, True), trained(case, everybody, False)
            same = [numpy.array_equal(one, other) for one, other in zip(early, late, strict=True)]
            found = {"different": same.count(False), "finite": all(numpy.isfinite(one).all() for one in early)}
        results.append(everybody.allgather_json(found))
        keras.backend.clear_session()
    if everybody.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
