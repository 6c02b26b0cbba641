"""What synchronous workers agree on between steps: stop, save, continue; and checks that end a run gone wrong.

Every rank may want to stop (a signal, the time limit). Rank 0 wants to save at intervals, and to leave if the starting
process can start more ranks. They sum their flags in one tiny all-reduce about ten times a second, at steps that every
rank computes alike.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.checkpoint.interval import CheckpointInterval
from hpcdl.cluster.launchers.base import seconds_left
from hpcdl.comm.arithmetic import all_finite
from hpcdl.core.errors import HpcdlError, NotFiniteError, UsageError
from hpcdl.core.processes.streams import StopRequest
from hpcdl.core.protocols import Communicator
from hpcdl.core.storage.disk import remove_file
from hpcdl.strategies.base.strategy import Worker

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


AGREE_EVERY_S = 0.1  # an agreement in every step costs LeNet one percent (docs/decisions/0012)
CALIBRATION_STEPS = (5, 50)
"""After this many steps the workers measure how many steps fit into the interval; the first steps are slow."""


@dataclass(frozen=True, kw_only=True)
class ControlFlags:
    """The group's decision after a step."""

    stop: bool = False
    save: bool = False
    grow: bool = False
    reason: str = ""


_NOTHING = ControlFlags()
_REASONS = ("", "a signal", "the time limit")
LEAVE = "leave"
"""A file next to the ranks' status reports: the starting process asks the ranks to save and leave to start more."""
LOOK_S = 1.0
"""How often one of the ranks checks for it."""
FOR_MORE = "the start of more workers"
"""The reason for leaving then."""


SPENT_VARIABLE = "HPCDL_SPENT_S"
"""Tells restarted ranks how many seconds of --time-limit had passed when they were started."""


def time_allowed(asked_s: float | None, environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds until a run must save and leave: the tighter of --time-limit and the job's own limit, or None.

    After an automatic restart --time-limit counts from the run's first start, so it may be over.
    """
    own_s = None if asked_s is None else asked_s - float(environment.get(SPENT_VARIABLE, "0"))
    limits = [limit for limit in (own_s, seconds_left(environment)) if limit is not None]
    return min(limits, default=None)


class Room:
    """Whether more workers want to join: the file LEAVE is in `folder`. Always false without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / LEAVE
        self._looked_s = -math.inf

    def wanted(self) -> bool:
        """Check for the file at most once per LOOK_S, and return False in between; only one rank calls this."""
        now_s = time.monotonic()
        if self._path is None or now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        return self._path.exists()

    def refuse(self) -> None:
        """Keep the current ranks, because their work cannot be saved."""
        if self._path is not None:
            remove_file(self._path)


class Control:
    """Agrees with the other workers; call `after_steps` on every rank after at most `free_steps` steps."""

    def __init__(
        self,
        group: Communicator,
        stop: StopRequest,
        worker: Worker,
        *,
        interval: CheckpointInterval,
        time_limit_s: float | None,
        room: Room,
    ) -> None:
        self._group, self._room = group, room
        self._worker = worker
        self._stop = stop
        self._every = interval
        self._began = self._saved = time.monotonic()
        self._deadline = self._began + time_limit_s if time_limit_s is not None else math.inf
        self._steps = 0
        self._interval = 1
        self._calibrated, self._calibrated_at_s = 0, self._began

    def free_steps(self) -> int:
        """Return the steps until the group agrees again, the same on every rank; unlimited for a single worker."""
        if self._group.size == 1:
            return sys.maxsize
        calibrations = [steps - self._steps for steps in CALIBRATION_STEPS if steps > self._steps]
        return min([self._interval - self._steps % self._interval, *calibrations])

    def after_steps(self, num_steps: int = 1) -> ControlFlags:
        """Return the group's decision, the same on every rank; some strategies carry the flags with every step."""
        carried = self._worker.agreed()
        if carried is not None:
            flags = self._granted(carried)
            # After `_granted`, or a save that was agreed just now would be requested again.
            self._worker.set_flags(self._own())
            return flags
        if self._group.size == 1:
            return self._granted(self._own())
        self._steps += num_steps
        # `free_steps` ends at these steps, so that no rank jumps over one.
        if self._steps in CALIBRATION_STEPS:
            self._calibrate()
        if self._steps % self._interval:
            return _NOTHING
        own_flags = self._own()
        self._group.allreduce(own_flags)
        return self._granted(own_flags)

    def _own(self) -> Array:
        now_s = time.monotonic()
        room = self._group.rank == 0 and self._room.wanted()
        return numpy.array([self._stop.asked, now_s >= self._deadline, self._saves(now_s), room], numpy.float64)

    def _granted(self, set_flags: Array) -> ControlFlags:
        if set_flags[2]:
            self._saved = time.monotonic()
        by_signal, by_time, save, room = (bool(value) for value in set_flags)
        reason = _REASONS[1 if by_signal else 2 if by_time else 0]
        return ControlFlags(stop=by_signal or by_time, save=save, grow=room, reason=reason)

    def _saves(self, now: float) -> bool:
        return self._group.rank == 0 and now - self._saved >= self._every.due_s

    def _calibrate(self) -> None:
        """Agree on the steps per interval, from the steps since the last calibration; errs towards fewer steps."""
        now_s = time.monotonic()
        step_s = (now_s - self._calibrated_at_s) / (self._steps - self._calibrated)
        self._calibrated, self._calibrated_at_s = self._steps, now_s
        slowest = max(self._group.allgather_json(step_s))  # every rank must compute the same interval
        self._interval = max(1, math.floor(AGREE_EVERY_S / slowest))


def check_kept(arrays: Iterable[tuple[str, Any]], step: int, rank: int) -> None:
    """Raise NotFiniteError if one of `arrays`, which are about to be saved, holds NaN or infinity."""
    for name, array in arrays:
        if numpy.issubdtype(array.dtype, numpy.floating) and not all_finite(array.reshape(-1)):
            raise NotFiniteError(f"{name} is not finite after step {step} on rank {rank}, and is not kept")


def check_same_weights(variables: Mapping[str, Any], group: Communicator, when: str, remedy: str) -> None:
    """Raise HpcdlError on every rank if `variables`, or arrays, are not bitwise equal on all ranks; collective.

    They are compared by position: the names are only for the error, as Keras may number them differently on another
    rank. The error has the first variable that differs, its ranks, `when` (`after step 10`), and the `remedy`.
    """
    if group.size == 1:
        return
    gathered = group.allgather_json([digest_of(variable) for variable in variables.values()])
    names = [*variables, *["a variable that this rank has not got"] * max(map(len, gathered))]
    for name, column in zip(names, itertools.zip_longest(*gathered, fillvalue=""), strict=False):
        # In a tie, the value of the lowest rank counts as right.
        usual = max(set(column), key=lambda digest: (column.count(digest), -column.index(digest)))
        odd_ranks = [str(rank) for rank, digest in enumerate(column) if digest != usual]
        if odd_ranks:
            raise HpcdlError(f"weights differ over the ranks {when}: {name} on rank {', '.join(odd_ranks)}; {remedy}")


def digest_of(variable: Any) -> str:
    """Return a digest of a variable's or array's type, shape and bytes."""
    value = variable.numpy() if hasattr(variable, "numpy") else numpy.asarray(variable)
    digest = hashlib.blake2b(f"{value.dtype} {value.shape}".encode(), digest_size=8)
    digest.update(value.tobytes())
    return digest.hexdigest()


def check_same_start(facts: Mapping[str, str], communicator: Communicator) -> None:
    """Raise UsageError on every rank if `facts` (name to value) differ over the ranks; names the first difference."""
    gathered = communicator.allgather_json(dict(facts))
    for name in facts:
        for rank, rank_facts in enumerate(gathered):
            if rank_facts.get(name) != gathered[0][name]:
                raise UsageError(
                    f"ranks differ in {name}: rank 0 has {gathered[0][name]}, rank {rank} has {rank_facts.get(name)}; "
                    "start every rank with the same command, software and data"
                )
