"""Networks that wait instead of computing: the variables of any network without load on a core, to study exchanges.

One laptop can thus emulate many hosts without its cores limiting the result. The forward pass waits a third of the
time. The backward pass waits the rest in pieces, from the last layer to the first. Gradients thus become ready one
after another, as in the real network. Gradients are zeros: nothing is learned.
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
"""The fraction of a training step taken by the forward pass (papers: training takes about three times as long)."""
MOST_PIECES = 16
Tensor = Any
"""A TensorFlow tensor."""


def emulated(network: keras.Model, emulation: Emulation) -> keras.Model:
    """Return a model with the inputs, outputs and variables of `network`, which waits instead of computing."""
    layer = EmulatedComputing(network, emulation.seconds, emulation.noise, name="emulated")
    image = keras.Input(batch_shape=network.inputs[0].shape, dtype=network.inputs[0].dtype)
    return keras.Model(image, layer(image), name=f"emulated_{network.name}")


@keras.saving.register_keras_serializable(package="hpcdl")
class EmulatedComputing(keras.layers.Layer):
    """Waits as long as a step of `network` would compute: `seconds`, times e^(noise x a normal random number)."""

    def __init__(self, network: keras.Model, seconds: float, noise: float, **options: Any) -> None:
        super().__init__(**options)
        self.network, self.seconds, self.noise = network, seconds, noise
        self._began, self._lasts_s = 0.0, 0.0

    def get_config(self) -> dict[str, Any]:
        """Return the configuration that recreates the layer."""
        network = keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "network": network, "seconds": self.seconds, "noise": self.noise}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EmulatedComputing:
        """Create the layer from a configuration."""
        return cls(keras.saving.deserialize_keras_object(config.pop("network")), **config)

    def compute_output_spec(self, inputs: Any) -> Any:
        """Return the specs of the network's own outputs."""
        specs = [keras.KerasTensor(output.shape, output.dtype) for output in self.network.outputs]
        return specs[0] if len(specs) == 1 else specs

    def call(self, inputs: Any) -> Any:
        """Return equal probabilities for every class, after the wait."""
        rows = tf.shape(inputs)[0]
        weights = [variable.value for variable in self.network.trainable_variables]
        zero = _waited(self._wait, tf.constant(0.0), weights)
        outputs = [
            tf.cast(zero, output.dtype)
            + tf.fill([rows, *output.shape[1:]], tf.cast(1 / output.shape[-1], output.dtype))
            for output in self.network.outputs
        ]
        return outputs[0] if len(outputs) == 1 else outputs

    def _wait(self, after: Sequence[Tensor], until: float) -> Tensor:
        """Return zero once all of `after` is ready and the step has reached `until`: FORWARD to 1, its end."""

        def sleep(*_before: Any) -> Any:
            if until == FORWARD:
                factor = math.exp(random.gauss(0.0, self.noise)) if self.noise else 1.0
                self._began, self._lasts_s = time.monotonic(), self.seconds * factor
            # Sleep until a moment, not for a time: a delayed piece on a busy machine then does not prolong the step.
            time.sleep(max(0.0, self._began + until * self._lasts_s - time.monotonic()))
            return np.float32(0.0)

        # Stateful functions run in the order of tracing: the exchange, traced after the backward pass, would wait for
        # all its pieces. Calls of a stateless function could be merged into one, so one input changes.
        waited = tf.numpy_function(carried(sleep), after, tf.float32, stateful=until == FORWARD)
        waited.set_shape(())  # numpy_function loses it
        return waited


def pieces(num_weights: int) -> list[list[int]]:
    """Return the indices of weights whose gradients become ready together, in the order of the backward pass."""
    parts = np.array_split(np.arange(num_weights)[::-1], min(num_weights, MOST_PIECES))
    return [[int(index) for index in part] for part in parts]


LAYERS = {"hpcdl>EmulatedComputing": EmulatedComputing}
"""For `keras.saving.load_model`: the layers in saved networks that Keras alone cannot read."""


def _waited(wait: Callable[[Sequence[Tensor], float], Tensor], after: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return zero after the forward pass; its gradients become ready piece by piece, last weights first."""

    @tf.custom_gradient
    def pass_forward(start: Tensor, *values: Tensor) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
        def pass_backward(upstream: Tensor) -> list[Tensor]:
            gradients: list[Tensor] = []
            parts = pieces(len(values))
            ready, changing = upstream, tf.reshape(values[0], [-1])[0]
            for number, part in enumerate(parts, start=1):
                ready = wait([ready, changing], FORWARD + (1 - FORWARD) * number / len(parts))
                # The sum makes each gradient wait for its piece; zeros alone would be ready at once.
                gradients += [tf.zeros_like(values[index]) + tf.cast(ready, values[index].dtype) for index in part]
            return [0.0 * upstream, *gradients[::-1]]

        return wait([start], FORWARD), pass_backward

    return pass_forward(after, *weights)
