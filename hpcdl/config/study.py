"""A study: the settings of `hpcdl sweep`, and the file that holds them (docs/how-to/sweep.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.config.load import Effective, Layer, flag_layer, load, set_layer, standard_layers
from hpcdl.config.settings import setting
from hpcdl.core.errors import ConfigError, UsageError
from hpcdl.core.files import read_toml

MODES = ("weak", "strong", "scale-up")
TABLES = ("matrix", "train", "small")


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
    """What is combined: every value of a list with every value of the others."""

    model: Sequence[str] = setting((), "Networks.", kind="names")
    data: Sequence[str] = setting((), "Data folders, or synthetic:NAME.", kind="names")
    strategy: Sequence[str] = setting(("ring",), "Parallel strategies.", kind="names")
    nodes: Sequence[int] = setting((), "Numbers of nodes; all ranks of a run count, servers too.", kind="counts")
    ranks_per_node: Sequence[int] = setting((), "Numbers of ranks on a node.", kind="counts")
    workers: Sequence[int] = setting((), "In place of nodes: numbers of workers; servers are added.", kind="counts")
    servers: Sequence[int] = setting((1,), "Numbers of servers, for strategies that have them.", kind="counts")
    threads: Sequence[int] = setting((), "Threads of one operation, per rank.", kind="counts")
    batch_size: Sequence[int] = setting((32,), "Samples per worker and step (weak, scale-up).", kind="counts")
    global_batch: Sequence[int] = setting((), "Samples per step over all workers (strong).", kind="counts")


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """All groups of one study."""

    plan: StudyPlan
    matrix: StudyMatrix


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as it will run: its points are those of all `matrices`; `train` holds what all runs share, by key."""

    name: str
    plan: StudyPlan
    matrices: Sequence[StudyMatrix]
    origin: str
    train: Mapping[str, Any]


def load_study(
    path: Path | None, flags: Mapping[str, Any], pairs: list[str] | None = None, *, small: bool = False
) -> Study:
    """The study of a file, flags over it. ConfigError holds every problem found.

    `small` lays the file's table [small] over the rest: its [small.matrix] stands in place of [matrix]. `pairs` are
    `key=value` settings of every run.
    """
    tables = _Tables(path, small=small)
    problems = list(tables.problems)
    configs: list[StudyConfig] = []
    for matrix in tables.matrices:
        own = Layer(origin=tables.origin, values={**tables.keys, **matrix})
        try:
            effective = load(StudyConfig, [*standard_layers("sweep"), own, flag_layer(flags)])
        except ConfigError as error:
            problems += error.problems
            continue
        configs.append(effective.config)
        problems += _contradictions(effective)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    plan = configs[0].plan
    name = plan.name or (path.stem if path else "sweep")
    train = {**tables.train, **set_layer(pairs or []).values}
    return Study(
        name=f"{name}-small" if small else name,
        plan=plan,
        matrices=[config.matrix for config in configs],
        origin=tables.origin,
        train=_dashed(train),
    )


def study_tables(study: Study) -> dict[str, Any]:
    """`study` as the document of a file that gives it again."""
    plan = {item.name: getattr(study.plan, item.name) for item in dataclasses.fields(study.plan)}
    matrices = [
        {item.name: list(values) for item in dataclasses.fields(matrix) if (values := getattr(matrix, item.name))}
        for matrix in study.matrices
    ]
    if study.plan.mode == "strong":  # its batch per worker follows from the global one, and may not be said
        matrices = [{key: values for key, values in matrix.items() if key != "batch_size"} for matrix in matrices]
    keys = {key: value for key, value in {**plan, "name": study.name}.items() if value is not None}
    return {**_dashed(keys), "train": dict(study.train), "matrix": [_dashed(matrix) for matrix in matrices]}


def _dashed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in values.items()}


class _Tables:
    """The parts of a study's file; what is no table where one must be becomes a problem."""

    def __init__(self, path: Path | None, *, small: bool) -> None:
        self.origin = str(path) if path else "flags"
        self.problems: list[str] = []
        document = read_toml(path) if path else {}
        over = self._tables(document, "small")[0] if small else {}
        if small and not over:
            raise UsageError(f"{self.origin} has no table [small]; leave --small out, or write one")
        self.keys = {key: value for key, value in {**document, **over}.items() if key not in TABLES}
        self.train = {**self._tables(document, "train")[0], **self._tables(over, "train")[0]}
        self.matrices = self._tables(over if "matrix" in over else document, "matrix", several=True)

    def _tables(self, document: Mapping[str, Any], name: str, *, several: bool = False) -> list[dict[str, Any]]:
        """The table `name`, empty where there is none; a list of tables where there may be several."""
        found = document.get(name, {})
        tables = found if several and isinstance(found, list) and found else [found]
        if all(isinstance(table, dict) for table in tables):
            return tables
        more = f", or [[{name}]] several times" if several else ""
        self.problems.append(f"{self.origin}: {name} must be a table; write [{name}]{more}, and its keys below")
        return [{}]


def _contradictions(effective: Effective[StudyConfig]) -> list[str]:
    """Settings that exclude each other, and lists that must not be empty."""
    matrix, mode = effective.config.matrix, effective.config.plan.mode
    found = [
        f"--{key} is needed: list at least one in [matrix], such as {key} = [{example!r}]"
        for key, values, example in (
            ("model", matrix.model, "lenet"),
            ("data", matrix.data, "synthetic:mnist"),
        )
        if not values
    ]
    if matrix.nodes and matrix.workers:
        found.append("nodes and workers exclude each other: nodes count servers' ranks too, workers do not; give one")
    if mode == "strong" and not matrix.global_batch:
        found.append("mode strong keeps the samples of a step: list global-batch, such as global-batch = [256]")
    if mode == "strong" and effective.origins["batch-size"] != "default":
        found.append("mode strong divides global-batch by the workers: leave batch-size out")
    if mode != "strong" and matrix.global_batch:
        found.append(f"mode {mode} keeps the samples per worker: write batch-size in place of global-batch")
    if mode == "scale-up" and not matrix.threads:
        found.append("mode scale-up needs threads: list them in [matrix], such as threads = [1, 2, 4]")
    return found
