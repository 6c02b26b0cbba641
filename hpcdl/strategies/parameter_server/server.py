"""The parameter servers of `ps`: one that waits for every worker, and one with backup workers.

The first computes the mean of all gradients, in float32, in the order of the ranks. The fixed order makes the result
bitwise reproducible. A server that waits sleeps (`Communicator.wait_any`), because it may share a node with workers.

With backup workers the first P - K gradients of each message count (J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz
2016: Revisiting Distributed Synchronous SGD, section 3). A gradient that comes too late is dropped; its sender still
gets every mean, in order, so that all workers hold the same weights. A late worker applies the means of the steps that
it has missed without computing gradients (`FOLLOW`), until it has caught up.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.errors import RankError, StoppedEarly
from hpcdl.strategies.parameter_server import placement
from hpcdl.strategies.parameter_server.placement import ANSWER_TAG, DATA_TAG, HEADER_TAG, ITEM_BYTES, receive_layout

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator, Request


SLOTS = 3
"""Message buffers per worker: one being summed, one being received, one whose mean is being sent."""


class Ledger:
    """A server's counts for the record."""

    def __init__(self) -> None:
        self.steps = 0
        self.busy_seconds = 0.0
        self.held_bytes = 0
        self.dropped_messages = 0

    def as_json(self) -> dict[str, Any]:
        """Return means per step, and the bytes of the gradient that this server averages."""
        steps = max(self.steps, 1)
        return {
            "steps": self.steps,
            "held_bytes": self.held_bytes,
            "busy_seconds_per_step": self.busy_seconds / steps,
            "dropped_messages": self.dropped_messages,
        }


class AveragingServer:
    """Serves the workers, ranks 0 to `num_workers` - 1; the server with `answers` also sends them the decisions."""

    def __init__(self, communicator: Communicator, num_workers: int, *, answers: bool) -> None:
        self._communicator = communicator
        self._num_workers = num_workers
        self._answers = answers
        self._ledger = Ledger()
        # If all servers sent to the same worker first, they would queue for its link.
        num_servers = communicator.size - num_workers
        first = (communicator.rank - num_workers) * num_workers // num_servers
        self._in_turn = [*range(first, num_workers), *range(first)]
        self._lengths: list[int] | None = None
        self._slots: list[list[Array]] = []

    def serve(self) -> dict[str, Any]:
        """Average until the workers have finished. Raises StoppedEarly if they stop before the end."""
        headers = numpy.zeros((self._num_workers, len(placement.header(placement.STEP, 0))))
        while True:
            coming = [
                self._communicator.irecv(row, worker, HEADER_TAG) for worker, row in enumerate(headers)
            ]  # fmt: skip
            # One by one, since all headers are needed. `wait` would spin, and the workers still compute.
            for request in coming:
                self._communicator.wait_any([request])
            kinds = {int(kind) for kind in headers[:, 0]}
            if len(kinds) > 1:
                raise RankError(f"workers disagree on what comes next: {sorted(kinds)}", rank=self._communicator.rank)
            if kinds == {placement.FINISH}:
                return self._ledger.as_json()
            if kinds == {placement.STOP}:
                raise StoppedEarly(f"stopped with the workers after {self._ledger.steps} steps")
            self._average_step()
            if self._answers:
                self._answer(headers)

    def _average_step(self) -> None:
        if self._lengths is None:
            self._lengths = receive_layout(self._communicator)
            self._ledger.held_bytes = ITEM_BYTES * sum(self._lengths)
            longest = max(self._lengths, default=0)
            shape = (self._num_workers, min(SLOTS, len(self._lengths)), longest)
            self._slots = [list(slots) for slots in numpy.zeros(shape, numpy.float32)]
        lengths = self._lengths
        coming = {number: self._receive(number) for number in range(min(SLOTS - 1, len(lengths)))}
        leaving: deque[list[Request]] = deque()
        for number in range(len(lengths)):
            leaving.append(self._average(number, coming.pop(number)))
            following = number + SLOTS - 1
            if following < len(lengths):
                if len(leaving) >= SLOTS - 1:
                    self._wait(leaving.popleft())  # the next receive takes the slot of message number - 1
                coming[following] = self._receive(following)
        for requests in leaving:
            self._wait(requests)
        self._ledger.steps += 1

    def _receive(self, number: int) -> list[Request]:
        return [
            self._communicator.irecv(self._buffer(worker, number), worker, DATA_TAG)
            for worker in range(self._num_workers)
        ]

    def _average(self, number: int, coming: list[Request]) -> list[Request]:
        """Sum one message of every worker in rank order as they arrive, and start to send the mean."""
        # The buffer of worker 0 becomes the sum, so its gradient needs no copy.
        mean = self._buffer(0, number)
        for worker, request in enumerate(coming):
            self._communicator.wait_any([request])
            began = time.perf_counter()
            if worker:
                numpy.add(mean, self._buffer(worker, number), out=mean)
            self._ledger.busy_seconds += time.perf_counter() - began
        began = time.perf_counter()
        mean *= numpy.float32(1 / self._num_workers)
        leaving = [self._communicator.isend(mean, worker, DATA_TAG) for worker in self._in_turn]
        self._ledger.busy_seconds += time.perf_counter() - began
        return leaving

    def _wait(self, leaving: list[Request]) -> None:
        began = time.perf_counter()
        for request in leaving:
            self._communicator.wait_any([request])
        self._ledger.busy_seconds += time.perf_counter() - began

    def _answer(self, headers: Array) -> None:
        message = placement.answer(headers[:, 2:].sum(axis=0), int(headers[0, 1]))
        leaving = [self._communicator.isend(message, worker, ANSWER_TAG) for worker in range(self._num_workers)]
        for request in leaving:
            self._communicator.wait_any([request])

    def _buffer(self, worker: int, number: int) -> Array:
        assert self._lengths is not None
        return self._slots[worker][number % SLOTS][: self._lengths[number]]


MAX_LAG = 8
"""Steps that a worker may be ahead of the slowest: the server keeps the means of this many steps."""
_BETWEEN_STEPS = -1


class Round:
    """One message of one step: its sum and, once `complete`, its mean."""

    def __init__(self, total: Array, num_workers: int) -> None:
        total[:] = 0
        self.total = total
        self.num_gradients = 0
        self.complete = False
        self.waiting: list[int] = []
        """Ranks that requested the mean before it was complete."""
        self.num_unserved = num_workers
        self.num_leaving = 0


class Rounds:
    """Rounds by step and number within the step; their buffers are reused."""

    def __init__(self, lengths: list[int], num_workers: int, num_needed: int) -> None:
        self.lengths = lengths
        self._num_workers, self._num_needed = num_workers, num_needed
        self._open: dict[tuple[int, int], Round] = {}
        self._pool: defaultdict[int, list[Array]] = defaultdict(list)
        self._num_complete: defaultdict[int, int] = defaultdict(int)
        self._num_closed: defaultdict[int, int] = defaultdict(int)

    def get(self, step: int, number: int) -> Round:
        """Return the round; open it if nothing has requested it yet."""
        key = (step, number)
        if key not in self._open:
            length = self.lengths[number]
            total = self._pool[length].pop() if self._pool[length] else numpy.empty(length, numpy.float32)
            self._open[key] = Round(total, self._num_workers)
        return self._open[key]

    def add(self, step: int, number: int, gradient: Array) -> bool:
        """Add a gradient. Return whether it counts. The last one needed turns the sum into a mean."""
        this_round = self.get(step, number)
        if this_round.complete:
            return False
        numpy.add(this_round.total, gradient, out=this_round.total)
        this_round.num_gradients += 1
        if this_round.num_gradients == self._num_needed:
            this_round.total *= numpy.float32(1 / self._num_needed)
            this_round.complete = True
            self._num_complete[step] += 1
        return True

    def step_complete(self, step: int) -> bool:
        """Whether every round of `step` has its mean."""
        return self._num_complete[step] == len(self.lengths)

    def sent(self, step: int, number: int) -> None:
        """Note that a send of this round's mean is complete; after the last worker's the buffer is free."""
        this_round = self._open[step, number]
        this_round.num_leaving -= 1
        if not this_round.num_unserved and not this_round.num_leaving:
            del self._open[step, number]
            self._pool[this_round.total.size].append(this_round.total)
            # Do not test for open rounds of the step: the next round may not be open yet.
            self._num_closed[step] += 1
            if self._num_closed[step] == len(self.lengths):
                del self._num_closed[step], self._num_complete[step]


class _Client:
    """A worker's state on the server: what it announced, and which of its messages comes next."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.header = placement.header(placement.STEP, 0)
        self.room = numpy.zeros(0, numpy.float32)
        self.number = _BETWEEN_STEPS
        self.request: Request | None = None

    @property
    def kind(self) -> int:
        """The kind of its last header."""
        return int(self.header[0])

    @property
    def step(self) -> int:
        """The step of its last header."""
        return int(self.header[1])


class QuorumServer:
    """Serves ranks 0 to `num_workers` - 1; a mean uses the first `num_needed` gradients."""

    def __init__(self, communicator: Communicator, num_workers: int, num_needed: int, *, answers: bool) -> None:
        self._communicator = communicator
        self._num_workers, self._num_needed, self._answers = num_workers, num_needed, answers
        self._ledger = Ledger()
        self._clients = [_Client(rank) for rank in range(num_workers)]
        self._rounds: Rounds | None = None
        self._leaving: list[tuple[Request, tuple[int, int] | None]] = []
        self._asking: dict[int, list[int]] = {}
        self._flags = numpy.zeros(placement.NUM_FLAGS)
        self._agreed: dict[int, Array] = {}
        self._newest = -1
        self._stopped = False

    def serve(self) -> dict[str, Any]:
        """Average until the workers have finished. Raises StoppedEarly if they stop before the end."""
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
        elif client.kind in (placement.FINISH, placement.STOP):
            self._stopped |= client.kind == placement.STOP
            self._clients.remove(client)
        else:
            self._flags = numpy.maximum(self._flags, client.header[2:])
        self._let_in()  # the arrival may have been the slowest worker's: others may continue

    def _let_in(self) -> None:
        """Begin the announced steps that are not too far ahead of the slowest worker's."""
        # Without a pending receive a client has announced a step and waits for leave to begin.
        announced = [client for client in self._clients if client.request is None]
        slowest = min((client.step for client in self._clients), default=0)
        for client in announced:
            if client.step - slowest <= MAX_LAG:
                self._begin_step(client)

    def _begin_step(self, client: _Client) -> None:
        if self._rounds is None:
            # Only worker 0 sends it, whoever announces first, so this may wait until worker 0 has traced its step.
            lengths = receive_layout(self._communicator)
            self._rounds = Rounds(lengths, self._num_workers, self._num_needed)
            self._ledger.held_bytes = ITEM_BYTES * sum(lengths)
            for each in self._clients:
                each.room = numpy.zeros(max(lengths, default=0), numpy.float32)
        client.number = 0
        if client.kind == placement.FOLLOW:
            for number in range(len(self._rounds.lengths)):
                self._hand_out(client, number)
            client.number = len(self._rounds.lengths)
        self._expect_next(client)

    def _expect_next(self, client: _Client) -> None:
        """Receive the step's next message, or after its last one the next header."""
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
            # A late worker asks for the decisions of up to MAX_LAG steps ago.
            self._agreed = {past: flags for past, flags in self._agreed.items() if past >= step - MAX_LAG - 1}
            self._agreed[step] = self._flags
            self._flags = numpy.zeros(placement.NUM_FLAGS)
            self._answer(step)
        client.number += 1
        self._expect_next(client)

    def _hand_out(self, client: _Client, number: int) -> None:
        """Send the mean to `client` and all others that wait for it; or make `client` wait."""
        assert self._rounds is not None
        this_round = self._rounds.get(client.step, number)
        this_round.waiting.append(client.rank)
        if not this_round.complete:
            return
        for rank in this_round.waiting:
            self._leaving.append(
                (self._communicator.isend(this_round.total, rank, DATA_TAG), (client.step, number)),
            )
        this_round.num_leaving += len(this_round.waiting)
        this_round.num_unserved -= len(this_round.waiting)
        this_round.waiting.clear()

    def _left(self, request: Request, key: tuple[int, int] | None) -> None:
        if key is not None and self._rounds is not None:
            self._rounds.sent(*key)

    def _answer(self, step: int) -> None:
        """Send the decision for `step` to the workers that asked, once it is settled."""
        if step > self._newest:
            return
        for rank in self._asking.pop(step, []):
            message = placement.answer(self._agreed[step], self._newest)
            self._leaving.append((self._communicator.isend(message, rank, ANSWER_TAG), None))
