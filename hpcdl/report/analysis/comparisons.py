"""Comparisons between runs and their verdicts: Welch on logarithms, Holm-corrected over a whole report.

Also compares a study with an earlier one: the same settings, and changes beyond noise.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.core.errors import UnknownNameError, UsageError
from hpcdl.core.statistics import Ratio, holm, welch_log_ratio
from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.names import label_of, setting_words, telling_settings
from hpcdl.report.analysis.settings import MATTERING, OF_STRATEGY
from hpcdl.report.runs.run import Run, learned_apart, positive

SIGNIFICANCE = 0.05
UNDECIDED = "not distinguishable"
STRATEGIES = "strategies"
"""The kind of comparison that every report makes."""
MOST_CONTENDERS = 16
"""Up to this number every pair is compared; more contenders are each compared with the fastest, to limit the tests."""
_JOB = ("model", "data", "workers", "batch_per_rank", "strategy", "servers", "nodes", "ranks_per_node", "threads",
        "profile", "machine", "processor", "version", "mpi")  # fmt: skip
"""Fields that make two runs repeats of one setting, beside `settings`."""
_FREE: Mapping[str, tuple[str, ...]] = {
    STRATEGIES: ("strategy", "servers", "nodes", "ranks_per_node", "threads", "profile", "mpi"),
    "machine": ("machine", "processor", "version", "nodes", "ranks_per_node", "threads", "profile", "mpi"),
    "processor": ("machine", "processor", "version", "nodes", "ranks_per_node", "threads", "profile", "mpi"),
    "version": ("version", "mpi"),
    "mpi": ("mpi",),
    "servers": ("servers", "nodes", "mpi"),
    "threads": ("threads", "profile"),
    "profile": ("profile", "threads"),
}
"""Fields in which contenders may differ, by what is compared. Machines of different kinds never have equal threads."""
_COUNTS = ("servers", "threads")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """The repeats of one setting in a contest."""

    name: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """Any of the repeats: their settings are equal."""
        return self.runs[0]


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Settings that ran the same job. `target` is the accuracy that all of them reached, None without one.

    `kind` is what is compared: strategies, or a field or setting (`machine`, `learning-rate`).
    """

    kind: str
    where: str
    contenders: tuple[Contender, ...]
    target: float | None


def check_comparable(key: str, runs: Sequence[Run]) -> None:
    """Raise UsageError if runs cannot be compared by `key`: it is unknown, or the runs do not differ in it."""
    if key in _FREE and key != STRATEGIES:
        values = {str(getattr(run, key)) for run in runs}
    elif key in MATTERING:
        values = {run.settings.get(key, "") for run in runs}
    else:
        if key in ("strategy", STRATEGIES):
            raise UsageError(f"--compare {key}: every report compares strategies; leave --compare out")
        raise UnknownNameError("--compare", key, [*(name for name in _FREE if name != STRATEGIES), *MATTERING])
    if len(values) < 2:
        raise UsageError(f"--compare {key}: all runs that were measured have the same; name runs that differ in it")


def build_contests(runs: Sequence[Run], by: str = STRATEGIES) -> list[Contest]:
    """Return jobs that two or more contenders ran: strategies with any settings, or runs differing only in `by`."""
    free = _FREE.get(by, ())
    fixed = [name for name in _JOB if name not in free]
    jobs: dict[Hashable, dict[Hashable, list[Run]]] = {}
    for run in runs:
        if run.usable:
            # Strategies have settings of their own: `_one_difference` decides later which pairs are fair.
            settings = () if by == STRATEGIES else tuple(item for item in run.settings.items() if item[0] != by)
            job = jobs.setdefault((*(getattr(run, name) for name in fixed), settings), {})
            contender = (*(getattr(run, name) for name in free), *run.settings.items())
            job.setdefault(contender, []).append(run)
    # Filled with zeros, so that 8 workers come before 16.
    ordered = sorted(jobs.items(), key=lambda item: [str(value).zfill(9) for value in item[0]])  # type: ignore[attr-defined]
    contests = [_contest(by, list(groups.values())) for _, groups in ordered]
    return [contest for contest in contests if len({_kind(item.first, by) for item in contest.contenders}) > 1]


def comparisons(contests: Sequence[Contest]) -> list[Comparison]:
    """Return comparisons of all pairs that differ in one thing. Strategies also need equal nodes, or ranks per node."""
    return [comparison for contest in contests for a, b in _pairs(contest) for comparison in _compared(contest, a, b)]


def seconds_to(run: Run, target: float) -> float | None:
    """Return seconds of training until held-out accuracy first reached `target`; None if it never did."""
    for point in run.history:
        if point.val_accuracy is not None and point.val_accuracy >= target:
            return point.seconds
    return None


def communication_and_step(run: Run) -> tuple[float, float] | None:
    """Return seconds of exposed communication and of waiting for the slowest rank, and seconds of the step."""
    total = sum(run.parts.values())
    if "exposed_communication" not in run.parts or total <= 0 or min(run.parts.values()) < 0:
        return None
    return run.parts["exposed_communication"] + run.parts.get("wait", 0.0), total


def _pairs(contest: Contest) -> Iterator[tuple[Contender, Contender]]:
    several = contest.contenders
    if len(several) > MOST_CONTENDERS:
        best = max(several, key=lambda item: statistics.fmean(run.images_per_second or 0.0 for run in item.runs))
        pairs = [(best, other) for other in several if other is not best]
    else:
        pairs = list(itertools.combinations(several, 2))
    for a, b in pairs:
        if contest.kind == STRATEGIES and not _one_difference(a.first, b.first, _own_keys(several)):
            continue
        if _kind(a.first, contest.kind) != _kind(b.first, contest.kind):
            yield a, b


OWN_RATE = ("learning-rate", "momentum")
"""Settings that a study may choose for each strategy separately."""


def _own_keys(contenders: Sequence[Contender]) -> set[str]:
    """Return those keys of OWN_RATE with one value per strategy: they belong to the strategy, as its period does."""
    keys = set()
    for key in OWN_RATE:
        pairs = {(item.first.strategy, item.first.settings.get(key)) for item in contenders}
        if len(pairs) == len({strategy for strategy, _ in pairs}):
            keys.add(key)
    return keys


def _one_difference(a: Run, b: Run, own_keys: set[str]) -> bool:
    """Return whether two runs differ in one thing: a strategy with its own settings, or one setting."""
    # Servers need more nodes, or more ranks on each; a pair that differs in both uses the machine differently.
    if a.nodes != b.nodes and a.ranks_per_node != b.ranks_per_node:
        return False
    differing = {key for key, value in a.settings.items() if b.settings.get(key) != value}
    return differing <= OF_STRATEGY | own_keys if a.strategy != b.strategy else len(differing) == 1


def _kind(run: Run, by: str) -> Hashable:
    """Return what a contender represents. Contenders of one kind are listed separately, but not compared."""
    if by == STRATEGIES:
        return run.strategy, run.variant
    return run.settings.get(by) if by in MATTERING else getattr(run, by)


def _compared(contest: Contest, a: Contender, b: Contender) -> Iterator[Comparison]:
    sides = [(side.name, [run.images_per_second or 0.0 for run in side.runs]) for side in (a, b)]
    comparison = compare(contest.kind, "images_per_second", contest.where, sides[0], sides[1])
    if comparison is not None:
        yield comparison
    if contest.target is None:
        return
    times = [
        (side.name, [seconds_to(run, contest.target) or 0.0 for run in learned_apart(side.runs)]) for side in (a, b)
    ]
    comparison = compare(contest.kind, "seconds_to_accuracy", contest.where, times[0], times[1], higher_is_better=False)
    if comparison is not None:
        yield comparison


def _contest(by: str, groups: Sequence[Sequence[Run]]) -> Contest:
    run = groups[0][0]
    names = _names(by, [group[0] for group in groups])
    contenders = tuple(Contender(name=name, runs=tuple(group)) for name, group in zip(names, groups, strict=True))
    strategy = "" if by == STRATEGIES else f"{run.strategy}, "
    where = f"{run.model}, {strategy}{counted(run.workers, 'worker')}, batch {run.batch_per_rank} per worker"
    shared = (
        [] if by == STRATEGIES else [setting_words(run, key, run.settings[key]) for key in run.settings if key != by]
    )
    where = ", ".join([where, *shared])
    target = _target([run for group in groups for run in group])
    return Contest(kind=by, where=where, contenders=contenders, target=target)


def _names(by: str, firsts: Sequence[Run]) -> list[str]:
    """Return names of the contenders, with the settings that distinguish each from its siblings."""
    families: dict[str, list[Run]] = {}
    for run in firsts:
        families.setdefault(_headline(run, by), []).append(run)
    shown = {
        name: [field for field in _FREE.get(by, ()) if field != by and len({getattr(run, field) for run in runs}) > 1]
        for name, runs in families.items()
    }
    names = []
    for run, telling in zip(firsts, telling_settings(firsts), strict=True):
        headline = _headline(run, by)
        shown_keys = telling if by == STRATEGIES else ()  # else all contenders share them, and the contest names them
        labels = [setting_words(run, key, run.settings[key]) for key in run.settings if key in shown_keys]
        labels += [f"{name.replace('_', ' ')} {getattr(run, name)}" for name in shown[headline] if name != "strategy"]
        names.append(" ".join([headline, *(f"({', '.join(labels)})" for _ in labels[:1])]))
    return names


def _headline(run: Run, by: str) -> str:
    if by == STRATEGIES:
        return label_of(run, "strategy", run.strategy)
    if by in MATTERING:
        return setting_words(run, by, run.settings.get(by, ""))
    return f"{by} {getattr(run, by)}" if by in _COUNTS else str(getattr(run, by)) or f"unknown {by}"


def _target(runs: Sequence[Run]) -> float | None:
    """Return the highest whole percentage of held-out accuracy that every run reached."""
    best = [max((point.val_accuracy or 0.0 for point in run.history), default=0.0) for run in runs]
    # 100 x 0.29 is 28.999999999999996 in floating point.
    target = math.floor(100 * min(1.0, *best) + 1e-9) / 100  # a record from elsewhere may hold any value
    return target if target > 0 else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`a` against `b` in one measure. `ratio` is a's mean over b's; `p_holm` is None until corrected or with one run.

    `kind` is `strategies`, `baseline`, or the value of --compare. `where` is the setting that both share.
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
        """Whether the mean of `a` is better, decided or not."""
        return (self.ratio.value > 1) == self.higher_is_better

    @property
    def verdict(self) -> str:
        """A sentence that a reader may quote."""
        runs = f"{min(self.ratio.n, self.ratio.n_base)} runs" if self.ratio.p_value is not None else "1 run"
        if not self.decided:
            return f"{UNDECIDED} with {runs}"
        better, worse = (self.a, self.b) if self.a_is_better else (self.b, self.a)
        factor = self.ratio.value if self.ratio.value > 1 else 1 / self.ratio.value
        return f"{better} better than {worse}, {factor:.3g} times"

    def as_json(self) -> dict[str, Any]:
        """Return one entry of `verdicts` in report.json."""
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
    """Compare two named samples. Returns None if a side has no positive values."""
    values, base = ([value for value in side if positive(value)] for side in (a[1], b[1]))
    if not values or not base:
        return None
    ratio = welch_log_ratio(values, base)
    return Comparison(
        kind=kind, measure=measure, higher_is_better=higher_is_better, where=where, a=a[0], b=b[0], ratio=ratio
    )  # fmt: skip


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with Holm's correction over all of them that have a p-value."""
    # Single runs have no p-value, and must not weaken the verdicts of others.
    tested = [comparison.ratio.p_value for comparison in comparisons if comparison.ratio.p_value is not None]
    adjusted = iter(holm(tested))
    return [
        comparison if comparison.ratio.p_value is None else dataclasses.replace(comparison, p_holm=next(adjusted))
        for comparison in comparisons
    ]


KIND = "baseline"
_SETTING = (
    "strategy", "model", "data", "variant", "nodes", "ranks", "workers", "servers", "ranks_per_node", "threads",
    "batch_per_rank", "global_batch",
)  # fmt: skip
_PLACE = ("machine", "processor")
_Setting = tuple[object, ...]


def compare_with(runs: Sequence[Run], baseline: Sequence[Run]) -> tuple[list[Comparison], list[str]]:
    """Return comparisons of each setting's throughput with the baseline's, and lines on what could not be compared.

    Machines and versions are never averaged: each group of one side is compared with each group of the other, on the
    same machine if both sides have it.
    """
    current, before = _groups(runs), _groups(baseline)
    verdicts, warnings = [], _missing(current, before)
    shared_places = {machine for groups in current.values() for machine, _ in groups} & {
        machine for groups in before.values() for machine, _ in groups
    }
    if not shared_places and current and before:
        warnings.append("mixed machines: the baseline was measured on another machine")
    now, then = ({run.mpi for run in side if run.mpi} for side in (runs, baseline))
    if now and then and now != then:
        warnings.append(f"mixed MPI libraries: the baseline ran over {listed(sorted(then))}, not {listed(sorted(now))}")
    for setting in (item for item in current if item in before):
        for (machine, version), group in current[setting].items():
            for (old_place, old_version), old in before[setting].items():
                if shared_places and machine != old_place:
                    continue
                names = (_name("this study", version, old_version), _name("baseline", old_version, version))
                item = compare(
                    KIND, "images_per_second", _where(group[0]), (names[0], _rates(group)), (names[1], _rates(old))
                )
                if item is not None:
                    verdicts.append(item)
    once = [item.where for item in verdicts if item.ratio.p_value is None]
    if once:
        warnings.append(f"single measurement: {counted(len(once), 'setting')} cannot be judged: {listed(once)}")
    return verdicts, warnings


def regressions(comparisons: Iterable[Comparison], percent: float) -> list[Comparison]:
    """Return the decided comparisons with the baseline that are slower by more than `percent`."""
    return [
        comparison
        for comparison in comparisons
        if comparison.kind == KIND
        and comparison.decided
        and not comparison.a_is_better
        and comparison.ratio.value < 1 - percent / 100
    ]


def why_unjudged(comparisons: Iterable[Comparison]) -> str:
    """Return why the baseline decides nothing, with advice; empty if it judges a setting."""
    against = [comparison for comparison in comparisons if comparison.kind == KIND]
    if any(comparison.p_holm is not None for comparison in against):
        return ""
    if not against:
        return (
            "no setting has usable runs on both sides; compare runs of the same network, data, size, batch and threads"
        )
    return "every setting that both sides have was measured once on one of them; repeat the runs"


def _groups(runs: Iterable[Run]) -> dict[_Setting, dict[tuple[_Setting, str], list[Run]]]:
    groups: dict[_Setting, dict[tuple[_Setting, str], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.usable:
            machine = tuple(getattr(run, name) for name in _PLACE)
            groups[tuple(getattr(run, name) for name in _SETTING)][machine, run.version].append(run)
    return groups


def _missing(now: Iterable[_Setting], before: Iterable[_Setting]) -> list[str]:
    settings_now, settings_before = set(now), set(before)
    lines = []
    if settings_before - settings_now:
        lines.append(
            f"{counted(len(settings_before - settings_now), 'setting')} of the baseline has no usable run here"
        )
    if settings_now - settings_before:
        lines.append(f"{counted(len(settings_now - settings_before), 'setting')} of this study is not in the baseline")
    return lines


def _name(side: str, version: str, other: str) -> str:
    return f"{side} ({version})" if version and version != other else side


def _where(run: Run) -> str:
    extras = [f"{counted(run.servers, 'server')}"] if run.servers else []
    extras += [counted(run.threads, "thread")] if run.threads else []
    label = ", ".join([counted(run.workers, "worker"), counted(run.nodes, "node"), *extras])
    return f"{run.model}, {run.strategy}, {label}, batch {run.batch_per_rank} per worker"


def _rates(runs: Sequence[Run]) -> list[float]:
    return [run.images_per_second or 0.0 for run in runs]
