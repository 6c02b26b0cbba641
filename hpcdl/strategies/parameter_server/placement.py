"""Which server averages which part of the gradient, and the control messages between workers and servers.

`round-robin` and `greedy` never cut a tensor (tf.compat.v1.train.replica_device_setter, with its default and with
GreedyLoadBalancingStrategy by bytes), so the largest variable bounds the balance. `split` cuts every bucket into equal
parts, one for each server.

A worker announces each step before it computes it, with its flags for all workers (to stop, to save). After the step
the first server answers with the decision for that step. Every worker gets the same answer, whenever it asks, so a late
worker stops and saves at the same step as the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from hpcdl.collectives.slices import plan_buckets

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator


ITEM_BYTES = 4
"""Gradients are sent and averaged in float32."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients sent together: `variables` in their order in the bucket's flat buffer.

    Server s takes the elements `bounds[s]` to `bounds[s + 1]`.
    """

    variables: tuple[int, ...]
    bounds: tuple[int, ...]


Layout = Callable[[Sequence[int]], Bucket]
"""From the variables of a bucket to its buffer."""


def round_robin(lengths: Sequence[int], num_servers: int) -> list[int]:
    """Return the server of each variable: in turn, in creation order."""
    return [index % num_servers for index in range(len(lengths))]


def greedy(lengths: Sequence[int], num_servers: int) -> list[int]:
    """Return the server of each variable: the one with the fewest bytes so far, in creation order."""
    loads = [0] * num_servers
    owners = []
    for length in lengths:
        owner = loads.index(min(loads))
        loads[owner] += length
        owners.append(owner)
    return owners


def _whole(assign: Callable[[Sequence[int], int], list[int]]) -> Callable[[Sequence[int], int], Layout]:
    """Return the layout of whole variables, each on the server that `assign` gives; a bucket's buffer is ordered so."""

    def prepare(lengths: Sequence[int], num_servers: int) -> Layout:
        owners = assign(lengths, num_servers)

        def layout(members: Sequence[int]) -> Bucket:
            # `sorted` is stable: a server's variables keep the order of the bucket on every rank.
            ordered = sorted(members, key=lambda index: owners[index])
            bounds = [0]
            for server in range(num_servers):
                bounds.append(bounds[-1] + sum(lengths[index] for index in members if owners[index] == server))
            return Bucket(variables=tuple(ordered), bounds=tuple(bounds))

        return layout

    return prepare


def _cut(lengths: Sequence[int], num_servers: int) -> Layout:
    """Cut every bucket into equal parts, to the element; a bucket of one large tensor is cut in place."""

    def layout(members: Sequence[int]) -> Bucket:
        base, longer = divmod(sum(lengths[index] for index in members), num_servers)
        bounds = tuple(part * base + min(part, longer) for part in range(num_servers + 1))
        return Bucket(variables=tuple(members), bounds=bounds)

    return layout


PLACEMENTS: dict[str, Callable[[Sequence[int], int], Layout]] = {
    "round-robin": _whole(round_robin),
    "greedy": _whole(greedy),
    "split": _cut,
}


def plan(lengths: Sequence[int], num_servers: int, placement: str, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return buckets in sending order (the last layer's first); `lengths` in elements, in creation order."""
    layout = PLACEMENTS[placement](lengths, num_servers)
    sizes = [length * ITEM_BYTES for length in lengths]
    return tuple(layout(members) for members in plan_buckets(sizes, bucket_bytes))


def held_bytes(buckets: Sequence[Bucket], num_servers: int) -> list[int]:
    """Return the bytes of the gradient that each server averages."""
    return [
        ITEM_BYTES * sum(bucket.bounds[server + 1] - bucket.bounds[server] for bucket in buckets)
        for server in range(num_servers)
    ]


def imbalance(loads: Sequence[float]) -> float:
    """Return the busiest server's load over the mean; 1 is even."""
    return max(loads) * len(loads) / sum(loads)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a bucket's buffer, `start` to `stop` in elements, and the server that averages it."""

    server: int
    start: int
    stop: int


def messages(bucket: Bucket, message_bytes: int, first_server: int = 0) -> tuple[Piece, ...]:
    """Return a bucket's pieces for sending, at most `message_bytes` each; the first pieces of all servers come first.

    A server sums one piece while it receives the next, and pieces stay in the cache. `first_server` is the server to
    begin with: if all workers began with the same one, they would queue for its link and leave the others idle.
    """
    step = max(1, message_bytes // ITEM_BYTES)
    num_servers = len(bucket.bounds) - 1
    pieces = [
        (start - first, (server - first_server) % num_servers, Piece(server=server, start=start, stop=stop))
        for server, (first, end) in enumerate(itertools.pairwise(bucket.bounds))
        for start in range(first, end, step)
        for stop in [min(start + step, end)]
    ]
    return tuple(piece for *_, piece in sorted(pieces, key=lambda item: item[:2]))


LAYOUT_TAG, HEADER_TAG, DATA_TAG, ANSWER_TAG = 1, 2, 3, 4

STEP, FOLLOW, FINISH, STOP = range(4)
"""Kinds of headers: a step with a gradient; a step completed without this worker's gradient; the end; an early end."""
NUM_FLAGS = 4
"""The number of flags in supervision/control.py: a signal, the time limit, a checkpoint, room for more workers."""


def header(kind: int, step: int, flags: Array | None = None) -> Array:
    """Return a worker's message to each server before a step: kind, step, flags; float64."""
    message = numpy.zeros(2 + NUM_FLAGS)
    message[:2] = kind, step
    if flags is not None:
        message[2:] = flags
    return message


def answer(flags: Array, newest_step: int) -> Array:
    """Return the first server's message after a step: the combined flags, and the newest completed step."""
    return numpy.array([*flags, newest_step], numpy.float64)


def no_answer() -> Array:
    """Return the answer before the first one arrives: no flags, no step completed."""
    return answer(numpy.zeros(NUM_FLAGS), -1)


def send_layout(communicator: Communicator, server_rank: int, lengths: list[int]) -> None:
    """Send a server the lengths of a step's messages, in elements; only the first worker does this."""
    for message in (numpy.array([len(lengths)]), numpy.array(lengths, numpy.int64)):
        communicator.isend(message, server_rank, LAYOUT_TAG).wait()


def receive_layout(communicator: Communicator) -> list[int]:
    """Receive the lengths from `send_layout`."""
    count = numpy.zeros(1, numpy.int64)
    communicator.irecv(count, 0, LAYOUT_TAG).wait()
    lengths = numpy.zeros(int(count[0]), numpy.int64)
    communicator.irecv(lengths, 0, LAYOUT_TAG).wait()
    return [int(length) for length in lengths]
