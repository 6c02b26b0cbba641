"""Every rank's spans on one clock, and steps as arrays over ranks: six borders each and the parts between them.

Also when the gradients of each bucket are ready, as shares of computing: what an exchange can hide behind the rest. A
trace has the begin of a bucket's exchange, not the moment when its gradients were there. Where the link was idle
before, these are one; where the bucket before has just ended, gradients were there at the latest then.
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


BEGAN, GOT_BATCH, HAD_GRADIENTS, EXCHANGED, UPDATED, ENDED = range(6)
INPUT, COMPUTE, WAIT, EXPOSED, UPDATE, OTHER = range(len(RECORD_PARTS))


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What workers did in the steps that all of them have kept, on rank 0's clock.

    `ranks` (R) and `numbers` (S) say which; `borders` is (R, S, 6), `waited_s` (R, S) what a strategy without common
    steps has noted itself; `errors_s` (R) how far off a rank's times may be. `synchronous`: ranks wait for the slowest.
    """

    ranks: Array
    numbers: Array
    borders: Array
    waited_s: Array
    errors_s: Array
    synchronous: bool

    @property
    def seconds(self) -> Array:
        """(R, S): how long each step took."""
        result: Array = self.borders[:, :, ENDED] - self.borders[:, :, BEGAN]
        return result

    @property
    def step_s(self) -> float:
        """The mean over ranks and steps."""
        return float(self.seconds.mean())

    def parts(self) -> Array:
        """(R, S, 6): seconds by the names of records (core/records/run_record.py)."""
        had, exchanged = self.borders[:, :, HAD_GRADIENTS], self.borders[:, :, EXCHANGED]
        slowest = had.max(axis=0)[None] if self.synchronous else had
        everybody = numpy.clip(numpy.maximum(slowest, had + self.waited_s), had, numpy.maximum(exchanged, had))
        borders = numpy.insert(self.borders, EXCHANGED, everybody, axis=2)
        result: Array = numpy.diff(borders, axis=2)
        return result

    def index_of(self, numbers: Array) -> tuple[Array, Array]:
        """Where each of `numbers` stands among the steps, and whether it does."""
        places = numpy.searchsorted(self.numbers, numbers).clip(0, len(self.numbers) - 1)
        return places, self.numbers[places] == numbers


def steps_of(merged: Merged, *, synchronous: bool, first: int = 0) -> Steps:
    """The steps from number `first` on that every worker has kept whole; UsageError where there are none.

    Where all of them come before `first`, these are better than none.
    """
    found: dict[int, tuple[Array, Array, Array]] = {}
    for rank in merged.ranks:
        columns = [merged.spans(rank, name) for name in PARTS]
        if len(columns[-1]):
            found[rank] = _borders(columns)
    if not found:
        raise UsageError("the trace holds no step of a worker; train more steps, or trace other steps or ranks")
    numbers = next(iter(found.values()))[0]
    for own, _, _ in found.values():
        numbers = numpy.intersect1d(numbers, own)
    if not len(numbers):
        raise UsageError("no step is in every worker's trace; give --trace a larger size=, or fewer steps")
    if numpy.any(numbers >= first):
        numbers = numbers[numbers >= first]
    rows = [numpy.searchsorted(own, numbers) for own, _, _ in found.values()]
    return Steps(
        ranks=numpy.array(list(found)),
        numbers=numbers,
        borders=numpy.stack([borders[row] for row, (_, borders, _) in zip(rows, found.values(), strict=True)]),
        waited_s=numpy.stack([waited[row] for row, (_, _, waited) in zip(rows, found.values(), strict=True)]),
        errors_s=numpy.array([merged.errors_s[rank] for rank in found]),
        synchronous=synchronous and len(found) > 1,
    )


def _borders(columns: list[Array]) -> tuple[Array, Array, Array]:
    """Numbers, six borders and own waits of the steps that have all their parts; the last of two with one number."""
    newest = []
    for column in columns:
        numbers, places = numpy.unique(column["step"][::-1], return_index=True)
        newest.append((numbers, column[::-1][places]))
    common = newest[0][0]
    for numbers, _ in newest[1:]:
        common = numpy.intersect1d(common, numbers)
    rows = [records[numpy.searchsorted(numbers, common)] for numbers, records in newest]
    borders = numpy.stack([*(row["begin_s"] for row in rows), rows[-1]["end_s"]], axis=1)
    return common, borders, rows[2]["value"] / 1e9


IDLE_SHARE = 0.02
"""Of computing: so long after the end of the bucket before, the link was idle, and no copy of gradients under way."""
MOST_STEPS_BUSY = 0.5
"""Where the link was busy in more steps than this, the begin is only the latest moment."""


def readiness(merged: Merged, steps: Steps) -> list[tuple[float, float]]:
    """(share of all bytes up to a bucket's end, share of computing when its gradients are there), rising in both.

    Medians over ranks and steps. Buckets that waited for the link lie between those that did not, no later than they
    began. Empty where nothing was exchanged in buckets while all ranks stepped together.
    """
    if not steps.synchronous:
        return []
    found = [_of_rank(merged, steps, row) for row in range(len(steps.ranks))]
    found = [item for item in found if item.size]
    if not found or len({item.shape[1] for item in found}) > 1:
        return []
    sizes, begins, idle = numpy.concatenate(found).transpose(2, 0, 1)
    shares = numpy.cumsum(numpy.median(sizes, axis=0))
    shares /= shares[-1]
    latest = numpy.minimum(numpy.median(begins, axis=0), 1.0)
    free = (idle > 0).mean(axis=0) > 1 - MOST_STEPS_BUSY
    free[0] = True
    known = numpy.interp(shares, [*shares[free], 1.0], [*latest[free], 1.0])
    ready = numpy.maximum.accumulate(numpy.minimum(known, latest))
    return list(zip(shares.tolist(), ready.tolist(), strict=True))


def _of_rank(merged: Merged, steps: Steps, row: int) -> Array:
    """(steps, buckets, 3): bytes, begin as a share of computing, 1 where the link was idle before; none: empty."""
    spans = merged.spans(int(steps.ranks[row]), BUCKET)
    places, known = steps.index_of(spans["step"])
    spans, places = spans[known], places[known]
    # A bucket that is compressed also exchanges its scale, under the same number: the larger one is the bucket.
    order = numpy.lexsort((spans["value"], spans["bucket"], places))
    spans, places = spans[order], places[order]
    last = numpy.append((numpy.diff(places) != 0) | (numpy.diff(spans["bucket"]) != 0), [True] if len(spans) else [])
    spans, places = spans[last.astype(bool)], places[last.astype(bool)]
    numbers, counts = numpy.unique(places, return_counts=True)
    if not len(numbers):
        return numpy.empty((0, 0, 3))
    whole = numpy.isin(places, numbers[counts == counts.max()])
    spans, places = spans[whole].reshape(-1, counts.max()), places[whole].reshape(-1, counts.max())[:, 0]
    borders = steps.borders[row, places]
    computing = (borders[:, HAD_GRADIENTS] - borders[:, GOT_BATCH])[:, None]
    begins = (spans["begin_s"] - borders[:, GOT_BATCH, None]) / computing
    before = numpy.column_stack([borders[:, GOT_BATCH], spans["end_s"][:, :-1]])
    idle = spans["begin_s"] - before > IDLE_SHARE * computing
    result: Array = numpy.stack([spans["value"].astype(float), begins, idle.astype(float)], axis=2)
    return result
