"""A search: the settings of `hpcdl search`, and the file that holds them with the space (docs/how-to/search.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.config.load import Layer, flag_layer, load, plain_keys, set_layer, settings_by_key, standard_layers
from hpcdl.config.other_names import unknown_key
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import AUTO, Setting, setting
from hpcdl.config.study import OF_A_STUDY
from hpcdl.core.errors import ConfigError, shown
from hpcdl.core.storage.files import read_toml

OBJECTIVES: Mapping[str, str] = {
    "accuracy": "maximize",
    "loss": "minimize",
    "seconds-to-target": "minimize",
    "node-hours-to-target": "minimize",
    "images-per-second": "maximize",
    "seconds": "minimize",
}
"""Possible objectives and their directions; times to a target need target-accuracy in [train]."""
SAMPLERS = ("tpe", "cma-es", "random", "grid")
_RANGE_KEYS = ("low", "high", "log", "step", "choices", "when")
_TABLES = ("space", "train")


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """How settings are proposed, tried and judged."""

    name: str | None = setting(None, "Name of the search; by default that of its file.")
    objective: Sequence[str] = setting(("accuracy",), "What is sought: one or several.", kind="names")
    trials: int = setting(30, "Number of trials in all; failed and stopped ones count.", at_least=1)
    sampler: str = setting("tpe", "How settings are proposed.", choices=SAMPLERS)
    ranks: int = setting(1, "Ranks of each trial.", at_least=1)
    parallel: int | None = setting(None, "Trials side by side; by default as many as ranks fit.", at_least=1)
    halving: bool = setting(True, "Stop trials early that are behind (asynchronous successive halving).")
    min_epochs: int = setting(1, "Epochs that every trial may train.", at_least=1)
    reduction: int = setting(3, "Of this many trials one continues, at each rung.", at_least=2)
    search_seed: int = setting(0, "Seed of the proposals.", at_least=0)
    budget: float | None = setting(None, "Start no trial after this time.", kind="seconds", above=0)
    run_timeout: float | None = setting(None, "A trial that takes longer has failed.", kind="seconds", above=0)


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """All groups of one search."""

    plan: SearchPlan


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One setting to search: `choices`, or a range from `low` to `high`.

    `when`: it applies only if other settings have one of these values.
    """

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    log: bool = False
    step: float | None = None
    when: Mapping[str, tuple[str, ...]]

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Return whether it is searched together with `values`."""
        return all(str(values.get(key)) in wanted for key, wanted in self.when.items())

    @property
    def text(self) -> str:
        """Its values in words, and the condition."""
        ways = (", logarithmic" if self.log else "") + (f", step {self.step:g}" if self.step else "")
        values = ", ".join(map(str, self.choices)) if self.choices else f"{self.low:g} to {self.high:g}{ways}"
        conditions = "; ".join(f"{key} {' or '.join(wanted)}" for key, wanted in self.when.items())
        return f"{values} (with {conditions})" if conditions else values

    @property
    def grid(self) -> tuple[Any, ...]:
        """Every value of a list, or of a range by its step (1 by default)."""
        if self.choices:
            return self.choices
        step = self.step or 1.0
        # The small term keeps the last value: 0.3 / 0.1 is 2.9999999999999996.
        values = [self.low + index * step for index in range(int((self.high - self.low) / step + 1e-9) + 1)]
        return tuple(int(value) for value in values) if self.whole else tuple(values)


@dataclass(frozen=True, kw_only=True)
class SearchStudy:
    """A search ready to run; `train` holds the settings that all trials share, by key."""

    name: str
    plan: SearchPlan
    space: tuple[Dimension, ...]
    origin: str
    train: Mapping[str, Any]

    @property
    def directions(self) -> list[str]:
        """The direction of each objective: maximize or minimize."""
        return [OBJECTIVES[name] for name in self.plan.objective]


def load_search(
    path: Path, flags: Mapping[str, Any], pairs: Sequence[str] | None = None, space: Path | None = None
) -> SearchStudy:
    """Return the search of a file, with flags over it; the [space] of the file `space` replaces its own.

    Raises ConfigError with every problem found.
    """
    document = read_toml(path)
    problems = [f"{path}: {name} must be a table" for name in _TABLES if not isinstance(document.get(name, {}), dict)]
    if problems:
        raise ConfigError(problems)
    space_document = read_toml(space) if space else document
    reader = _SpaceReader(str(space or path), space_document.get("space", {}))
    problems += reader.problems
    train = {**plain_keys(document.get("train", {})), **set_layer(list(pairs or [])).values}
    keys = {key: value for key, value in document.items() if key not in _TABLES}
    try:
        layer = Layer(origin=str(path), values=plain_keys(keys), tables=_TABLES)
        plan = load(SearchConfig, [*standard_layers("search"), layer, flag_layer(flags)]).config.plan
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    search = SearchStudy(
        name=plan.name or path.stem, plan=plan, space=tuple(reader.space), origin=str(path), train=train
    )
    problems += _contradictions(search)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return search


class _SpaceReader:
    """Reads the dimensions of a [space]; problems are collected in `problems`."""

    def __init__(self, origin: str, table: Any) -> None:
        self.problems: list[str] = []
        self.space: list[Dimension] = []
        self._origin = origin
        settings = settings_by_key(TrainConfig)
        if not isinstance(table, dict) or not table:
            self._complain("[space] must name settings of hpcdl train, such as learning-rate = {low = 1e-3, high = 1}")
            return
        for key, raw in plain_keys(table).items():
            if key not in settings:
                self._complain(f"space: {unknown_key(key, settings)}")
            elif key in OF_A_STUDY:
                self._complain(f"space: {key}: the search gives it; say --ranks, --out or --resume")
            else:
                self._read(settings[key], raw)
        keys = {dimension.key for dimension in self.space}
        for dimension in self.space:
            for condition in dimension.when:
                if condition not in settings:
                    self._complain(f"space: {dimension.key}: when: {unknown_key(condition, keys)}")

    def _complain(self, text: str) -> None:
        self.problems.append(f"{self._origin}: {text}")

    def _read(self, setting: Setting, given: Any) -> None:
        table = {"choices": given} if isinstance(given, list) else given
        if not isinstance(table, dict) or not set(table) <= set(_RANGE_KEYS):
            self._complain(
                f"space: {setting.key}: write a list of values, or {{low = .., high = ..}} with log, step and when"
            )
            return
        when = {
            key: tuple(map(str, value if isinstance(value, list) else [value]))
            for key, value in plain_keys(dict(table.get("when", {}))).items()
        }
        try:
            if "choices" in table:
                choices = tuple(setting.parse(value) for value in table["choices"])
                if not choices:
                    raise ValueError("no values to choose from")
                self.space.append(Dimension(key=setting.key, choices=choices, when=when))
            else:
                self.space.append(self._range(setting, table, when))
        except (KeyError, TypeError, ValueError) as error:
            why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
            self._complain(f"space: {setting.key}: {why}")

    def _range(self, setting: Setting, table: Mapping[str, Any], when: Mapping[str, tuple[str, ...]]) -> Dimension:
        if setting.kind not in ("int", "float", "bytes", "amount", "seconds") or setting.choices:
            raise ValueError("is not a number; list its values")
        if AUTO in (table["low"], table["high"]):
            raise ValueError(f"{AUTO} is not an end of a range; list the values")
        low, high = (float(setting.parse(table[end])) for end in ("low", "high"))
        log, step = bool(table.get("log", False)), table.get("step")
        if not low < high or (log and low <= 0) or (log and step is not None):
            raise ValueError(
                f"{shown(dict(table))} is not a range; low must be below high (above 0 with log); log or step"
            )
        if step is not None and not (math.isfinite(float(step)) and float(step) > 0):
            raise ValueError(f"step {step} must be above 0")
        whole = setting.kind in ("int", "bytes", "amount")
        return Dimension(key=setting.key, low=low, high=high, whole=whole, log=log, step=step, when=when)


def _contradictions(search: SearchStudy) -> list[str]:
    plan, keys = search.plan, {dimension.key for dimension in search.space}
    problems = [f"{search.origin}: [train] {key}: {OF_A_STUDY[key]}" for key in search.train if key in OF_A_STUDY]
    problems += [
        f"objective: {name!r} is not one of {', '.join(OBJECTIVES)}"
        for name in plan.objective
        if name not in OBJECTIVES
    ]
    # Without a target no trial would ever reach one.
    if any("target" in name for name in plan.objective) and "target-accuracy" not in {*search.train, *keys}:
        problems.append("objective: a time to a target needs target-accuracy in [train]")
    problems += [
        f"{search.origin}: {key} is needed: write it in [train] or [space]"
        for key in ("model", "data")
        if key not in {*search.train, *keys}
    ]
    if plan.sampler == "grid":
        problems += [
            f"space: {dimension.key}: sampler grid needs "
            f"{'no when' if dimension.when else 'a list of values, or a step'}"
            for dimension in search.space
            if dimension.when or (not dimension.choices and dimension.step is None)
        ]
        if len(plan.objective) > 1:
            problems.append("objective: sampler grid takes one")
    if plan.sampler == "cma-es" and len(plan.objective) > 1:
        problems.append("objective: sampler cma-es takes one; use tpe")
    return problems
