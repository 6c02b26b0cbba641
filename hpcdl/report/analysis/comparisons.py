"""Who can be compared with whom, in what, and the verdicts: Welch on logarithms, Holm-corrected over a whole report."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.core.statistics import Ratio, holm, welch_log_ratio
from hpcdl.report.analysis.names import counted
from hpcdl.report.runs.run import Run, positive

SIGNIFICANCE = 0.05
UNDECIDED = "not distinguishable"
_SHARED = ("model", "data", "machine", "processor", "version", "workers", "batch_per_rank")
_OWN = ("strategy", "variant", "servers", "nodes", "ranks_per_node", "threads")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """The repeats of one strategy in a contest."""

    name: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """Any of the repeats: their settings are equal."""
        return self.runs[0]


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Strategies that ran the same job; `target` is the accuracy that all of them reached, None without one."""

    where: str
    contenders: tuple[Contender, ...]
    target: float | None


def build_contests(runs: Sequence[Run]) -> list[Contest]:
    """Every job (model, data, machine, version, workers, batch) that two strategies or variants or more ran."""
    settings: dict[tuple[object, ...], dict[tuple[object, ...], list[Run]]] = {}
    for run in runs:
        if run.usable:
            shared = settings.setdefault(tuple(getattr(run, name) for name in _SHARED), {})
            shared.setdefault(tuple(getattr(run, name) for name in _OWN), []).append(run)
    ordered = sorted(settings.items(), key=lambda item: [str(value).zfill(9) for value in item[0]])
    return [_contest(list(groups.values())) for _, groups in ordered if len({key[:2] for key in groups}) > 1]


def comparisons(contests: Sequence[Contest]) -> list[Comparison]:
    """All pairs of different strategies or variants that ran on as many nodes, or with as many ranks on each."""
    return [found for contest in contests for a, b in _pairs(contest) for found in _compared(contest, a, b)]


def seconds_to(run: Run, target: float) -> float | None:
    """Seconds of training until held-out accuracy first was `target`; None where it never was."""
    for point in run.history:
        if point.val_accuracy is not None and point.val_accuracy >= target:
            return point.seconds
    return None


def communication_share(run: Run) -> float | None:
    """Exposed communication and waiting for the slowest rank, as a share of the step."""
    total = sum(run.parts.values())
    if "exposed_communication" not in run.parts or total <= 0 or min(run.parts.values()) < 0:
        return None
    return (run.parts["exposed_communication"] + run.parts.get("wait", 0.0)) / total


def _pairs(contest: Contest) -> Iterator[tuple[Contender, Contender]]:
    for a, b in itertools.combinations(contest.contenders, 2):
        alike = a.first.nodes == b.first.nodes or a.first.ranks_per_node == b.first.ranks_per_node
        if _kind(a) != _kind(b) and alike:
            yield a, b


def _kind(contender: Contender) -> tuple[str, str]:
    return contender.first.strategy, contender.first.variant


def _compared(contest: Contest, a: Contender, b: Contender) -> Iterator[Comparison]:
    sides = [(side.name, [run.images_per_second or 0.0 for run in side.runs]) for side in (a, b)]
    found = compare("strategies", "images_per_second", contest.where, sides[0], sides[1])
    if found is not None:
        yield found
    if contest.target is None:
        return
    times = [(side.name, [seconds_to(run, contest.target) or 0.0 for run in side.runs]) for side in (a, b)]
    found = compare("strategies", "seconds_to_accuracy", contest.where, times[0], times[1], higher_is_better=False)
    if found is not None:
        yield found


def _contest(groups: Sequence[Sequence[Run]]) -> Contest:
    run = groups[0][0]
    names = _names([group[0] for group in groups])
    contenders = tuple(Contender(name=name, runs=tuple(group)) for name, group in zip(names, groups, strict=True))
    where = f"{run.model}, {counted(run.workers, 'worker')}, batch {run.batch_per_rank} per worker"
    return Contest(where=where, contenders=contenders, target=_target([run for group in groups for run in group]))


def _names(firsts: Sequence[Run]) -> list[str]:
    """The strategy's name, with what tells its variants apart."""
    names = []
    for run in firsts:
        siblings = [other for other in firsts if other.strategy == run.strategy]
        extras = [name for name in _OWN[2:] if len({getattr(other, name) for other in siblings}) > 1]
        told = [run.variant] if run.variant and len({other.variant for other in siblings}) > 1 else []
        told += [f"{name.replace('_', ' ')} {getattr(run, name)}" for name in extras]
        names.append(" ".join([run.strategy, *(f"({', '.join(told)})" for _ in told[:1])]))
    return names


def _target(runs: Sequence[Run]) -> float | None:
    """The highest whole percentage of held-out accuracy that every run reached."""
    best = [max((point.val_accuracy or 0.0 for point in run.history), default=0.0) for run in runs]
    target = math.floor(100 * min(best) + 1e-9) / 100
    return target if target > 0 else None


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
