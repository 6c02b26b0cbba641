"""A network with batch normalisation and dropout that records what it is fed, and can fail on one rank.

Ranks read these environment variables: RECORD_DIR, the folder for rank-R.jsonl, with a line for each training step;
STEP_S, the minimum seconds of a step; SLOW_WHILE, a file: while it exists a step of rank 1 takes SLOW_S more; FAULT
(nan, bit, error or exit), which happens on FAULT_RANK at step FAULT_STEP.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf

from hpcdl.models import lenet

_NAMES = ("HPCDL_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
RANK = int(next((os.environ[name] for name in _NAMES if name in os.environ), 0))
FAULT_STEP = int(os.environ.get("FAULT_STEP", "5"))


def fault_at(step: int) -> str:
    """Return the fault of this rank at `step`, or an empty string."""
    here = step == FAULT_STEP and int(os.environ.get("FAULT_RANK", "1")) == RANK
    return os.environ.get("FAULT", "") if here else ""


def note(images: Any, steps: Any) -> Any:
    """Record which images a step is fed; return them, or what a fault turns them into."""
    step, fault = int(steps), fault_at(int(steps))
    time.sleep(float(os.environ.get("STEP_S", "0")))
    if RANK == 1 and Path(os.environ.get("SLOW_WHILE", os.devnull)).is_file():
        time.sleep(float(os.environ["SLOW_S"]))
    if "RECORD_DIR" in os.environ:
        fed = [zlib.crc32(image.tobytes()) for image in images]
        line = json.dumps({"step": step, "at": time.time(), "images": fed})
        with (Path(os.environ["RECORD_DIR"]) / f"rank-{RANK}.jsonl").open("a") as file:
            file.write(f"\n{line}\n")
    if fault == "error":
        raise ValueError("planted")
    if fault == "exit":
        os._exit(0)
    return images * images.dtype.type("nan") if fault == "nan" else images


def damaged(scale: Any, steps: Any) -> Any:
    """Return `scale`, for the fault `bit` with one bit flipped, as failing memory would."""
    if fault_at(int(steps)) != "bit":
        return scale
    flipped = scale.copy()
    flipped.view(numpy.uint32)[...] ^= 1 << 12
    return flipped


class Probe(keras.layers.Layer):
    """A layer that multiplies by one weight and counts training steps in another, which checkpoints keep."""

    def build(self, input_shape: Any) -> None:
        """Create the two weights."""
        self.scale = self.add_weight(shape=(1, 1, 1, 1), initializer="ones", autocast=False, name="scale")
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, autocast=False, name="steps")

    def call(self, images: Any, training: bool | None = None) -> Any:
        """Record the batch and apply the fault, in training only."""
        if training:
            noted = tf.numpy_function(note, [images, tf.convert_to_tensor(self.steps)], images.dtype)
            images = tf.ensure_shape(noted, images.shape)
            scale = tf.numpy_function(damaged, [tf.convert_to_tensor(self.scale), self.steps.value], tf.float32)
            self.scale.assign(tf.reshape(scale, self.scale.shape))
            self.steps.assign_add(1)
        return images * keras.ops.cast(self.scale, images.dtype)


def build(num_classes: int, input_shape: Any) -> Any:
    """Build the network."""
    inputs = keras.Input(input_shape)
    hidden = keras.layers.Flatten()(Probe(name="probe")(inputs))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(64, activation="tanh")(hidden))
    return keras.Model(inputs, keras.layers.Dense(num_classes)(keras.layers.Dropout(0.2)(hidden)))


def build_lenet(num_classes: int, input_shape: Any) -> Any:
    """Build a LeNet that records what it is fed."""
    inputs = keras.Input(input_shape)
    return keras.Model(inputs, lenet.build(num_classes, input_shape)(Probe(name="probe")(inputs)))


@keras.saving.register_keras_serializable("planted")
class Overflow(keras.layers.Layer):
    """A layer that overflows outside of training."""

    def call(self, outputs: Any, training: bool | None = None) -> Any:
        """Return the inputs in training, otherwise their product with infinity."""
        return outputs if training else outputs * numpy.inf


def build_overflowing(num_classes: int, input_shape: Any) -> Any:
    """Build a network whose loss is finite in training and infinite in evaluation."""
    inputs = keras.Input(input_shape)
    return keras.Model(inputs, Overflow()(keras.layers.Dense(num_classes)(keras.layers.Flatten()(inputs))))


class Idle(keras.layers.Layer):
    """A layer with a weight that does not affect its output."""

    def build(self, input_shape: Any) -> None:
        """Create the weight."""
        self.add_weight(shape=(3,), initializer="ones", name="idle")

    def call(self, images: Any) -> Any:
        """Return the inputs unchanged."""
        return images


def build_with_idle_weight(num_classes: int, input_shape: Any) -> Any:
    """Build a network with a weight that no gradient reaches."""
    inputs = keras.Input(input_shape)
    hidden = keras.layers.Flatten()(Idle(name="aside")(inputs))
    return keras.Model(inputs, keras.layers.Dense(num_classes)(hidden))


def build_cut_off(num_classes: int, input_shape: Any) -> Any:
    """Build a network that no gradient reaches at all."""
    inputs = keras.Input(input_shape)
    outputs = keras.layers.Dense(num_classes)(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Lambda(tf.stop_gradient)(outputs))


def build_regression(num_classes: int, input_shape: Any) -> Any:
    """Build a model that is not a classifier."""
    inputs = keras.Input(input_shape)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(inputs)))
