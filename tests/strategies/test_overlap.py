"""The graph of a step, by strategy: what its first bucket waits for, and which gradients stop it."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from hpcdl.comm.threads import ThreadCommunicator, alone, run
from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
from hpcdl.core.errors import NotFiniteError, originals
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.table import STRATEGIES, find_strategy, load_strategy

tf = pytest.importorskip("tensorflow")
ALL_REDUCES = [name for name, info in STRATEGIES.items() if info.features.keras_fit and not info.features.servers
               and not info.features.elastic and not info.features.periodic and name != "single"]  # fmt: skip


def graph_of_step(strategy: str) -> Any:
    """Return the graph of worker 0's step: a network of three layers, each variable a bucket."""
    import keras

    from hpcdl.step.objective import Classification
    from hpcdl.step.optimizers import build_optimizer
    from hpcdl.step.step import build_step

    layers = [keras.layers.Dense(5, activation="tanh", name=name) for name in ("first", "second", "third")]
    model = keras.Sequential([keras.Input((4,)), *layers])

    def rank(communicator: ThreadCommunicator) -> Any:
        context = Context(
            info=find_strategy(strategy),
            communicator=communicator,
            num_workers=2,
            num_servers=0,
            exchange=ExchangeConfig(strategy=strategy, bucket_size=1),
            optimizer=OptimizerConfig(),
        )
        worker = load_strategy(context.info).worker(context)
        if communicator.rank:
            return None
        optimizer = build_optimizer(OptimizerConfig(), model.trainable_variables, loss_scaling=False)
        step: Any = build_step(model, optimizer, worker, Classification())
        batch = tf.TensorSpec((8, 4), tf.float32), tf.TensorSpec((8,), tf.int64)
        return step.__wrapped__.get_concrete_function(*batch).graph

    return run(2, rank)[0]


def before(operation: Any) -> set[str]:
    """Return the names of all operations that must run before `operation`."""
    found: set[str] = set()
    waiting = [operation]
    while waiting:
        one = waiting.pop()
        new = [*(tensor.op for tensor in one.inputs), *one.control_inputs]
        waiting += [other for other in new if other.name not in found]
        found |= {other.name for other in new}
    return found


@pytest.mark.parametrize("strategy", ALL_REDUCES)
def test_the_first_bucket_does_not_wait_for_the_first_layers_gradient(strategy: str) -> None:
    """The first bucket does not wait for the first layer's gradient, which comes last.

    TensorFlow orders Python functions by itself: one that waits for all gradients would delay the others.
    """
    operations = graph_of_step(strategy).get_operations()
    last_gradient = {one.name for one in operations if "gradient_tape" in one.name and "first" in one.name}
    assert last_gradient
    exchanges = [one for one in operations if one.type == "PyFunc"]
    waits = [bool(before(one) & last_gradient) for one in exchanges]
    assert len(exchanges) >= 6 and waits[-1]
    assert waits.index(True) >= 4, "third and second layer, kernel and bias, leave before"
    (stamp,) = (one for one in operations if one.type == "PyFuncStateless")
    assert stamp.name in before(exchanges[-1]) and stamp.name not in before(exchanges[3])


@pytest.mark.parametrize("strategy", ALL_REDUCES)
def test_one_rank_alone_is_stopped_by_what_is_not_finite_and_not_by_what_is_large(strategy: str) -> None:
    """A rank that trains alone checks its gradients itself: gradients of 1e30, whose squares overflow, pass."""
    context = Context(
        info=find_strategy(strategy),
        communicator=alone(),
        num_workers=1,
        num_servers=0,
        exchange=ExchangeConfig(strategy=strategy),
        optimizer=OptimizerConfig(),
    )
    worker = load_strategy(context.info).worker(context)
    step = tf.function(lambda gradient: worker.sum_up([gradient], ["kernel"])[0])
    large = tf.fill((40,), 1e30)
    assert numpy.array_equal(step(large), large)
    with pytest.raises(NotFiniteError, match="the gradient of kernel is not finite on rank 0"), originals():
        step(large * 1e30)
