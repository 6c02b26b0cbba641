"""Ranks of the test of periodic averaging: the workers' own steps on MPI ranks, against a plain program on rank 0.

`python periodic_ranks.py CASES.json OUT.jsonl` under mpiexec. The plain program is written from the papers: one Keras
model and one Keras optimizer for each worker in turn, and the outer equations in numpy, in double precision.
"""

from __future__ import annotations

import hashlib
import json
import sys
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
from hpcdl.core.protocols import Communicator  # noqa: E402
from hpcdl.step.objective import Classification  # noqa: E402
from hpcdl.step.step import build_step  # noqa: E402
from hpcdl.strategies.base.strategy import Context, Worker  # noqa: E402
from hpcdl.strategies.table import find_strategy, load_strategy  # noqa: E402

BATCH = 6
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.02),
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.002, weight_decay=0.01),
}


def network() -> keras.Model:
    """Build a smooth network with moving statistics."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(4, 3, activation="swish")(inputs)
    x = keras.layers.BatchNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def samples(worker: int, step: int) -> tuple[Any, Any]:
    """Return a worker's batch at a step."""
    generator = numpy.random.default_rng(1000 * worker + step)
    labels = generator.integers(0, 10, BATCH)
    images = generator.random((BATCH, 8, 8, 1), numpy.float32) * 0.5
    images[numpy.arange(BATCH), labels % 8, :, 0] += 0.5
    return tf.constant(images), tf.constant(labels)


def split(model: keras.Model) -> tuple[list[Any], list[Any]]:
    """Return trainable weights and moving statistics."""
    return model.trainable_variables, model.non_trainable_variables


def outer(case: dict[str, Any], x: Any, v: Any, change: Any) -> tuple[Any, Any]:
    """Apply the papers' equations to one variable; return the new weights and momentum."""
    if case["strategy"] == "local-sgd":
        return x - change, v
    rate, momentum = case["outer"]
    if case["strategy"] == "slowmo":
        gamma = case["gamma"]
        u = momentum * v + change / gamma
        return x - rate * gamma * u, u
    v = momentum * v + change
    return x - rate * (change + momentum * v), v


def plain(case: dict[str, Any]) -> tuple[list[numpy.ndarray], list[numpy.ndarray], list[list[numpy.ndarray]]]:
    """Return shared weights, shared statistics, and each worker's optimizer state at the end of a plain program."""
    workers = range(case["workers"])
    models = [network() for _ in workers]
    optimizers = [OPTIMIZERS[case["optimizer"]]() for _ in workers]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = [numpy.float64(variable) for variable in models[0].trainable_variables]
    v = [numpy.zeros_like(one) for one in x]
    for step in range(case["steps"]):
        for worker in workers:
            model = models[worker]
            images, labels = samples(worker, step)
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            trainable = model.trainable_variables
            optimizers[worker].apply(tape.gradient(loss, trainable), trainable)
        done = step + 1
        whole = done % case["period"] == 0 or done == case["steps"]
        if not whole and "period_within" in case and done % case["period_within"] == 0:
            for node in range(0, case["workers"], 2):
                pair = zip(*(models[node + one].weights for one in range(2)), strict=True)
                for both in pair:
                    mean = numpy.mean([numpy.float64(variable) for variable in both], axis=0)
                    for variable in both:
                        variable.assign(mean)
        if done % case["period"] and done > case.get("post_local_start", 0) and done != case["steps"]:
            continue
        own = [split(model) for model in models]
        for index in range(len(x)):
            change = numpy.mean([x[index] - numpy.float64(trainable[index]) for trainable, _ in own], axis=0)
            x[index], v[index] = outer(case, x[index], v[index], change)
        for index in range(len(own[0][1])):
            mean = numpy.mean([numpy.float64(statistics[index]) for _, statistics in own], axis=0)
            for _, statistics in own:
                statistics[index].assign(mean)
        if case["strategy"] == "slowmo":  # line 2 of its algorithm 1, the reset
            for optimizer in optimizers:
                for momentum in optimizer.momentums:
                    momentum.assign(numpy.zeros(momentum.shape))
        for trainable, _ in own:
            for variable, value in zip(trainable, x, strict=True):
                variable.assign(value)
    statistics = [numpy.asarray(one) for one in models[0].non_trainable_variables]
    return x, statistics, [[numpy.asarray(one) for one in optimizer.variables] for optimizer in optimizers]


def synchronous(case: dict[str, Any]) -> list[numpy.ndarray]:
    """Return the weights after plain synchronous SGD: one optimizer, which takes the mean of the workers' gradients."""
    model, optimizer = network(), OPTIMIZERS[case["optimizer"]]()
    trainable = model.trainable_variables
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for step in range(case["steps"]):
        gradients = []
        for worker in range(case["workers"]):
            images, labels = samples(worker, step)
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            gradients.append(tape.gradient(loss, trainable))
        optimizer.apply([tf.add_n(parts) / len(parts) for parts in zip(*gradients, strict=True)], trainable)
    return [numpy.asarray(one) for one in trainable]


def train(case: dict[str, Any], worker: Worker, rank: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Train the same way with the strategy's worker."""
    model, optimizer = network(), OPTIMIZERS[case["optimizer"]]()
    optimizer.build(model.trainable_variables)
    step = build_step(model, optimizer, worker, Classification())
    worker.start([*model.weights, *optimizer.variables])
    for number in range(case["steps"]):
        worker.learning_rate = case.get("gamma", 0.0)
        worker.before_step(number)
        step(*samples(rank, number))
        worker.after_step(number)
    center = worker.center()
    assert center is not None
    worker.finish()
    return list(center), [numpy.asarray(one) for one in model.non_trainable_variables], list(optimizer.variables)


def error(ours: Any, theirs: Any, nothing: float = 1e-7) -> float:
    """Return the largest difference over the largest value, of the worst tensor; up to `nothing` counts as none.

    Some biases stay near zero.
    """
    pairs = [
        (numpy.asarray(a, numpy.float64), numpy.asarray(b, numpy.float64)) for a, b in zip(ours, theirs, strict=True)
    ]
    return max(float(max(abs(a - b).max() - nothing, 0.0) / max(abs(b).max(), 1e-12)) for a, b in pairs)


def run_case(case: dict[str, Any], everybody: Communicator) -> dict[str, Any]:
    """Return how far the ranks' results are from the plain program's; empty except on rank 0."""
    takes_part = everybody.rank < case["workers"]
    group = everybody.split(0 if takes_part else 1)
    if not takes_part:
        return {}
    if "period_within" in case:
        group.host = f"node{group.rank // 2}"  # type: ignore[misc]
    rate, momentum = case.get("outer", (None, None))
    elastic = ElasticConfig(
        period=case["period"], outer_rate=rate, outer_momentum=momentum,
        post_local_start=case.get("post_local_start", 0),
        **{key: case[key] for key in ("period_within", "fragments", "overlap", "mixing") if key in case},
    )  # fmt: skip
    info = find_strategy(case["strategy"])
    context = Context(
        info=info, communicator=group, num_workers=case["workers"], num_servers=0, exchange=ExchangeConfig(),
        optimizer=OptimizerConfig(), elastic=elastic, deterministic=True, num_steps=case["steps"],
    )  # fmt: skip
    ours = train(case, load_strategy(info).worker(context), group.rank)
    numbers = [[numpy.asarray(one).tolist() for one in part] for part in ours]
    found = group.allgather_json([hashlib.sha256(b"".join(one.tobytes() for one in ours[0])).hexdigest(), numbers])
    return compared(case, found) if group.rank == 0 else {}


def compared(case: dict[str, Any], found: list[Any]) -> dict[str, Any]:
    """Return the largest difference of any rank to the plain program, which rank 0 alone runs."""
    theirs = plain(case)
    errors = [
        [error(weights, theirs[0]), error(statistics, theirs[1]), error(optimizer, theirs[2][rank])]
        for rank, (_, (weights, statistics, optimizer)) in enumerate(found)
    ]
    if case["period"] == 1:
        expected = synchronous(case)
        # The sums have another order: in a bias whose gradient's parts cancel, oneDNN's rounding errors are near 1e-7 a
        # step.
        apart = [error(weights, expected, nothing=1e-6) for _, (weights, *_) in found]
        errors = [[*own, one] for own, one in zip(errors, apart, strict=True)]
    worst = numpy.max(errors, axis=0).tolist()
    return {
        "digest": found[0][0],
        "alike": len({digest for digest, _ in found}) == 1,
        **dict(zip(("weights", "statistics", "optimizer", "synchronous"), worst, strict=False)),
    }


def main() -> None:
    """Run the cases of a file; rank 0 writes the result of each as a line of another file."""
    runtime.configure(deterministic=True, seed=7)
    everybody = world()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        result = run_case(case, everybody)
        if everybody.rank == 0:
            with Path(sys.argv[2]).open("a") as file:
                file.write(json.dumps(result) + "\n")
        tf.keras.backend.clear_session()
        everybody.allgather_json(None, patient=True)  # a barrier would keep the cores of waiting ranks busy


if __name__ == "__main__":
    main()
