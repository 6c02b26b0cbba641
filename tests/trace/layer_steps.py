"""Train some steps with and without spans of layers; write the differences and the recorded spans.

`python layer_steps.py OUT.json`; first with TensorFlow's own clock, then with op determinism, which refuses it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hpcdl.supervision import runtime

runtime.silence()

import keras  # noqa: E402  TensorFlow must find its environment set
import numpy  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras import layers  # noqa: E402

from hpcdl.comm.observed import NOTHING, NoRecorder, Recorder  # noqa: E402
from hpcdl.comm.threads import run  # noqa: E402
from hpcdl.config.schema import ExchangeConfig, OptimizerConfig  # noqa: E402
from hpcdl.step.objective import Classification  # noqa: E402
from hpcdl.step.optimizers import build_optimizer  # noqa: E402
from hpcdl.step.step import build_step  # noqa: E402
from hpcdl.strategies.base.strategy import Context  # noqa: E402
from hpcdl.strategies.table import find_strategy, load_strategy  # noqa: E402

STEPS, BATCH = 4, 6


class Spans(NoRecorder):
    """A recorder that requests layers and keeps what it receives."""

    wants_layers = True

    def __init__(self) -> None:
        self.found: list[tuple[str, str, float, float]] = []

    def layers(self, spans: Iterable[tuple[str, str, float, float]]) -> None:
        self.found += spans


def chain() -> keras.Model:
    """Layers in sequence, some without weights."""
    return keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            layers.Conv2D(8, 3, activation="relu", name="first"),
            layers.BatchNormalization(name="norm"),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, name="second"),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, name="last"),
        ]
    )


def branches() -> keras.Model:
    """Two paths from one input, a layer that is called twice, and a layer with its weights in a loop."""
    inputs = keras.Input((12, 12, 3))
    stem = layers.Conv2D(4, 3, padding="same", activation="relu", name="stem")(inputs)
    left = layers.Conv2D(4, 1, name="left")(stem)
    right = layers.Conv2D(4, 3, padding="same", name="right")(stem)
    both = layers.Add()([left, right, stem])
    rows = layers.Reshape((12, 48))(both)
    shared = layers.Dense(48, name="shared")
    read = layers.LSTM(8, name="rows")(shared(shared(rows)))
    return keras.Model(inputs, layers.Dense(10, name="last")(read))


MODELS: dict[str, Callable[[], keras.Model]] = {"chain": chain, "branches": branches}


def trained(name: str, recorder: Recorder, accumulate: int) -> list[Any]:
    """Return all weights after some steps."""
    keras.utils.set_random_seed(5)
    model = MODELS[name]()
    optimizer = build_optimizer(OptimizerConfig(optimizer="adam"), model.trainable_variables, loss_scaling=False)
    info = find_strategy("single")

    def on_rank(group: Any) -> list[Any]:
        settings = {"exchange": ExchangeConfig(strategy="single"), "optimizer": OptimizerConfig()}
        context = Context(info=info, communicator=group, num_workers=1, num_servers=0, **settings)
        worker = load_strategy(info).worker(context)
        step = build_step(model, optimizer, worker, Classification(), accumulate, recorder=recorder)
        worker.start([*model.weights, *optimizer.variables])
        generator = numpy.random.default_rng(1)
        for _ in range(STEPS):
            images = tf.constant(generator.random((BATCH, 12, 12, 3), numpy.float32))
            step(images, tf.constant(generator.integers(0, 10, BATCH)))
        return [numpy.array(variable) for variable in (*model.weights, *optimizer.variables)]

    (arrays,) = run(1, on_rank)
    return arrays


def main() -> None:
    """Train each network with and without spans; then once more with op determinism."""
    results: dict[str, Any] = {}
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    for clock in ("own", "python"):
        if clock == "python":
            tf.config.experimental.enable_op_determinism()
        for name, accumulate in (("chain", 1), ("branches", 1), ("chain", 2)):
            spans = Spans()
            reported, plain = trained(name, spans, accumulate), trained(name, NOTHING, accumulate)
            different = [numpy.array_equal(a, b) for a, b in zip(reported, plain, strict=True)].count(False)
            results[f"{name} {accumulate} {clock}"] = {"different": different, "spans": spans.found}
            keras.backend.clear_session()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
