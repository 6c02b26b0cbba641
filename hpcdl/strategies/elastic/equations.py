"""The equations of the EASGD family on flat weight buffers, and the moving rate that they use. No TensorFlow.

Sources: You, Buluc and Demmel 2017 (arXiv 1708.02983), equations (1) to (6); Zhang, Choromanska and LeCun 2015 (arXiv
1412.6651). Notation there: W worker's weights, W~ center, dW gradient, eta learning rate, rho elasticity,
alpha = eta rho moving rate, mu momentum. All elastic terms use the weights before the update.

Everything works in place, block by block, so that intermediate results stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy

from hpcdl.config.schema import ElasticConfig

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

BLOCK_ELEMENTS = 1 << 15
"""128 KiB of float32: a few such blocks fit in a core's second-level cache."""
DEFAULT_TOTAL_RATE = 0.9
"""Default of workers x alpha; the value that Zhang et al. 2015 (section 5) use, where SC17 names none."""

Rate = Callable[[float], float]
"""The moving rate alpha at a learning rate."""


def moving_rate(elastic: ElasticConfig, num_workers: int) -> Rate:
    """Alpha as a function of the learning rate: eta x rho, or constant."""
    if elastic.elasticity is not None:
        elasticity = elastic.elasticity
        return lambda learning_rate: learning_rate * elasticity
    constant = DEFAULT_TOTAL_RATE / num_workers if elastic.moving_rate is None else elastic.moving_rate
    return lambda learning_rate: constant


def descend(weights: Array, gradient: Array, learning_rate: float) -> None:
    """W <- W - eta dW."""
    for part, change in _with_scratch(weights.size):
        numpy.multiply(gradient[part], learning_rate, out=change)
        weights[part] -= change


def descend_and_reply(center: Array, gradient: Array, reply: Array, learning_rate: float) -> None:
    """The same on the center; `reply`, which may be the gradient's memory, becomes the center when it is done."""
    for part, change in _with_scratch(center.size):
        numpy.multiply(gradient[part], learning_rate, out=change)
        numpy.subtract(center[part], change, out=reply[part])
        center[part] = reply[part]


def descend_with_momentum(
    weights: Array, velocity: Array, gradient: Array, learning_rate: float, momentum: float
) -> None:
    """V <- mu V - eta dW; W <- W + V. Equations (3) and (4)."""
    for part in blocks(weights.size):
        velocity[part] *= momentum
        velocity[part] -= learning_rate * gradient[part]
        weights[part] += velocity[part]


def elastic_step(weights: Array, center: Array, gradient: Array, learning_rate: float, alpha: float) -> None:
    """W <- W - eta dW - alpha (W - W~). Equation (1)."""
    change: Array = numpy.empty(min(weights.size, BLOCK_ELEMENTS), numpy.float32)
    for part, pull in _with_scratch(weights.size):
        numpy.subtract(weights[part], center[part], out=pull)
        pull *= alpha
        pull += numpy.multiply(gradient[part], learning_rate, out=change[: pull.size])
        weights[part] -= pull


def elastic_momentum_step(
    weights: Array,
    velocity: Array,
    center: Array,
    gradient: Array,
    learning_rate: float,
    alpha: float,
    momentum: float,
) -> None:
    """V <- mu V - eta dW; W <- W + V - alpha (W - W~). Equations (5) and (6)."""
    for part in blocks(weights.size):
        pull = weights[part] - center[part]
        pull *= alpha
        velocity[part] *= momentum
        velocity[part] -= learning_rate * gradient[part]
        weights[part] += velocity[part] - pull


def attract_center(center: Array, total: Array, num_workers: int, alpha: float) -> None:
    """W~ <- W~ + alpha sum_i (W_i - W~), where `total` is the sum of the workers' weights. Equation (2)."""
    for part in blocks(center.size):
        center[part] += alpha * (total[part] - num_workers * center[part])


def attract_center_by(center: Array, differences: Array, alpha: float) -> None:
    """The same, where `differences` is sum_i (W_i - W~)."""
    for part in blocks(center.size):
        center[part] += alpha * differences[part]


def swap_elastic(center: Array, weights: Array, reply: Array, alpha: float) -> None:
    """One worker's exchange: equation (2) for that worker alone.

    `reply`, which may be the weights' memory, becomes the center before it.
    """
    for part, pull in _with_scratch(center.size):
        numpy.subtract(weights[part], center[part], out=pull)
        pull *= alpha
        reply[part] = center[part]
        center[part] += pull


def distance(weights: Array, center: Array) -> float:
    """Euclidean distance, relative to the center's norm; infinite or NaN where weights have diverged."""
    squares = norm = 0.0
    with numpy.errstate(over="ignore", invalid="ignore"):
        for part in blocks(center.size):
            difference = weights[part] - center[part]
            squares += float(difference @ difference)
            norm += float(center[part] @ center[part])
    return float(numpy.sqrt(squares / norm)) if norm > 0 else float(numpy.sqrt(squares))


def _with_scratch(length: int) -> Iterator[tuple[slice, Array]]:
    """The parts of a buffer, each with the same memory for what is in between: fresh memory costs more than the sum."""
    scratch: Array = numpy.empty(min(length, BLOCK_ELEMENTS), numpy.float32)
    for part in blocks(length):
        yield part, scratch[: part.stop - part.start]


def blocks(length: int) -> Iterator[slice]:
    """Parts of a buffer that stay in the cache, one after another."""
    for start in range(0, length, BLOCK_ELEMENTS):
        yield slice(start, min(start + BLOCK_ELEMENTS, length))
