"""A study: the settings of `hpcdl sweep`, and the file that holds them (docs/sweep.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.config.load import Effective, Layer, flag_layer, load, read_toml, set_layer, standard_layers
from hpcdl.config.settings import setting
from hpcdl.core.errors import ConfigError, UsageError

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
    """A study as it will run: `train` holds the settings that all its runs share, by key."""

    name: str
    plan: StudyPlan
    matrix: StudyMatrix
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
    layers = [*standard_layers("sweep"), Layer(origin=tables.origin, values=tables.keys), flag_layer(flags)]
    problems = list(tables.problems)
    try:
        effective = load(StudyConfig, layers)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    problems += _contradictions(effective)
    if problems:
        raise ConfigError(problems)
    name = effective.config.plan.name or (path.stem if path else "sweep")
    train = {**tables.train, **set_layer(pairs or []).values}
    return Study(
        name=f"{name}-small" if small else name,
        plan=effective.config.plan,
        matrix=effective.config.matrix,
        origin=tables.origin,
        train={key.replace("_", "-"): value for key, value in train.items()},
    )


class _Tables:
    """The parts of a study's file; what is no table where one must be becomes a problem."""

    def __init__(self, path: Path | None, *, small: bool) -> None:
        self.origin = str(path) if path else "flags"
        self.problems: list[str] = []
        document = read_toml(path) if path else {}
        matrix, train, over = (self._table(document, name) for name in TABLES)
        if small and not over:
            raise UsageError(f"{self.origin} has no table [small]; leave --small out, or write one")
        keys = {key: value for key, value in document.items() if key not in TABLES}
        if small:
            matrix = self._table(over, "matrix", inside="small.") or matrix
            train = {**train, **self._table(over, "train", inside="small.")}
            keys.update({key: value for key, value in over.items() if key not in TABLES})
        self.keys: dict[str, Any] = {**keys, **matrix}
        self.train: dict[str, Any] = train

    def _table(self, document: Mapping[str, Any], name: str, inside: str = "") -> dict[str, Any]:
        found = document.get(name, {})
        if isinstance(found, dict):
            return found
        self.problems.append(f"{self.origin}: {name} must be a table; write [{inside}{name}] and its keys below")
        return {}


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
