"""Results of other commands about a report's runs, and results of `hpcdl infer`. A report only shows them.

`hpcdl trace` finds where the time inside steps goes, `hpcdl predict` how long they would take at other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcdl.config.commands import InferConfig
from hpcdl.config.load import all_settings
from hpcdl.config.settings import TIME
from hpcdl.core.records.run_record import RunRecord, is_measured
from hpcdl.core.statistics import mean_of_known
from hpcdl.core.units import IMAGES
from hpcdl.report.runs.run import finite, machine_name, positive

_LOCATIONS = ("data", "ranks")
"""Settings that have their own columns."""
_TIMED = tuple(
    item.key
    for item in all_settings(InferConfig)
    if item.matters and TIME in item.matters and item.key not in _LOCATIONS
)


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """One inference. Times are in seconds; `batch_seconds_*` are for a batch on one rank; None means not measured.

    `accelerators`: number of ranks that computed on a GPU, by its name; `gpu_utilisation`: their mean, 0 to 1.
    `settings`: those that affect the time, as text. `num_kept`: samples computed before the call was resumed.
    """

    name: str
    status: str
    message: str = ""
    model: str
    data: str
    splits: Sequence[str] = ()
    nodes: int
    ranks: int
    threads: int | None = None
    batch_size: int | None = None
    machine: str = ""
    counted: str = IMAGES
    images_per_second: float | None = None
    num_computed: int = 0
    num_kept: int = 0
    batch_seconds_median: float | None = None
    batch_seconds_p99: float | None = None
    first_batch_seconds: float | None = None
    accelerators: Mapping[str, int] = field(default_factory=dict)
    gpu_utilisation: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    @property
    def usable(self) -> bool:
        """Whether its rate measures the whole inference: a resumed call has computed only a part."""
        counted = self.ranks >= 1 and self.nodes >= 1
        return counted and is_measured(self.status) and positive(self.images_per_second) and not self.num_kept

    def as_json(self) -> dict[str, Any]:
        """Return its form in report.json."""
        return {**asdict(self), "usable": self.usable}


def inferred_of(record: RunRecord, name: str) -> Inferred:
    """Return the report's view of a record of an inference."""
    inference = record.inference
    assert inference is not None
    return Inferred(
        name=name,
        status=record.status,
        message=record.message,
        model=record.model,
        data=record.data,
        splits=inference.splits,
        nodes=record.nodes,
        ranks=record.ranks,
        threads=record.intra_op_threads,
        batch_size=record.batch_per_rank,
        machine=machine_name(record.machine, record.hosts),
        counted=record.counted,
        images_per_second=finite(record.images_per_second),
        num_computed=inference.num_computed,
        num_kept=inference.num_kept,
        batch_seconds_median=finite(inference.batch_seconds_median),
        batch_seconds_p99=finite(inference.batch_seconds_p99),
        first_batch_seconds=finite(inference.first_batch_seconds),
        accelerators=dict(record.accelerators),
        gpu_utilisation=mean_of_known([rank.gpu_utilisation for rank in record.rank_records]),
        settings={key: str(record.config[key]) for key in _TIMED if key in record.config},
        warnings=record.warnings,
    )


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """`rank` makes each step longer by `seconds_per_step`; `cause` is likely, because of `evidence`."""

    rank: int
    host: str
    cause: str
    seconds_per_step: float
    evidence: str


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """Traffic of the interfaces of `host`, in and out: pairs of (seconds since the first sample, bytes per second)."""

    host: str
    mean: float
    busiest: float
    link_share: float | None
    samples: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """Means over the `steps` that every worker's trace has.

    `hidden`: share of the exchange that computing hides; `idle_s`: time of a step in which a rank waits. The critical
    path has the seconds of each part on the rank that all others wait for; `gains_s` how much shorter a step would be
    without that part. `recording`: share of the time that recording took.
    """

    name: str
    ranks: int
    steps: int
    step_s: float
    hidden: float | None
    gap_median_s: float | None
    gap_p90_s: float | None
    idle_s: float
    recording: float
    critical_path: Mapping[str, float]
    gains_s: Mapping[str, float]
    slow_ranks: Sequence[SlowRank]
    ready: Sequence[tuple[float, float]] = ()
    """For each bucket of gradients: the share of all bytes up to its end, and of computing when it is ready."""
    network: Sequence[HostNetwork] = ()


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """Mean results of the runs of one strategy, size and batch."""

    strategy: str
    nodes: int
    workers: int
    batch_per_rank: float
    images_per_second: float


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """One network's forecasts: `document` is that of `hpcdl predict --json`, `measured` its basis.

    `left_out` says why there is none, or which runs it omits. `counted` is the unit of the rates.
    """

    subject: str
    document: Mapping[str, Any] = field(default_factory=dict)
    measured: Sequence[MeasuredRate] = ()
    counted: str = IMAGES
    left_out: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return an entry of `prediction` in report.json."""
        return {"subject": self.subject, "left_out": self.left_out or None, **self.document}
