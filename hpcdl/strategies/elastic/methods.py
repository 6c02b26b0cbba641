"""ONE table of the EASGD family's methods with a center: what each sends, what the center does, who waits for whom.

Sources: You, Buluc and Demmel 2017 (arXiv 1708.02983), SC17; Zhang, Choromanska and LeCun 2015 (arXiv 1412.6651); Niu,
Recht, Re and Wright 2011 (arXiv 1106.5730). A new method is a row here; strategy.py reads it. Strings only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdl.strategies.base.strategy import Features, StrategyInfo

_PAPER = "You, Buluc and Demmel 2017 (arXiv 1708.02983)"
_FAMILY = "elastic averaging"
_BASELINE = "asynchronous SGD"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method whose workers exchange with a center; its equations are numbered as in SC17 (replica.py).

    `in_rank_order`: the center serves its workers round robin; otherwise first come, first served, one at a time, which
    is the lock of the methods that have one. `lock_free` methods have no server: workers change the center themselves.
    """

    name: str
    summary: str
    source: str
    equations: str
    rule: str
    """How a request changes the center: a name in server.py's RULES."""
    elastic: bool
    """Workers keep their own weights and are pulled to the center; otherwise they send gradients and pull it."""
    momentum: bool = False
    """Momentum of the worker if `elastic`, else of the center."""
    overlapped: bool = False
    """The exchange runs while the worker computes its gradient, on which it does not depend."""
    in_rank_order: bool = False
    lock_free: bool = False

    @property
    def info(self) -> StrategyInfo:
        """The method's entry in the table of strategies."""
        return StrategyInfo(
            name=self.name,
            family=_FAMILY if self.elastic else _BASELINE,
            summary=self.summary,
            source=self.source,
            features=Features(
                synchronous=self.in_rank_order,
                deterministic=self.in_rank_order,
                exact_resume=self.in_rank_order,
                servers=not self.lock_free,
                lock_free=self.lock_free,
                accumulation=True,
                elastic=self.elastic,
                in_place=not self.lock_free,
                optimizers=("momentum" if self.momentum else "sgd",),
            ),
            target="hpcdl.strategies.elastic.strategy:CenterStrategy",
        )


METHODS = {
    method.name: method
    for method in (
        Method(  # The exchange blocks, after the backward pass: the baseline for the other methods.
            name="easgd",
            summary="The original EASGD: workers exchange with the center one after another, in rank order.",
            source=f"{_PAPER}, baseline; equations (1) (2)",
            equations="(1) on the worker; (2) for one worker at a time on the center",
            rule="attraction",
            elastic=True,
            in_rank_order=True,
        ),
        Method(
            name="async-sgd",
            summary="Each gradient updates the center as soon as it arrives; workers pull the center.",
            source=f"{_PAPER}, baseline",
            equations="W~ <- W~ - eta dW_i; the worker continues from the W~ that comes back",
            rule="descent",
            elastic=False,
        ),
        Method(
            name="async-msgd",
            summary="Async SGD with momentum on the center.",
            source=f"{_PAPER}, baseline; equations (3) (4)",
            equations="V <- mu V - eta dW_i; W~ <- W~ + V, whose V belongs to the center",
            rule="momentum descent",
            elastic=False,
            momentum=True,
        ),
        Method(
            name="hogwild-sgd",
            summary="Async SGD without a lock: workers themselves update the center, in shared or remote memory.",
            source=f"{_PAPER}, baseline; Niu et al. 2011 (arXiv 1106.5730)",
            equations="as async-sgd, by the worker itself",
            rule="descent",
            elastic=False,
            lock_free=True,
        ),
        Method(
            name="async-easgd",
            summary="Workers exchange with the center elastically, first come, first served, while they compute.",
            source=f"{_PAPER}; equations (1) (2)",
            equations="(1) on the worker; (2) for the arriving worker alone on the center",
            rule="attraction",
            elastic=True,
            overlapped=True,
        ),
        Method(
            name="async-measgd",
            summary="Async EASGD with momentum on the workers.",
            source=f"{_PAPER}; equations (2) (5) (6)",
            equations="(5) and (6) on the worker; (2) for the arriving worker alone on the center",
            rule="attraction",
            elastic=True,
            momentum=True,
            overlapped=True,
        ),
        Method(
            name="hogwild-easgd",
            summary="Async EASGD without a lock: workers themselves update the center, in shared or remote memory.",
            source=f"{_PAPER}; equations (1) (2)",
            equations="(1) on the worker; (2) for the worker alone, by the worker itself",
            rule="attraction",
            elastic=True,
            overlapped=True,
            lock_free=True,
        ),
    )
}

ELASTIC_FAMILY: Sequence[StrategyInfo] = (
    *(method.info for method in METHODS.values()),
    StrategyInfo(
        name="sync-easgd",
        family=_FAMILY,
        summary="All workers exchange with the center at once, by an all-reduce during the computation; deterministic.",
        source=f"{_PAPER}, Sync EASGD 1 to 3; equations (1) (2)",
        features=Features(
            deterministic=True,
            compression=True,
            accumulation=True,
            exact_resume=True,
            keras_fit=True,
            elastic=True,
            optimizers=("sgd",),
            groups=True,
            in_place=True,
        ),
        target="hpcdl.strategies.elastic.sync_easgd:SyncEasgd",
    ),
)
