"""Steps as arrays over ranks: six borders each on one clock, the parts between them, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import PARTS
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
