"""When the gradients of each bucket are ready, as shares of computing: what an exchange can hide behind the rest.

A trace has the begin of a bucket's exchange, not the moment when its gradients were there. Where the link was idle
before, these are one; where the bucket before has just ended, gradients were there at the latest then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import BUCKET
from hpcdl.trace.merge import Merged
from hpcdl.trace.steps import GOT_BATCH, HAD_GRADIENTS, Steps

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

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
