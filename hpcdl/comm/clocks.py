"""Offsets between the ranks' clocks, by ping-pong over a tree of clocks, so that many nodes need few rounds.

A clock read within a round trip is known to within half of that trip, on any network. This is the error of a point.
Ranks that read one kernel's clock need no messages. Scheme: Hunold and Carpen-Amarie 2018 (hierarchical clock
synchronisation in MPI); the reader interpolates between points (trace/steps.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from hpcdl.comm.observed import for_control

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator

PINGS = 20
SAME_CLOCK_ERROR_S = 1e-6
"""Two cores of one machine agree on its clock to better than this."""


@dataclass(frozen=True, kw_only=True)
class ClockPoint:
    """This rank's clock showed `own_s` when that of rank `parent` showed `parent_s`, to within `error_s`."""

    parent: int
    own_s: float
    parent_s: float
    error_s: float


def clock_identity() -> str:
    """Return a text equal in processes with the same `time.monotonic`: the kernel's boot and the time namespace."""
    try:
        # Containers may have a time namespace, in which `time.monotonic` is another clock.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"  # only within a process is the clock surely the same


def parents_of(identities: Sequence[str]) -> list[int]:
    """Return for each rank the rank with whose clock it compares its own; rank 0 with its own.

    The first rank of each clock compares with another clock's first rank, over a binomial tree; all others with the
    first rank of their clock.
    """
    first: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        first.setdefault(identity, rank)
    leaders = list(first.values())
    above = {leaders[0]: 0}
    for number, leader in enumerate(leaders[1:], 1):
        # Without its highest bit: at each depth there are twice as many clocks to compare with.
        above[leader] = leaders[number - (1 << number.bit_length() - 1)]
    return [above.get(rank, first[identity]) for rank, identity in enumerate(identities)]


def measure(
    communicator: Communicator, clock: Callable[[], float] = time.monotonic, identity: str | None = None
) -> ClockPoint:
    """Return a point of this rank's clock against its parent's; collective. `identity`: of a non-system clock."""
    group = for_control(communicator)
    identities: list[str] = group.allgather_json(clock_identity() if identity is None else identity)
    parents = parents_of(identities)
    point = ClockPoint(parent=0, own_s=0.0, parent_s=0.0, error_s=0.0)
    for child in sorted(range(1, group.size), key=lambda rank: _round(rank, parents)):
        if identities[child] == identities[parents[child]]:
            continue
        if group.rank == parents[child]:
            _answer(group, child, clock)
        elif group.rank == child:
            point = _ping(group, parents[child], clock)
    if point.error_s:
        return point
    now_s = clock()
    error_s = SAME_CLOCK_ERROR_S if group.rank else 0.0
    return ClockPoint(parent=parents[group.rank], own_s=now_s, parent_s=now_s, error_s=error_s)


def _round(rank: int, parents: Sequence[int]) -> int:
    """Return the depth of `rank` below rank 0: ranks of one depth are measured in parallel where possible."""
    depth = 0
    while rank:
        rank, depth = parents[rank], depth + 1
    return depth


def _answer(group: Communicator, child: int, clock: Callable[[], float]) -> None:
    stamp = numpy.zeros(1)
    for _ in range(PINGS):
        group.irecv(stamp, child).wait()
        stamp[0] = clock()
        group.isend(stamp, child).wait()


def _ping(group: Communicator, parent: int, clock: Callable[[], float]) -> ClockPoint:
    """Return the point of the fastest of several round trips."""
    stamp = numpy.zeros(1)
    points: list[ClockPoint] = []
    for _ in range(PINGS):
        sent = clock()
        group.isend(stamp, parent).wait()
        group.irecv(stamp, parent).wait()
        received = clock()
        half_s = max((received - sent) / 2, 1e-9)  # 0 would mean that no trip was measured
        points.append(ClockPoint(parent=parent, own_s=sent + half_s, parent_s=float(stamp[0]), error_s=half_s))
    return min(points, key=lambda point: point.error_s)
