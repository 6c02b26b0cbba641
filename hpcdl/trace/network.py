"""The traffic of each host's interfaces over time, by the kernel's counts of each second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.trace.counters import NETWORK
from hpcdl.trace.file import COUNTER
from hpcdl.trace.steps import Merged

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

SHORTEST_S = 0.1
"""Counts closer together than this, as at the end of a run, give no reliable rate."""


@dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """Bytes per second in and out together, without the loopback, between times of rank 0's clock.

    `times_s` has one value more than `rates`. `link_share`: the busiest second relative to the link's capacity in both
    directions; None if the link's speed is unknown.
    """

    host: str
    times_s: Array
    rates: Array
    link_share: float | None

    @property
    def mean(self) -> float:
        """Bytes per second over the whole time."""
        return float((self.rates * numpy.diff(self.times_s)).sum() / (self.times_s[-1] - self.times_s[0]))

    @property
    def busiest(self) -> float:
        """Bytes in the busiest second."""
        return float(self.rates.max())

    def as_json(self) -> dict[str, Any]:
        """Return what `hpcdl trace --json` prints of a host."""
        numbers = {"mean_bytes_per_second": self.mean, "busiest_bytes_per_second": self.busiest}
        return {"host": self.host, **numbers, "link_share": self.link_share}


def traffic(merged: Merged, link_bytes_per_second: float | None = None) -> list[HostTraffic]:
    """Return every host with traffic. Its ranks read the same counts, so one of them is used."""
    by_host: dict[str, HostTraffic] = {}
    for rank in merged.ranks:
        trace = merged.traces[rank]
        samples = trace.counters[trace.counters["name"] == trace.code(COUNTER + NETWORK)]
        if trace.host in by_host or len(samples) < 2:
            continue
        # One shift for the whole trace: against seconds, a clock's drift is negligible.
        shift_s = float(merged.records[rank]["begin_s"][0] - trace.records["begin_s"][0])
        times_s = samples["begin_s"] + shift_s
        kept = [0]
        for index in range(1, len(times_s)):
            if times_s[index] - times_s[kept[-1]] >= SHORTEST_S:
                kept.append(index)
        rates = numpy.diff(samples["value"][kept]) / numpy.diff(times_s[kept])
        if len(kept) < 2 or not rates.max() > 0:
            continue
        share = float(rates.max()) / (2 * link_bytes_per_second) if link_bytes_per_second else None
        by_host[trace.host] = HostTraffic(host=trace.host, times_s=times_s[kept], rates=rates, link_share=share)
    return list(by_host.values())


def largest(hosts: Sequence[HostTraffic]) -> float:
    """Return the largest traffic of any host in one second."""
    return max(host.busiest for host in hosts)
