"""A study: the settings of `hpcdl sweep`, and the file that holds them (docs/how-to/sweep.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.config.load import (
    Layer,
    ResolvedConfig,
    flag_layer,
    load,
    plain_keys,
    set_layer,
    settings_by_key,
    standard_layers,
)
from hpcdl.config.other_names import unknown_key
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import Setting, setting
from hpcdl.core.errors import ConfigError, UsageError
from hpcdl.core.storage.files import read_toml

MODES = ("weak", "strong", "scale-up")
TABLES = ("matrix", "train", "small", "labels", "choose")
OF_A_STUDY = {
    "ranks": "list nodes or workers in [matrix]",
    "run-dir": "the study names the folders; choose theirs with --out",
    "resume": "runs of a study begin at step 0",
    "allow": "runs of a study begin at step 0",
}
"""Settings of a run that cannot be an axis of a study."""


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """How the runs of a study are repeated and ended."""

    name: str | None = setting(None, "Name of the study; by default that of its file.")
    mode: str = setting(
        "weak", "What stays fixed: the batch per worker, the global batch, or all but threads.", choices=MODES
    )
    repeats: int = setting(3, "Runs of each point.", at_least=1)
    order_seed: int = setting(0, "Seed of the random order of the runs.", at_least=0)
    retries: int = setting(1, "How often a failed run is started again.", at_least=0)
    run_timeout: float | None = setting(None, "A run that takes longer than this has failed.", kind="seconds", above=0)
    run_estimate: float | None = setting(
        None, "Time that a run will take, for the estimate; by default computed.", kind="seconds", above=0
    )
    keep_models: bool = setting(False, "Keep each run's model and checkpoints, not only its record.")


@dataclass(frozen=True, kw_only=True)
class StudyMatrix:
    """The axes to combine: every value of a list with every value of the others."""

    model: Sequence[str] = setting((), "Networks.", kind="names")
    data: Sequence[str] = setting((), "Data folders, or synthetic:NAME.", kind="names")
    strategy: Sequence[str] = setting(("ring",), "Parallel strategies.", kind="names")
    nodes: Sequence[int] = setting((), "Numbers of nodes; all ranks of a run count, servers too.", kind="counts")
    ranks_per_node: Sequence[int] = setting((), "Numbers of ranks on a node.", kind="counts")
    workers: Sequence[int] = setting((), "In place of nodes: numbers of workers; servers are added.", kind="counts")
    servers: Sequence[Any] = setting(
        (1,), "Numbers of servers, or workers/8, for strategies that have them.", kind="shares"
    )
    threads: Sequence[int] = setting((), "Threads of one operation, per rank.", kind="counts")
    batch_size: Sequence[int] = setting((32,), "Samples per worker and step (weak, scale-up).", kind="counts")
    global_batch: Sequence[int] = setting((), "Samples per step over all workers (strong).", kind="counts")


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """All groups of one study."""

    plan: StudyPlan
    matrix: StudyMatrix


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One [matrix] of a study: declared axes, other keys of `hpcdl train` with their values, and how they combine.

    Axes that are `zipped` advance together. Points that match an entry of `exclude` in all of its keys are omitted.
    """

    shape: StudyMatrix
    axes: Mapping[str, Sequence[Any]]
    zipped: Sequence[Sequence[str]] = ()
    exclude: Sequence[Mapping[str, Sequence[str]]] = ()


@dataclass(frozen=True, kw_only=True)
class TriedSettings:
    """[choose]: trials of each point, one run each; the point then runs with the values of best held-out accuracy.

    `axes` are keys of `hpcdl train` with the values to try; `train` are settings for these trials only.
    """

    axes: Mapping[str, Sequence[Any]]
    train: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study ready to run: its points are those of all `matrices`; `train` holds the shared settings, by key.

    `labels` are the names that reports give a setting (`learning-rate`) or one of its values (`strategy=ring`).
    """

    name: str
    plan: StudyPlan
    matrices: Sequence[Matrix]
    origin: str
    train: Mapping[str, Any]
    labels: Mapping[str, str]
    choice: TriedSettings | None = None


def load_study(
    path: Path | None,
    flags: Mapping[str, Any],
    pairs: list[str] | None = None,
    *,
    small: bool = False,
    axes: Sequence[str] = (),
    zipped: Sequence[str] = (),
) -> Study:
    """Return the study of a file, with flags over it. Raises ConfigError with every problem found.

    `small` lays the file's table [small] over the rest: its [small.matrix] replaces [matrix]. `pairs` are `key=value`
    settings of every run. `axes` are `key=value,value`, and `zipped` are `key,key`; both apply to every matrix.
    """
    tables = _Tables(path, small=small)
    problems = list(tables.problems)
    more = {key: value.split(",") for key, value in set_layer(list(axes)).values.items()}
    configs: list[StudyConfig] = []
    matrices: list[Matrix] = []
    for table in tables.matrices:
        reader = _MatrixReader(tables.origin, {**plain_keys(table), **more}, [text.split(",") for text in zipped])
        problems += reader.problems
        study_layer = Layer(origin=tables.origin, values={**tables.keys, **reader.rest}, tables=TABLES)
        try:
            resolved = load(StudyConfig, [*standard_layers("sweep"), study_layer, flag_layer(flags)])
        except ConfigError as error:
            problems += error.problems
            continue
        if configs and (unlike := _unlike(configs[0].plan, resolved.config.plan)):
            problems.append(f"{tables.origin}: {unlike} differs between matrices: give it once, above them")
        configs.append(resolved.config)
        matrices.append(dataclasses.replace(reader.matrix, shape=resolved.config.matrix))
        # Only for matrices that load: a question about a wrong value would mislead.
        problems += [*_contradictions(resolved), *_unequal(matrices[-1])]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    # Only now: whether a key is also an axis needs every matrix read without errors.
    choice = _choice(tables.origin, tables.choose, {key for matrix in matrices for key in axes_of(matrix)}, problems)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    plan = configs[0].plan
    name = plan.name or (path.stem if path else "sweep")
    train = {**tables.train, **_numbers(set_layer(pairs or []).values)}
    return Study(
        name=f"{name}-small" if small else name,
        plan=plan,
        matrices=matrices,
        origin=tables.origin,
        train=plain_keys(train),
        labels=tables.labels,
        choice=choice,
    )


def _unlike(first: StudyPlan, other: StudyPlan) -> str:
    """Return the first key of the plan that two matrices give differently; a study has one plan."""
    names = (entry.name for entry in dataclasses.fields(StudyPlan))
    return next((name.replace("_", "-") for name in names if getattr(first, name) != getattr(other, name)), "")


def _choice(origin: str, table: Mapping[str, Any], axes: Collection[str], problems: list[str]) -> TriedSettings | None:
    """Return the trials of the table [choose], None without one; append its errors to `problems`."""
    if not table:
        return None
    by_key = settings_by_key(TrainConfig)
    tried: dict[str, Sequence[Any]] = {}
    settings: dict[str, Any] = {}
    for key, raw in plain_keys(table).items():
        if key not in by_key:
            problems.append(f"{origin}: [choose]: {unknown_key(key, by_key)}")
            continue
        if key in axes or key in OF_A_STUDY:
            problems.append(f"{origin}: [choose] {key}: {OF_A_STUDY.get(key, 'it is also in [matrix]; drop one')}")
            continue
        try:
            values = tuple(by_key[key].parse(value) for value in (raw if isinstance(raw, list) else [raw]))
        except ValueError as error:
            problems.append(f"{origin}: [choose] {key}: {error}")
            continue
        if isinstance(raw, list):
            tried[key] = values
        else:
            settings[key] = values[0]
    if not any(len(values) > 1 for values in tried.values()):
        problems.append(f"{origin}: [choose] needs a list of values to try, such as learning-rate = [0.01, 0.03, 0.1]")
    return TriedSettings(axes=tried, train=settings)


class _MatrixReader:
    """Splits a [matrix]: other keys of `hpcdl train`, zip and exclude in `matrix`, and the `rest`."""

    def __init__(self, origin: str, table: Mapping[str, Any], zipped: Sequence[Sequence[str]]) -> None:
        self.problems: list[str] = []
        declared = settings_by_key(StudyConfig)
        # Axes such as servers are settings of `train` too, but a matrix accepts more values: `workers/8`.
        settings = {key: entry for key, entry in settings_by_key(TrainConfig).items() if key not in declared}
        values = dict(table)
        groups = values.pop("zip", [])
        groups = [groups] if groups and all(isinstance(entry, str) for entry in groups) else groups
        exclude = values.pop("exclude", [])
        axes = {key: self._values(origin, settings[key], values.pop(key)) for key in list(values) if key in settings}
        self.rest = {key: value for key, value in values.items() if key in declared}
        self._know(origin, "matrix", values, {*declared, *settings})
        self.matrix = Matrix(
            shape=StudyMatrix(),
            axes=axes,
            zipped=[*self._groups(origin, groups, {*declared, *settings}), *zipped],
            exclude=self._exclusions(origin, exclude, {*declared, *settings}),
        )

    def _values(self, origin: str, setting: Setting, given: Any) -> tuple[Any, ...]:
        listed = given if isinstance(given, list) else [given]
        if not listed:
            self.problems.append(f"{origin}: {setting.key}: no values; list one or more, or leave it out")
        values = []
        for value in listed:
            try:
                values.append(setting.parse(value))
            except ValueError as error:
                self.problems.append(f"{origin}: {setting.key}: {error}")
        if setting.key in OF_A_STUDY:
            self.problems.append(f"{origin}: {setting.key}: {OF_A_STUDY[setting.key]}")
        return tuple(values)

    def _groups(self, origin: str, groups: Any, known: Collection[str]) -> list[list[str]]:
        lists = isinstance(groups, list) and all(isinstance(group, list) and len(group) > 1 for group in groups)
        if not lists:
            self.problems.append(f'{origin}: zip must list axes that advance together: zip = ["workers", "servers"]')
            return []
        key_groups = [[str(key).replace("_", "-") for key in group] for group in groups]
        self._know(origin, "zip", (key for group in key_groups for key in group), known)
        return key_groups

    def _exclusions(self, origin: str, given: Any, known: Collection[str]) -> list[Mapping[str, Sequence[str]]]:
        if not isinstance(given, list) or not all(isinstance(table, dict) and table for table in given):
            self.problems.append(f'{origin}: exclude must list tables: exclude = [{{strategy = "ps", workers = 1}}]')
            return []
        exclusions: list[Mapping[str, Sequence[str]]] = [
            {
                key: [str(choice) for choice in (value if isinstance(value, list) else [value])]
                for key, value in table.items()
            }
            for table in map(plain_keys, given)
        ]
        self._know(origin, "exclude", (key for table in exclusions for key in table), known)
        return exclusions

    def _know(self, origin: str, where: str, keys: Iterable[str], known: Collection[str]) -> None:
        self.problems += [f"{origin}: {where}: {unknown_key(key, known)}" for key in keys if key not in known]


def axes_of(matrix: Matrix) -> dict[str, Sequence[Any]]:
    """Return every axis of a matrix that has values, by key, in the order of combination."""
    shape = matrix.shape
    declared = {field.name.replace("_", "-"): getattr(shape, field.name) for field in dataclasses.fields(shape)}
    if shape.global_batch:
        # The batch of a worker follows from the global one; the default of batch-size is no axis.
        del declared["batch-size"]
    return {key: values for key, values in {**declared, **matrix.axes}.items() if values}


def _unequal(matrix: Matrix) -> list[str]:
    """Return errors about zipped axes that cannot advance together."""
    axes = axes_of(matrix)
    problems = [f"zip: {key} has no values in this matrix; list them, or leave it out"
             for group in matrix.zipped for key in group if key not in axes]  # fmt: skip
    for group in matrix.zipped:
        counts = {key: len(axes[key]) for key in group if key in axes}
        if len(set(counts.values())) > 1:
            lengths = ", ".join(f"{key} has {count}" for key, count in counts.items())
            problems.append(f"zip: axes that advance together need as many values each, but {lengths}")
    return problems


def study_tables(study: Study) -> dict[str, Any]:
    """Return `study` as the document of a file that defines it again."""
    plan = {entry.name: getattr(study.plan, entry.name) for entry in dataclasses.fields(study.plan)}
    matrices = []
    for matrix in study.matrices:
        table: dict[str, Any] = {key: [_as_toml(value) for value in values] for key, values in axes_of(matrix).items()}
        table |= {"zip": [list(group) for group in matrix.zipped]} if matrix.zipped else {}
        table |= {"exclude": [{key: list(values) for key, values in entry.items()} for entry in matrix.exclude]}
        matrices.append({key: value for key, value in table.items() if value})
    keys = {key: value for key, value in {**plan, "name": study.name}.items() if value is not None}
    more: dict[str, Any] = {"labels": dict(study.labels)} if study.labels else {}
    if study.choice is not None:
        tried = {key: [_as_toml(value) for value in values] for key, values in study.choice.axes.items()}
        more["choose"] = tried | {key: _as_toml(value) for key, value in study.choice.train.items()}
    return {**plain_keys(keys), "train": dict(study.train), **more, "matrix": matrices}


def _numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` as in a study's file: numbers are numbers, not text."""
    declared, values = settings_by_key(TrainConfig), dict(settings)
    for key, value in settings.items():
        try:
            parsed = declared[key].parse(value) if key in declared else value
        except ValueError:
            continue  # the runs' settings are checked together, later
        # Text of other kinds stays as typed, such as 2h or 25MiB.
        if isinstance(parsed, bool | int | float):
            values[key] = parsed
    return values


def _as_toml(value: Any) -> Any:
    return "none" if value is None else str(value) if isinstance(value, Path) else value


class _Tables:
    """The parts of a study's file; a value that should be a table and is not becomes a problem."""

    def __init__(self, path: Path | None, *, small: bool) -> None:
        self.origin = str(path) if path else "flags"
        self.problems: list[str] = []
        document = read_toml(path) if path else {}
        over = self._tables(document, "small")[0] if small else {}
        if small and not over:
            raise UsageError(f"{self.origin} has no table [small]; leave --small out, or write one")
        self.keys = {key: value for key, value in {**document, **over}.items() if key not in TABLES}
        self.train = {**self._tables(document, "train")[0], **self._tables(over, "train")[0]}
        self.choose = self._tables(over if "choose" in over else document, "choose")[0]
        self.matrices = self._tables(over if "matrix" in over else document, "matrix", several=True)
        self.labels = dict(_labels(self._tables(document, "labels")[0]))

    def _tables(self, document: Mapping[str, Any], name: str, *, several: bool = False) -> list[dict[str, Any]]:
        """Return the table `name`, empty if absent; a list of tables if several are allowed."""
        content = document.get(name, {})
        tables = content if several and isinstance(content, list) and content else [content]
        if all(isinstance(table, dict) for table in tables):
            return tables
        more = f", or [[{name}]] several times" if several else ""
        self.problems.append(f"{self.origin}: {name} must be a table; write [{name}]{more}, and its keys below")
        return [{}]


def _labels(table: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield `strategy=ring` from a [labels.strategy], and `learning-rate` from a key whose value is text."""
    for key, value in plain_keys(table).items():
        if isinstance(value, dict):
            yield from ((f"{key}={choice}", str(label)) for choice, label in value.items())
        else:
            yield key, str(value)


def _contradictions(resolved: ResolvedConfig[StudyConfig]) -> list[str]:
    """Return errors about settings that exclude each other, and lists that must not be empty."""
    matrix, mode = resolved.config.matrix, resolved.config.plan.mode
    problems = [
        f"--{key} is needed: list at least one in [matrix], such as {key} = [{example!r}]"
        for key, values, example in (
            ("model", matrix.model, "lenet"),
            ("data", matrix.data, "synthetic:mnist"),
        )
        if not values
    ]
    if not matrix.workers and any(isinstance(share, str) for share in matrix.servers):
        problems.append("servers in shares of the workers need workers: list them in [matrix] in place of nodes")
    if matrix.nodes and matrix.workers:
        problems.append(
            "nodes and workers exclude each other: nodes count servers' ranks too, workers do not; give one"
        )
    if mode == "strong" and not matrix.global_batch:
        problems.append("mode strong keeps the samples of a step: list global-batch, such as global-batch = [256]")
    if mode == "strong" and resolved.origins["batch-size"] != "default":
        problems.append("mode strong divides global-batch by the workers: leave batch-size out")
    if mode != "strong" and matrix.global_batch:
        problems.append(f"mode {mode} keeps the samples per worker: write batch-size in place of global-batch")
    if mode == "scale-up" and not matrix.threads:
        problems.append("mode scale-up needs threads: list them in [matrix], such as threads = [1, 2, 4]")
    return problems
