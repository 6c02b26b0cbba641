"""Every rank's spans on rank 0's clock, with what is known of the error; refused where clocks were not measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.records.run_record import FILE_NAME as RECORD
from hpcdl.trace.file import RankTrace, read_trace
from hpcdl.trace.recorder import FOLDER, collect

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

UNKNOWN_DRIFT = 1e-4
"""Of a clock that was measured once: more than crystals drift apart."""
_FILE = re.compile(r"rank-\d+\.trace")


@dataclass(frozen=True, kw_only=True)
class ClockModel:
    """A rank's clock against its parent's: straight lines between the points that were measured, and on beyond them."""

    parent: int
    points: Array

    def to_parent(self, times_s: Array) -> Array:
        """`times_s` of this clock as the parent's."""
        own_s = self.points["own_s"]
        offsets_s = self.points["parent_s"] - own_s
        offset_s = numpy.interp(times_s, own_s, offsets_s)
        if len(own_s) > 1:
            offset_s += self._slope(0) * numpy.minimum(times_s - own_s[0], 0)
            offset_s += self._slope(-2) * numpy.maximum(times_s - own_s[-1], 0)
        result: Array = times_s + offset_s
        return result

    def error_s(self, times_s: Array) -> Array:
        """How far off `to_parent` may be: between two points no more than they, beyond them what their slope may be."""
        own_s, errors_s = self.points["own_s"], self.points["error_s"]
        beyond_s = numpy.maximum(own_s[0] - times_s, 0) + numpy.maximum(times_s - own_s[-1], 0)
        slope_error = UNKNOWN_DRIFT if errors_s.max() > 0 else 0.0
        if len(own_s) > 1:
            slope_error = min(slope_error, float(errors_s[0] + errors_s[-1]) / float(own_s[-1] - own_s[0]))
        result: Array = numpy.interp(times_s, own_s, errors_s) + slope_error * beyond_s + self._bend_s()
        return result

    @property
    def drift(self) -> float:
        """Seconds that this clock gains on its parent's in each second."""
        if len(self.points) < 2:
            return 0.0
        first, last = self.points[0], self.points[-1]
        own_s = float(last["own_s"] - first["own_s"])
        return 1 - float(last["parent_s"] - first["parent_s"]) / own_s

    def _slope(self, place: int) -> float:
        """Of the offset between the point at `place` and the next."""
        here, there = self.points[place], self.points[place + 1]
        own_s = float(there["own_s"] - here["own_s"])
        return float(there["parent_s"] - here["parent_s"]) / own_s - 1

    def _bend_s(self) -> float:
        """How far a point lies off the line between its neighbours, beyond what their errors explain."""
        own_s, errors_s = self.points["own_s"], self.points["error_s"]
        if len(own_s) < 3:
            return 0.0
        offsets_s = self.points["parent_s"] - own_s
        share = (own_s[1:-1] - own_s[:-2]) / (own_s[2:] - own_s[:-2])
        line_s = offsets_s[:-2] + share * (offsets_s[2:] - offsets_s[:-2])
        told_s = errors_s[1:-1] + numpy.maximum(errors_s[:-2], errors_s[2:])
        return float(numpy.maximum(numpy.abs(offsets_s[1:-1] - line_s) - told_s, 0).max())


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """A host's clock against rank 0's: `offset_s` ahead at the first point, gaining `drift`, known to `error_s`."""

    host: str
    offset_s: float
    drift: float
    error_s: float


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Traces by rank on rank 0's clock. `errors_s`: of each rank, the largest over its spans."""

    traces: Mapping[int, RankTrace]
    records: Mapping[int, Array]
    errors_s: Mapping[int, float]
    clocks: Sequence[HostClock]

    @property
    def ranks(self) -> list[int]:
        """The ranks that have spans."""
        return sorted(rank for rank, records in self.records.items() if len(records))

    def spans(self, rank: int, name: str) -> Array:
        """The rank's records of that name, in order."""
        records = self.records[rank]
        found: Array = records[records["name"] == self.traces[rank].code(name)]
        return found


def read_run(run_dir: Path) -> list[RankTrace]:
    """The traces of a run, also of one that was killed; UsageError where it has none."""
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir} is not a run directory")
    left = collect(run_dir)
    paths = sorted(path for path in (run_dir / FOLDER).glob("*") if _FILE.fullmatch(path.name))
    if left:
        raise UsageError(f"{run_dir} lacks {len(left)} of its traces: {left[0]}; copy it into {run_dir / FOLDER}")
    if not paths and not (run_dir / RECORD).exists():
        raise UsageError(f"{run_dir} is not a run directory, which has a {RECORD}; name one, such as {run_dir}/RUN")
    if not paths:
        raise UsageError(f"{run_dir} holds no trace: it was trained with --trace off, or ended before its first step")
    return [read_trace(path) for path in paths]


def merge(traces: Sequence[RankTrace]) -> Merged:
    """All on rank 0's clock; CorruptError where a clock was never measured, or the way to rank 0's is missing."""
    by_rank = {trace.rank: trace for trace in traces}
    records: dict[int, Array] = {}
    errors_s: dict[int, float] = {}
    hosts: dict[str, tuple[int, list[ClockModel]]] = {}
    for rank, trace in sorted(by_rank.items()):
        way = _way(by_rank, rank)
        moved = trace.records.copy()
        moved["begin_s"], _ = _moved(way, trace.records["begin_s"])
        moved["end_s"], errors = _moved(way, trace.records["end_s"])
        records[rank] = moved
        errors_s[rank] = float(errors.max()) if len(errors) else 0.0
        hosts.setdefault(trace.host, (rank, way))
    clocks = [_host_clock(host, by_rank[rank], way, errors_s[rank]) for host, (rank, way) in hosts.items()]
    return Merged(traces=by_rank, records=records, errors_s=errors_s, clocks=clocks)


def _way(by_rank: Mapping[int, RankTrace], rank: int) -> list[ClockModel]:
    """The clocks from `rank`'s to rank 0's."""
    way, here = list[ClockModel](), rank
    while here:
        trace = by_rank.get(here)
        if trace is None or not len(trace.points) or len(way) > len(by_rank):
            raise CorruptError(
                f"the clock of rank {here} was not measured, so rank {rank}'s spans cannot be put in order with others"
            )
        way.append(ClockModel(parent=trace.parent, points=trace.points))
        here = trace.parent
    return way


def _moved(way: Sequence[ClockModel], times_s: Array) -> tuple[Array, Array]:
    """`times_s` on rank 0's clock, and their errors."""
    errors_s = numpy.zeros_like(times_s)
    for model in way:
        errors_s = errors_s + model.error_s(times_s)
        times_s = model.to_parent(times_s)
    return times_s, errors_s


def _host_clock(host: str, trace: RankTrace, way: Sequence[ClockModel], error_s: float) -> HostClock:
    if not way:
        return HostClock(host=host, offset_s=0.0, drift=0.0, error_s=0.0)
    begin_s = numpy.array([trace.points["own_s"][0], trace.points["own_s"][0] + 1.0])
    moved_s, _ = _moved(way, begin_s)
    gained = 1 - float(moved_s[1] - moved_s[0]) if len(trace.points) > 1 else 0.0
    return HostClock(host=host, offset_s=float(begin_s[0] - moved_s[0]), drift=gained, error_s=error_s)
