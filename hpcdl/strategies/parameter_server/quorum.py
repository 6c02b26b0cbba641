"""A parameter server with backup workers: the first P - K gradients of each message count (Chen et al. 2016).

J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz: Revisiting Distributed Synchronous SGD, section 3. A gradient that
comes too late is dropped; its sender still gets every mean, in order, so that all workers hold the same weights. A
late worker takes the means of the steps that it has missed without computing them (`FOLLOW`), until it has caught up.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.errors import StoppedEarly
from hpcdl.strategies.parameter_server import agreement
from hpcdl.strategies.parameter_server.agreement import ANSWER_TAG, DATA_TAG, HEADER_TAG, receive_layout
from hpcdl.strategies.parameter_server.averaging import Ledger
from hpcdl.strategies.parameter_server.placement import ITEM_BYTES

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator, Request

MAX_LAG = 8
"""Steps that a worker may be ahead of the slowest: the means of so many steps are kept."""
_BETWEEN_STEPS = -1


class Round:
    """One message of one step: its sum and, once `complete`, its mean."""

    def __init__(self, total: Array, num_workers: int) -> None:
        total[:] = 0
        self.total = total
        self.num_gradients = 0
        self.complete = False
        self.waiting: list[int] = []
        """Ranks that have asked for the mean before it was complete."""
        self.num_unserved = num_workers
        self.num_leaving = 0


class Rounds:
    """Rounds by step and number within the step; their buffers are used again."""

    def __init__(self, lengths: list[int], num_workers: int, num_needed: int) -> None:
        self.lengths = lengths
        self._num_workers, self._num_needed = num_workers, num_needed
        self._open: dict[tuple[int, int], Round] = {}
        self._pool: defaultdict[int, list[Array]] = defaultdict(list)
        self._num_complete: defaultdict[int, int] = defaultdict(int)
        self._num_closed: defaultdict[int, int] = defaultdict(int)

    def get(self, step: int, number: int) -> Round:
        """The round, opened where nobody has asked for it yet."""
        key = (step, number)
        if key not in self._open:
            length = self.lengths[number]
            total = self._pool[length].pop() if self._pool[length] else numpy.empty(length, numpy.float32)
            self._open[key] = Round(total, self._num_workers)
        return self._open[key]

    def add(self, step: int, number: int, gradient: Array) -> bool:
        """Add a gradient; whether it counts. The last one that is needed makes the sum a mean."""
        found = self.get(step, number)
        if found.complete:
            return False
        numpy.add(found.total, gradient, out=found.total)
        found.num_gradients += 1
        if found.num_gradients == self._num_needed:
            found.total *= numpy.float32(1 / self._num_needed)
            found.complete = True
            self._num_complete[step] += 1
        return True

    def step_complete(self, step: int) -> bool:
        """Whether every round of `step` has its mean."""
        return self._num_complete[step] == len(self.lengths)

    def sent(self, step: int, number: int) -> None:
        """A send of this round's mean is through; after the last worker's its buffer is free."""
        found = self._open[step, number]
        found.num_leaving -= 1
        if not found.num_unserved and not found.num_leaving:
            del self._open[step, number]
            self._pool[found.total.size].append(found.total)
            # Not when no round of the step is open: the next one may not have been opened yet.
            self._num_closed[step] += 1
            if self._num_closed[step] == len(self.lengths):
                del self._num_closed[step], self._num_complete[step]


class _Client:
    """A worker as the server sees it: what it has announced, and which of its messages comes next."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.header = agreement.header(agreement.STEP, 0)
        self.room = numpy.zeros(0, numpy.float32)
        self.number = _BETWEEN_STEPS
        self.request: Request | None = None

    @property
    def kind(self) -> int:
        """What it has announced last."""
        return int(self.header[0])

    @property
    def step(self) -> int:
        """The step that it has announced last."""
        return int(self.header[1])


class QuorumServer:
    """Serves ranks 0 to `num_workers` - 1; a mean takes the first `num_needed` gradients."""

    def __init__(self, communicator: Communicator, num_workers: int, num_needed: int, *, answers: bool) -> None:
        self._communicator = communicator
        self._num_workers, self._num_needed, self._answers = num_workers, num_needed, answers
        self._ledger = Ledger()
        self._clients = [_Client(rank) for rank in range(num_workers)]
        self._rounds: Rounds | None = None
        self._leaving: list[tuple[Request, tuple[int, int] | None]] = []
        self._asking: dict[int, list[int]] = {}
        self._wishes = numpy.zeros(agreement.NUM_FLAGS)
        self._agreed: dict[int, Array] = {}
        self._newest = -1
        self._stopped = False

    def serve(self) -> dict[str, Any]:
        """Average until the workers have finished; StoppedEarly where they stop before the end."""
        for client in self._clients:
            self._expect_header(client)
        while self._clients or self._leaving:
            coming = [(client.request, client) for client in self._clients if client.request is not None]
            requests = [request for request, _ in coming] + [request for request, _ in self._leaving]
            index = self._communicator.wait_any(requests)
            began = time.perf_counter()
            if index < len(coming):
                self._arrived(coming[index][1])
            else:
                self._left(*self._leaving.pop(index - len(coming)))
            self._ledger.busy_seconds += time.perf_counter() - began
        if self._stopped:
            raise StoppedEarly(f"stopped with the workers after {self._ledger.steps} steps")
        return self._ledger.as_json()

    def _arrived(self, client: _Client) -> None:
        client.request = None
        if client.number != _BETWEEN_STEPS:
            self._take_gradient(client)
        elif client.kind in (agreement.FINISH, agreement.STOP):
            self._stopped |= client.kind == agreement.STOP
            self._clients.remove(client)
        else:
            self._wishes = numpy.maximum(self._wishes, client.header[2:])
        self._let_in()

    def _let_in(self) -> None:
        """Begin the announced steps that are not too far ahead of the slowest worker's."""
        announced = [client for client in self._clients if client.request is None]
        slowest = min((client.step for client in self._clients), default=0)
        for client in announced:
            if client.step - slowest <= MAX_LAG:
                self._begin_step(client)

    def _begin_step(self, client: _Client) -> None:
        if self._rounds is None:
            lengths = receive_layout(self._communicator)
            self._rounds = Rounds(lengths, self._num_workers, self._num_needed)
            self._ledger.held_bytes = ITEM_BYTES * sum(lengths)
            for each in self._clients:
                each.room = numpy.zeros(max(lengths, default=0), numpy.float32)
        client.number = 0
        if client.kind == agreement.FOLLOW:
            for number in range(len(self._rounds.lengths)):
                self._hand_out(client, number)
            client.number = len(self._rounds.lengths)
        self._expect_next(client)

    def _expect_next(self, client: _Client) -> None:
        """Wait for the step's next message, or behind its last one for the next header."""
        assert self._rounds is not None
        if client.number < len(self._rounds.lengths):
            room = client.room[: self._rounds.lengths[client.number]]
            client.request = self._communicator.irecv(room, client.rank, DATA_TAG)
            return
        if self._answers:
            self._asking.setdefault(client.step, []).append(client.rank)
            self._answer(client.step)
        self._expect_header(client)

    def _expect_header(self, client: _Client) -> None:
        client.number = _BETWEEN_STEPS
        client.request = self._communicator.irecv(client.header, client.rank, HEADER_TAG)

    def _take_gradient(self, client: _Client) -> None:
        assert self._rounds is not None
        step, number = client.step, client.number
        gradient = client.room[: self._rounds.lengths[number]]
        if not self._rounds.add(step, number, gradient):
            self._ledger.dropped_messages += 1
        self._hand_out(client, number)
        if step > self._newest and self._rounds.step_complete(step):
            self._newest = step
            self._ledger.steps += 1
            self._agreed = {kept: wishes for kept, wishes in self._agreed.items() if kept >= step - MAX_LAG - 1}
            self._agreed[step] = self._wishes
            self._wishes = numpy.zeros(agreement.NUM_FLAGS)
            self._answer(step)
        client.number += 1
        self._expect_next(client)

    def _hand_out(self, client: _Client, number: int) -> None:
        """Send the mean to `client`, and to all who have waited for it; or let `client` wait."""
        assert self._rounds is not None
        found = self._rounds.get(client.step, number)
        found.waiting.append(client.rank)
        if not found.complete:
            return
        for rank in found.waiting:
            self._leaving.append(
                (self._communicator.isend(found.total, rank, DATA_TAG), (client.step, number)),
            )
        found.num_leaving += len(found.waiting)
        found.num_unserved -= len(found.waiting)
        found.waiting.clear()

    def _left(self, request: Request, key: tuple[int, int] | None) -> None:
        if key is not None and self._rounds is not None:
            self._rounds.sent(*key)

    def _answer(self, step: int) -> None:
        """Tell those who have asked what holds after `step`, once that is settled."""
        if step > self._newest:
            return
        for rank in self._asking.pop(step, []):
            message = agreement.answer(self._agreed[step], self._newest)
            self._leaving.append((self._communicator.isend(message, rank, ANSWER_TAG), None))
