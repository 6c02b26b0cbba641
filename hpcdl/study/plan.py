"""The runs of a study: every combination of its matrix, repeated, in random order, interleaved."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.config.study import Matrix, Study, StudyMatrix, TriedSettings, axes_of
from hpcdl.core.errors import UsageError
from hpcdl.core.units import counted
from hpcdl.strategies.base.strategy import check_ranks
from hpcdl.strategies.table import find_strategy

MOST_RUNS = 100_000
_TRY = "try"


@dataclass(frozen=True, kw_only=True)
class StudyPoint:
    """One setting to measure. `batch_size` is per worker. If `threads` is None, the node profile chooses them.

    `settings` are other keys of `hpcdl train` that vary in the study, with their values.
    """

    number: int
    model: str
    data: str
    strategy: str
    nodes: int
    ranks_per_node: int
    ranks: int
    workers: int
    servers: int
    batch_size: int
    threads: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    shared_threads: int | None = None
    """Threads of a rank, equal at every size of a weak study whose ranks share a node (study/points.py)."""
    tried_for: int = 0
    """The number of the point for which this one is a try (config/study.py); 0 for measured points."""

    @property
    def label(self) -> str:
        """The point in a few words, for people."""
        servers = f" + {counted(self.servers, 'server')}" if self.servers else ""
        threads = f" x {self.threads} threads" if self.threads else ""
        settings = f", {self.listed_settings}" if self.settings else ""
        return (
            f"{self.model} on {self.data}, {self.strategy}: {counted(self.workers, 'worker')}{servers}{threads}, "
            f"batch {self.batch_size}, {counted(self.nodes, 'node')}{settings}"
        )

    @property
    def listed_settings(self) -> str:
        """The other settings on one line."""
        return ", ".join(f"{key} {value}" for key, value in self.settings)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One repeat of a point. `name` is the name of its folder."""

    name: str
    point: StudyPoint
    repeat: int


@dataclass(frozen=True, kw_only=True)
class StudyRuns:
    """The runs in starting order, and a line for each kind of impossible combination."""

    points: Sequence[StudyPoint]
    runs: Sequence[PlannedRun]
    left_out: Sequence[str]
    remarks: Sequence[str] = ()
    """Further remarks about the plan."""

    @property
    def node_counts(self) -> list[int]:
        """Every number of nodes that a point needs, ascending."""
        return sorted({point.nodes for point in self.points})

    @property
    def measured(self) -> list[StudyPoint]:
        """The points without those that are only tries."""
        return [point for point in self.points if not point.tried_for]

    def only_nodes(self, nodes: int) -> StudyRuns:
        """Return the points of that many nodes, with their names in the whole plan. Raises UsageError if none."""
        points = [point for point in self.points if point.nodes == nodes]
        if not points:
            node_counts = ", ".join(map(str, self.node_counts))
            raise UsageError(f"no point of the study needs {nodes} nodes; its points need {node_counts}")
        return StudyRuns(
            points=points,
            runs=[run for run in self.runs if run.point.nodes == nodes],
            left_out=(),
            remarks=self.remarks,
        )

    def with_threads(self, threads: int, remarks: Sequence[str]) -> StudyRuns:
        """Return the plan with `threads` threads for all ranks, and with further remarks."""
        points = {point.number: dataclasses.replace(point, shared_threads=threads) for point in self.points}
        runs = [dataclasses.replace(run, point=points[run.point.number]) for run in self.runs]
        return dataclasses.replace(self, points=[*points.values()], runs=runs, remarks=[*self.remarks, *remarks])

    def without(self, refused: Mapping[int, str]) -> StudyRuns:
        """Return the plan without some points, given by number, and without their tries. Adds the reasons."""
        kept = [point for point in self.points if not {point.number, point.tried_for} & refused.keys()]
        numbers = {point.number for point in kept}
        return StudyRuns(
            points=kept,
            runs=[run for run in self.runs if run.point.number in numbers],
            left_out=[*self.left_out, *_counted_reasons(Counter(refused.values()))],
            remarks=self.remarks,
        )


def make_plan(study: Study) -> StudyRuns:
    """Return the runs of `study`. Raises UnknownNameError for a strategy, UsageError if no combination is possible."""
    _check_seeds(study)
    points: list[StudyPoint] = []
    seen: set[StudyPoint] = set()
    left_out: Counter[str] = Counter()
    for candidate in _combinations(study):
        if isinstance(candidate, str):
            left_out[candidate] += 1
        # Matrices may overlap, and each point is measured once.
        elif candidate not in seen:
            seen.add(candidate)
            points.append(dataclasses.replace(candidate, number=len(points) + 1))
        # Inside the loop: a matrix of a few lines may have more combinations than memory.
        if len(points) * study.plan.repeats > MOST_RUNS or left_out.total() > MOST_RUNS:
            raise UsageError(f"{study.origin}: the matrix and its repeats are more than {MOST_RUNS} runs; shorten them")
    remarks = _counted_reasons(left_out)
    if not points:
        raise UsageError(f"{study.origin}: nothing of the matrix can run; {'; '.join(remarks)}")
    tries = _tries(points, study.choice) if study.choice else []
    if len(points) * study.plan.repeats + len(tries) > MOST_RUNS:
        raise UsageError(
            f"{study.origin}: the matrix, its repeats and tries are more than {MOST_RUNS} runs; shorten them"
        )
    runs = [*_in_order(tries, 1, study.plan.order_seed), *_in_order(points, study.plan.repeats, study.plan.order_seed)]
    return StudyRuns(points=[*tries, *points], runs=runs, left_out=remarks)


def _check_seeds(study: Study) -> None:
    """Raise UsageError if a run would be made twice: reports would count one random draw as two measurements."""
    repeats = study.plan.repeats
    for matrix in study.matrices:
        if any("seed" in group for group in matrix.zipped):
            continue  # each seed is paired with another value
        seeds = sorted({int(seed) for seed in matrix.axes.get("seed", ())})
        for seed, following in itertools.pairwise(seeds):
            if following - seed < repeats:
                raise UsageError(
                    f"{study.origin}: seed: {counted(repeats, 'repeat')} of seed {seed} have seeds {seed} to "
                    f"{seed + repeats - 1}, so that {following} would run twice; list seeds {repeats} apart, or leave "
                    "seed out of [matrix] and give more repeats"
                )


def _tries(points: Sequence[StudyPoint], choice: TriedSettings) -> list[StudyPoint]:
    """Return the tries of each point. A try trains its whole length, because a stop would make it look worse."""
    fixed = {"target-accuracy": None, **choice.train}
    tries: list[StudyPoint] = []
    for point in points:
        for values in itertools.product(*choice.axes.values()):
            settings = {**dict(point.settings), **fixed, **dict(zip(choice.axes, values, strict=True))}
            number = len(points) + len(tries) + 1
            tries.append(
                dataclasses.replace(point, number=number, settings=tuple(settings.items()), tried_for=point.number)
            )
    return tries


def _counted_reasons(reasons: Mapping[str, int]) -> list[str]:
    return [f"left out {count} of the matrix: {reason}" for reason, count in reasons.items()]


def _in_order(points: Sequence[StudyPoint], repeats: int, seed: int) -> list[PlannedRun]:
    """Return every point once in random order, then every point again, so that a drifting machine favors none."""
    # A generator of its own: a resumed study must get the same order, which is in its digest.
    shuffler = random.Random(seed)
    runs = []
    for repeat in range(1, repeats + 1):
        turn = list(points)
        shuffler.shuffle(turn)
        runs += [PlannedRun(name=_run_name(point, repeat), point=point, repeat=repeat) for point in turn]
    return runs


def is_try(name: str) -> bool:
    """Return whether the run of that name is a try."""
    return name.endswith(f"-{_TRY}")


def _run_name(point: StudyPoint, repeat: int) -> str:
    last = _TRY if point.tried_for else f"r{repeat}"
    return f"{point.number:03d}-{point.strategy}-{point.workers}w-{point.batch_size}b-{last}"


def _combinations(study: Study) -> Iterator[StudyPoint | str]:
    """Yield each combination as a point without a number, or the reason why it cannot run."""
    for matrix in study.matrices:
        for values in _products(matrix):
            try:
                if not any(_matches(values, item) for item in matrix.exclude):
                    yield _point(matrix, values)
            except UsageError as error:
                yield str(error)


def _products(matrix: Matrix) -> Iterator[dict[str, Any]]:
    """Yield the values of each combination by key, once each. Servers are 0 for strategies without them."""
    axes = axes_of(matrix)
    groups = [list(group) for group in matrix.zipped]
    groups += [[key] for key in axes if not any(key in group for group in groups)]
    order = list(axes)
    # Points are numbered in the order in which the axes are listed.
    groups.sort(key=lambda group: min(map(order.index, group)))
    seen: set[tuple[Any, ...]] = set()
    for picked in itertools.product(*(zip(*(axes[key] for key in group), strict=True) for group in groups)):
        values = {key: value for group, row in zip(groups, picked, strict=True)
                  for key, value in zip(group, row, strict=True)}  # fmt: skip
        if not find_strategy(values["strategy"]).features.servers:
            values["servers"] = 0
        kept = tuple(values[key] for key in order)
        if kept not in seen:
            seen.add(kept)
            yield values


def _matches(values: Mapping[str, Any], exclusion: Mapping[str, Sequence[str]]) -> bool:
    return all(key in values and str(values[key]) in wanted for key, wanted in exclusion.items())


def _point(matrix: Matrix, values: Mapping[str, Any]) -> StudyPoint:
    """Return the point of `values`. Raises UsageError if its ranks, servers and batches do not fit together."""
    info = find_strategy(values["strategy"])
    size = values.get("workers") or values.get("nodes") or 1
    servers = _servers(values["servers"], size)
    ranks, nodes, on_node = _shape(matrix.shape, size, values.get("ranks-per-node"), servers)
    workers = check_ranks(info, ranks=ranks, servers=servers)
    batch_size = _share(values["global-batch"], workers) if "global-batch" in values else values["batch-size"]
    return StudyPoint(
        number=0, model=values["model"], data=values["data"], strategy=values["strategy"], nodes=nodes,
        ranks_per_node=on_node, ranks=ranks, workers=workers, servers=servers, batch_size=batch_size,
        threads=values.get("threads"), settings=tuple((key, values[key]) for key in matrix.axes),
    )  # fmt: skip


def _servers(share: int | str, workers: int) -> int:
    """Return a number of servers, or the share of the workers that `workers/8` means, rounded up."""
    return share if isinstance(share, int) else -(-workers // int(share.partition("/")[2]))


def _shape(matrix: StudyMatrix, size: int, ranks_per_node: int | None, servers: int) -> tuple[int, int, int]:
    """Return ranks, nodes and ranks per node: for `size` workers and their servers, or for `size` nodes."""
    if matrix.workers:
        ranks = size + servers
        on_node = min(ranks_per_node or ranks, ranks)
        return ranks, -(-ranks // on_node), on_node
    on_node = ranks_per_node or 1
    return size * on_node, size, on_node


def _share(global_batch: int, workers: int) -> int:
    """Return the samples per worker. Raises UsageError if they are not a whole number."""
    if global_batch % workers:
        raise UsageError(f"a global batch of {global_batch} cannot be divided among {workers} workers evenly")
    return global_batch // workers
