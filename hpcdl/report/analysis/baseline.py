"""A study against an earlier one: the same settings, what changed beyond noise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.comparisons import Comparison, compare
from hpcdl.report.runs.run import Run

KIND = "baseline"
_SETTING = (
    "strategy", "model", "data", "variant", "nodes", "ranks", "workers", "servers", "ranks_per_node", "threads",
    "batch_per_rank", "global_batch",
)  # fmt: skip
_PLACE = ("machine", "processor")
_Setting = tuple[object, ...]


def compare_with(runs: Sequence[Run], baseline: Sequence[Run]) -> tuple[list[Comparison], list[str]]:
    """The throughput of each setting against the baseline's, and what could not be compared.

    Machines and versions are never averaged: each group of one side meets each group of the other, on the same
    machine where both sides have it.
    """
    now, before = _groups(runs), _groups(baseline)
    found, warnings = [], _missing(now, before)
    shared_places = {place for groups in now.values() for place, _ in groups} & {
        place for groups in before.values() for place, _ in groups
    }
    if not shared_places and now and before:
        warnings.append("mixed machines: the baseline was measured on another machine")
    for setting in (item for item in now if item in before):
        for (place, version), group in now[setting].items():
            for (old_place, old_version), old in before[setting].items():
                if shared_places and place != old_place:
                    continue
                names = (_name("this study", version, old_version), _name("baseline", old_version, version))
                item = compare(
                    KIND, "images_per_second", _where(group[0]), (names[0], _rates(group)), (names[1], _rates(old))
                )
                if item is not None:
                    found.append(item)
    once = [item.where for item in found if item.ratio.p_value is None]
    if once:
        warnings.append(f"single measurement: {counted(len(once), 'setting')} cannot be judged: {listed(once)}")
    return found, warnings


def regressions(comparisons: Iterable[Comparison], percent: float) -> list[Comparison]:
    """The decided comparisons with the baseline that are slower by more than `percent`."""
    return [
        item
        for item in comparisons
        if item.kind == KIND and item.decided and not item.a_is_better and item.ratio.value < 1 - percent / 100
    ]


def _groups(runs: Iterable[Run]) -> dict[_Setting, dict[tuple[_Setting, str], list[Run]]]:
    groups: dict[_Setting, dict[tuple[_Setting, str], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.usable:
            place = tuple(getattr(run, name) for name in _PLACE)
            groups[tuple(getattr(run, name) for name in _SETTING)][place, run.version].append(run)
    return groups


def _missing(now: Iterable[_Setting], before: Iterable[_Setting]) -> list[str]:
    here, there = set(now), set(before)
    lines = []
    if there - here:
        lines.append(f"{counted(len(there - here), 'setting')} of the baseline has no usable run here")
    if here - there:
        lines.append(f"{counted(len(here - there), 'setting')} of this study is not in the baseline")
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
