"""Strategies side by side: who can be compared with whom, and in what."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcdl.report.analysis.names import counted
from hpcdl.report.analysis.verdicts import Comparison, compare
from hpcdl.report.runs.run import Run

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
