"""A run as the report sees it: the flat part of a record, without the step times that a report does not show."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpcdl.core.records import PARTS, HistoryPoint, RunRecord
from hpcdl.core.statistics import quantiles

MODES = ("weak", "strong", "scale-up")
NOT_MEASURED = ("failed", "running")
"""States of a record whose numbers are not a measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLoad:
    """What one server moved and worked per step; None where it was not measured."""

    rank: int
    bytes_per_step: float
    busy_seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run. `batch_per_rank` is per worker, 0 for unknown; times in seconds; None means not measured.

    `config` holds its settings as text, `settings` those of them that keep it apart from other runs of its network and
    data, once a report has looked at all runs; `labels` are their study's names of settings and of `key=value`; `profile` names the file of the node profile.
    `rounds_per_step` and `round_bytes_per_step` are those of the rank that has most to do.
    """

    name: str
    status: str = "done"
    message: str = ""
    mode: str = ""
    strategy: str
    model: str
    data: str = ""
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
    step_seconds: float | None = None
    step_seconds_p95: float | None = None
    seconds_per_epoch: float | None = None
    seconds_total: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    imbalance_seconds: float | None = None
    bytes_per_step: float | None = None
    link_bytes_per_second: float | None = None
    gradient_bytes: int | None = None
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
    config: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    rounds_per_step: float | None = None
    round_bytes_per_step: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def variant(self) -> str:
        """The settings that keep it apart, in words."""
        return ", ".join(f"{key} {value}" for key, value in self.settings.items())

    @property
    def usable(self) -> bool:
        """Whether its throughput is a measurement."""
        counts = min(self.workers, self.nodes, self.threads or 1)
        return self.status not in NOT_MEASURED and positive(self.images_per_second) and counts >= 1


_ALIKE = tuple({item.name for item in fields(Run)} & {item.name for item in fields(RunRecord)})
_alike = attrgetter(*_ALIKE)
"""What a run takes from its record as it is; a report does it thousands of times."""


def positive(value: float | None) -> bool:
    """Whether `value` is a finite number above zero."""
    return value is not None and math.isfinite(value) and value > 0


def finite(value: float | None) -> float | None:
    """`value`, or None where it is infinite or not a number: JSON has neither."""
    return value if value is not None and math.isfinite(value) else None


def from_record(record: RunRecord, name: str) -> Run:
    """The report's view of `record`; `name` is what the report calls it."""
    steps = [value for value in record.step_seconds[record.warmup_steps :] if math.isfinite(value)]
    versions = (("hpcdl", record.software.get("hpcdl")), ("tensorflow", record.software.get("tensorflow")))
    alike = zip(_ALIKE, _alike(record), strict=True)
    known: dict[str, Any] = {key: finite(value) if isinstance(value, float) else value for key, value in alike}
    loads = (
        ServerLoad(
            rank=item.rank,
            bytes_per_step=(item.bytes_sent_per_step or 0.0) + (item.bytes_received_per_step or 0.0),
            busy_seconds=item.busy_seconds_per_step,
        )
        for item in record.rank_records
        if item.role == "server"
    )
    counts = [(item.rounds_per_step, item.round_bytes_per_step) for item in record.rank_records]
    known_counts = [(rounds, size) for rounds, size in counts if rounds is not None and size is not None]
    busiest = max(known_counts, key=lambda pair: pair[::-1]) if len(known_counts) == len(counts) > 0 else (None, None)
    return Run(**known | {
        "name": name,
        "mode": record.mode if record.mode in MODES else "",
        "threads": record.intra_op_threads,
        "batch_per_rank": record.batch_per_rank or 0,
        "global_batch": record.global_batch or 0,
        "machine": machine_name(record.machine, record.hosts),
        "version": ", ".join(f"{package} {version}" for package, version in versions if version),
        "step_seconds": _step_seconds(record, steps),
        "step_seconds_p95": quantiles(steps, [0.95])[0] if steps else record.step_seconds_quantiles.get("95%"),
        "parts": {part: record.parts[part] for part in PARTS if math.isfinite(record.parts.get(part, math.nan))},
        "bytes_per_step": finite(record.bytes_sent_per_step),
        "rounds_per_step": busiest[0],
        "round_bytes_per_step": busiest[1],
        "profile": Path(record.profile).name,
        "server_loads": tuple(loads),
        "config": {key: str(value) for key, value in record.config.items()},
    })  # fmt: skip


def machine_name(machine: str, hosts: Sequence[str]) -> str:
    """`machine`, or the family of a host's name (`node17` is one of `node*`): jobs start on different nodes of one."""
    if machine not in hosts:
        return machine
    first, dot, domain = machine.partition(".")
    return re.sub(r"\d+", "*", first) + dot + domain


def _step_seconds(record: RunRecord, steps: list[float]) -> float | None:
    """Mean seconds of a step after warm-up: from the parts, which sum to it, else from the steps' times."""
    total = sum(record.parts.values())
    if record.parts and positive(total):
        return total
    return sum(steps) / len(steps) if steps else None
