"""Comparisons and their verdicts: Welch on logarithms, Holm-corrected over all comparisons that a report shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.core.statistics import Ratio, holm, welch_log_ratio
from hpcdl.report.runs.run import positive

SIGNIFICANCE = 0.05
UNDECIDED = "not distinguishable"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`a` against `b` in one measure; `ratio` is a's mean over b's, `p_holm` None until corrected or with single runs.

    `kind` is `strategies` or `baseline`, `where` the setting that both share.
    """

    kind: str
    measure: str
    higher_is_better: bool
    where: str
    a: str
    b: str
    ratio: Ratio
    p_holm: float | None = None

    @property
    def decided(self) -> bool:
        """Whether the difference holds after Holm's correction."""
        return self.p_holm is not None and self.p_holm < SIGNIFICANCE

    @property
    def a_is_better(self) -> bool:
        """Which way the means differ, decided or not."""
        return (self.ratio.value > 1) == self.higher_is_better

    @property
    def verdict(self) -> str:
        """The sentence that a reader may quote."""
        runs = f"{min(self.ratio.n, self.ratio.n_base)} runs" if self.ratio.p_value is not None else "1 run"
        if not self.decided:
            return f"{UNDECIDED} with {runs}"
        better, worse = (self.a, self.b) if self.a_is_better else (self.b, self.a)
        factor = self.ratio.value if self.ratio.value > 1 else 1 / self.ratio.value
        return f"{better} better than {worse}, {factor:.3g} times"

    def as_json(self) -> dict[str, Any]:
        """One entry of `verdicts` in report.json."""
        return {
            "kind": self.kind,
            "measure": self.measure,
            "where": self.where,
            "a": self.a,
            "b": self.b,
            "n_a": self.ratio.n,
            "n_b": self.ratio.n_base,
            "ratio": self.ratio.value,
            "low": self.ratio.low,
            "high": self.ratio.high,
            "p": self.ratio.p_value,
            "p_holm": self.p_holm,
            "decided": self.decided,
            "verdict": self.verdict,
        }


def compare(
    kind: str, measure: str, where: str, a: tuple[str, Sequence[float]], b: tuple[str, Sequence[float]],
    *, higher_is_better: bool = True,
) -> Comparison | None:  # fmt: skip
    """Compare two named samples; None where a side has no positive values."""
    values, base = ([value for value in side if positive(value)] for side in (a[1], b[1]))
    if not values or not base:
        return None
    ratio = welch_log_ratio(values, base)
    return Comparison(
        kind=kind, measure=measure, higher_is_better=higher_is_better, where=where, a=a[0], b=b[0], ratio=ratio
    )  # fmt: skip


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with Holm's correction over all of them that have a p-value."""
    tested = [item.ratio.p_value for item in comparisons if item.ratio.p_value is not None]
    adjusted = iter(holm(tested))
    return [
        item if item.ratio.p_value is None else dataclasses.replace(item, p_holm=next(adjusted)) for item in comparisons
    ]
