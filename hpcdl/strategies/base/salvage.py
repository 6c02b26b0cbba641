"""Recovers the center from the surviving ranks: servers' parts as they are, a lost server's part from a worker's copy.

Every worker has the center as it last received it. The freshest copy counts, by the number of updates it includes.
Later changes to that part by other workers are lost, and so is its velocity. Uses only numpy and a communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator


@dataclass(frozen=True, kw_only=True)
class CenterPart:
    """The part of the center that a rank has after `count` updates: `values` (float32), from element `start` on.

    `held`: this is the center itself, on its server; otherwise a worker's copy of the whole center.
    """

    start: int
    values: Array
    count: int
    held: bool = False
    velocity: Array | None = None

    @property
    def claim(self) -> Claim:
        """What the other ranks need to know about it."""
        return Claim(self.start, self.start + self.values.size, self.count, self.held, self.velocity is not None)


class Claim(NamedTuple):
    """A CenterPart without its values, in a JSON-serializable form."""

    start: int
    stop: int
    updates: int
    held: bool
    has_velocity: bool


class Origin(NamedTuple):
    """Elements of the center and the rank that provides them."""

    rank: int
    start: int
    stop: int


@dataclass(kw_only=True)
class Center:
    """The center after `count` updates, on the first rank; on other workers too, once it is `shared`.

    `num_copied` of its elements come from a worker's copy, which includes `copied_count` updates.
    """

    values: Array
    velocity: Array | None
    count: int
    num_copied: int
    copied_count: int

    def share(self, workers: Communicator) -> None:
        """Broadcast it to all `workers` from the first. Collective over them."""
        for array in (self.values, self.velocity):
            if array is not None:
                workers.broadcast(array)

    def log_line(self) -> str:
        """Describe what was lost, as the end of a sentence; empty if nothing was."""
        if not self.num_copied:
            return ""
        velocity = "" if self.velocity is None else ", without its velocity"
        return (
            f"; {self.num_copied} of {self.values.size} weights of the center were on a lost server: a worker's copy "
            f"after update {self.copied_count} of {self.count} takes their place{velocity}"
        )


def origins_of(claims: Sequence[Claim | None]) -> list[Origin]:
    """Return which rank provides which elements, in order and each once; empty if no worker has a copy."""
    copies = [rank for rank, claim in enumerate(claims) if claim is not None and not claim.held]
    if not copies:
        return []
    # Of equally fresh copies the lowest rank's.
    freshest = max(copies, key=lambda rank: (_claim(claims, rank).updates, -rank))
    holders = [rank for rank, claim in enumerate(claims) if claim is not None and claim.held]
    origins, reached = list[Origin](), 0
    for rank in sorted(holders, key=lambda rank: _claim(claims, rank).start):
        start, stop = _claim(claims, rank)[:2]
        # What lies before a surviving server's part was on a lost one.
        origins += [Origin(freshest, reached, start), Origin(rank, start, stop)]
        reached = stop
    origins.append(Origin(freshest, reached, _claim(claims, freshest).stop))
    return [origin for origin in origins if origin.start < origin.stop]


def gather_center(left: Communicator, part: CenterPart | None) -> Center | None:
    """Return the center, assembled from the parts on the ranks of `left`; None if there is none yet. Collective.

    The first rank, a worker, gets it; other workers get empty buffers for it, servers keep no more than their part.
    """
    answers = left.allgather_json(None if part is None else part.claim)
    claims = [None if answer is None else Claim(*answer) for answer in answers]
    origins = origins_of(claims)
    if not origins:
        return None
    has_velocity = any(claim is not None and claim.has_velocity for claim in claims)
    room = 0 if part is not None and part.held else origins[-1].stop
    center = Center(
        values=numpy.zeros(room, numpy.float32),
        velocity=numpy.zeros(room, numpy.float32) if has_velocity else None,
        count=max(claim.updates for claim in claims if claim is not None),
        num_copied=sum(span.stop - span.start for span in origins if not _claim(claims, span.rank).held),
        copied_count=max(claim.updates for claim in claims if claim is not None and not claim.held),
    )
    start = 0 if part is None else part.start
    _bring(left, origins, center.values, start, None if part is None else part.values)
    if center.velocity is not None:
        # Copies on workers have no velocity: those elements stay zero.
        moving = [origin for origin in origins if _claim(claims, origin.rank).has_velocity]
        _bring(left, moving, center.velocity, start, None if part is None else part.velocity)
    return center


def _claim(claims: Sequence[Claim | None], rank: int) -> Claim:
    claim = claims[rank]
    assert claim is not None
    return claim


def _bring(left: Communicator, origins: Sequence[Origin], target: Array, start: int, held: Array | None) -> None:
    """Fill `target` on the first rank with the elements of `origins`; this rank has `held`, from element `start` on."""
    # Every rank walks the same list, so blocking messages match without tags.
    for origin in origins:
        part = slice(origin.start, origin.stop)
        if origin.rank == left.rank:
            assert held is not None
            elements = held[origin.start - start : origin.stop - start]
            if left.rank == 0:
                target[part] = elements
            else:
                left.isend(elements, 0).wait()
        elif left.rank == 0:
            left.irecv(target[part], origin.rank).wait()
