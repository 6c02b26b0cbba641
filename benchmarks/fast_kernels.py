"""Steps and layers with hpcdl's fast kernels, beside Keras's own operations.

    python -m benchmarks.fast_kernels [--networks resnet50,googlenet] [--batch-size 8] [--cores 1] [--tries 5]
        [--onednn on|off] [--layers | --losses]

Whole steps (forward, backward, update with momentum) of one worker without an exchange: the same network and samples
with and without, in turn in one process. `--layers` times only the operations of the table, forward and backward.
Processor time is printed beside wall time: with one core it is more reliable on a shared machine. `--losses`: the
difference of the losses over 20 steps with and without fast kernels; and by rounding alone, with Keras's operations
on inputs that differ in one bit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

NETWORKS = {
    "lenet": (28, 28, 1), "cifar10-quick": (32, 32, 3), "resnet50": (224, 224, 3), "googlenet": (224, 224, 3),
    "alexnet": (227, 227, 3), "vgg19": (224, 224, 3), "hepcnn": (224, 224, 3), "transformer": (64, 128),
    "unet": (96, 96, 3), "lstm": (64, 128),
}  # fmt: skip
"""Shapes of one sample; the last three networks are built here."""
LAYERS: dict[str, tuple[int, ...]] = {
    "batch normalization": (8, 56, 56, 256), "batch normalization, late": (8, 7, 7, 2048),
    "batch normalization of rows": (256, 1024), "batch normalization of volumes": (4, 16, 32, 32, 32),
    "layer normalization": (16, 128, 256), "1x1 convolution": (8, 56, 56, 256), "gelu": (16, 128, 1024),
    "approximate gelu": (16, 128, 1024), "silu": (16, 128, 1024), "hard silu": (16, 128, 1024),
    "gelu of few": (8, 16, 64),
    "attention": (8, 64, 256), "attention over many": (4, 512, 256), "lstm": (8, 64, 128),
}  # fmt: skip
LOSSES = ((False, 0.0), (True, 0.0), (False, 2.0**-23))
"""With or without fast kernels, and the relative change of the inputs."""
NUM_STEPS = 20
CALLS = 10
"""Calls of a layer in sequence per timing."""
CLASSES = 10


def main() -> None:
    """Print a row for each network or layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--onednn", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--losses", action="store_true")
    options = parser.parse_args()
    engine = engine_on(options.cores, options.onednn)
    if options.losses:
        for name in options.networks.split(","):
            plain, fast, rounded = (losses(name, options.batch_size, fast=on, last=bit) for on, bit in LOSSES)
            print(f"{name:16s} fast kernels {apart(plain, fast):.1e}, a bit of the inputs {apart(plain, rounded):.1e}")
        return
    print(f"{engine}, {options.cores} core(s), batch {options.batch_size}, medians of {options.tries} tries")
    print(f"{'':32s}{'Keras ms':>10s}{'fast ms':>10s}{'ratio':>8s}{'processor':>11s}  in force")
    if options.layers:
        for name, shape in LAYERS.items():
            pair, names = layer_steps(name, shape)
            show(name, pair, names, max(options.tries, 5))
        return
    for name in options.networks.split(","):
        pair, names = network_steps(name, options.batch_size)
        show(name, pair, names, options.tries)


def engine_on(num_cores: int, onednn: str = "auto") -> str:
    """Import TensorFlow on the last cores of this process, with oneDNN `on`, `off` or default; return the engine."""
    if onednn != "auto":
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = str(int(onednn == "on"))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-num_cores:])

    from hpcdl.supervision.runtime import import_tensorflow

    import_tensorflow(fixed_shapes=True)  # as a rank that trains does
    import tensorflow as tf

    from hpcdl.step.keras_internals import onednn_in_use

    tf.config.threading.set_intra_op_parallelism_threads(num_cores)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return "oneDNN" if onednn_in_use() else "Eigen"


def show(name: str, pair: list[Callable[[], Any]], names: tuple[str, ...], tries: int) -> None:
    """Time both in turn, and print one row."""
    taken: list[list[tuple[float, float]]] = [[], []]
    for number in range(tries + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            began, worked = time.perf_counter(), time.process_time()
            pair[index]()
            if number:  # the first one traces
                taken[index].append((time.perf_counter() - began, time.process_time() - worked))
    plain, fast = (statistics.median(clock for clock, _ in own) * 1e3 for own in taken)
    ratio = statistics.median(b[0] / a[0] for a, b in zip(*taken, strict=True))
    work = statistics.median(b[1] / a[1] for a, b in zip(*taken, strict=True))
    print(f"{name:32s}{plain:10.2f}{fast:10.2f}{ratio:8.3f}{work:11.3f}  {', '.join(names) or 'none'}", flush=True)


def network_steps(name: str, batch_size: int) -> tuple[list[Callable[[], Any]], tuple[str, ...]]:
    """Return a step without and one with fast kernels, of equal networks."""
    batch = next(batches(name, batch_size))
    steps, names = [], ()
    for on in (False, True):
        step, names = step_of_network(name, fast=on)
        step(*batch)  # traced while these kernels are active
        steps.append(lambda step=step: float(step(*batch)[0]))
    return steps, names


def step_of_network(name: str, *, fast: bool, learning_rate: float = 0.01) -> tuple[Any, tuple[str, ...]]:
    """Return one worker's training step with momentum, traced at its first call, and the active kernels."""
    import keras

    from hpcdl.config.schema import OptimizerConfig
    from hpcdl.step.kernels.table import use_fast_kernels
    from hpcdl.step.objective import Classification
    from hpcdl.step.optimizers import build_optimizer
    from hpcdl.step.step import build_step
    from hpcdl.strategies.single import SingleWorker

    keras.utils.set_random_seed(1)
    model = built(name, NETWORKS[name])
    names = use_fast_kernels(model, on=fast).names
    config = OptimizerConfig(optimizer="momentum", learning_rate=learning_rate)
    optimizer = build_optimizer(config, model.trainable_variables)
    return build_step(model, optimizer, SingleWorker(), Classification()), names


def batches(name: str, batch_size: int) -> Iterator[tuple[Any, Any]]:
    """Yield generated samples with their classes, the same in each call."""
    import numpy
    import tensorflow as tf

    generator = numpy.random.default_rng(0)
    while True:
        samples = tf.constant(generator.random((batch_size, *NETWORKS[name]), numpy.float32))
        yield samples, tf.constant(generator.integers(0, CLASSES, batch_size))


def losses(name: str, batch_size: int, *, fast: bool, last: float) -> list[float]:
    """Return the loss of each of NUM_STEPS steps, each with other samples, which are multiplied by 1 + `last`."""
    step, _ = step_of_network(name, fast=fast, learning_rate=1e-3)
    given = itertools.islice(batches(name, batch_size), NUM_STEPS)
    return [float(step(samples * (1 + last), labels)[0]) for samples, labels in given]


def apart(losses: list[float], others: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(one - other) / abs(one) for one, other in zip(losses, others, strict=True))


def built(name: str, shape: tuple[int, ...]) -> Any:
    """Build a network of hpcdl's, a small transformer (two blocks), U-Net (three levels) or LSTM (two layers)."""
    import keras

    from benchmarks.peers import networks
    from hpcdl.models.load import load_model

    layers = keras.layers
    if name == "transformer":
        inputs = x = keras.Input(shape)
        for _ in range(2):
            y = layers.LayerNormalization()(x)
            x = layers.Add()([x, layers.MultiHeadAttention(4, shape[1] // 4)(y, y)])
            y = layers.Dense(4 * shape[1], activation="gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dense(shape[1])(y)])
        return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
    if name in ("lstm", "unet"):
        return networks.NETWORKS[name]()
    return load_model(name, classes=CLASSES, input_shape=shape)


def layer_steps(name: str, shape: tuple[int, ...]) -> tuple[list[Callable[[], Any]], tuple[str, ...]]:
    """Return one layer forward and backward, without and with fast kernels."""
    import keras
    import numpy
    import tensorflow as tf

    from hpcdl.step.kernels.table import use_fast_kernels

    layers = keras.layers
    if name.startswith("batch") or name == "lstm":
        layer = layers.LSTM(256, return_sequences=True) if name == "lstm" else layers.BatchNormalization()
        named = {"training": True}
    elif name.startswith("attention"):
        named = {}
        attention = layers.MultiHeadAttention(8, 32)
        attention.build(shape, shape)

        def layer(inputs: Any) -> Any:
            return attention(inputs, inputs, training=True)

        layer.trainable_variables = attention.trainable_variables
    else:  # in a model, as in training
        named = {"training": True}
        kind = {
            "layer normalization": layers.LayerNormalization,
            "1x1 convolution": lambda: layers.Conv2D(64, 1, use_bias=False),
            "gelu": lambda: layers.Activation("gelu"),
            "gelu of few": lambda: layers.Activation("gelu"),
            "approximate gelu": lambda: layers.Lambda(lambda x: keras.activations.gelu(x, approximate=True)),
            "silu": lambda: layers.Activation("silu"),
            "hard silu": lambda: layers.Activation("hard_silu"),
        }[name]
        layer = keras.Sequential([kind()])
    generator = numpy.random.default_rng(0)
    inputs = tf.constant(generator.standard_normal(shape, numpy.float32))
    upstream = tf.constant(generator.standard_normal(layer(inputs).shape, numpy.float32))

    def made() -> Callable[[], Any]:
        @tf.function(autograph=False)
        def step(inputs: Any, upstream: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = layer(inputs, **named)
            sources = [inputs, *(variable.value for variable in layer.trainable_variables)]
            return outputs, tape.gradient(outputs, sources, upstream)

        step(inputs, upstream)

        def repeated() -> None:
            for _ in range(CALLS):
                step(inputs, upstream)

        return repeated

    pair, names = [], ()
    for on in (False, True):
        names = use_fast_kernels(on=on).names
        pair.append(made())
    return pair, names


if __name__ == "__main__":
    main()
