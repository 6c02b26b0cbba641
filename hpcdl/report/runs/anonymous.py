"""Runs without hosts, users and paths, for reports that go to other people."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hpcdl.config.load import settings_by_key
from hpcdl.config.schema import TrainConfig
from hpcdl.report.runs.findings import Inferred, TracedRun
from hpcdl.report.runs.searches import SearchRecord, TunedNode
from hpcdl.report.runs.sources import Gathered

Item = TypeVar("Item")
WITHHELD = "(withheld)"
# Plain words and versions: paths, addresses and e-mails need other characters.
_VERSION = re.compile(r"[\w .+()-]{1,60}")
_SYNTHETIC = "synthetic:"
_DEFAULTS = {key: str(item.default) for key, item in settings_by_key(TrainConfig).items()}


def anonymised(gathered: Gathered, *, hide_data: bool = False) -> Gathered:
    """Return the same measurements under neutral names. Free text is withheld, because it may name people and places.

    A data set keeps its name, which says what was learnt, unless it is a path or `hide_data` is set.
    """
    machine = _numbered("machine", gathered.runs, lambda run: run.machine)
    data = _numbered("data", gathered.runs, lambda run: run.data if hide_data or _is_place(run.data) else "")
    # An empty word gives ` 1`, which is stripped below.
    content = _numbered("", gathered.runs, lambda run: run.data_content)
    profile = _numbered("profile", gathered.runs, lambda run: run.profile)
    withheld = {value for run in gathered.runs for name, value in run.config.items() if not _is_harmless(name, value)}
    values = {value: f"{WITHHELD} {number}" for number, value in enumerate(sorted(withheld), start=1)}
    model = _numbered("model", gathered.runs, lambda run: run.model if _is_path(run.model) else "")
    return Gathered(
        runs=tuple(
            dataclasses.replace(
                run,
                name=f"run {number}",
                message=WITHHELD if run.message else "",
                hosts=(),
                slowest=run.slowest and dataclasses.replace(run.slowest, host=""),
                config=_neutral(run.config, values),
                # A study's labels are free text.
                labels={},
                profile=profile.get(run.profile, run.profile),
                machine=machine.get(run.machine, run.machine),
                data=data.get(run.data, run.data),
                data_content=content.get(run.data_content, "").strip(),
                model=model.get(run.model, run.model),
                software={name: value for name, value in run.software.items() if _VERSION.fullmatch(value)},
                environment={},
                warnings=(WITHHELD,) if run.warnings else (),
            )
            for number, run in enumerate(gathered.runs, start=1)
        ),
        unreadable=tuple(f"record {number}" for number, _ in enumerate(gathered.unreadable, start=1)),
        remarks=(WITHHELD,) if gathered.remarks else (),
        run_dirs=tuple((f"run {number}", run_dir) for number, (_, run_dir) in enumerate(gathered.run_dirs, start=1)),
        inferences=_anonymised_inferences(gathered.inferences, hide_data=hide_data),
    )


def _anonymised_inferences(inferences: Sequence[Inferred], *, hide_data: bool) -> tuple[Inferred, ...]:
    """Return the same under neutral names, without settings that may name people and places."""
    data = _numbered("data", inferences, lambda item: item.data if hide_data or _is_place(item.data) else "")
    model = _numbered("model", inferences, lambda item: item.model if _is_path(item.model) else "")
    return tuple(
        dataclasses.replace(
            item,
            name=f"inference {number}",
            message=WITHHELD if item.message else "",
            model=model.get(item.model, item.model),
            data=data.get(item.data, item.data),
            machine="",
            settings={key: value if _VERSION.fullmatch(value) else WITHHELD for key, value in item.settings.items()},
            warnings=(WITHHELD,) if item.warnings else (),
        )
        for number, item in enumerate(inferences, start=1)
    )


def _neutral(config: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Return settings without what may name people and places. Values that differed still differ."""
    return {name: values.get(value, value) for name, value in config.items()}


def anonymised_tunings(tunings: Sequence[TunedNode]) -> list[TunedNode]:
    """Return the same searches under neutral names, without the trials' messages."""
    return [
        dataclasses.replace(
            tuning,
            name=f"tuning {number}",
            model="model" if _is_path(tuning.model) else tuning.model,
            machine="",
            software={name: value for name, value in tuning.software.items() if _VERSION.fullmatch(value)},
            attempts=[
                dataclasses.replace(attempt, message=WITHHELD if attempt.message else "") for attempt in tuning.attempts
            ],
        )
        for number, tuning in enumerate(tunings, start=1)
    ]


def anonymised_searches(searches: Sequence[SearchRecord]) -> list[SearchRecord]:
    """Return the same searches under neutral names, without command lines and messages."""
    return [
        dataclasses.replace(
            search,
            name=f"search {number}",
            origin="",
            mark="",
            commands=[WITHHELD for _ in search.commands],
            trials=[dataclasses.replace(trial, message=WITHHELD if trial.message else "") for trial in search.trials],
        )
        for number, search in enumerate(searches, start=1)
    ]


def anonymised_traces(traced: Sequence[TracedRun]) -> list[TracedRun]:
    """Return the same traces without hosts. Their runs have neutral names already."""
    return [
        dataclasses.replace(
            run,
            slow_ranks=[dataclasses.replace(one, host=WITHHELD) for one in run.slow_ranks],
            network=[
                dataclasses.replace(one, host=f"host {number}") for number, one in enumerate(run.network, start=1)
            ],
        )
        for run in traced
    ]


def _numbered(word: str, runs: Sequence[Item], value: Callable[[Item], str]) -> dict[str, str]:
    """Return a neutral name for each different value, in order of appearance."""
    distinct = [name for name in dict.fromkeys(value(run) for run in runs) if name]
    return {name: f"{word} {number}" for number, name in enumerate(distinct, start=1)}


def _is_harmless(key: str, value: str) -> bool:
    """Return whether a setting reveals no people and places: a default, nothing at all, or plain words."""
    return value == "" or value == _DEFAULTS.get(key) or _VERSION.fullmatch(value) is not None


def _is_place(data: str) -> bool:
    return _is_path(data) and not data.startswith(_SYNTHETIC)


def _is_path(model: str) -> bool:
    return "/" in model or "\\" in model or ":" in model
