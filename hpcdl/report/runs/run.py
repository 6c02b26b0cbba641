"""A run as the report uses it: the flat part of a record, without the step times that a report does not show."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from operator import attrgetter
from statistics import median
from typing import Any

from hpcdl.core.records.run_record import PARTS, HistoryPoint, RankRecord, RunRecord, is_measured
from hpcdl.core.statistics import mean_of_known, quantiles
from hpcdl.core.units import IMAGES, counted, format_seconds, listed

MODES = ("weak", "strong", "scale-up")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLoad:
    """What one server moved and worked per step; None if it was not measured.

    `computed`: its bytes are the size of its variables, times workers, in both directions, because TensorFlow's gRPC
    servers count none.
    """

    rank: int
    bytes_per_step: float
    busy_seconds: float | None
    computed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowWorker:
    """The worker that computes longest: seconds of a step beyond the others' median, and in times of it."""

    rank: int
    host: str
    beyond_s: float
    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run. `batch_per_rank` is per worker, 0 for unknown; times are in seconds; None means not measured.

    `counted` is the unit of `images_per_second`; `usable` says whether that is a measurement. `data_content`
    distinguishes data of the same name: their checksum, without the seed, which differs between repeats. `config` holds
    its settings as text; `settings` those that distinguish it from other runs of its network and data, once a report
    has read all runs. `labels` are the study's names of settings and of `key=value`. `profile` names the file of the
    node profile. `measured_steps` are those after the warm-up, below 1 if there were none.
    `rounds_per_step` and `round_bytes_per_step` are those of the busiest rank. `stated` are efficiency and speed-up as
    an imported table has them.
    """

    name: str
    status: str = "done"
    message: str = ""
    started_at: str = ""
    mode: str = ""
    strategy: str
    model: str
    data: str = ""
    data_content: str = ""
    nodes: int
    ranks: int
    workers: int
    servers: int = 0
    ranks_per_node: int
    threads: int | None = None
    batch_per_rank: int
    global_batch: int
    machine: str = ""
    version: str = ""
    images_per_second: float | None
    counted: str = IMAGES
    step_seconds: float | None = None
    step_seconds_p95: float | None = None
    measured_steps: int | None = None
    first_and_last_steps: tuple[float, float] | None = None
    seconds_per_epoch: float | None = None
    seconds_total: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    imbalance_seconds: float | None = None
    slowest: SlowWorker | None = None
    bytes_per_step: float | None = None
    link_bytes_per_second: float | None = None
    gradient_bytes: int | None = None
    gradient_elements: tuple[int, ...] = ()
    evaluated_on: str = ""
    imported: bool = False
    stated: Mapping[str, float] = field(default_factory=dict)
    bucket_bytes: int | None = None
    period: int | None = None
    server_loads: tuple[ServerLoad, ...] = ()
    staleness_mean: float | None = None
    staleness_max: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    history: tuple[HistoryPoint, ...] = ()
    processor: str = ""
    cores_per_node: int | None = None
    hosts: tuple[str, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""
    fast_kernels: Sequence[str] = ()
    accelerators: Mapping[str, int] = field(default_factory=dict)
    gpu_utilisation: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    rounds_per_step: float | None = None
    round_bytes_per_step: float | None = None
    warnings: tuple[str, ...] = ()
    resumed_from_steps: tuple[int, ...] = ()
    usable: bool = field(init=False)

    def __post_init__(self) -> None:
        counted = self.workers >= 1 and self.nodes >= 1 and (self.threads or 1) >= 1
        usable = counted and is_measured(self.status) and positive(self.images_per_second)
        object.__setattr__(self, "usable", usable)

    @property
    def mpi(self) -> str:
        """The MPI library; empty for one process, which has none, and if it is not known."""
        return self.software.get("mpi", "")

    @property
    def variant(self) -> str:
        """The distinguishing settings as text."""
        return ", ".join(f"{key} {value}" for key, value in self.settings.items())


_OWN = frozenset(("mode", "batch_per_rank", "global_batch", "machine", "step_seconds", "parts", "profile", "config"))
"""Fields of a run that share a name, but not the value, with a field of the record."""
_ALIKE = tuple({item.name for item in fields(Run)} & {item.name for item in fields(RunRecord)} - _OWN)
_alike = attrgetter(*_ALIKE)
"""Fields that a run copies from its record. attrgetter is fast: a report does this thousands of times."""
_REAL = tuple(item.name for item in fields(Run) if item.name in _ALIKE and item.type == "float | None")
_VERSIONS = ("hpcdl", "tensorflow")
_P95 = "95%"

EMULATED = "emulated:"
"""Prefix of models whose computing is a wait (hpcdl.models.table): they learn nothing, and their accuracy is chance."""


def positive(value: float | None) -> bool:
    """Return whether `value` is a finite number above zero."""
    return value is not None and math.isfinite(value) and value > 0


def rates_in_order(runs: Sequence[Run]) -> list[float]:
    """Return throughputs by time of start; rows of a table have none, and keep their order."""
    return [run.images_per_second or 0.0 for run in sorted(runs, key=attrgetter("started_at"))]


_AGREE = 1.25
"""Records of hpcdl agree within 1.02; a run that continued with fewer workers may be further off."""


def contradictions(runs: Sequence[Run]) -> list[str]:
    """Describe the contradictions in each measured run's record: it was edited, or put together by hand."""
    lines = []
    for run in runs:
        batch, step, rate = run.global_batch, run.step_seconds, run.images_per_second
        if run.workers + run.servers > run.ranks:
            parts = f"{counted(run.workers, 'worker')} and {counted(run.servers, 'server')}"
            lines.append(f"{run.name} ({parts} among {counted(run.ranks, 'rank')})")
        elif not (run.usable and batch and step and rate) or run.resumed_from_steps:
            continue
        elif not batch / _AGREE < rate * step < batch * _AGREE:
            text = f"{rate:,.4g} {run.counted}/s, {batch / step:,.4g} by its steps of {batch}"
            lines.append(f"{run.name} ({text})")
    return lines


FEW_STEPS = 5
"""With fewer steps after the warm-up, a mean of them and who was slow are mostly chance."""


def few_steps(run: Run) -> bool:
    """Return whether a run has too few steps after the warm-up; False if they are not known, as in a table."""
    return run.measured_steps is not None and run.measured_steps < FEW_STEPS


_UNSTEADY = 1.5
SLOW = 1.5
"""How many times as long as the others a worker computes, to be called slow."""
_LEAST_OF_STEP = 0.1


def unsteady(run: Run) -> str:
    """Return the name of a run whose steps changed their speed meanwhile, with both speeds; empty for others."""
    first_s, last_s = run.first_and_last_steps or (0.0, 0.0)
    if not run.usable or max(first_s, last_s) <= _UNSTEADY * min(first_s, last_s) or min(first_s, last_s) <= 0:
        return ""
    return f"{run.name} {format_seconds(first_s)} to {format_seconds(last_s)}"


def slow_worker(run: Run) -> str:
    """Return the name of a run with a worker that computes much longer than the others, and where; else empty."""
    slow = run.slowest
    if not run.usable or few_steps(run) or slow is None or slow.factor <= SLOW:
        return ""
    if slow.beyond_s <= _LEAST_OF_STEP * (run.step_seconds or 0.0):
        return ""
    return f"{run.name} rank {slow.rank}{f' on {slow.host}' if slow.host else ''} {slow.factor:.1f} x"


def learned_apart(runs: Sequence[Run]) -> list[Run]:
    """Return `runs` of one setting without those that repeat the learning of another: one seed, and the same numbers.

    Workers that do not wait for each other learn differently with one seed too: these stay.
    """
    kept: dict[object, Run] = {}
    for run in runs:
        seed = run.config.get("seed")
        alike = None if seed is None or run.loss is None else (seed, run.loss, run.accuracy)
        kept.setdefault(alike or id(run), run)
    return list(kept.values())


def finite(value: float | None) -> float | None:
    """Return `value`, or None if it is infinite or not a number: JSON has neither."""
    return value if value is not None and isfinite(value) else None


_ONE_PROCESS = "threads"
"""What a run of one process records in place of MPI (comm/threads)."""


def from_record(record: RunRecord, name: str) -> Run:
    """Return the report's view of a record. `name` is its name in the report."""
    field_values: dict[str, Any] = dict(zip(_ALIKE, _alike(record), strict=True))
    for key in _REAL:
        field_values[key] = finite(field_values[key])
    if record.model.startswith(EMULATED):
        field_values["accuracy"] = None
        field_values["history"] = tuple(replace(point, accuracy=None, val_accuracy=None) for point in record.history)
    if record.accelerators:
        # On one node a run on GPUs is no repeat of one on its processor alone.
        field_values["processor"] = " with ".join(filter(None, (record.processor, listed(sorted(record.accelerators)))))
    software = field_values["software"]
    if software.get("mpi") == _ONE_PROCESS:
        field_values["software"] = software = {package: held for package, held in software.items() if package != "mpi"}
    return Run(
        **field_values,
        **_of_ranks(record),
        name=name,
        data_content=_data_content(record.data_checksum),
        mode=record.mode if record.mode in MODES else "",
        threads=record.intra_op_threads,
        batch_per_rank=record.batch_per_rank or 0,
        global_batch=record.global_batch or 0,
        machine=machine_name(record.machine, record.hosts),
        version=", ".join([f"{package} {software[package]}" for package in _VERSIONS if software.get(package)]),
        step_seconds=_step_seconds(record),
        step_seconds_p95=_step_seconds_p95(record),
        measured_steps=len(record.step_seconds) - record.warmup_steps if record.step_seconds else None,
        first_and_last_steps=_first_and_last_steps(record),
        slowest=_slowest(record.rank_records),
        parts={part: value for part in PARTS if isfinite(value := record.parts.get(part, math.nan))},
        bytes_per_step=None if record.strategy in _UNCOUNTED else finite(record.bytes_sent_per_step),
        profile=record.profile.rpartition("/")[2],
        gpu_utilisation=mean_of_known([rank.gpu_utilisation for rank in record.rank_records if rank.role == "worker"]),
        config={key: str(value) for key, value in record.config.items()},
    )


_SYNTHETIC = "synthetic:"


def _data_content(checksum: str) -> str:
    """Return what identifies the data. Data generated on reading have a name and a seed in place of a checksum."""
    return "made up" if checksum.startswith(_SYNTHETIC) else checksum


_NAMES = tuple(item.name for item in fields(Run) if item.init)
_values = attrgetter(*_NAMES)


def with_settings(run: Run, settings: Mapping[str, str]) -> Run:
    """Return the run with these `settings`. It is twice as fast as `replace`, which matters for thousands of runs."""
    field_values: dict[str, Any] = dict(zip(_NAMES, _values(run), strict=True))
    field_values["settings"] = settings
    return Run(**field_values)


def _of_ranks(record: RunRecord) -> dict[str, Any]:
    """Return the servers' loads and the busiest rank's exchange, if all ranks counted theirs."""
    ranks = record.rank_records
    servers = [rank for rank in ranks if rank.role == "server"]
    if record.strategy in _UNCOUNTED:
        return {"server_loads": _placed(ranks, servers, record.workers)}
    loads = (
        ServerLoad(
            rank=rank.rank,
            bytes_per_step=(rank.bytes_sent_per_step or 0.0) + (rank.bytes_received_per_step or 0.0),
            busy_seconds=rank.busy_seconds_per_step,
        )
        for rank in servers
    )
    pairs = [
        (rank.round_bytes_per_step, rank.rounds_per_step)
        for rank in ranks
        if rank.round_bytes_per_step is not None and rank.rounds_per_step is not None
    ]
    # A rank without counts might be the busiest one.
    size, most = max(pairs) if len(pairs) == len(ranks) > 0 else (None, None)
    return {"server_loads": tuple(loads), "rounds_per_step": most, "round_bytes_per_step": size}


def _slowest(ranks: Sequence[RankRecord]) -> SlowWorker | None:
    """Return the worker that computes longest; None for one worker, and if a worker's computing is unknown."""
    workers = [rank for rank in ranks if rank.role == "worker"]
    seconds = [rank.parts.get("compute", math.nan) for rank in workers]
    if len(workers) < 2 or not all(map(positive, seconds)):
        return None
    rank, most_s = max(zip(workers, seconds, strict=True), key=lambda pair: pair[1])
    # Of two workers the faster one is the measure: a median would hide half of the difference.
    others_s = median(sorted(seconds)[:-1])
    return SlowWorker(rank=rank.rank, host=rank.host, beyond_s=most_s - others_s, factor=most_s / others_s)


_UNCOUNTED = frozenset(("grpc-ps", "grpc-ring", "nccl"))
"""Strategies whose messages TensorFlow sends itself: hpcdl counts only its own few messages of them."""


def _placed(ranks: Sequence[RankRecord], servers: Sequence[RankRecord], workers: int) -> tuple[ServerLoad, ...]:
    """Return loads computed from the variables' sizes: each worker gets them and returns gradients; none if unknown."""
    sizes_by_rank = [rank.details.get("server_bytes") for rank in ranks]
    sizes = next((sizes for sizes in sizes_by_rank if isinstance(sizes, list) and len(sizes) == len(servers)), None)
    if sizes is None or not all(isinstance(size, int | float) and size >= 0 for size in sizes):
        return ()
    return tuple(
        ServerLoad(rank=rank.rank, bytes_per_step=2.0 * workers * size, busy_seconds=None, computed=True)
        for rank, size in zip(servers, sizes, strict=True)
    )


def machine_name(machine: str, hosts: Sequence[str]) -> str:
    """Return `machine`, or the pattern of a host name (`node17` is one of `node*`): jobs start on different nodes."""
    if machine not in hosts:
        return machine
    first, dot, domain = machine.partition(".")
    return re.sub(r"\d+", "*", first) + dot + domain


def _step_seconds(record: RunRecord) -> float | None:
    """Return mean seconds of a step after warm-up: from the parts, which sum to it, else from the step times."""
    parts_s = [record.parts[part] for part in PARTS if part in record.parts]
    if parts_s and min(parts_s) >= 0 and positive(total := sum(parts_s)):
        return total
    steps = _warm_steps(record)
    return sum(steps) / len(steps) if steps else None


def _step_seconds_p95(record: RunRecord) -> float | None:
    """Return the 95 % quantile of the steps after warm-up: as recorded, else from the step times."""
    if (recorded := record.step_seconds_quantiles.get(_P95)) is not None:
        return recorded
    steps = _warm_steps(record)
    return quantiles(steps, [0.95])[0] if steps else None


_FEWEST_TO_DIVIDE = 30
_MOST_LOOKED_AT = 50
"""Steps of a third that its median looks at: thousands of runs are read within seconds."""


def _first_and_last_steps(record: RunRecord) -> tuple[float, float] | None:
    """Return the median of the first and of the last third of the steps after warm-up; None for few steps."""
    third = (len(record.step_seconds) - record.warmup_steps) // 3
    if 3 * third < _FEWEST_TO_DIVIDE:
        return None
    stride = third // _MOST_LOOKED_AT + 1
    first = record.step_seconds[record.warmup_steps : record.warmup_steps + third : stride]
    thirds = [list(filter(isfinite, own)) for own in (first, record.step_seconds[-third::stride])]
    return (median(thirds[0]), median(thirds[1])) if all(thirds) else None


def _warm_steps(record: RunRecord) -> list[float]:
    return [value for value in record.step_seconds[record.warmup_steps :] if isfinite(value)]
