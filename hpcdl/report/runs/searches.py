"""Searches as a report uses them: for hyper-parameters by `search`, for a node's best settings by `tune-threads`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.core.errors import CorruptError
from hpcdl.core.records.from_json import read_as
from hpcdl.core.units import IMAGES
from hpcdl.report.runs.sources import Walk

SCHEMA = "hpcdl.search/1"
FILE_NAME = "search.json"
OF_SAMPLES = {"accuracy", "loss"}
"""Objectives measured on held-out samples, if the data have any."""
LEAST_BEST = 5
"""Trials that the best tenth must have for importances to say much."""


@dataclass(frozen=True, kw_only=True)
class SearchTrial:
    """One trial: its settings, its state and, if it finished, its values by objective.

    `ended_after_s` is the time of the search until its end, over all calls; `message` says why it failed.
    """

    number: int
    state: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    values: Sequence[float] = ()
    ended_after_s: float | None = None
    seconds: float | None = None
    node_hours: float | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """One search. `directions` say for each objective whether to maximize or minimize it.

    `front` has the numbers of the best trials, the best first; `commands` are the commands to train each.
    `on_training`: accuracy and loss are those of the training samples, because the data have no others. `places` are
    the processors and versions of finished trials: more than one after a search was resumed elsewhere.
    """

    schema: str = SCHEMA
    name: str
    origin: str
    sampler: str
    objectives: Sequence[str]
    directions: Sequence[str]
    planned: int
    mark: str
    seconds: float = 0.0
    trials: Sequence[SearchTrial] = ()
    front: Sequence[int] = ()
    commands: Sequence[str] = ()
    importance: Mapping[str, float] = field(default_factory=dict)
    on_training: bool = False
    places: Sequence[str] = ()

    @property
    def importance_doubt(self) -> str:
        """The reason why `importance` may be chance; empty without doubts, or without `importance`.

        PED-ANOVA compares the best tenth with all; Optuna's documentation asks for at least five trials in that tenth.
        """
        finished = sum(bool(trial.values) for trial in self.trials)
        best = math.ceil(finished / 10)
        if not self.importance or best >= LEAST_BEST:
            return ""
        return (
            f"importances compare the best {best} of {finished} trials with all of them: with fewer than {LEAST_BEST} "
            "of the best they may be chance"
        )

    @property
    def doubts(self) -> list[str]:
        """What to know before believing the value of the best trial."""
        return [*self._by_heart(), *self._elsewhere(), *self._longer(), *self._luckiest(), *self._chance()]

    def _by_heart(self) -> Iterator[str]:
        if self.on_training:
            yield (
                "accuracy and loss are of the samples trained on, the data have no others: the winner may have learnt "
                "them by heart; hpcdl shard --split train=0.9,val=0.1 holds some out"
            )

    def _elsewhere(self) -> Iterator[str]:
        timed = [name for name in self.objectives if name not in OF_SAMPLES]
        if timed and len(self.places) > 1:
            yield f"{' and '.join(timed)} of trials on different machines or versions compete: {'; '.join(self.places)}"

        for key, affected in _MEASURES_BY.items():
            names = [name for name in self.objectives if affected in name]
            if names and self._differ_in(key):
                yield (
                    f"{key} was searched too: {' and '.join(names)} measured by different {key} do not show which "
                    "trial is better; search once for each"
                )

    def _longer(self) -> Iterator[str]:
        if OF_SAMPLES & {*self.objectives} and any(" --steps " in command for command in self.commands):
            varied = [name for name in _SAMPLES_OF_A_STEP if self._differ_in(name)]
            if varied:
                yield (
                    f"{' and '.join(varied)} was searched with a fixed number of steps: trials with more samples in a "
                    "step trained longer; give epochs in place of steps"
                )

    def _luckiest(self) -> Iterator[str]:
        """Yield the values of all trials with the best one's settings, if these differ: the search took the best."""
        best = [trial.settings for trial in self.trials if trial.number in self.front[:1]]
        values = [trial.values[0] for trial in self.trials if trial.values and trial.settings in best]
        if len(set(values)) > 1:
            yield (
                f"{len(values)} trials had the settings of the best, with {self.objectives[0]} from {min(values):.4g} "
                f"to {max(values):.4g}, in the mean {sum(values) / len(values):.4g}: compare this mean with the others"
            )

    def _differ_in(self, key: str) -> bool:
        return len({str(trial.settings[key]) for trial in self.trials if key in trial.settings}) > 1

    def _chance(self) -> Iterator[str]:
        """Yield how far the best of several trials may be chance; nothing for one trial, which was not chosen."""
        compared = sum(trial.state in ("finished", "stopped") for trial in self.trials)
        if compared < 2 or not self.front:
            return
        tried = _seed_of(self.commands[0])
        # One of three may be the winner's own seed.
        first, second = [str(seed) for seed in (1, 2, 3) if str(seed) != tried][:2]
        yield (
            f"each of {compared} trials ran once, so the best is partly chance: repeat its command with "
            f"--seed {first}, then {second}, before you report its value"
        )
        if any("seed" in trial.settings for trial in self.trials):
            yield "seed was searched too: which seed is best is chance, and says nothing of another run"
        if OF_SAMPLES & {*self.objectives} and not self.on_training:
            yield (
                "the held-out samples that chose the best flatter it: before you report its value, rate it by "
                "hpcdl evaluate RUN --data DIR --split NAME on samples that no trial was rated on"
            )

    def trial(self, number: int) -> SearchTrial:
        """Return one trial by its number."""
        return next(trial for trial in self.trials if trial.number == number)

    def best_so_far(self) -> list[tuple[SearchTrial, float]]:
        """Return each trial that improved the first objective, in order of their ends, with its value."""
        upwards = self.directions[0] == "maximize"
        improvements: list[tuple[SearchTrial, float]] = []
        ended = [trial for trial in self.trials if trial.values and trial.ended_after_s is not None]
        for trial in sorted(ended, key=lambda trial: trial.ended_after_s or 0.0):
            value = trial.values[0]
            if not improvements or (value > improvements[-1][1] if upwards else value < improvements[-1][1]):
                improvements.append((trial, value))
        return improvements


_MEASURES_BY = {"data": "", "loss": "loss", "target-accuracy": "target"}
"""Settings that say what is measured, and the part of an objective's name that they change; empty: they change all."""


_SAMPLES_OF_A_STEP = ("batch-size", "accumulate", "ranks")
"""Settings that say how many samples a step trains on."""


def _seed_of(command: str) -> str:
    """Return the seed in a command of `hpcdl train`, "" if it has none."""
    return command.partition(" --seed ")[2].partition(" ")[0]


def find_searches(path: Path, walked: Walk) -> list[Path]:
    """Return the searches at `path`, or in a folder in it. `walked` is the result of its walk."""
    paths = [Path(folder) / FILE_NAME for folder, files in walked if FILE_NAME in files]
    return [file for file in paths if file.parent == path] or [file for file in paths if file.parent.parent == path]


def read_search(path: Path) -> SearchRecord:
    """Return the record of a search. Raises CorruptError if it is damaged."""
    remedy = "; choose another --out DIR"
    try:
        record = read_as(SearchRecord, path, SCHEMA, remedy)
    except FileNotFoundError as error:  # a broken link
        raise CorruptError(f"cannot read {path}: {error.strerror}{remedy}") from error
    if problem := _problem_of(record):
        raise CorruptError(f"{path} is damaged: {problem}{remedy}")
    return record


def _problem_of(record: SearchRecord) -> str:
    """Return the inconsistency in the record's trials, or "" if there is none."""
    trials = {trial.number: trial for trial in record.trials}
    if not len(record.directions) == len(record.objectives) > 0:
        return f"{len(record.objectives)} objectives, {len(record.directions)} directions"
    if len(record.commands) != len(record.front):
        return f"{len(record.front)} best trials, {len(record.commands)} commands"
    for number in record.front:
        if number not in trials or len(trials[number].values) != len(record.objectives):
            return f"the best trial {number} is none that has finished"
    return ""


@dataclass(frozen=True, kw_only=True)
class TunedTrial:
    """One candidate: settings as text, its rate over `n` samples, or the status and message of its failure."""

    settings: Mapping[str, str]
    status: str
    n: int
    images_per_second: float | None
    ci95: float | None
    memory_bytes_per_rank: int | None
    message: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class SettingEffect:
    """The effect of a setting's value: speed over the mean of the setting's values, the other settings held equal.

    `low` and `high` are its 95 % interval.
    """

    setting: str
    value: str
    ratio: float
    low: float
    high: float
    num_trials: int


@dataclass(frozen=True, kw_only=True)
class ThreadPoint:
    """The best candidate with `threads` threads on the node in total."""

    threads: int
    images_per_second: float
    ci95: float | None
    n: int
    settings: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ThreadCurve:
    """The rate against ascending threads at one batch size, which is None if it was not searched."""

    batch_size: int | None
    points: Sequence[ThreadPoint]


@dataclass(frozen=True, kw_only=True)
class TunedNode:
    """One search: where, for what, the winner and its certainty, and all candidates, the fastest first.

    `counted` is the unit of its rates.
    """

    name: str
    model: str
    batch_size: int
    machine: str = ""
    processor: str = ""
    fingerprint: str = ""
    engine: str = ""
    created_at: str = ""
    software: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    images_per_second: float | None = None
    counted: str = IMAGES
    ci95: float | None = None
    n: int = 0
    verdict: str = ""
    attempts: Sequence[TunedTrial] = ()
    effects: Sequence[SettingEffect] = ()
    curves: Sequence[ThreadCurve] = ()
    picture: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return its form in report.json."""
        return dataclasses.asdict(self)


def words(settings: Mapping[str, str]) -> str:
    """Return settings on one line."""
    return " ".join(f"{name}={value}" for name, value in settings.items())
