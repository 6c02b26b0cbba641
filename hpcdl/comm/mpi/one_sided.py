"""Memory of other ranks, reached without their help: MPI's windows, and whether they make progress by themselves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.mpi.calls import translated
from hpcdl.core.errors import RankError
from hpcdl.core.protocols import Communicator

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

PROBE_S = 0.5
"""The probed rank stays out of MPI for up to so long; an MPI with passive progress needs a millisecond."""
HEAD_START_S = 0.25
"""The others begin so much later than the probed rank, which would serve them while it still leaves the barrier."""


class MpiRemoteArray:
    """A window under one shared lock for its whole life; passive target, so that owners take no part.

    `mpi` is the mpi4py module, `group` an MPI communicator, `kind` the elements' MPI type.
    """

    def __init__(self, mpi: Any, group: Any, length: int, dtype: Any, kind: Any) -> None:
        self._mpi, self._kind = mpi, kind
        self._item_bytes = numpy.dtype(dtype).itemsize
        self.rank: int = group.Get_rank()
        self.host: str = mpi.Get_processor_name()
        self._window = mpi.Win.Allocate(length * self._item_bytes, self._item_bytes, comm=group)
        self.own: Array = numpy.frombuffer(self._window.tomemory(), dtype=dtype, count=length)
        self.own[...] = 0
        self._window.Lock_all()
        group.Barrier()

    @translated
    def read(self, owner: int, target: Array) -> None:
        """MPI_Get."""
        self._window.Get([target, target.size, self._kind], owner, [0, target.size, self._kind])
        self._window.Flush(owner)

    @translated
    def add(self, owner: int, values: Array, start: int = 0) -> None:
        """MPI_Accumulate with MPI_SUM."""
        place = [start, values.size, self._kind]
        self._window.Accumulate([values, values.size, self._kind], owner, place, self._mpi.SUM)
        self._window.Flush(owner)

    @translated
    def free(self) -> None:
        """Unlock and free; collective."""
        self._window.Unlock_all()
        self._window.Free()


def no_passive_progress(group: Communicator) -> str:
    """Why ranks of other nodes cannot change this MPI's windows while their owner computes; empty where they can.

    Collective. Tried, not asked for: rank 0 stays out of MPI for a while and looks at its memory, to which ranks of
    other nodes add.
    """
    try:
        array = group.remote_array(1 if group.rank == 0 else 0, numpy.float64)
    except RankError as error:
        problem = f"{group.library} has no windows here ({error})"
    else:
        problem = ""
    problems: list[str] = [text for text in group.allgather_json(problem) if text]
    if problems:
        return problems[0]
    hosts = group.allgather_json(group.host)
    far = group.host != hosts[0]
    if far:  # connections are made while the owner still helps
        array.add(0, numpy.ones(1))
    group.barrier()
    expected = 2 * sum(host != hosts[0] for host in hosts)
    if far:
        time.sleep(HEAD_START_S)
        array.add(0, numpy.ones(1))
    arrived = group.allgather_json(group.rank == 0 and _arrives(array.own, expected))[0]
    total = numpy.zeros(1)
    array.read(0, total)
    array.free()
    wrong = [found for found in group.allgather_json(float(total[0])) if found != expected]
    if wrong:
        return f"{group.library} loses one-sided updates ({wrong[0]:g} of {expected} arrived)"
    return "" if arrived else f"{group.library} lets one-sided updates wait until their target calls MPI"


def _arrives(memory: Array, expected: float) -> bool:
    """Whether `memory` comes to hold `expected` while nobody calls MPI here."""
    deadline = time.monotonic() + HEAD_START_S + PROBE_S
    while memory[0] < expected and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(memory[0] >= expected)
