"""Ranks of a script that compute together: they agree before every collective, so that none waits for ever.

Each collective of a script begins with a header, one small all-reduce: an identifier of the collective and its shapes,
and a weight. If ranks are in different collectives, all of them know at once, and end with one line that names both.
The header also says which ranks have no more data (`join`): these take part in the others' sums with zeros.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy

from hpcdl.comm.observed import for_control
from hpcdl.core.errors import UsageError
from hpcdl.core.units import listed

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator

Kept = TypeVar("Kept")
_WITHOUT_BATCH = "the end of a fit's data, before its first batch"
_TWO_THREADS = "two threads of a rank exchange at once, one in {}: let one thread train after the other"
_LARGEST_NUMBER = 1 << 20
"""Upper limit of identifiers of collectives: their squares, summed over some thousand ranks, are exact in float64."""


class ScriptGroup:
    """All ranks, or those of a process set. `messages` is a separate message space for one thread at a time.

    `started`: keys of the variables that have been made equal. `num_collectives`: number of collectives begun.
    `num_joined`: number of ranks that had joined at the last one. `keep` holds objects that live as long as the group.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.messages = communicator.duplicate()
        self.rank, self.size = self.messages.rank, self.messages.size
        self.started: set[str] = set()
        self.num_joined = 0
        self.num_collectives = 0
        self.unequal = False
        self.num_batches: int | None = None
        """Batches of this rank in an epoch of the fit, if known."""
        self._control = for_control(self.messages)
        self._entered = threading.Lock()
        self._kept: dict[Any, Any] = {}
        self._sums: dict[int, list[Callable[[], Any]]] = {}
        self._recorded: list[Callable[[], Any]] | None = None

    def keep(self, key: Any, make: Callable[[], Kept]) -> Kept:
        """Return the object that `make` returned when `key` was first requested."""
        if key not in self._kept:
            self._kept[key] = make()
        entry: Kept = self._kept[key]
        return entry

    def forget(self, key: Any) -> None:
        """Forget the object of `key`, so that the next request makes a new one."""
        self._kept.pop(key, None)

    def agree(
        self, collective: str, details: Sequence[str] = (), *, names: Sequence[str] = (), weight: float = 0.0
    ) -> float:
        """Begin a collective. Return the sum of all ranks' weights once every rank is in the same one. Collective.

        Raises UsageError on every rank if they differ, with the first difference. `details`: what else must agree.
        `names`: labels of the details for the error's text, which may differ between ranks.
        """
        self._recorded = None
        self.num_collectives += 1
        if self.size == 1:
            return weight
        number = zlib.crc32("\n".join([collective, *details]).encode()) % _LARGEST_NUMBER
        if not self._entered.acquire(blocking=False):
            raise UsageError(_TWO_THREADS.format(collective))
        try:
            total_weight, self.num_joined, common = self._headers(number, weight, joined=False)
            if common is None:
                self._refuse_different_calls([collective, *details], ["", *names])
        finally:
            self._entered.release()
        # A rank that has joined takes part by what it recorded at an earlier call of the same sum.
        if self.num_joined and number not in self._sums:
            self._refuse_different_calls([f"{collective}, which was no sum that all ranks have taken part in before"])
        if number not in self._sums:
            self._recorded = self._sums[number] = []
        return total_weight

    def summing(self, function: Callable[..., Any], *, empty: bool = False) -> Callable[..., Any]:
        """Wrap `function`, the part of a collective that sums arrays over the ranks or gathers their rows (`empty`).

        A rank that has joined calls it with zeros of the same shape, or without rows.
        """

        def call(*arrays: Array) -> Any:
            forms = [((0, *array.shape[1:]) if empty else array.shape, array.dtype) for array in arrays]
            self.when_joined(lambda: function(*[numpy.zeros(*form) for form in forms]))
            return function(*arrays)

        return call

    def when_joined(self, take_part: Callable[[], Any]) -> None:
        """Record the call with which a rank that has joined takes part in the others' current collective."""
        if self._recorded is not None:
            self._recorded.append(take_part)

    def join(self, *, without_batch: bool = False) -> int:
        """Take part in the others' sums with zeros until every rank has joined. Return the last rank to join.

        Afterwards `unequal` tells whether any rank took part in that way, that is, whether others had more steps.
        `without_batch`: a fit on this rank has come to the end of its data before the first batch.
        """
        num_sums = 0
        while self.size > 1:
            _, num_joined, number = self._headers(0, 0.0, joined=True)
            if num_joined == self.size:
                break
            if number is None or number not in self._sums:
                self._refuse_different_calls([_WITHOUT_BATCH if without_batch else "hpcdl.join()"])
            else:
                for take_part in self._sums[number]:
                    take_part()
                num_sums += 1
        waited = self._control.allgather_json(num_sums)
        self.unequal = max(waited) > 0
        # Who has taken part in the fewest sums of others has joined last.
        return max(rank for rank, rounds in enumerate(waited) if rounds == min(waited))

    def _headers(self, number: int, weight: float, *, joined: bool) -> tuple[float, int, int | None]:
        """Return the sum of weights, the number of joined ranks, and the others' identifier; None if they differ."""
        # Sums of numbers and of their squares tell whether all ranks have the same one: see `same` below.
        header = numpy.array([number, number * number, weight, joined], numpy.float64)
        self._control.allreduce(header)
        num_joined = int(header[3])
        active, total, squares = self.size - num_joined, int(header[0]), int(header[1])
        same = active * squares == total * total  # Cauchy-Schwarz: equal only if all numbers are equal
        return float(header[2]), num_joined, (total // active if active else 0) if same else None

    def _refuse_different_calls(self, calls: Sequence[str], names: Sequence[str] = ()) -> None:
        """Raise an error that names the difference between the ranks. Collective."""
        answers = self._control.allgather_json([list(calls), list(names), self.num_batches])
        texts: list[list[str]] = [text for text, *_ in answers]
        if empty := [rank for rank, text in enumerate(texts) if text[0] == _WITHOUT_BATCH]:
            raise UsageError(_message_without_batch(empty, [num_batches for *_, num_batches in answers]))
        if all(text == texts[0] for text in texts):  # numbers of another thread's collective were added up with these
            raise UsageError(_TWO_THREADS.format(texts[0][0]))
        other_rank = next((rank for rank, text in enumerate(texts) if text != texts[0]), 0)
        pairs = enumerate(itertools.zip_longest(texts[0], texts[other_rank], fillvalue="nothing more"))
        row, pair = next(
            ((row, pair) for row, pair in pairs if pair[0] != pair[1]), (0, (texts[0][0], texts[other_rank][0]))
        )
        first, second = (
            f"{answers[rank][1][row]}: {line}" if 0 < row < len(answers[rank][1]) else line
            for rank, line in zip((0, other_rank), pair, strict=True)
        )
        raise UsageError(
            f"the ranks are not in the same collective: {f'{texts[0][0]}: ' if row else ''}rank 0 has {first}, "
            f"rank {other_rank} has {second}; let every rank make the same calls with the same shapes, and take the "
            "same number of steps (hpcdl.join)"
        )


def _message_without_batch(empty: Sequence[int], num_batches: Sequence[int | None]) -> str:
    """Return the error for ranks whose fit has no batch, with the number of batches where every rank knows its own."""
    ranks = f"rank{'s' if len(empty) > 1 else ''} {listed([str(rank) for rank in empty])}"
    known = [number for number in num_batches if number is not None]
    # With steps_per_epoch Keras gives that number, whatever the data have.
    if len(known) == len(num_batches) and not any(num_batches[rank] for rank in empty):
        batches = "1 batch" if sum(known) == 1 else f"{sum(known):,} batches"
        what = f"the training data have {batches} for {len(known)} ranks, none for {ranks}"
    else:
        what = f"the training data have no batch for {ranks}"
    return f"{what}: use fewer ranks or smaller batches, so that model.fit has one on every rank"
