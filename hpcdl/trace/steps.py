"""Steps as arrays over ranks: six borders each on one clock, the parts between them, and what they add up to.

Also when the gradients of each bucket are ready, as shares of computing: what an exchange can hide behind the rest. A
trace has the begin of a bucket's exchange, not the moment when its gradients were there. Where the link was idle
before, these are one; where the bucket before has just ended, gradients were there at the latest then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import BUCKET, PARTS
from hpcdl.core.errors import UsageError
from hpcdl.core.records.run_record import PARTS as RECORD_PARTS
from hpcdl.trace.merge import Merged

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

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
