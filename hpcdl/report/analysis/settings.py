"""Which settings keep runs apart: those that config/schema declares to matter, where runs of a job differ in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any

from hpcdl.config.load import groups_of, settings_by_key
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import RESULT, Matters, Setting, settings_of
from hpcdl.report.runs.run import Run, with_settings

_RECORDED: Mapping[str, Callable[[Run], Any]] = {
    "model": lambda run: run.model,
    "data": lambda run: run.data,
    "strategy": lambda run: run.strategy,
    "batch-size": lambda run: run.batch_per_rank,
    "ranks": lambda run: run.ranks,
    "servers": lambda run: run.servers,
    "profile": lambda run: run.profile,
}
"""Settings that a record holds in fields of its own, as they came out."""
_SETTINGS: Mapping[str, Setting] = settings_by_key(TrainConfig)
MATTERING = tuple(
    key
    for key, item in _SETTINGS.items()
    if item.matters and Matters.REPEAT not in item.matters and key not in _RECORDED
)
"""Settings that change results, extent or time, but for those in which repeats differ."""
COSTLY = frozenset(key for key in MATTERING if Matters.TIME in (_SETTINGS[key].matters or Matters.NOTHING))
"""Settings that change what a step does or sends."""
_DEFAULTS = {key: "none" if item.default is None else str(item.default) for key, item in _SETTINGS.items()}
_PLACES = frozenset(
    key for key, item in _SETTINGS.items() if item.kind == "Path" and Matters.RESULT not in (item.matters or RESULT)
)
"""Folders that differ by job, and change nothing by where they are."""
_EXCHANGE = ("exchange", "elastic")
OF_STRATEGY = frozenset(item.key for name, group in groups_of(TrainConfig).items() if name in _EXCHANGE
                        for item in settings_of(group))  # fmt: skip
"""Settings of how ranks exchange: what belongs to a strategy, and another strategy may not have."""
_ALWAYS_TOLD = ("precision", "optimizer", "learning-rate", "schedule", "seed")
_OF_ONE_CALL = ("resume", "allow")
UNSTATED = "unstated"
"""The value of every setting of a run that was measured elsewhere, and said nothing of its settings."""


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs with `settings` holding those that matter and differ among the runs of one network and data set."""
    jobs: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        jobs.setdefault((run.model, run.data), []).append(run)
    varying = {job: _varying(members, MATTERING) for job, members in jobs.items()}
    return [
        with_settings(run, {key: value_of(run, key) for key in keys}) if (keys := varying[run.model, run.data]) else run
        for run in runs
    ]


_SETTING = attrgetter(
    "model", "strategy", "data", "nodes", "workers", "servers", "threads", "ranks_per_node", "profile",
    "batch_per_rank", "machine", "processor", "version",
)  # fmt: skip


def settings_of_runs(runs: Iterable[Run]) -> list[list[Run]]:
    """The usable runs, those of one setting together."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        if run.usable:
            groups.setdefault((*_SETTING(run), *run.settings.items()), []).append(run)
    return list(groups.values())


def value_of(run: Run, key: str) -> str:
    """A setting of a run as text; what the record leaves out had its default."""
    if not run.config:
        return UNSTATED
    if key in _PLACES:
        return "given" if key in run.config else "none"
    return run.config.get(key, _DEFAULTS[key])


def values_of(runs: Sequence[Run], key: str) -> set[str]:
    """The different values that runs have of a setting, as `value_of` tells them."""
    if key in _PLACES:
        return {value_of(run, key) for run in runs}
    configs = [run.config for run in runs if run.config]
    found = set(map(methodcaller("get", key, _DEFAULTS[key]), configs))
    return found if len(configs) == len(runs) else found | {UNSTATED}


def default_of(key: str) -> str:
    """The default of a setting as text."""
    return _DEFAULTS[key]


def told_keys(runs: Iterable[Run]) -> list[str]:
    """The keys that a reader needs to run the like again: what decides how it learns, and what is not its default."""
    members = [run for run in runs if run.config]
    keys = [key for key, item in _SETTINGS.items() if item.matters and key not in _RECORDED]
    stated = set[str]().union(*(run.config for run in members))
    return [
        key for key in keys if key in stated and (key in _ALWAYS_TOLD or values_of(members, key) != {_DEFAULTS[key]})
    ]


def varying_keys(runs: Iterable[Run]) -> list[str]:
    """Every key of `hpcdl train` that matters and in which `runs` differ, those with fields of their own first."""
    members = list(runs)
    recorded = [key for key, field in _RECORDED.items() if len({field(run) for run in members}) > 1]
    return recorded + _varying(members, MATTERING)


def settings_row(run: Run, keys: Iterable[str]) -> dict[str, Any]:
    """The run's values of `keys` in types that JSON has."""
    return {key: _RECORDED[key](run) if key in _RECORDED else _typed(key, value_of(run, key)) for key in keys}


def trifling_differences(runs: Sequence[Run]) -> Iterable[str]:
    """A line for the settings in which runs differ though they change neither results nor time."""
    trifles = [
        key
        for key, item in _SETTINGS.items()
        if item.matters is Matters.NOTHING and item.kind != "Path" and key not in _OF_ONE_CALL
    ]
    stated = [run for run in runs if run.config]
    differing = [f"{key} ({', '.join(sorted(values_of(stated, key)))})" for key in _varying(stated, trifles)]
    if differing:
        yield f"runs differ in settings that change neither results nor time, and are averaged: {', '.join(differing)}"


def _varying(runs: Sequence[Run], keys: Iterable[str]) -> list[str]:
    """The keys of which `runs` have more than one value; what no run states, they all have alike."""
    configs = [run.config for run in runs if run.config]
    if len(configs) not in (0, len(runs)):
        return list(keys)  # some say nothing of their settings, and are unlike all that do
    stated = set[str]().union(*configs)
    return [key for key in keys if key in stated and _differ(configs, key)]


def _differ(configs: Sequence[Mapping[str, str]], key: str) -> bool:
    if key in _PLACES:
        return 0 < sum(key in config for config in configs) < len(configs)
    return len(set(map(methodcaller("get", key, _DEFAULTS[key]), configs))) > 1


def _typed(key: str, text: str) -> Any:
    """The value of a setting in its own type; text where it is unset or unstated."""
    if _SETTINGS[key].kind in ("int", "float", "bool", "bytes", "seconds"):
        try:
            return _SETTINGS[key].parse(text)
        except ValueError:
            return text
    return text
