"""Clusters whose laws differ from the timeline's: only formulas of this file give the duration of a step.

Each law says how a step grows with the number of workers; nothing here is taken from hpcdl/predict. A run's step has
noise between runs. Sizes 1, 2 and 4 are measured three times each; 8, 16 and 32 are predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy

from hpcdl.models.table import MODELS
from hpcdl.report.runs.run import Run
from tests.report.synthetic import make_run

SIZES = (1, 2, 4)
AHEAD = (8, 16, 32)
STRATEGIES = ("ring", "ps", "sync-easgd")
SERVERS = 4
_NETWORKS = ("lenet", "cifar10-quick", "googlenet", "resnet50", "alexnet")
Growth = Callable[[float], float]
"""Duration of a step on n workers, relative to one worker."""


@dataclass(frozen=True, kw_only=True)
class OtherCluster:
    """One true cluster: `growth` of each strategy, seconds on one worker, noise between runs."""

    law: str
    seed: int
    model: str
    step_s: float
    noise: float
    growth: Mapping[str, Growth]

    def true_step(self, strategy: str, workers: int) -> float:
        """Return the seconds of a mean step."""
        return self.step_s * self.growth[strategy](workers)

    def study(self, sizes: tuple[int, ...] = SIZES, repeats: int = 3) -> list[Run]:
        """Return runs in the report's form; servers have their own nodes."""
        random = numpy.random.default_rng([self.seed, 1])
        found = []
        for strategy in STRATEGIES:
            servers = SERVERS if strategy == "ps" else 0
            for n in sizes:
                for _ in range(repeats):
                    step = self.true_step(strategy, n) * math.exp(self.noise * random.standard_normal())
                    found.append(
                        make_run(n, n * 32 / step, strategy=strategy, model=self.model, servers=servers,
                                 nodes=n + servers, step_seconds=step, gradient_bytes=MODELS[self.model].gradient_bytes)
                    )  # fmt: skip
        return found


def make_other(law: str, seed: int) -> OtherCluster:
    """Return a cluster of this law; all its numbers follow from `seed`."""
    random = numpy.random.default_rng([seed, sorted(LAWS).index(law)])

    def between(low: float, high: float) -> float:
        return float(math.exp(random.uniform(math.log(low), math.log(high))))

    return OtherCluster(
        law=law, seed=seed, model=_NETWORKS[seed % len(_NETWORKS)], step_s=between(0.03, 2.0),
        noise=between(0.003, 0.02), growth={name: LAWS[law](between) for name in STRATEGIES},
    )  # fmt: skip


Between = Callable[[float, float], float]


def _usl(between: Between) -> Growth:
    """Gunther's universal scalability law."""
    sigma, kappa = between(0.002, 0.05), between(2e-5, 1.5e-3)
    return lambda n: 1 + sigma * (n - 1) + kappa * n * (n - 1)


def _half_duplex(between: Between) -> Growth:
    """Servers with half-duplex ports: pushes and pulls of all workers are sent one after the other."""
    way, hidden, latency = between(0.003, 0.08), between(0.2, 0.9), between(0.001, 0.02)
    return lambda n: max(1 + latency + 2 * way, (1 - hidden) + 2 * way * n) if n > 1 else 1 + 2 * way


def _slower_links(between: Between) -> Growth:
    """A ring that becomes slower on more nodes than one switch connects."""
    latency, bytes_s = between(0.0005, 0.005), between(0.02, 0.4)
    beyond, slower = between(6, 20), between(1.15, 2.0)

    def growth(n: float) -> float:
        factor = slower if n > beyond else 1.0
        return 1 + 2 * (n - 1) * latency + 2 * (n - 1) / n * bytes_s * factor

    return growth


def _steps(between: Between) -> Growth:
    """Contention that rises in steps: each level of switches shares fewer uplinks."""
    latency, bytes_s, step, share = between(0.0005, 0.01), between(0.02, 0.3), between(2, 8), between(1.05, 1.5)

    def growth(n: float) -> float:
        levels = math.floor(math.log(n, step) + 1e-9) if n > 1 else 0
        return 1 + 2 * math.log2(n) * latency + 2 * (n - 1) / n * bytes_s * share**levels

    return growth


def _stragglers(between: Between) -> Growth:
    """All workers wait for the slowest, whose times have a heavy tail (Pareto), and then reduce."""
    tail, scale, bytes_s = between(2.5, 10), between(0.01, 0.15), between(0.01, 0.2)
    return lambda n: 1 + scale * (n ** (1 / tail) - 1) + 2 * (n - 1) / n * bytes_s


def _coordinator(between: Between) -> Growth:
    """A library whose rank 0 hears from every worker, and whose all-reduce grows with a power of the nodes."""
    message, bytes_s, power = between(0.0003, 0.01), between(0.01, 0.2), between(0.1, 0.6)
    return lambda n: 1 + message * (n - 1) + (bytes_s * n**power if n > 1 else 0.0)


LAWS: Mapping[str, Callable[[Between], Growth]] = {
    "universal law": _usl,
    "half-duplex servers": _half_duplex,
    "slower links": _slower_links,
    "steps of contention": _steps,
    "stragglers": _stragglers,
    "coordinator": _coordinator,
}
