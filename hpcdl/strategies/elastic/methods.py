"""The entries of the EASGD family in the table of strategies. Strings only."""

from __future__ import annotations

from hpcdl.strategies.base import Features, StrategyInfo

_PAPER = "You, Buluc and Demmel 2017 (arXiv 1708.02983)"
_FAMILY = "elastic averaging"
_BASELINE = "asynchronous SGD"

ELASTIC_FAMILY = (
    StrategyInfo(
        name="easgd",
        family=_FAMILY,
        summary="Original EASGD: workers exchange with the center one after another, in rank order.",
        source=f"{_PAPER}, baseline; equations (1) (2)",
        features=Features(
            deterministic=True, servers=True, accumulation=True, exact_resume=True, elastic=True, optimizers=("sgd",)
        ),
        target="hpcdl.strategies.elastic.easgd:Easgd",
    ),
    StrategyInfo(
        name="async-sgd",
        family=_BASELINE,
        summary="Each gradient moves the center as it comes; workers pull the center.",
        source=f"{_PAPER}, baseline",
        features=Features(synchronous=False, servers=True, accumulation=True, optimizers=("sgd",)),
        target="hpcdl.strategies.elastic.async_sgd:AsyncSgd",
    ),
    StrategyInfo(
        name="async-msgd",
        family=_BASELINE,
        summary="Async SGD with momentum on the center.",
        source=f"{_PAPER}, baseline; equations (3) (4)",
        features=Features(synchronous=False, servers=True, accumulation=True, optimizers=("momentum",)),
        target="hpcdl.strategies.elastic.async_msgd:AsyncMsgd",
    ),
    StrategyInfo(
        name="hogwild-sgd",
        family=_BASELINE,
        summary="Async SGD without the lock: workers change the center in shared or remote memory themselves.",
        source=f"{_PAPER}, baseline; Niu et al. 2011 (arXiv 1106.5730)",
        features=Features(synchronous=False, lock_free=True, accumulation=True, optimizers=("sgd",)),
        target="hpcdl.strategies.elastic.hogwild_sgd:HogwildSgd",
    ),
    StrategyInfo(
        name="async-easgd",
        family=_FAMILY,
        summary="Elastic exchange with the center, first come first served, beside the computation.",
        source=f"{_PAPER}; equations (1) (2)",
        features=Features(synchronous=False, servers=True, accumulation=True, elastic=True, optimizers=("sgd",)),
        target="hpcdl.strategies.elastic.async_easgd:AsyncEasgd",
    ),
    StrategyInfo(
        name="async-measgd",
        family=_FAMILY,
        summary="Async EASGD whose workers have momentum.",
        source=f"{_PAPER}; equations (2) (5) (6)",
        features=Features(synchronous=False, servers=True, accumulation=True, elastic=True, optimizers=("momentum",)),
        target="hpcdl.strategies.elastic.async_measgd:AsyncMeasgd",
    ),
    StrategyInfo(
        name="hogwild-easgd",
        family=_FAMILY,
        summary="Async EASGD without the lock: workers change the center in shared or remote memory themselves.",
        source=f"{_PAPER}; equations (1) (2)",
        features=Features(synchronous=False, lock_free=True, accumulation=True, elastic=True, optimizers=("sgd",)),
        target="hpcdl.strategies.elastic.hogwild_easgd:HogwildEasgd",
    ),
    StrategyInfo(
        name="sync-easgd",
        family=_FAMILY,
        summary="All workers exchange with the center at once, by an all-reduce beside the computation; deterministic.",
        source=f"{_PAPER}, Sync EASGD 1 to 3; equations (1) (2)",
        features=Features(
            deterministic=True, accumulation=True, exact_resume=True, elastic=True, optimizers=("sgd",), groups=True
        ),
        target="hpcdl.strategies.elastic.sync_easgd:SyncEasgd",
    ),
)
