"""Ranks of the equality test: every case trains a small network on a group of ranks and compares with `single`.

`python equality_ranks.py CASES.json OUT.json` under mpiexec; one TensorFlow start serves every case.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
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
from hpcdl.core.protocols import Communicator  # noqa: E402
from hpcdl.data.format.order import pass_slice  # noqa: E402
from hpcdl.models.load import load_model  # noqa: E402
from hpcdl.step.kernels.table import use_fast_kernels  # noqa: E402
from hpcdl.step.objective import Classification  # noqa: E402
from hpcdl.step.optimizers import build_optimizer  # noqa: E402
from hpcdl.step.step import build_step  # noqa: E402
from hpcdl.strategies.base.strategy import Context, Worker  # noqa: E402
from hpcdl.strategies.single import SingleWorker  # noqa: E402
from hpcdl.strategies.table import find_strategy, load_strategy  # noqa: E402

NUM_STEPS = 20


def small_residual() -> keras.Model:
    """Two residual blocks without batch normalisation: additions and shared inputs, few parameters.

    The activations are smooth: if a rectifier flips, rounding errors grow a thousandfold, however gradients are summed.
    """
    inputs = keras.Input((14, 14, 1))
    x = keras.layers.Conv2D(8, 3, padding="same", activation="swish")(inputs)
    for _ in range(2):
        y = keras.layers.Conv2D(8, 3, padding="same", activation="swish")(x)
        y = keras.layers.Conv2D(8, 3, padding="same")(y)
        x = keras.layers.Activation("swish")(keras.layers.Add()([x, y]))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def small_normalised() -> keras.Model:
    """All layers with fast kernels except batch normalization, which depends on the number of samples per worker."""
    inputs = keras.Input((10, 10, 1))
    x = keras.layers.Conv2D(8, 3)(inputs)
    y = keras.layers.Conv2D(8, 1, activation="gelu")(keras.layers.LayerNormalization()(x))
    x = keras.layers.Flatten()(keras.layers.Add()([x, y]))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


NETWORKS = {
    "normalised": small_normalised,
    "lenet": lambda: load_model("lenet", classes=10, input_shape=(28, 28, 1)),
    "residual": small_residual,
}


def samples(shape: tuple[int, ...], batch: int, step: int) -> tuple[Any, Any]:
    """Return the global batch of a step: noise with a row that shows the label, without ties for pooling to break."""
    generator = numpy.random.default_rng(1000 + step)
    labels = generator.integers(0, 10, batch)
    images = generator.random((len(labels), *shape), numpy.float32) * 0.5
    images[numpy.arange(len(labels)), labels, :, 0] += 0.5
    return images, labels


def train(case: dict[str, Any], worker: Worker, rank: int, num_slices: int) -> list[numpy.ndarray]:
    """Train from the common start; a rank takes its slice of each global batch."""
    keras.utils.set_random_seed(7)
    model = NETWORKS[case["network"]]()
    kernels = use_fast_kernels(model, on=case.get("fast", False))
    assert bool(kernels.names) == case.get("fast", False) and not kernels.warnings
    config = OptimizerConfig(optimizer=case["optimizer"], learning_rate=case["learning_rate"])
    optimizer = build_optimizer(config, model.trainable_variables)
    global_batch = case["num_workers"] * case["batch"] + case["more"]
    own = pass_slice(global_batch, rank, num_slices)
    accumulate = case["accumulate"] if num_slices > 1 else 1
    parts = tuple(len(pass_slice(len(own), part, accumulate)) for part in range(accumulate))
    weight = len(own) * num_slices / global_batch
    step = build_step(model, optimizer, worker, Classification(), accumulate, slices=parts, weight=weight)
    worker.start([*model.weights, *optimizer.variables])
    for number in range(NUM_STEPS):
        images, labels = samples(model.input_shape[1:], global_batch, number)
        mine = slice(own.start, own.stop)
        worker.before_step(number)
        step(tf.constant(images[mine]), tf.constant(labels[mine]))
        worker.after_step(number)
    worker.finish()
    return [numpy.asarray(variable.numpy()) for variable in model.trainable_variables]


@cache
def trained_alone(network: str, optimizer: str, learning_rate: float, batch: int) -> list[numpy.ndarray]:
    """Return what `single` makes of the global batches: the same for every strategy and number of workers."""
    case = {"network": network, "optimizer": optimizer, "learning_rate": learning_rate}
    return train({**case, "num_workers": 1, "batch": batch, "more": 0, "accumulate": 1}, SingleWorker(), 0, 1)


def run_case(case: dict[str, Any], everybody: Communicator) -> dict[str, Any]:
    """Return the largest difference to `single`, and whether the ranks agree bit for bit; meaningful on rank 0."""
    info = find_strategy(case["strategy"])
    num_servers = case.get("servers", 0)
    num_ranks = case["num_workers"] + num_servers
    takes_part = everybody.rank < num_ranks
    group = everybody.split(0 if takes_part else 1)
    if not takes_part:
        return {}
    context = Context(
        info=info,
        communicator=group,
        num_workers=case["num_workers"],
        num_servers=num_servers,
        exchange=ExchangeConfig(**{"bucket_size": 200_000, **case.get("exchange", {})}),
        optimizer=OptimizerConfig(optimizer=case["optimizer"], learning_rate=case["learning_rate"]),
        deterministic=True,
    )
    strategy = load_strategy(info)
    if not context.is_worker:
        strategy.server(context).serve()
        group.allgather_json(None)
        return {}
    weights = train(case, strategy.worker(context), group.rank, case["num_workers"])
    digests = group.allgather_json([hashlib.sha256(weight.tobytes()).hexdigest() for weight in weights])
    if group.rank:
        return {}
    own = [digest for digest in digests if digest is not None]
    global_batch = case["num_workers"] * case["batch"] + case["more"]
    reference = trained_alone(case["network"], case["optimizer"], case["learning_rate"], global_batch)
    errors = [float(abs(a - b).max() / abs(b).max()) for a, b in zip(weights, reference, strict=True)]
    return {"error": max(errors), "bitwise": all(digest == own[0] for digest in own)}


def main() -> None:
    """Run the cases of a file; rank 0 writes the result of each as a line of another file."""
    runtime.configure(deterministic=True, seed=7)
    everybody = world()
    cases = json.loads(Path(sys.argv[1]).read_text())
    for case in cases:
        result = run_case(case, everybody)
        if everybody.rank == 0:
            with Path(sys.argv[2]).open("a") as file:
                file.write(json.dumps(result) + "\n")
        tf.keras.backend.clear_session()
        everybody.barrier()


if __name__ == "__main__":
    main()
