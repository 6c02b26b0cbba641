"""Messages to and fro between pairs of ranks: what one link does, and which pair is the slowest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from hpcdl.core.linear_fit import AlphaBeta, alpha_beta

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator

SHORT_BYTES = 8
LONG_BYTES = 1 << 20
REPEATS = 9
ALL_PAIRS_UP_TO = 48
"""Ranks up to which every pair is measured; beyond, those at distances of powers of two."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ranks and the link between them, one way."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_s: float
    seconds_per_byte: float

    @property
    def seconds(self) -> float:
        """One long message."""
        return self.latency_s + self.seconds_per_byte * LONG_BYTES


def choose_pairs(num_ranks: int) -> list[tuple[int, int]]:
    """The pairs to be measured, each with the lower rank first."""
    if num_ranks <= ALL_PAIRS_UP_TO:
        return [(low, high) for low in range(num_ranks) for high in range(low + 1, num_ranks)]
    distances = [1 << bit for bit in range((num_ranks - 1).bit_length())]
    pairs = {(rank, (rank + distance) % num_ranks) for rank in range(num_ranks) for distance in distances}
    return sorted({(min(pair), max(pair)) for pair in pairs})


def sweep(communicator: Communicator) -> list[Pair]:
    """Measure pair after pair, the others waiting; every rank calls it and gets all pairs."""
    hosts = communicator.allgather_json(communicator.host)
    buffers = [numpy.zeros(num_bytes, numpy.uint8) for num_bytes in (SHORT_BYTES, LONG_BYTES)]
    own: list[tuple[tuple[int, int], AlphaBeta]] = []
    for low, high in choose_pairs(communicator.size):
        communicator.barrier()
        if communicator.rank in (low, high):
            peer = high if communicator.rank == low else low
            seconds = [_one_way(communicator, peer, buffer, first=communicator.rank == low) for buffer in buffers]
            fit = alpha_beta([SHORT_BYTES, LONG_BYTES], seconds)
            if communicator.rank == low and fit is not None:
                own.append(((low, high), fit))
    found = communicator.allgather_json([[*ranks, fit.latency_s, fit.seconds_per_byte] for ranks, fit in own])
    return [
        Pair(ranks=(low, high), hosts=(hosts[low], hosts[high]), latency_s=latency, seconds_per_byte=per_byte)
        for of_rank in found
        for low, high, latency, per_byte in of_rank
    ]


def median_link(pairs: Sequence[Pair]) -> AlphaBeta:
    """The link of the pair in the middle."""
    return AlphaBeta(
        latency_s=statistics.median(pair.latency_s for pair in pairs),
        seconds_per_byte=statistics.median(pair.seconds_per_byte for pair in pairs),
    )


def _one_way(communicator: Communicator, peer: int, buffer: Array, *, first: bool) -> float:
    """Median seconds of half a round trip."""
    samples = []
    for repeat in range(REPEATS + 2):
        start_s = time.perf_counter()
        if first:
            communicator.isend(buffer, peer).wait()
        communicator.irecv(buffer, peer).wait()
        if not first:
            communicator.isend(buffer, peer).wait()
        if repeat > 1:
            samples.append((time.perf_counter() - start_s) / 2)
    return statistics.median(samples)
