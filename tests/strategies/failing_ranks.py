"""Ranks whose step fails: `python failing_ranks.py CASES.json OUT.json` under mpiexec, one TensorFlow for all.

A case fails at its second step: by NaN in one worker's gradients (the loss stays finite), or by an error that every
worker's communicator raises in the exchange. Rank 0 writes the result of each worker's step, and whether its weights
changed.
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
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig  # noqa: E402
from hpcdl.core import errors  # noqa: E402
from hpcdl.step.objective import Classification  # noqa: E402
from hpcdl.step.optimizers import build_optimizer  # noqa: E402
from hpcdl.step.step import build_step  # noqa: E402
from hpcdl.strategies.base import graph  # noqa: E402
from hpcdl.strategies.base.strategy import Context, Worker  # noqa: E402
from hpcdl.strategies.table import find_strategy, load_strategy  # noqa: E402

TEXT = "planted on 3 {ranks}: 50 % \u00fc of them"
BATCH = 4
LATE_S = 2.0
"""Delay in seconds of the case's late worker: long enough for the other worker's gradient to be the one that counts."""
BROKEN = {"isend", "irecv", "wait_any", "allreduce", "barrier"}


class Breaking:
    """A communicator that raises the error in `planted`, if it has one; so do communicators made from it."""

    def __init__(self, inner: Any, planted: list[Exception]) -> None:
        self._inner, self._planted = inner, planted

    def duplicate(self) -> Breaking:
        return Breaking(self._inner.duplicate(), self._planted)

    def split(self, color: int, key: int = 0) -> Breaking:
        return Breaking(self._inner.split(color, key), self._planted)

    def __getattr__(self, name: str) -> Any:
        if name in BROKEN and self._planted:
            raise self._planted[0]
        return getattr(self._inner, name)


def network() -> tuple[Any, Any]:
    """Return a classifier, and the variable that makes the gradient of its first layers NaN."""
    bad = keras.Variable(0.0, trainable=False, name="bad")

    @tf.custom_gradient
    def spoiled(values: Any) -> Any:
        return tf.identity(values), lambda upstream: upstream + tf.where(bad.value > 0, float("nan"), 0.0)

    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(300, name="first")(inputs)
    hidden = keras.layers.ReLU()(keras.layers.Lambda(spoiled)(hidden))
    return keras.Model(inputs, keras.layers.Dense(10, name="last")(hidden)), bad


def judged(case: dict[str, Any], worker: Worker, model: Any) -> list[Any]:
    """Return the weights that a fault must not change.

    If workers exchange weights after their own update, a failed exchange must not change the shared weights.
    """
    if case["fault"] != "nan" and find_strategy(case["strategy"]).features.periodic:
        center = worker.center()
        assert center is not None
        return [value.copy() for value in center]
    return [variable.numpy() for variable in model.trainable_variables]


def work(case: dict[str, Any], worker: Worker, rank: int, planted: list[Exception]) -> dict[str, Any]:
    """Take one step that succeeds and one that fails; return the error and whether weights changed."""
    model, bad = network()
    optimizer = build_optimizer(
        OptimizerConfig(optimizer=case["optimizer"]), model.trainable_variables, loss_scaling=case["skips"]
    )
    worker.loss_share = worker.loss_share if case["servers"] == 0 else 1.0
    step = build_step(model, optimizer, worker, Classification(), case["accumulate"])
    worker.start([*model.weights, *optimizer.variables])
    generator = numpy.random.default_rng(rank)
    images = tf.constant(generator.random((BATCH, 8), numpy.float32))
    labels = tf.constant(generator.integers(0, 10, BATCH))
    worker.learning_rate = 0.01
    worker.before_step(0)
    step(images, labels)
    worker.after_step(0)
    before = judged(case, worker, model)
    raised: Exception | None = None
    if case["fault"] == "nan":
        bad.assign(float(rank == 1))
        worker.before_step(1)
    else:
        fault = getattr(errors, case["fault"])(TEXT)
        # Raise before a background exchange has started: otherwise its messages are never received, and a server that
        # has answered waits in vain for its next answer to be received. `ps` announces the step first.
        beside = bool(find_strategy(case["strategy"]).features.optimizers)
        planted += [fault] * beside
        worker.before_step(1)
        planted[:] = [fault]
    if rank == case["late"]:
        time.sleep(LATE_S)
    try:
        loss = float(step(images, labels)[0])
        assert numpy.isfinite(loss)
    except Exception as error:  # noqa: BLE001  whatever it is, the test judges it
        raised = error
    after = judged(case, worker, model)
    if planted:  # finish in order what other ranks wait for
        planted.clear()
        step(images, labels)
        worker.after_step(1)
    worker.finish()
    return {
        "error": type(raised).__name__,
        "text": str(raised),
        "finite": all(numpy.isfinite(value).all() for value in after),
        "moved": any((one != other).any() for one, other in zip(before, after, strict=True)),
    }


def run_case(case: dict[str, Any], everybody: Any) -> list[Any]:
    """Return the result of each rank's second step."""
    info = find_strategy(case["strategy"])
    planted: list[Exception] = []
    num_ranks = case["workers"] + case["servers"]
    group = everybody.split(int(everybody.rank < num_ranks))
    found: dict[str, Any] = {}
    if everybody.rank < num_ranks:
        context = Context(
            info=info,
            communicator=Breaking(group, planted),
            num_workers=case["workers"],
            num_servers=case["servers"],
            exchange=ExchangeConfig(**{"bucket_size": 4000, **case["exchange"]}),
            optimizer=OptimizerConfig(optimizer=case["optimizer"]),
            elastic=ElasticConfig(**case["elastic"]),
            deterministic=True,
        )
        strategy = load_strategy(info)
        if context.is_worker:
            found = work(case, strategy.worker(context), group.rank, planted)
        else:
            strategy.server(context).serve()
    gathered: list[Any] = everybody.allgather_json(found)
    return gathered[: case["workers"]]


def main() -> None:
    """Run the cases of a file."""
    runtime.configure(deterministic=True, seed=7)
    graph.FIRST_WORD_S = 0.0
    everybody = world()
    results = [run_case(case, everybody) for case in json.loads(Path(sys.argv[1]).read_text())]
    if everybody.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
