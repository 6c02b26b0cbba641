"""Every rank's spans on one clock, and steps as arrays over ranks: six borders each and the parts between them.

Also computes when the gradients of each bucket are ready, as shares of computing, because an exchange can hide behind
the rest. A trace has the start of a bucket's exchange, not the time when its gradients were ready. If the link was idle
before, these are the same; if the previous bucket has just ended, gradients were ready at that time or earlier.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import BUCKET, PARTS
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.records.run_record import FILE_NAME as RECORD
from hpcdl.core.records.run_record import PARTS as RECORD_PARTS
from hpcdl.trace.file import RankTrace, read_trace
from hpcdl.trace.recorder import FOLDER, collect

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

UNKNOWN_DRIFT = 1e-4
"""Drift of a clock that was measured once: more than that of any crystal."""
_FILE = re.compile(r"rank-\d+\.trace")


@dataclass(frozen=True, kw_only=True)
class ClockModel:
    """A rank's clock relative to its parent's: piecewise linear between measured points, and extrapolated beyond."""

    parent: int
    points: Array

    def to_parent(self, times_s: Array) -> Array:
        """Return `times_s` of this clock as the parent's."""
        own_s = self.points["own_s"]
        offsets_s = self.points["parent_s"] - own_s
        offset_s = numpy.interp(times_s, own_s, offsets_s)
        if len(own_s) > 1:  # `interp` is constant beyond the points, a drifting offset is not
            offset_s += self._slope(0) * numpy.minimum(times_s - own_s[0], 0)
            offset_s += self._slope(-2) * numpy.maximum(times_s - own_s[-1], 0)
        result: Array = times_s + offset_s
        return result

    def error_s(self, times_s: Array) -> Array:
        """Return the error of `to_parent`: between points that of the points, beyond them also that of the slope."""
        own_s, errors_s = self.points["own_s"], self.points["error_s"]
        beyond_s = numpy.maximum(own_s[0] - times_s, 0) + numpy.maximum(times_s - own_s[-1], 0)
        # Errors of 0 belong to ranks of one kernel, which share its clock.
        slope_error = UNKNOWN_DRIFT if errors_s.max() > 0 else 0.0
        if len(own_s) > 1:
            slope_error = min(slope_error, float(errors_s[0] + errors_s[-1]) / float(own_s[-1] - own_s[0]))
        result: Array = numpy.interp(times_s, own_s, errors_s) + slope_error * beyond_s + self._bend_s()
        return result

    @property
    def drift(self) -> float:
        """Seconds that this clock gains on its parent's per second."""
        if len(self.points) < 2:
            return 0.0
        first, last = self.points[0], self.points[-1]
        own_s = float(last["own_s"] - first["own_s"])
        return 1 - float(last["parent_s"] - first["parent_s"]) / own_s

    def _slope(self, index: int) -> float:
        """Return the slope of the offset between the point at `index` and the next."""
        point, next_point = self.points[index], self.points[index + 1]
        own_s = float(next_point["own_s"] - point["own_s"])
        return float(next_point["parent_s"] - point["parent_s"]) / own_s - 1

    def _bend_s(self) -> float:
        """Return how far a point is from the line between its neighbors, beyond what their errors explain."""
        own_s, errors_s = self.points["own_s"], self.points["error_s"]
        if len(own_s) < 3:
            return 0.0
        offsets_s = self.points["parent_s"] - own_s
        share = (own_s[1:-1] - own_s[:-2]) / (own_s[2:] - own_s[:-2])
        line_s = offsets_s[:-2] + share * (offsets_s[2:] - offsets_s[:-2])
        explained_s = errors_s[1:-1] + numpy.maximum(errors_s[:-2], errors_s[2:])
        return float(numpy.maximum(numpy.abs(offsets_s[1:-1] - line_s) - explained_s, 0).max())


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """A host's clock relative to rank 0's: `offset_s` ahead at first, gaining `drift`, with error `error_s`."""

    host: str
    offset_s: float
    drift: float
    error_s: float


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Traces by rank on rank 0's clock. `errors_s`: the largest error of each rank's spans."""

    traces: Mapping[int, RankTrace]
    records: Mapping[int, Array]
    errors_s: Mapping[int, float]
    clocks: Sequence[HostClock]

    @property
    def ranks(self) -> list[int]:
        """The ranks that have spans."""
        return sorted(rank for rank, records in self.records.items() if len(records))

    def spans(self, rank: int, name: str) -> Array:
        """Return the rank's records with that name, in order."""
        records = self.records[rank]
        spans: Array = records[records["name"] == self.traces[rank].code(name)]
        return spans


def read_run(run_dir: Path) -> list[RankTrace]:
    """Return the traces of a run, also of a killed one. Raises UsageError if it has none."""
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
    """Put all traces on rank 0's clock. Raises CorruptError if a clock, or the path to rank 0's, was not measured."""
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
        # Ranks of a host share its clock, so one of them is enough.
        hosts.setdefault(trace.host, (rank, way))
    clocks = [_host_clock(host, by_rank[rank], way, errors_s[rank]) for host, (rank, way) in hosts.items()]
    return Merged(traces=by_rank, records=records, errors_s=errors_s, clocks=clocks)


def _way(by_rank: Mapping[int, RankTrace], rank: int) -> list[ClockModel]:
    """Return the clocks from `rank`'s to rank 0's."""
    way, hop = list[ClockModel](), rank
    while hop:
        trace = by_rank.get(hop)
        # The parents in a damaged file may form a circle.
        if trace is None or not len(trace.points) or len(way) > len(by_rank):
            raise CorruptError(
                f"the clock of rank {hop} was not measured, so rank {rank}'s spans cannot be put in order with others"
            )
        way.append(ClockModel(parent=trace.parent, points=trace.points))
        hop = trace.parent
    return way


def _moved(way: Sequence[ClockModel], times_s: Array) -> tuple[Array, Array]:
    """Return `times_s` on rank 0's clock, and their errors."""
    errors_s = numpy.zeros_like(times_s)
    for model in way:
        errors_s = errors_s + model.error_s(times_s)
        times_s = model.to_parent(times_s)
    return times_s, errors_s


def _host_clock(host: str, trace: RankTrace, way: Sequence[ClockModel], error_s: float) -> HostClock:
    if not way:
        return HostClock(host=host, offset_s=0.0, drift=0.0, error_s=0.0)
    # Two moments a second apart: on rank 0's clock their distance differs by the drift.
    begin_s = numpy.array([trace.points["own_s"][0], trace.points["own_s"][0] + 1.0])
    moved_s, _ = _moved(way, begin_s)
    gained = 1 - float(moved_s[1] - moved_s[0]) if len(trace.points) > 1 else 0.0
    return HostClock(host=host, offset_s=float(begin_s[0] - moved_s[0]), drift=gained, error_s=error_s)


BEGAN, GOT_BATCH, HAD_GRADIENTS, EXCHANGED, UPDATED, ENDED = range(6)  # around the five PARTS
INPUT, COMPUTE, WAIT, EXPOSED, UPDATE, OTHER = range(len(RECORD_PARTS))  # a record's parts: the exchange is split


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps that all workers have kept, on rank 0's clock.

    `ranks` (R) and `numbers` (S) identify them. `borders` is (R, S, 6); `waited_s` (R, S) are waits that a strategy
    without common steps has recorded; `errors_s` (R) are errors of times. `synchronous`: ranks wait for the slowest.
    """

    ranks: Array
    numbers: Array
    borders: Array
    waited_s: Array
    errors_s: Array
    synchronous: bool

    @property
    def seconds(self) -> Array:
        """Seconds of each step, (R, S)."""
        result: Array = self.borders[:, :, ENDED] - self.borders[:, :, BEGAN]
        return result

    @property
    def step_s(self) -> float:
        """The mean over ranks and steps."""
        return float(self.seconds.mean())

    def parts(self) -> Array:
        """Return seconds by the names of records (core/records/run_record.py), (R, S, 6)."""
        had, exchanged = self.borders[:, :, HAD_GRADIENTS], self.borders[:, :, EXCHANGED]
        slowest = had.max(axis=0)[None] if self.synchronous else had
        # Clocks have errors: the end of the wait must stay between this rank's own borders.
        everybody = numpy.clip(numpy.maximum(slowest, had + self.waited_s), had, numpy.maximum(exchanged, had))
        borders = numpy.insert(self.borders, EXCHANGED, everybody, axis=2)
        result: Array = numpy.diff(borders, axis=2)
        return result

    def index_of(self, numbers: Array) -> tuple[Array, Array]:
        """Return the index of each of `numbers` among the steps, and whether it is there."""
        indices = numpy.searchsorted(self.numbers, numbers).clip(0, len(self.numbers) - 1)
        return indices, self.numbers[indices] == numbers


def steps_of(merged: Merged, *, synchronous: bool, first: int = 0) -> Steps:
    """Return the steps from number `first` on that every worker has kept whole. Raises UsageError if there are none.

    If all of them come before `first`, these are used instead.
    """
    steps_by_rank: dict[int, tuple[Array, Array, Array]] = {}
    for rank in merged.ranks:
        columns = [merged.spans(rank, name) for name in PARTS]
        if len(columns[-1]):
            steps_by_rank[rank] = _borders(columns)
    if not steps_by_rank:
        raise UsageError("the trace holds no step of a worker; train more steps, or trace other steps or ranks")
    numbers = next(iter(steps_by_rank.values()))[0]
    for rank_numbers, _, _ in steps_by_rank.values():
        numbers = numpy.intersect1d(numbers, rank_numbers)
    if not len(numbers):
        raise UsageError("no step is in every worker's trace; give --trace a larger size=, or fewer steps")
    # Steps of the warm-up are slow, but better than none in a short trace.
    if numpy.any(numbers >= first):
        numbers = numbers[numbers >= first]
    rows = [numpy.searchsorted(rank_numbers, numbers) for rank_numbers, _, _ in steps_by_rank.values()]
    return Steps(
        ranks=numpy.array(list(steps_by_rank)),
        numbers=numbers,
        borders=numpy.stack([borders[row] for row, (_, borders, _) in zip(rows, steps_by_rank.values(), strict=True)]),
        waited_s=numpy.stack([waited[row] for row, (_, _, waited) in zip(rows, steps_by_rank.values(), strict=True)]),
        errors_s=numpy.array([merged.errors_s[rank] for rank in steps_by_rank]),
        synchronous=synchronous and len(steps_by_rank) > 1,
    )


def _borders(columns: list[Array]) -> tuple[Array, Array, Array]:
    """Return numbers, six borders and own waits of complete steps; of two with one number, the last."""
    newest = []
    for column in columns:
        # `unique` returns the first of equal numbers, which in reverse order is the last.
        numbers, indices = numpy.unique(column["step"][::-1], return_index=True)
        newest.append((numbers, column[::-1][indices]))
    common = newest[0][0]
    for numbers, _ in newest[1:]:
        common = numpy.intersect1d(common, numbers)
    rows = [records[numpy.searchsorted(numbers, common)] for numbers, records in newest]
    borders = numpy.stack([*(row["begin_s"] for row in rows), rows[-1]["end_s"]], axis=1)
    # The third part is the exchange, whose value is its wait in nanoseconds.
    return common, borders, rows[2]["value"] / 1e9


IDLE_SHARE = 0.02
"""Share of computing after the previous bucket's end from which the link was idle, with no gradients being copied."""
MOST_STEPS_BUSY = 0.5
"""If the link was busy in more than this share of steps, its start is only an upper bound."""


def readiness(merged: Merged, steps: Steps) -> list[tuple[float, float]]:
    """Return (share of all bytes up to a bucket's end, share of computing when its gradients are ready), both rising.

    They are medians over ranks and steps. Buckets that waited for the link are interpolated between the others, no
    later than they began. Empty if nothing was exchanged in buckets while all ranks stepped together.
    """
    if not steps.synchronous:
        return []
    by_rank = [_of_rank(merged, steps, row) for row in range(len(steps.ranks))]
    by_rank = [item for item in by_rank if item.size]
    if not by_rank or len({item.shape[1] for item in by_rank}) > 1:
        return []
    sizes, begins, idle = numpy.concatenate(by_rank).transpose(2, 0, 1)
    shares = numpy.cumsum(numpy.median(sizes, axis=0))
    shares /= shares[-1]
    latest = numpy.minimum(numpy.median(begins, axis=0), 1.0)
    free = (idle > 0).mean(axis=0) > 1 - MOST_STEPS_BUSY
    free[0] = True  # no bucket before it kept the link busy
    interpolated = numpy.interp(shares, [*shares[free], 1.0], [*latest[free], 1.0])
    ready = numpy.maximum.accumulate(numpy.minimum(interpolated, latest))
    return list(zip(shares.tolist(), ready.tolist(), strict=True))


def _of_rank(merged: Merged, steps: Steps, row: int) -> Array:
    """Return (steps, buckets, 3): bytes, start as a share of computing, 1 if the link was idle before, or empty."""
    spans = merged.spans(int(steps.ranks[row]), BUCKET)
    indices, inside = steps.index_of(spans["step"])
    spans, indices = spans[inside], indices[inside]
    # A compressed bucket also exchanges its scale, under the same number: the larger span is the bucket.
    order = numpy.lexsort((spans["value"], spans["bucket"], indices))
    spans, indices = spans[order], indices[order]
    last = numpy.append((numpy.diff(indices) != 0) | (numpy.diff(spans["bucket"]) != 0), [True] if len(spans) else [])
    spans, indices = spans[last.astype(bool)], indices[last.astype(bool)]
    numbers, counts = numpy.unique(indices, return_counts=True)
    if not len(numbers):
        return numpy.empty((0, 0, 3))
    # Steps with fewer buckets have lost some to newer spans of the ring.
    complete = numpy.isin(indices, numbers[counts == counts.max()])
    spans, indices = spans[complete].reshape(-1, counts.max()), indices[complete].reshape(-1, counts.max())[:, 0]
    borders = steps.borders[row, indices]
    computing = (borders[:, HAD_GRADIENTS] - borders[:, GOT_BATCH])[:, None]
    begins = (spans["begin_s"] - borders[:, GOT_BATCH, None]) / computing
    before = numpy.column_stack([borders[:, GOT_BATCH], spans["end_s"][:, :-1]])
    idle = spans["begin_s"] - before > IDLE_SHARE * computing
    result: Array = numpy.stack([spans["value"].astype(float), begins, idle.astype(float)], axis=2)
    return result
