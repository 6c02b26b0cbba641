"""Alpha and beta of the exposed communication: seconds = alpha x rounds + beta x bytes, by each strategy's own cost.

Rounds and bytes on the critical path of one exchange of n bytes among p workers (Thakur, Rabenseifner, Gropp 2005;
Patarasuk, Yuan 2009), all gradients taken as one message. What computing hides is not in the seconds, so that alpha
and beta are those that training feels, at most the network's own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.core.linear_fit import LinearFit, fit_relative
from hpcdl.report.runs.run import Run, positive

_Cost = Callable[[int, int, int], tuple[float, float]]


def _levels(p: int) -> int:
    return math.ceil(math.log2(p))


COSTS: Mapping[str, _Cost] = {
    "ring": lambda p, n, servers: (2 * (p - 1), 2 * n * (p - 1) / p),
    "halving-doubling": lambda p, n, servers: (2 * _levels(p), 2 * n * (p - 1) / p),
    "recursive-doubling": lambda p, n, servers: (_levels(p), _levels(p) * n),
    "tree": lambda p, n, servers: (2 * _levels(p), 2 * _levels(p) * n),
    "sync-easgd": lambda p, n, servers: (2 * _levels(p), 2 * _levels(p) * n),
    "ps": lambda p, n, servers: (2 * p, 2 * p * n / max(servers, 1)),
    "grpc-ps": lambda p, n, servers: (2 * p, 2 * p * n / max(servers, 1)),
    "easgd": lambda p, n, servers: (2 * p, 2 * p * n / max(servers, 1)),
}
"""Strategy -> (rounds, bytes) from workers, gradient bytes and servers; strategies without a formula are left out."""


@dataclass(frozen=True, kw_only=True)
class CommunicationFit:
    """Alpha (seconds per round) and beta (seconds per byte) of one strategy on one machine."""

    strategy: str
    machine: str
    fit: LinearFit

    def as_json(self) -> dict[str, Any]:
        """One entry of `fits` in report.json."""
        alpha, beta = self.fit.coefficients
        return {
            "law": "alpha-beta",
            "strategy": self.strategy,
            "machine": self.machine,
            "parameters": {
                "alpha_seconds": dataclasses.asdict(alpha),
                "beta_seconds_per_byte": dataclasses.asdict(beta),
            },
            "r2": self.fit.r2,
            "spread": self.fit.spread,
            "runs": self.fit.num_runs,
        }


def fit_communication(runs: Sequence[Run]) -> list[CommunicationFit]:
    """A fit for each strategy and machine whose runs differ enough in workers or size to tell alpha from beta."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if _measured(run):
            groups.setdefault((run.strategy, run.machine, run.processor), []).append(run)
    found = []
    for (strategy, machine, processor), members in sorted(groups.items()):
        cost = COSTS[strategy]
        design = [cost(run.workers, run.gradient_bytes or 0, run.servers) for run in members]
        fit = fit_relative(design, [run.parts["exposed_communication"] for run in members])
        if fit is not None and len(set(design)) > 1:
            found.append(CommunicationFit(strategy=strategy, machine=machine or processor, fit=fit))
    return found


def _measured(run: Run) -> bool:
    exchanges = run.strategy in COSTS and (run.workers > 1 or run.servers > 0)
    exchanges = exchanges and run.config.get("compress", "none") == "none"
    return run.usable and exchanges and bool(run.gradient_bytes) and positive(run.parts.get("exposed_communication"))
