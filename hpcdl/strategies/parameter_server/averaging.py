"""A parameter server that waits for every worker: the mean of all gradients, in float32, in the order of the ranks.

The order makes the sum the same in every run, so that the result is bitwise reproducible. A server that waits sleeps
(`Communicator.wait_any`): it may share a node with workers.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.errors import RankError, StoppedEarly
from hpcdl.strategies.parameter_server import agreement
from hpcdl.strategies.parameter_server.agreement import ANSWER_TAG, DATA_TAG, HEADER_TAG, receive_layout
from hpcdl.strategies.parameter_server.placement import ITEM_BYTES

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator, Request

SLOTS = 3
"""Messages of a worker that have room at once: one that is summed, one that comes in, one whose mean goes out."""


class Ledger:
    """What a server counts for the record."""

    def __init__(self) -> None:
        self.steps = 0
        self.busy_seconds = 0.0
        self.held_bytes = 0
        self.dropped_messages = 0

    def as_json(self) -> dict[str, Any]:
        """Means per step, and the bytes of the gradient that this server averages."""
        steps = max(self.steps, 1)
        return {
            "steps": self.steps,
            "held_bytes": self.held_bytes,
            "busy_seconds_per_step": self.busy_seconds / steps,
            "dropped_messages": self.dropped_messages,
        }


class AveragingServer:
    """Serves the workers, ranks 0 to `num_workers` - 1; `answers` on the server that tells them what holds."""

    def __init__(self, communicator: Communicator, num_workers: int, *, answers: bool) -> None:
        self._communicator = communicator
        self._num_workers = num_workers
        self._answers = answers
        self._ledger = Ledger()
        # Servers that all send to the same worker first would stand in line before its link.
        num_servers = communicator.size - num_workers
        first = (communicator.rank - num_workers) * num_workers // num_servers
        self._in_turn = [*range(first, num_workers), *range(first)]
        self._lengths: list[int] | None = None
        self._slots: list[list[Array]] = []

    def serve(self) -> dict[str, Any]:
        """Average until the workers have finished; StoppedEarly where they stop before the end."""
        headers = numpy.zeros((self._num_workers, len(agreement.header(agreement.STEP, 0))))
        while True:
            coming = [
                self._communicator.irecv(row, worker, HEADER_TAG) for worker, row in enumerate(headers)
            ]  # fmt: skip
            for request in coming:
                self._communicator.wait_any([request])
            kinds = {int(kind) for kind in headers[:, 0]}
            if len(kinds) > 1:
                raise RankError(f"workers disagree on what comes next: {sorted(kinds)}", rank=self._communicator.rank)
            if kinds == {agreement.FINISH}:
                return self._ledger.as_json()
            if kinds == {agreement.STOP}:
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
                    self._wait(leaving.popleft())
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
        """Sum one message of every worker as they come, in rank order, and start to send the mean."""
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
        message = agreement.answer(headers[:, 2:].sum(axis=0), int(headers[0, 1]))
        leaving = [self._communicator.isend(message, worker, ANSWER_TAG) for worker in range(self._num_workers)]
        for request in leaving:
            self._communicator.wait_any([request])

    def _buffer(self, worker: int, number: int) -> Array:
        assert self._lengths is not None
        return self._slots[worker][number % SLOTS][: self._lengths[number]]
