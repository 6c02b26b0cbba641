"""The weights that all workers share, and the exchange that updates them by the mean of their changes. No TensorFlow.

x are the shared weights, x_i a worker's own after its steps, D = mean over the workers of (x - x_i). The mean of the
weights themselves is x - D. Changes are summed rather than weights: small numbers lose less to rounding.

- `mean`: Stich 2018 (arXiv 1805.09767), algorithm 1, the line of a synchronisation.
- `slow_momentum`: Wang et al. 2019 (arXiv 1910.00643), algorithm 1, lines 7 and 8. With a constant learning rate this
  is BMUF (Chen and Huo 2016): block momentum beta, block learning rate alpha. Its line 2, of buffers: worker.py.
- `nesterov`: Douillard et al. 2023 (arXiv 2311.08105), algorithm 1, lines 12 and 14, with the outer optimizer of its
  section 2.
- `mix`: Douillard et al. 2025 (arXiv 2501.18512), algorithm 2, line 13: the weights with which a worker continues after
  a fragment's exchange. Its line 12 is `nesterov` on the fragment alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.collectives import auto
from hpcdl.collectives.slices import Workspace
from hpcdl.comm.arithmetic import all_finite, not_finite
from hpcdl.comm.observed import BUCKET, for_control, recorder_of
from hpcdl.core.protocols import Communicator
from hpcdl.core.statistics import Sample
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.elastic.replica import distance
from hpcdl.strategies.periodic.methods import METHODS

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


@dataclass(frozen=True, kw_only=True)
class OuterRates:
    """The rates of one exchange: `inner` is the learning rate of the steps before it, or its mean if it changed."""

    outer: float
    momentum: float
    inner: float


def mean(weights: Array, velocity: Array, change: Array, rates: OuterRates) -> None:
    """x <- x - D, the mean of x_i."""
    weights -= change


def slow_momentum(weights: Array, velocity: Array, change: Array, rates: OuterRates) -> None:
    """u <- beta u + D / gamma; x <- x - alpha gamma u. `change` is overwritten."""
    velocity *= rates.momentum
    if rates.inner == 0:  # no weight was updated, and division by zero must be avoided
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


def mix(weights: Array, outer: Array, share: float) -> None:
    """x_i <- (1 - s) x_i + s x: mix the `share` s of the outer weights into a worker's own; the paper's 1 - alpha."""
    if share == 1:  # the outer weights bit for bit, even if a worker's own are huge
        weights[:] = outer
        return
    weights *= 1 - share
    weights += share * outer


RULES: Mapping[str, Callable[[Array, Array, Array, OuterRates], None]] = {
    "mean": mean,
    "slow momentum": slow_momentum,
    "nesterov": nesterov,
}
"""By the names in methods.py."""


EXCHANGES_TIMED = 5
PREFIX = "periodic/"
"""Prefix of the names of a worker's entries in a checkpoint."""


class SharedWeights:
    """`weights`: float32, all trainable variables concatenated; the same bits on every worker.

    Names and lengths of the `variables` in it are for messages.
    """

    def __init__(self, context: Context) -> None:
        method, elastic = METHODS[context.info.name], context.elastic
        # A separate communicator: the exchange runs on TensorFlow's threads, parallel to the main thread's messages.
        self.group = context.communicator.duplicate()
        self.weights: Array = numpy.zeros(0, numpy.float32)
        self.variables: Sequence[tuple[str, int]] = ()
        self._rule = RULES[method.rule]
        self._outer_rate = given_or(elastic.outer_rate, method.outer_rate)
        self._momentum = given_or(elastic.outer_momentum, method.outer_momentum)
        self.period, self._num_steps = elastic.period_steps, context.num_steps
        self._post_local_start = elastic.post_local_start
        self._within = elastic.period_within
        self.node, self.num_nodes = self.group, 1
        if self._within is not None:
            host = context.communicator.host
            hosts = self.group.allgather_json(host)
            # A node's color is the first rank on it.
            self.node = self.group.split(hosts.index(host), self.group.rank)
            self.num_nodes = len(set(hosts))
        self.all_meet = False
        """Whether the announced step's exchange is one of all workers, not only of a node."""
        self.last_exchange: int | None = None
        """Steps done at the last exchange of all workers completed here, or at the start; None before the start."""
        self._velocity: Array = numpy.zeros(0, numpy.float32)
        self._step = 0
        self._rate_sum, self._num_rates = 0.0, 0
        self._restored: dict[str, Array] = {}
        # The algorithm depends on size and ranks alone: measured choices could differ between two runs.
        self._workspace, self._node_workspace = Workspace(measure=False), Workspace(measure=False)
        self._distances = Sample(1)
        self._last_distance = 0.0

    def start(self, weights: Array) -> None:
        """Begin with `weights`, equal on every worker, and with the restored state if there is one."""
        self.weights = weights.astype(numpy.float32)
        self._velocity = self._restored.get(f"{PREFIX}velocity", numpy.zeros_like(self.weights))
        self._rate_sum, self._num_rates = 0.0, 0
        if f"{PREFIX}rates" in self._restored:
            self._rate_sum, count = self._restored[f"{PREFIX}rates"].tolist()
            self._num_rates = int(count)
        self._restored = {}

    def lay_out(self, statistics: Sequence[tuple[str, int]]) -> None:
        """Set the names and lengths of the moving statistics that follow the weights in an exchange."""

    def before_step(self, step: int, learning_rate: float) -> bool:
        """Whether `step`, counted from 0, ends with an exchange: every `period`-th, the first ones, the run's last.

        If workers of a node have a period of their own, also every `period_within`-th.
        """
        self._step = step
        if self.last_exchange is None:
            self.last_exchange = step
        self._rate_sum += learning_rate
        self._num_rates += 1
        num_done = step + 1
        self.all_meet = self.ends_round(num_done)
        return self.all_meet or (self._within is not None and num_done % self._within == 0)

    def ends_round(self, done: int) -> bool:
        """Whether all workers of this run exchange after `done` steps."""
        return self._meets_after(done) or done == self._num_steps

    def exchange(self, local: Array) -> Array:
        """Return the new shared weights in place of a worker's `local`, whose memory they take. Collective.

        What follows the weights in `local` (moving statistics) is replaced by its mean over the workers. Between two
        exchanges of all workers `local` is replaced by its mean over those of the node, and the shared weights stay.
        """
        own_weights = local[: self.weights.size]
        if not self.all_meet:
            numpy.subtract(self.weights, own_weights, out=own_weights)
            self._average(local, self.node, self._node_workspace)
            self._check_finite(local, self.variables)
            numpy.subtract(self.weights, own_weights, out=own_weights)
            return local
        self._note_distance(own_weights)
        numpy.subtract(self.weights, own_weights, out=own_weights)
        self._average(local, self.group, self._workspace)
        self._check_finite(local, self.variables)
        self._rule(self.weights, self._velocity, own_weights, self._rates())
        self._check_finite(self.weights, self.variables)
        own_weights[:] = self.weights
        # Only once it is complete: survivors repeat an exchange that none of them completed.
        self.last_exchange = self._step + 1
        return local

    def meet(self, local: Array, done: int) -> Array:
        """As `exchange`, of all workers after `done` steps, as at the end of a run. Collective.

        If that step has ended with such an exchange already, `local` stays.
        """
        return local if self._meets_after(done) else self.repeat(local, done)

    def repeat(self, local: Array, done: int) -> Array:
        """As `exchange`, of all remaining workers after `done` steps. Collective."""
        self._step, self.all_meet = done - 1, True
        return self.exchange(local)

    def level(self, communicator: Communicator, root: int) -> None:
        """Take the shared weights, outer momentum and rates of `root`. Collective.

        For workers that took part in the others' exchanges without steps of their own: their rates differ.
        """
        rates = numpy.array([self._rate_sum, self._num_rates], numpy.float64)
        for buffer in (self.weights, self._velocity, rates):
            communicator.broadcast(buffer, root)
        self._rate_sum, self._num_rates = float(rates[0]), int(rates[1])

    def regroup(self, communicator: Communicator) -> None:
        """Exchange with the workers of `communicator`, the survivors, from here on."""
        self._workspace.close()
        self.group, self._workspace = communicator, Workspace(measure=False)

    def take_missed(self, root: int, *, missed: bool) -> None:
        """Take over an exchange that completed for `root` and all others except those that `missed` it. Collective.

        Workers that took part have the same weights and outer momentum; their rates are of the steps after it.
        """
        for buffer in (self.weights, self._velocity):
            self.group.broadcast(buffer, root)
        if missed:
            self._rate_sum, self._num_rates = 0.0, 0

    def exchange_seconds(self) -> float:
        """Return the median time of several exchanges of zeros, without late workers. Collective."""
        group, seconds = for_control(self.group), list[float]()
        # Zeros and copies: neither the weights nor the velocity may change.
        buffer = numpy.zeros_like(self.weights)
        for _ in range(EXCHANGES_TIMED):
            group.barrier()
            began_s = time.perf_counter()
            auto.allreduce(group, buffer, self._workspace)
            self._rule(buffer.copy(), buffer.copy(), buffer, OuterRates(outer=1.0, momentum=0.0, inner=1.0))
            seconds.append(time.perf_counter() - began_s)
        return statistics.median(seconds)

    def state(self) -> dict[str, Array]:
        """Return the state for a checkpoint besides weights: outer momentum, and rates since the last exchange."""
        rates = numpy.array([self._rate_sum, self._num_rates], numpy.float64)
        return {f"{PREFIX}velocity": self._velocity.copy(), f"{PREFIX}rates": rates}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the state, at the next `start`. Raises KeyError if a part is missing."""
        self._restored = {name: arrays[name] for name in (f"{PREFIX}velocity", f"{PREFIX}rates")}

    def details(self) -> dict[str, Any]:
        """Return the distances of this worker's weights from the shared ones at its exchanges."""
        if not self._distances.count:
            return {}
        distances = self._distances
        return {"distance_to_center": {"mean": distances.mean, "max": distances.largest, "last": self._last_distance}}

    def close(self) -> None:
        """Free the buffers."""
        self._workspace.close()
        self._node_workspace.close()

    def _meets_after(self, done: int) -> bool:
        """Whether all workers exchange after `done` steps, even if the run does not end there."""
        return (self.period > 0 and done % self.period == 0) or done <= self._post_local_start

    def _average(self, buffer: Array, group: Communicator, workspace: Workspace, number: int = 0) -> None:
        """Replace `buffer` by its mean over the workers of `group`; a trace shows it as bucket `number`."""
        began_s = time.monotonic()
        auto.allreduce(group, buffer, workspace)
        buffer /= group.size
        recorder_of(group).span(BUCKET, began_s, time.monotonic(), num_bytes=buffer.nbytes, bucket=number)

    def _rates(self) -> OuterRates:
        """Return the rates of an exchange now; reset the mean of the learning rates."""
        inner = self._rate_sum / max(self._num_rates, 1)
        self._rate_sum, self._num_rates = 0.0, 0
        return OuterRates(outer=self._outer_rate, momentum=self._momentum, inner=inner)

    def _note_distance(self, local: Array) -> None:
        this_distance = distance(local, self.weights)
        if math.isfinite(this_distance):  # JSON cannot hold non-finite numbers
            self._distances.add(this_distance)
            self._last_distance = this_distance

    def _check_finite(self, values: Array, variables: Sequence[tuple[str, int]]) -> None:
        """Raise NotFiniteError, on every worker: all have equal sums. `variables`: names and lengths of the parts."""
        if all_finite(values):
            return
        bad, start = [], 0
        for name, length in variables:
            if not all_finite(values[start : start + length]):
                bad.append(name)
            start += length
        raise not_finite(bad, "the mean over the workers", self._step, self.group.rank)


def given_or(given: float | None, default: float | None) -> float:
    """Return the given value, else the method's default; 0 if its equation has no such number."""
    return given if given is not None else default or 0.0
