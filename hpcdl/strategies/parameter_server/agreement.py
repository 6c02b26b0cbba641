"""What workers and parameter servers say to each other beside gradients: one short message a step each way.

A worker announces each step before it computes it, with what it wishes of everybody (to stop, to save). The first
server answers after the step with what holds for that step on every worker: the same answer to all, whenever they ask,
so that a late worker stops and saves at the same step as the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator

LAYOUT_TAG, HEADER_TAG, DATA_TAG, ANSWER_TAG = 1, 2, 3, 4

STEP, FOLLOW, FINISH, STOP = range(4)
"""Kinds of headers: a step with a gradient; one whose gradient nobody waits for any more; the end; an early end."""
NUM_FLAGS = 4
"""As many as supervision/control.py adds up: a signal, the time limit, a checkpoint, room for more workers."""


def header(kind: int, step: int, wishes: Array | None = None) -> Array:
    """What a worker sends to each server before a step: kind, step, wishes; float64."""
    message = numpy.zeros(2 + NUM_FLAGS)
    message[:2] = kind, step
    if wishes is not None:
        message[2:] = wishes
    return message


def answer(wishes: Array, newest_step: int) -> Array:
    """What the first server sends after a step: everybody's wishes, and the newest step that it has finished."""
    return numpy.array([*wishes, newest_step], numpy.float64)


def no_answer() -> Array:
    """What holds before the first answer: no wishes, no step finished."""
    return answer(numpy.zeros(NUM_FLAGS), -1)


def send_layout(communicator: Communicator, server_rank: int, lengths: list[int]) -> None:
    """Tell a server the lengths of a step's messages, in elements; the first worker does."""
    for message in (numpy.array([len(lengths)]), numpy.array(lengths, numpy.int64)):
        communicator.isend(message, server_rank, LAYOUT_TAG).wait()


def receive_layout(communicator: Communicator) -> list[int]:
    """What `send_layout` sent."""
    count = numpy.zeros(1, numpy.int64)
    communicator.irecv(count, 0, LAYOUT_TAG).wait()
    lengths = numpy.zeros(int(count[0]), numpy.int64)
    communicator.irecv(lengths, 0, LAYOUT_TAG).wait()
    return [int(length) for length in lengths]
