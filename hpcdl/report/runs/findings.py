"""What other commands find out about a report's runs; a report only shows it.

`hpcdl trace` finds where the time inside of steps goes, `hpcdl predict` what they would take at other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcdl.core.units import IMAGES


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """`rank` makes each step longer by `seconds_per_step`, likely for `cause`, because of `evidence`."""

    rank: int
    host: str
    cause: str
    seconds_per_step: float
    evidence: str


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """What the interfaces of `host` carried, in and out: (seconds since the first sample, bytes a second) in order."""

    host: str
    mean: float
    busiest: float
    link_share: float | None
    samples: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """Means over the `steps` that every worker's trace has.

    `hidden`: the share of the exchange that computing hides; `idle_s`: of a step, the time in which a rank waits. The
    critical path is the seconds of each part on the rank that all others wait for; `gains_s` what a step would lose
    without that part. `recording`: the share of the time that recording took.
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
    """For each bucket of gradients: the share of all bytes up to its end, and of computing when it is there."""
    network: Sequence[HostNetwork] = ()


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """What the runs of one strategy, size and batch reached in the mean."""

    strategy: str
    nodes: int
    workers: int
    batch_per_rank: float
    images_per_second: float


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """One network's forecasts: `document` is that of `hpcdl predict --json`, `measured` what it was made from.

    `left_out` says why there is none, or what of the runs it does not know. `counted` is what rates count.
    """

    subject: str
    document: Mapping[str, Any] = field(default_factory=dict)
    measured: Sequence[MeasuredRate] = ()
    counted: str = IMAGES
    left_out: str = ""

    def as_json(self) -> dict[str, Any]:
        """An entry of `prediction` in report.json."""
        return {"subject": self.subject, "left_out": self.left_out or None, **self.document}
