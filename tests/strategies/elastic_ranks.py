"""Run the strategies' own replicas and servers as threads, in an order of arrival that the test sets."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdl.comm import threads
from hpcdl.comm.observed import CONTROL, observe
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.table import find_strategy, load_strategy
from tests.rounds import Counts, TracingCommunicator

Gradient = Callable[[int, int, np.ndarray], np.ndarray]


class Turns:
    """Let one worker at a time do its step, in a given order."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self._queue = [worker for order in orders for worker in order]
        self._changed = threading.Condition()
        self._next = 0

    def take(self, worker: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next >= len(self._queue) or self._queue[self._next] == worker, 60)

    def give(self) -> None:
        with self._changed:
            self._next += 1
            self._changed.notify_all()


@dataclass(kw_only=True)
class StepCounts(Counts):
    """What a worker has sent from its first step to its last; `observed`: the bytes by hpcdl's own count."""

    messages_in_steps: int = 0
    bytes_in_steps: int = 0
    observed: int = 0
    steps: int = 0
    center_steps: int = 0
    """Updates of the center by all workers, in steps, when the worker had left."""


class Outcome:
    """The result of a run: the center, the workers' weights, details of replicas and servers, and message counts."""

    def __init__(
        self, center: np.ndarray, weights: list[np.ndarray], details: list[Any], counts: list[StepCounts]
    ) -> None:
        self.center, self.weights, self.details, self.counts = center, weights, details, counts


def run(
    name: str,
    start: np.ndarray,
    gradient: Gradient,
    *,
    workers: int,
    steps: int,
    servers: int = 1,
    orders: Sequence[Sequence[int]] | None = None,
    eta: float = 0.05,
    mu: float = 0.9,
    sizes: Sequence[int] | None = None,
    hosts: Sequence[str] = (),
    compress: str = "none",
    to_the_end: bool = False,
    **elastic: Any,
) -> Outcome:
    """Run `steps` steps of strategy `name`. With `orders` the workers' steps take turns; otherwise they run freely.

    With `to_the_end` each worker continues, as in training, until the center has `steps` steps of all of them.

    `hosts` names each rank's node, by default one for all.
    """
    info = find_strategy(name)
    servers = servers if info.features.servers else 0
    turns = Turns(orders) if orders is not None else None
    counts = [StepCounts() for _ in range(workers + servers)]

    def rank(inner: threads.ThreadCommunicator) -> Any:
        communicator = observe(TracingCommunicator(inner, counts[inner.rank]))
        seen = communicator.monitor
        context = Context(
            info=info,
            communicator=communicator,
            num_workers=workers,
            num_servers=servers,
            exchange=ExchangeConfig(servers=max(servers, 1), compress=compress),
            optimizer=OptimizerConfig(learning_rate=eta, momentum=mu),
            elastic=ElasticConfig(**elastic),
        )
        strategy: Any = load_strategy(info)
        if not context.is_worker:
            return strategy.server(context).serve()
        me = communicator.rank
        replica = strategy.replica(context)
        replica.total = steps * workers if to_the_end else 0
        replica.start(start.astype(np.float32), sizes or [start.size])
        before = seen.traffic(CONTROL)
        for step in itertools.count() if to_the_end else range(steps):
            if replica.stopped:
                break
            counts[me].steps += 1
            if turns:
                turns.take(me)
            replica.before_step(step)
            replica.step(gradient(me, step, replica.weights.astype(np.float64)).astype(np.float32))
            if turns:
                turns.give()
        counts[me].messages_in_steps = counts[me].messages
        counts[me].bytes_in_steps = counts[me].bytes
        counts[me].observed = (seen.traffic(CONTROL) - before).bytes_sent
        replica.group.barrier()
        center = replica.center().copy()
        replica.finish()
        counts[me].center_steps = replica.count
        return center, replica.weights.copy(), replica.details()

    results = threads.run(workers + servers, rank, hosts)
    return Outcome(
        results[0][0], [result[1] for result in results[:workers]],
        [result[2] for result in results[:workers]] + results[workers:], counts,
    )  # fmt: skip
