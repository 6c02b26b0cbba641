"""What an exchange does to the weights that all workers share, by the mean of their changes. Numpy, in place.

x are the shared weights, x_i a worker's own after its steps, D = mean over the workers of (x - x_i). The mean of the
weights themselves is x - D. Changes are summed rather than weights: small numbers lose less to rounding.

- `mean`: Stich 2018 (arXiv 1805.09767), algorithm 1, the line of a synchronisation.
- `slow_momentum`: Wang et al. 2019 (arXiv 1910.00643), algorithm 1, lines 7 and 8. With a constant learning rate this
  is BMUF (Chen and Huo 2016): block momentum beta, block learning rate alpha. Its line 2, of buffers: worker.py.
- `nesterov`: Douillard et al. 2023 (arXiv 2311.08105), algorithm 1, lines 12 and 14, with the outer optimizer of its
  section 2.
- `mix`: Douillard et al. 2025 (arXiv 2501.18512), algorithm 2, line 13: what a worker goes on with when a fragment's
  exchange is over. Its line 12 is `nesterov` on the fragment alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


@dataclass(frozen=True, kw_only=True)
class OuterRates:
    """The numbers of one exchange: `inner` is the learning rate of the steps before it, their mean where it changed."""

    outer: float
    momentum: float
    inner: float


def mean(weights: Array, velocity: Array, change: Array, rates: OuterRates) -> None:
    """x <- x - D, the mean of x_i."""
    weights -= change


def slow_momentum(weights: Array, velocity: Array, change: Array, rates: OuterRates) -> None:
    """u <- beta u + D / gamma; x <- x - alpha gamma u. `change` is overwritten."""
    velocity *= rates.momentum
    if rates.inner == 0:  # no weight has moved, and there is nothing to divide by
        return
    change /= rates.inner
    velocity += change
    weights -= rates.outer * rates.inner * velocity


def nesterov(weights: Array, velocity: Array, change: Array, rates: OuterRates) -> None:
    """v <- mu v + D; x <- x - eta (D + mu v). `change` is overwritten."""
    velocity *= rates.momentum
    velocity += change
    change += rates.momentum * velocity
    change *= rates.outer
    weights -= change


def mix(own: Array, outer: Array, share: float) -> None:
    """x_i <- (1 - s) x_i + s x: a worker's own weights take the `share` s of the outer ones; the paper's 1 - alpha."""
    if share == 1:  # the outer weights themselves, bit for bit, also where a worker's own are huge
        own[:] = outer
        return
    own *= 1 - share
    own += share * outer


RULES: Mapping[str, Callable[[Array, Array, Array, OuterRates], None]] = {
    "mean": mean,
    "slow momentum": slow_momentum,
    "nesterov": nesterov,
}
"""By the name that methods.py has."""
