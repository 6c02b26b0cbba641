"""The size of a Keras model, counted from its layers: parameters, moving statistics and multiply-accumulates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Counts of one model; `macs` are forward, per image, in convolutions and dense layers only.

    `moving_statistics` are all weights that no gradient changes: those of batch normalisation, and frozen ones.
    """

    parameters: int
    moving_statistics: int
    macs: int

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all gradients in float32."""
        return 4 * self.parameters


def measure_size(model: keras.Model) -> ModelSize:
    """Count the weights and MACs of a built model.

    A kernel is applied once per output position (a transposed convolution: per input position), so that groups and
    depth-wise kernels are counted correctly. Raises ValueError for a layer that is called more than once.
    """
    return ModelSize(
        parameters=sum(math.prod(weight.shape) for weight in model.trainable_weights),
        moving_statistics=sum(math.prod(weight.shape) for weight in model.non_trainable_weights),
        macs=_macs(model),
    )


def _macs(layer: Any) -> int:
    children = getattr(layer, "layers", None)
    if children is not None:
        return sum(_macs(child) for child in children)
    kernels = [getattr(layer, name, None) for name in ("kernel", "depthwise_kernel", "pointwise_kernel")]
    weights: int = sum(math.prod(kernel.shape) for kernel in kernels if kernel is not None)
    if not weights:
        return 0
    transposed = isinstance(
        layer, keras.layers.Conv1DTranspose | keras.layers.Conv2DTranspose | keras.layers.Conv3DTranspose
    )
    positions: tuple[int, ...] = (layer.input if transposed else layer.output).shape[1:-1]
    return weights * math.prod(positions)
