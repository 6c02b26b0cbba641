"""Runs in one table, and two runs side by side. Of thousands of records only the flat part is read."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.config.commands import InferConfig
from hpcdl.config.load import all_settings
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import NOTHING
from hpcdl.core.errors import CorruptError, UsageError, suggestion
from hpcdl.core.processes.collector import no_collection
from hpcdl.core.records.from_json import partly, read_as
from hpcdl.core.records.run_record import FILE_NAME, RUNNING, SCHEMA, RunRecord, state_of
from hpcdl.core.units import IMAGES
from hpcdl.report.runs.sources import find_run_dirs, passed_over, run_name, walk

FACTS = (
    "status", "strategy", "model", "data", "ranks", "workers", "servers", "nodes", "batch_per_rank", "global_batch",
    "steps", "accuracy", "loss", "images_per_second", "counted", "seconds_per_epoch", "seconds_total", "started_at",
    "machine", "study", "repeat",
)  # fmt: skip
"""Fields of a record in a row, beside the settings."""
RESULTS = (
    "steps", "accuracy", "loss", "images_per_second", "seconds_per_epoch", "seconds_total", "seconds_to_target",
    "bytes_sent_per_step", "imbalance_seconds", "staleness_mean",
)  # fmt: skip
_SERIES = ("step_seconds", "history", "rank_records")
"""The long lists of a record."""
_CONDITION = re.compile(r"([A-Za-z0-9_-]+)\s*(>=|<=|!=|=|>|<)\s*(.*)")
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRun:
    """A run as a row: `facts` by the names of FACTS, `settings` by the flags' names. `path` is its folder."""

    name: str
    path: Path
    facts: Mapping[str, Any]
    settings: Mapping[str, Any]

    def value(self, key: str) -> Any:
        """Return a fact or a setting; None if this run has none. Dashes and underscores are equivalent."""
        plain = key.replace("-", "_")
        if plain == "name":
            return self.name
        return self.facts[plain] if plain in self.facts else self.settings.get(key.replace("_", "-"))


def list_runs(folder: Path) -> tuple[list[ListedRun], list[str]]:
    """Return the runs at or below `folder`, oldest first, and a line for each unreadable record or folder."""
    runs: list[ListedRun] = []
    walked = walk(folder)
    run_dirs = find_run_dirs(folder, walked)
    unreadable = passed_over(walked, run_dirs)
    # Records hold no cycles, for which Python would search among thousands of them.
    with no_collection():
        for run_dir in run_dirs:
            try:
                record = read_flat(run_dir)
            except CorruptError as error:
                unreadable.append(str(error))
                continue
            facts = {key: record.get(key) for key in FACTS}
            name = run_name(folder, run_dir)
            runs.append(ListedRun(name=name, path=run_dir, facts=facts, settings=record["config"]))
    return sorted(runs, key=lambda run: (str(run.facts["started_at"] or ""), run.name)), unreadable


def read_flat(run_dir: Path) -> dict[str, Any]:
    """Return a record without its long lists (step times, history, ranks). Raises CorruptError if there is none.

    Missing fields are None. `status` is the run's current state.
    """
    path = run_dir / FILE_NAME
    try:
        record = dict(vars(read_as(partly(RunRecord, _SERIES), path, SCHEMA)))
    except FileNotFoundError:
        raise CorruptError(f"cannot read {path}: it is gone") from None
    record["status"] = state_of(run_dir, record["status"] or RUNNING)
    defaults = {"counted": IMAGES, "config": {}, "software": {}}
    return record | {key: value for key, value in defaults.items() if record[key] is None}


def known_keys(runs: Sequence[ListedRun]) -> list[str]:
    """Return the keys that a filter or an order may use: facts and every setting of the runs."""
    settings = (key for key in _all_settings(runs) if key not in FACTS)
    return ["name", *(fact.replace("_", "-") for fact in FACTS), *settings]


def _all_settings(runs: Sequence[ListedRun]) -> list[str]:
    """Return every setting of the runs; nearly all runs have the same ones."""
    kinds = dict.fromkeys(tuple(run.settings) for run in runs)
    return list(dict.fromkeys(key for kind in kinds for key in kind))


def selected(runs: Sequence[ListedRun], conditions: Sequence[str]) -> list[ListedRun]:
    """Return runs that meet all conditions: KEY=VALUE (or VALUE,VALUE), KEY!=VALUE; >=, <=, >, < for numbers."""
    keys = known_keys(runs)
    chosen = list(runs)
    for condition in conditions:
        match = _CONDITION.fullmatch(condition.strip())
        if match is None:
            raise UsageError(f"--where {condition}: write KEY=VALUE, KEY!=VALUE, KEY>=X, KEY<=X, KEY>X or KEY<X")
        key, sign, text = match.groups()
        _check_key("--where", key, keys)
        holds = _test(sign, text, condition)
        chosen = [run for run in chosen if holds(run.value(key))]
    return chosen


def _test(sign: str, text: str, condition: str) -> Callable[[Any], bool]:
    if sign in ("=", "!="):
        wanted = [item.strip() for item in text.split(",")]
        return lambda value: any(_same(value, item) for item in wanted) == (sign == "=")
    try:
        bound = float(text)
    except ValueError:
        raise UsageError(f"--where {condition}: {sign} compares numbers; write for example accuracy>=0.9") from None
    return lambda value: _is_number(value) and bool(_ORDERS[sign](value, bound))


def _same(value: Any, text: str) -> bool:
    if _is_number(value):
        try:
            return bool(float(text) == value)
        except ValueError:
            return False
    return as_text(value) == text


def ordered(runs: Sequence[ListedRun], key: str, *, descending: bool = False) -> list[ListedRun]:
    """Return the runs ordered by `key`: numbers by size, words alphabetically; runs without it come last."""
    _check_key("--sort", key, known_keys(runs))
    have = [run for run in runs if run.value(key) is not None]
    without_value = [run for run in runs if run.value(key) is None]

    def place(run: ListedRun) -> tuple[bool, float, str]:
        value = run.value(key)
        # Numbers and words cannot be compared with each other, so words come first.
        return (True, value, "") if _is_number(value) else (False, 0.0, as_text(value))

    return [*sorted(have, key=place, reverse=descending), *without_value]


def _check_key(flag: str, key: str, known: Sequence[str]) -> None:
    if key.replace("_", "-") not in known:
        raise UsageError(f"{flag}: unknown key {key!r}{suggestion(key, known)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_text(value: Any) -> str:
    """Return a value of a record as a user would type it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"  # 18014, not 1.801e+04
    return ",".join(map(as_text, value)) if isinstance(value, list | tuple) else str(value)


def varying_settings(runs: Sequence[ListedRun]) -> list[str]:
    """Return settings that differ between the runs and are declared to change results or speed."""
    declared = [*all_settings(TrainConfig), *all_settings(InferConfig)]
    plain = {item.key for item in declared if item.matters is NOTHING}
    return [key for key in _all_settings(runs) if key not in plain and _num_values(runs, key) > 1]


_ALWAYS_RECORDED = frozenset(item.key for item in all_settings(TrainConfig) if item.default is not None)
"""Settings that every record has: one without them was written by a version that did not have them, or by `infer`."""


def _num_values(runs: Sequence[ListedRun], key: str) -> int:
    """Return the number of different values of a setting. Records that cannot tell it do not count."""
    values = [run.settings.get(key) for run in runs if key in run.settings or key not in _ALWAYS_RECORDED]
    try:
        return len(set(values))
    except TypeError:  # some values are lists
        return len(set(map(as_text, values)))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference between two runs: `kind` is setting, software or result; `ratio` is second to first."""

    kind: str
    key: str
    first: Any
    second: Any

    def shown(self, value: Any) -> str:
        """Return one of the values as text."""
        absent = value is None and self.kind == "setting" and self.key in _ALWAYS_RECORDED
        return "not recorded" if absent else as_text(value)

    @property
    def ratio(self) -> float | None:
        """The second number divided by the first, if both are finite and none is negative."""
        if self.kind != "result" or not (_is_number(self.first) and _is_number(self.second)):
            return None
        return float(self.second / self.first) if 0 < self.first < math.inf and 0 <= self.second < math.inf else None


def differences(first: Path, second: Path) -> list[Difference]:
    """Return the differences between two runs: settings, data and software, then results."""
    first_record, second_record = read_flat(_only_run(first)), read_flat(_only_run(second))
    result = []
    for kind, left, right in (
        ("setting", _compared(first_record), _compared(second_record)),
        ("software", first_record["software"], second_record["software"]),
        ("result", _results(first_record), _results(second_record)),
    ):
        for key in dict.fromkeys([*left, *right]):
            nothing = left.get(key) in (None, "") and right.get(key) in (None, "")  # a record of an older version
            if left.get(key) != right.get(key) and not nothing:
                result.append(Difference(kind=kind, key=key, first=left.get(key), second=right.get(key)))
    return result


def _only_run(path: Path) -> Path:
    run_dirs = find_run_dirs(path)
    if len(run_dirs) > 1:
        raise UsageError(f"{path} holds {len(run_dirs)} runs; name one of them, such as {run_dirs[0]}")
    return run_dirs[0]


def _compared(record: Mapping[str, Any]) -> dict[str, Any]:
    facts = {key: record.get(key) for key in ("data_checksum", "machine", "nodes")}
    # Every run has its own folder, so these always differ.
    config = {key: value for key, value in record["config"].items() if key not in ("run-dir", "out", "resume")}
    return {**config, **{key: value for key, value in facts.items() if value is not None}}


def _results(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: record.get(key) for key in ("status", *RESULTS)}
