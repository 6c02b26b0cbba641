"""The settings that distinguish runs: those that config/schema declares to matter and in which runs of a job differ."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from hpcdl.config.load import groups_of, settings_by_key
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import RESULT, Matters, Setting, settings_of
from hpcdl.core.units import listed
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
"""Settings that a record holds in its own fields, with the values that resulted."""
_SETTINGS: Mapping[str, Setting] = settings_by_key(TrainConfig)
MATTERING = tuple(
    key
    for key, item in _SETTINGS.items()
    if item.matters and Matters.REPEAT not in item.matters and key not in _RECORDED
)
"""Settings that change results, extent or time, except those in which repeats differ."""
COSTLY = frozenset(key for key in MATTERING if Matters.TIME in (_SETTINGS[key].matters or Matters.NOTHING))
"""Settings that change what a step computes or sends."""
_DEFAULTS = {key: "none" if item.default is None else str(item.default) for key, item in _SETTINGS.items()}
_LOCATIONS = frozenset(
    key for key, item in _SETTINGS.items() if item.kind == "Path" and Matters.RESULT not in (item.matters or RESULT)
)
"""Folders that differ between jobs and whose location has no effect."""
_EXCHANGE = ("exchange", "elastic")
OF_STRATEGY = frozenset(item.key for name, group in groups_of(TrainConfig).items() if name in _EXCHANGE
                        for item in settings_of(group))  # fmt: skip
"""Settings of the exchange: they belong to a strategy, and another strategy may not have them."""
_ALWAYS_LISTED = ("precision", "optimizer", "learning-rate", "schedule", "seed")
_OF_ONE_CALL = ("resume", "allow")
UNSTATED = "unstated"
"""The value of every setting of a run measured elsewhere that states no settings."""


def by_varied_settings(runs: Sequence[Run]) -> list[Run]:
    """Return runs whose `settings` hold those that matter and differ among runs of one network and data set."""
    jobs: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        # Runs of different networks or data are never compared: what differs between them distinguishes none.
        jobs.setdefault((run.model, run.data), []).append(run)
    varying = {job: _varying(members, MATTERING) for job, members in jobs.items()}
    short = {key: shortened_numbers({value_of(run, key) for run in runs}) for keys in varying.values() for key in keys}
    return [
        with_settings(run, {key: short[key][value_of(run, key)] for key in keys})
        if (keys := varying[run.model, run.data])
        else run
        for run in runs
    ]


def shortened_numbers(texts: Iterable[str]) -> dict[str, str]:
    """Return a text for each of `texts`: a number with four digits, such as a search draws with 17, or with all of
    them where two would look alike.
    """
    short = {text: _four_digits(text) for text in texts}
    alike = Counter(short.values())
    return {text: value if alike[value] == 1 else text for text, value in short.items()}


def _four_digits(text: str) -> str:
    return f"{float(text):.4g}" if _LONG_NUMBER.fullmatch(text) else text


_LONG_NUMBER = re.compile(r"-?\d*\.\d{7,}(e[-+]?\d+)?")
"""A number that nobody typed."""


_SHOWN = 8
"""Characters of a checksum that are enough to distinguish two."""


def with_variants_by_content(runs: Sequence[Run]) -> tuple[list[Run], str]:
    """Return the runs, with a checksum in `data` if one name has several contents, and a caveat about it."""
    contents: dict[str, dict[str, None]] = {}
    for run in runs:
        if run.data and run.data_content:
            contents.setdefault(run.data, {})[run.data_content] = None
    several = {data for data, checksums in contents.items() if len(checksums) > 1}
    if not several:
        return list(runs), ""
    renamed = [
        dataclasses.replace(run, data=f"{run.data} ({run.data_content[:_SHOWN] or 'unknown content'})")
        if run.data in several
        else run
        for run in runs
    ]
    names = [f"{data} ({', '.join(key[:_SHOWN] for key in contents[data])})" for data in sorted(several)]
    return (
        renamed,
        f"one name of data for several contents (by checksum), never averaged with each other: {listed(names)}",
    )


_SETTING = attrgetter(
    "model", "strategy", "data", "nodes", "workers", "servers", "threads", "ranks_per_node", "profile",
    "batch_per_rank", "machine", "processor", "version",
)  # fmt: skip


def settings_of_runs(runs: Iterable[Run]) -> list[list[Run]]:
    """Return the usable runs, grouped by setting."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    usable = [run for run in runs if run.usable]
    # One process has none: where all others have one library, it tells nothing.
    several = len({run.mpi for run in usable if run.mpi}) > 1
    for run in usable:
        groups.setdefault((*_SETTING(run), several and run.mpi, *run.settings.items()), []).append(run)
    return list(groups.values())


def value_of(run: Run, key: str) -> str:
    """Return a setting of a run as text. A setting missing in the record had its default."""
    if not run.config:
        return UNSTATED
    if key in _LOCATIONS:
        return "given" if key in run.config else "none"
    return run.config.get(key, _DEFAULTS[key])


def default_of(key: str) -> str:
    """Return the default of a setting as text."""
    return _DEFAULTS[key]


def listed_values(runs: Iterable[Run]) -> dict[str, set[str]]:
    """Return the settings a reader needs for a similar run: those that affect learning, and non-default ones."""
    keys = [key for key, setting in _SETTINGS.items() if setting.matters and key not in _RECORDED]
    values = _values([run.config for run in runs if run.config], keys)
    return {key: texts for key, texts in values.items() if key in _ALWAYS_LISTED or texts != {_DEFAULTS[key]}}


def varying_keys(runs: Iterable[Run]) -> list[str]:
    """Return every key of `hpcdl train` that matters and in which `runs` differ, first those with their own fields."""
    members = list(runs)
    recorded = [key for key, field in _RECORDED.items() if len({field(run) for run in members}) > 1]
    return recorded + _varying(members, MATTERING)


def settings_row(run: Run, keys: Iterable[str]) -> dict[str, Any]:
    """Return the run's values of `keys` in types that JSON has."""
    return {key: _RECORDED[key](run) if key in _RECORDED else _typed(key, value_of(run, key)) for key in keys}


def trifling_differences(runs: Sequence[Run]) -> Iterable[str]:
    """Yield a line for settings in which runs differ, but which are declared to change neither results nor time."""
    trifles = [
        key
        for key, setting in _SETTINGS.items()
        if setting.matters is Matters.NOTHING and setting.kind != "Path" and key not in _OF_ONE_CALL
    ]
    values = _values([run.config for run in runs if run.config], trifles)
    differing = [f"{key} ({', '.join(sorted(texts))})" for key, texts in values.items() if len(texts) > 1]
    if differing:
        yield f"runs differ in settings that do not keep them apart in means: {', '.join(differing)}"


def _varying(runs: Sequence[Run], keys: Iterable[str]) -> list[str]:
    """Return the keys with more than one value in `runs`. A key that no run states is equal in all."""
    configs = [run.config for run in runs if run.config]
    if len(configs) not in (0, len(runs)):
        return list(keys)  # some runs state no settings, and differ from all that do
    return [key for key, texts in _values(configs, keys).items() if len(texts) > 1]


def _values(configs: Sequence[Mapping[str, str]], keys: Iterable[str]) -> dict[str, set[str]]:
    """Return the different values, as `value_of` gives them, of those `keys` that any of `configs` states."""
    stated = set[str]().union(*configs)
    chosen = [key for key in keys if key in stated]
    # Thousands of runs have few distinct configurations, so a set of rows is much shorter than a list.
    rows = {tuple(map({**_DEFAULTS, **config}.__getitem__, chosen)) for config in configs}
    values_by_key = dict(zip(chosen, map(set, zip(*rows, strict=True)), strict=True))
    for key in _LOCATIONS & values_by_key.keys():
        values_by_key[key] = {"given" if key in config else "none" for config in configs}
    return values_by_key


def _typed(key: str, text: str) -> Any:
    """Return the value of a setting in its own type; text if it is unset or unstated."""
    if _SETTINGS[key].kind in ("int", "float", "bool", "bytes", "seconds"):
        try:
            return _SETTINGS[key].parse(text)
        except ValueError:
            return text
    return text
