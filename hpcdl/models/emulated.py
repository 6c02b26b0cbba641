"""Networks whose computing is a wait: any network's variables, no core used, for studies of the exchange alone.

A laptop can so play many hosts without its cores being the result. The forward pass waits a third of the time; the
backward pass the rest, in pieces from the last layer to the first, so that gradients become ready one after the other
as those of the network would. Gradients are zeros: nothing is learned.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpcdl.core.errors import carried
from hpcdl.models.table import Emulation

FORWARD = 1 / 3
"""The share of a training step that the forward pass takes (papers: training is about three times forward)."""
MOST_PIECES = 16
Tensor = Any
"""A tensor of TensorFlow."""


def emulated(network: keras.Model, emulation: Emulation) -> keras.Model:
    """`network` with its inputs, outputs and variables, but a wait in place of its computing."""
    layer = EmulatedComputing(network, emulation.seconds, emulation.noise, name="emulated")
    image = keras.Input(batch_shape=network.inputs[0].shape, dtype=network.inputs[0].dtype)
    return keras.Model(image, layer(image), name=f"emulated_{network.name}")


@keras.saving.register_keras_serializable(package="hpcdl")
class EmulatedComputing(keras.layers.Layer):
    """Waits as long as `network` is said to compute for a step: `seconds`, times e^(noise x a normal number)."""

    def __init__(self, network: keras.Model, seconds: float, noise: float, **options: Any) -> None:
        super().__init__(**options)
        self.network, self.seconds, self.noise = network, seconds, noise
        self._began, self._lasts_s = 0.0, 0.0

    def get_config(self) -> dict[str, Any]:
        """What makes the layer again."""
        network = keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "network": network, "seconds": self.seconds, "noise": self.noise}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EmulatedComputing:
        """The layer of a configuration."""
        return cls(keras.saving.deserialize_keras_object(config.pop("network")), **config)

    def compute_output_spec(self, inputs: Any) -> Any:
        """As the network's own outputs."""
        found = [keras.KerasTensor(output.shape, output.dtype) for output in self.network.outputs]
        return found[0] if len(found) == 1 else found

    def call(self, inputs: Any) -> Any:
        """Equal probabilities for every class, after the wait."""
        rows = tf.shape(inputs)[0]
        weights = [variable.value for variable in self.network.trainable_variables]
        done = _waited(self._wait, tf.constant(0.0), weights)
        made = [
            tf.cast(done, output.dtype)
            + tf.fill([rows, *output.shape[1:]], tf.cast(1 / output.shape[-1], output.dtype))
            for output in self.network.outputs
        ]
        return made[0] if len(made) == 1 else made

    def _wait(self, after: Sequence[Tensor], until: float) -> Tensor:
        """Zero, when all of `after` is there and the step is as far as `until`: 1 is its end, FORWARD begins it."""

        def sleep(*_before: Any) -> Any:
            if until == FORWARD:
                factor = math.exp(random.gauss(0.0, self.noise)) if self.noise else 1.0
                self._began, self._lasts_s = time.monotonic(), self.seconds * factor
            # Until a moment, not for a time: what a busy machine takes from one piece does not make the step longer.
            time.sleep(max(0.0, self._began + until * self._lasts_s - time.monotonic()))
            return np.float32(0.0)

        # Functions with side effects run in the order in which they were traced: the exchange, traced behind the
        # backward pass, would wait for all of its pieces. One without could be called once for all: an input changes.
        waited = tf.numpy_function(carried(sleep), after, tf.float32, stateful=until == FORWARD)
        waited.set_shape(())
        return waited


def pieces(num_weights: int) -> list[list[int]]:
    """Places of weights whose gradients become ready together, in the order of the backward pass."""
    parts = np.array_split(np.arange(num_weights)[::-1], min(num_weights, MOST_PIECES))
    return [[int(place) for place in part] for part in parts]


LAYERS = {"hpcdl>EmulatedComputing": EmulatedComputing}
"""For `keras.saving.load_model`: saved networks that no Keras alone can read."""


def _waited(wait: Callable[[Sequence[Tensor], float], Tensor], after: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Zero after the forward pass; its gradients come piece by piece, last weights first."""

    @tf.custom_gradient
    def pass_forward(start: Tensor, *values: Tensor) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
        def pass_backward(upstream: Tensor) -> list[Tensor]:
            gradients: list[Tensor] = []
            parts = pieces(len(values))
            ready, changing = upstream, tf.reshape(values[0], [-1])[0]
            for done, part in enumerate(parts, start=1):
                ready = wait([ready, changing], FORWARD + (1 - FORWARD) * done / len(parts))
                gradients += [tf.zeros_like(values[place]) + tf.cast(ready, values[place].dtype) for place in part]
            return [0.0 * upstream, *gradients[::-1]]

        return wait([start], FORWARD), pass_backward

    return pass_forward(after, *weights)
