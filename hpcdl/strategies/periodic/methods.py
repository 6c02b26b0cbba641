"""ONE table of the methods whose workers exchange every H steps: what an exchange does, and its default settings.

Sources: Stich 2018 (arXiv 1805.09767); Lin, Stich, Patel and Jaggi 2018 (arXiv 1808.07217); Wang, Tantia, Ballas and
Rabbat 2019 (arXiv 1910.00643); Douillard and others 2023 (arXiv 2311.08105) and 2025 (arXiv 2501.18512). A new method
is a row here and, if its equation is new, a function in shared.py. Strings and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdl.strategies.base.strategy import Features, StrategyInfo


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Defaults of a method that exchanges weights in fragments, each during some steps."""

    fragments: int
    """The maximum: never more than the model's layers, or a period's steps."""
    overlap: int
    mixing: float


@dataclass(frozen=True, kw_only=True)
class PeriodicMethod:
    """A method whose workers update their own weights for `period` steps, then all take the same new weights.

    `outer_rate` and `outer_momentum` are the defaults of the flags, None if the equation has no such number.
    """

    name: str
    summary: str
    source: str
    equations: str
    rule: str
    """How an exchange uses the mean change: a name in shared.py's RULES."""
    period: int
    outer_rate: float | None = None
    outer_momentum: float | None = None
    resets_momentum: bool = False
    """Whether an exchange, which has a momentum of its own, resets SGD's momentum."""
    post_local: bool = False
    """Whether the first steps may each end with an exchange."""
    streaming: Streaming | None = None
    """How fragments of the weights are exchanged in turn, if the method has them."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The settings that it supports, by the names of their flags."""
        supported = {
            "period": True,
            "outer-rate": self.outer_rate is not None,
            "outer-momentum": self.outer_momentum is not None,
            "post-local-start": self.post_local,
            **dict.fromkeys(("period-within", "period-between"), self.streaming is None),
            **dict.fromkeys(("fragments", "overlap", "mixing"), self.streaming is not None),
        }
        return tuple(flag for flag, has in supported.items() if has)

    @property
    def info(self) -> StrategyInfo:
        """The method's entry in the table of strategies."""
        return StrategyInfo(
            name=self.name,
            family="periodic averaging",
            summary=self.summary,
            source=self.source,
            features=Features(
                deterministic=True,
                exact_resume=True,
                compression=self.streaming is not None,
                compression_by_block=self.streaming is not None,
                accumulation=True,
                lars=True,
                several_steps=True,
                keras_fit=True,
                in_place=self.streaming is None,
                periodic=self.flags,
                default_period=self.period,
            ),
            target="hpcdl.strategies.periodic.worker:Periodic",
        )


METHODS = {
    method.name: method
    for method in (
        PeriodicMethod(
            name="local-sgd",
            summary="Workers train alone and average their weights every --period steps.",
            source="Stich 2018 (arXiv 1805.09767), algorithm 1; post-local start: Lin et al. 2018 (arXiv 1808.07217)",
            equations="x <- mean of x_i",
            rule="mean",
            period=8,
            post_local=True,
        ),
        PeriodicMethod(
            name="slowmo",
            summary="Local SGD with slow momentum on the mean weights; BMUF if the learning rate is constant.",
            source="Wang et al. 2019 (arXiv 1910.00643), algorithm 1",
            equations="u <- beta u + (x - mean of x_i) / gamma; x <- x - alpha gamma u",
            rule="slow momentum",
            period=12,
            outer_rate=1.0,
            outer_momentum=0.6,
            resets_momentum=True,
        ),
        PeriodicMethod(
            name="diloco",
            summary="Each worker keeps its own optimizer; Nesterov momentum applies the mean change to the weights.",
            source="Douillard et al. 2023 (arXiv 2311.08105), algorithm 1",
            equations="D <- x - mean of x_i; v <- mu v + D; x <- x - eta (D + mu v)",
            rule="nesterov",
            period=50,
            outer_rate=0.7,
            outer_momentum=0.9,
        ),
        PeriodicMethod(
            name="streaming-diloco",
            summary="DiLoCo in fragments of layers, exchanged in turn while the next steps are computed.",
            source="Douillard et al. 2025 (arXiv 2501.18512), algorithm 2",
            equations="D <- x - mean of x_i; v <- mu v + D; x <- x - eta (D + mu v); x_i <- (1 - s) x_i + s x",
            rule="nesterov",
            period=50,
            outer_rate=0.7,
            outer_momentum=0.9,
            streaming=Streaming(fragments=4, overlap=1, mixing=0.5),
        ),
    )
}

PERIODIC_FAMILY: Sequence[StrategyInfo] = tuple(method.info for method in METHODS.values())
