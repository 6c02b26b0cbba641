"""The methods of the EASGD family as plain loops in float64, written from the equations alone.

`orders[t]` lists the workers in the order in which their exchange number t reaches the center. A gradient is a function
of (worker, step, weights). Every simulator returns the center and the workers' weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Gradient = Callable[[int, int, np.ndarray], np.ndarray]
State = tuple[np.ndarray, list[np.ndarray]]


def round_robin_easgd(
    start: np.ndarray, gradient: Gradient, workers: int, steps: int, eta: float, alpha: float
) -> State:
    return arriving_easgd(start, gradient, [list(range(workers))] * steps, eta, alpha)


def arriving_easgd(
    start: np.ndarray, gradient: Gradient, orders: Sequence[Sequence[int]], eta: float, alpha: float, mu: float = 0.0
) -> State:
    """Apply (2) for the arriving worker alone, and (5)(6) on the worker, which equal (1) for mu = 0."""
    workers = len(orders[0])
    center = start.copy()
    weights = [start.copy() for _ in range(workers)]
    velocity = [np.zeros_like(start) for _ in range(workers)]
    for step, order in enumerate(orders):
        for i in order:
            g = gradient(i, step, weights[i])
            pull = weights[i] - center
            center = center + alpha * pull
            velocity[i] = mu * velocity[i] - eta * g
            weights[i] = weights[i] + velocity[i] - alpha * pull
    return center, weights


def sync_easgd(
    start: np.ndarray, gradient: Gradient, workers: int, steps: int, eta: float, alpha: float, period: int = 1
) -> State:
    """Apply (1) on every worker and (2) with the sum, both with the weights before the step."""
    center = start.copy()
    weights = [start.copy() for _ in range(workers)]
    for step in range(steps):
        strength = alpha if step % period == 0 else 0.0
        old = [w.copy() for w in weights]
        weights = [w - eta * gradient(i, step, w) - strength * (w - center) for i, w in enumerate(old)]
        center = center + strength * sum(w - center for w in old)
    return center, weights


def arriving_sgd(
    start: np.ndarray, gradient: Gradient, orders: Sequence[Sequence[int]], eta: float, mu: float = 0.0
) -> State:
    """Apply gradients that each worker took at the center that its previous exchange returned."""
    workers = len(orders[0])
    center, velocity = start.copy(), np.zeros_like(start)
    weights = [start.copy() for _ in range(workers)]
    for step, order in enumerate(orders):
        for i in order:
            velocity = mu * velocity - eta * gradient(i, step, weights[i])
            center = center + velocity
            weights[i] = center.copy()
    return center, weights
