"""A traced run as the report sees it: what `hpcdl trace` finds inside its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
