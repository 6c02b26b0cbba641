"""Transport of buffers: in slices, several in progress at a time; in pieces of unequal length; with persistent scratch.

For pieces, each rank sends every other rank its piece directly: p - 1 messages with only the bytes needed there. This
is the minimum, in one round, for groups of a few hundred ranks at most.

An algorithm describes the exchange of one slice as a generator: it posts messages, yields, and waits for them when it
is resumed. `run_sliced` resumes the slices in progress in turn, so that messages of some arrive while another is
summed. A rank that shares its core with back-propagation then has more to do each time it gets the core.

This cannot deadlock if the exchange of a single slice cannot. A rank that waits in stage j of any slice has posted
stage j of all slices in progress. A rank that waits in a later slice has posted all stages of the earlier ones.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy

from hpcdl.comm.arithmetic import plain_add

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator, Request


Kept = TypeVar("Kept")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of an all-reduce: `rounds` for a buffer of one slice, `bytes` sent by the busiest rank.

    `chain_bytes` are those of messages that must follow one another, if they are more than a rank sends itself.
    """

    rounds: int
    bytes: int
    chain_bytes: int = 0

    @property
    def bytes_in_turn(self) -> int:
        """The bandwidth cost: bytes that cannot be sent simultaneously."""
        return max(self.bytes, self.chain_bytes)


def unseen(part: Array) -> None:
    """Do nothing with a finished part."""


class Workspace:
    """Persistent scratch memory of one all-reduce on one communicator; not for use by two threads at once.

    Buffers are allocated once and kept: a new page costs more than the copy it saves. `message_bytes` is the largest
    message: longer buffers are sent in slices that stay in the cache. `measure` lets `auto` time the algorithms if it
    has no table; without it, `auto` chooses by size alone, the same in every run.
    """

    def __init__(self, *, message_bytes: int = 4 << 20, measure: bool = True) -> None:
        self.message_bytes = message_bytes
        self.measure = measure
        self.chosen: dict[int, str] = {}
        self._scratch: dict[Any, Array] = {}
        self._kept: dict[Any, Any] = {}
        self._closers: list[Callable[[], None]] = []

    def scratch(self, key: Any, num_elements: int, dtype: Any) -> Array:
        """Return a flat buffer of its own for each `key`; its content is undefined."""
        num_bytes = num_elements * numpy.dtype(dtype).itemsize
        if key not in self._scratch or self._scratch[key].nbytes < num_bytes:
            self._scratch[key] = numpy.zeros(num_bytes, numpy.uint8)
        view: Array = self._scratch[key][:num_bytes].view(dtype)
        return view

    def keep(self, key: Any, make: Callable[[], Kept], close: Callable[[Kept], None] = lambda _: None) -> Kept:
        """Return the result of `make` from the first call with `key`; `Workspace.close` calls `close` on it."""
        if key not in self._kept:
            new = make()
            self._kept[key] = new
            self._closers.append(lambda: close(new))
        kept: Kept = self._kept[key]
        return kept

    def close(self) -> None:
        """Free everything, including sub-communicators; every rank calls it."""
        self._scratch.clear()
        self._kept.clear()
        while self._closers:
            self._closers.pop()()


def swap_pieces(communicator: Communicator, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
    """Send `outgoing[rank]` to each rank, and fill `incoming[rank]` with what that rank sends.

    Buffers are C-contiguous, lengths agree on both sides; pieces without elements are not sent.
    """
    rank, size = communicator.rank, communicator.size
    incoming[rank][...] = outgoing[rank]
    requests: list[Request] = []
    for distance in range(1, size):
        # Each rank begins with a different partner: if all sent to rank 0 first, they would queue for it.
        source, destination = (rank - distance) % size, (rank + distance) % size
        if incoming[source].size:
            requests.append(communicator.irecv(incoming[source], source))
        if outgoing[destination].size:
            requests.append(communicator.isend(outgoing[destination], destination))
    for request in requests:
        request.wait()


def swap_numbers(communicator: Communicator, numbers: Array) -> Array:
    """Send row r of `numbers` (ranks, n), int64, to each rank r; row r of the result comes from rank r."""
    received = numpy.empty_like(numbers)
    swap_pieces(communicator, list(numbers), list(received))
    return received


def gather_pieces(communicator: Communicator, local_pieces: Sequence[Array]) -> list[list[Array]]:
    """Return all ranks' arrays, in rank order for each of `local_pieces`; first dimensions may differ between ranks."""
    lengths = numpy.array([len(array) for array in local_pieces], numpy.int64)
    everybody = swap_numbers(communicator, numpy.tile(lengths, (communicator.size, 1)))
    gathered = []
    for index, array in enumerate(local_pieces):
        pieces = [numpy.empty((length, *array.shape[1:]), array.dtype) for length in everybody[:, index]]
        swap_pieces(communicator, [numpy.ascontiguousarray(array)] * communicator.size, pieces)
        gathered.append(pieces)
    return gathered


if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, Finished

    Exchange = Callable[[Communicator, Array, Array, Add, int], Iterator[None]]
    """Sum `part` over the ranks: `exchange(communicator, part, scratch, add, tag)`.

    `scratch` is as long as the largest of the shares that the exchange cuts `part` into.
    """

SLOTS = 4
"""Slices in progress: with fewer, a rank that shares its core must yield it more often."""
LEAST_BYTES = 1 << 20
"""Messages are not cut shorter than this to overlap: each synchronises two ranks."""
FIRST_SHARE = 16
_END = object()


def run_sliced(
    exchange: Exchange,
    communicator: Communicator,
    buffer: Array,
    workspace: Workspace | None,
    add: Add | None,
    finished: Finished = unseen,
    *,
    shares: int = 1,
) -> None:
    """Sum `buffer` over the ranks in place, slice by slice; `finished` is called with each.

    The exchange cuts a slice into `shares` messages, so slices are that much longer: multiples of `shares` elements,
    except for the last. A buffer of up to SLOTS slices is in progress as a whole.
    """
    flat = flattened(buffer)
    if communicator.size == 1 or buffer.size == 0:
        finished(flat)
        return
    workspace = workspace or Workspace()
    per_message = _message_length(flat, shares, workspace.message_bytes)
    slice_length = per_message * shares
    if flat.size <= slice_length:  # a single slice
        scratch = workspace.scratch(("slot", 0), per_message, flat.dtype)
        for _ in exchange(communicator, flat, scratch, add or plain_add, 0):
            pass
        finished(flat)
        return
    # On a rank all slices take equally many turns. So slice i is always in slot i % SLOTS, and its messages have the
    # same tag on every rank.
    starts = collections.deque(range(0, flat.size, slice_length))

    def work(slot: int) -> Iterator[None]:
        scratch = workspace.scratch(("slot", slot), per_message, flat.dtype)
        while starts:
            start = starts.popleft()
            part = flat[start : start + slice_length]
            yield from exchange(communicator, part, scratch, add or plain_add, slot)
            finished(part)

    in_turn = collections.deque(work(slot) for slot in range(min(SLOTS, len(starts))))
    while in_turn:
        exchanging = in_turn.popleft()
        if next(exchanging, _END) is not _END:  # an exchange yields None, so None cannot mark its end
            in_turn.append(exchanging)


def _message_length(flat: Array, shares: int, most_bytes: int) -> int:
    """Return the elements of a message: SLOTS slices if that makes messages neither too short nor too long."""
    longest = max(1, most_bytes // flat.itemsize)
    least = min(longest, LEAST_BYTES // flat.itemsize)
    even = -(-flat.size // (shares * SLOTS))
    # Never longer than the buffer: short buffers must not pay for long scratch.
    return min(max(least, min(even, longest)), -(-flat.size // shares))


def flattened(buffer: Array) -> Array:
    """Return a flat view of `buffer`. Raises ValueError if that would be a copy."""
    if not buffer.flags.c_contiguous:
        raise ValueError("an all-reduce works in place on C-contiguous buffers; copy it first")
    return buffer.reshape(-1)


def span(length: int, num_parts: int, part: int) -> tuple[int, int]:
    """Return the bounds of one of `num_parts` parts of `length` elements; the first ones may be longer by one."""
    base, longer = divmod(length, num_parts)
    start = part * base + min(part, longer)
    return start, start + base + (part < longer)


def spans(length: int, num_parts: int) -> list[tuple[int, int]]:
    """Return the bounds of all parts, by `span`."""
    return [span(length, num_parts, part) for part in range(num_parts)]


def plan_buckets(
    sizes_bytes: Sequence[int], bucket_bytes: int, *, small_first: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Return buckets of gradient indices, in sending order: the last layer's first.

    Back-propagation computes the last layer's gradient first, so gradients are sent in reverse layer order as they
    become available. A bucket is closed before it would exceed `bucket_bytes`. A tensor of at least that size is a
    bucket of its own, which saves its copy. `small_first`: if there are several buckets, the first is closed once it
    holds 1/FIRST_SHARE of `bucket_bytes`, so that the network starts early in back-propagation.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket of {bucket_bytes} bytes holds nothing")
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    filled = 0
    early_bytes = bucket_bytes / FIRST_SHARE if small_first and sum(sizes_bytes) > bucket_bytes else math.inf
    for index in reversed(range(len(sizes_bytes))):
        size = sizes_bytes[index]
        if current and (filled + size > bucket_bytes or (not buckets and filled >= early_bytes)):
            buckets.append(tuple(current))
            current, filled = [], 0
        current.append(index)
        filled += size
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)
