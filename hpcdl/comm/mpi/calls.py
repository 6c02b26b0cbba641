"""Waits and errors of MPI calls, with the rank and its node in each error; and one-sided access to remote memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy

from hpcdl.core.errors import BrokenGroup, RankError
from hpcdl.core.protocols import Communicator

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


_EAGER_LOOKS = 20
_PAUSE_STEP_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""A wait for the first of several messages polls this often without a pause, then with growing pauses."""
_LONGEST_SLEEP_S = 10e-3


def failed_ranks(mpi: Any, group: Any) -> set[int]:
    """Return the ranks of `group` that MPI knows to be dead, by ULFM; empty if the library lacks it."""
    try:
        dead = group.Get_failed()
        ranks = dead.Translate_ranks(None, group.Get_group())
    except (AttributeError, NotImplementedError, mpi.Exception):  # mpi4py, its build or the library may lack ULFM
        return set()
    return {int(rank) for rank in ranks}


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def translated(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """Translate MPI errors of a method; its object has `rank`, `host` and `_mpi`, the module with the Exception."""

    @functools.wraps(method)
    def wrapper(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return method(self, *args, **kwargs)
        except self._mpi.Exception as error:
            kind = BrokenGroup if error.Get_error_class() in _broken(self._mpi) else RankError
            raise kind(
                f"rank {self.rank} on {self.host}: MPI failed in {method.__name__}: {error}",
                rank=self.rank,
                host=self.host,
            ) from error

    return wrapper


def _broken(mpi: Any) -> tuple[int, ...]:
    """Return the ULFM error classes of a broken group."""
    return mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED


def first_done(
    mpi: Any, handles: Sequence[Any], look: Callable[[], None], check: Callable[[], None] = lambda: None
) -> int:  # fmt: skip
    """Return the index of the first completed MPI request; sleeps between polls, because every MPI's own wait spins.

    `look` is called once the pauses are at their longest, `check` before each poll.
    """
    looks, pause_s = 0, 0.0
    while True:
        check()
        index, is_done = mpi.Request.Testany(handles)
        if is_done:
            return max(int(index), 0)  # undefined if all of them were complete before: then any will do
        looks += 1
        if looks > _EAGER_LOOKS:
            pause_s = min(pause_s + _PAUSE_STEP_S, _LONGEST_PAUSE_S)
            time.sleep(pause_s)
            if pause_s == _LONGEST_PAUSE_S:
                look()


def asleep(handle: Any) -> None:
    """Return when an MPI request is complete, which may take long: sleeps for growing intervals between polls."""
    pause_s = _PAUSE_STEP_S
    while not handle.Test():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_SLEEP_S)


PROBE_S = 0.5
"""The probed rank stays out of MPI for up to this long; an MPI with passive progress needs a millisecond."""
HEAD_START_S = 0.25
"""The others start this much later than the probed rank, which could otherwise serve them while leaving the barrier."""


class MpiRemoteArray:
    """A window under one shared lock for its whole life; passive target, so that owners take no part.

    `mpi` is the mpi4py module, `group` an MPI communicator, `kind` the elements' MPI type.
    """

    def __init__(self, mpi: Any, group: Any, length: int, dtype: Any, kind: Any) -> None:
        self._mpi, self._kind = mpi, kind
        self._item_bytes = numpy.dtype(dtype).itemsize
        self.rank: int = group.Get_rank()
        self.host: str = mpi.Get_processor_name()
        # The unit is an element, so displacements count elements.
        self._window = mpi.Win.Allocate(length * self._item_bytes, self._item_bytes, comm=group)
        self.own: Array = numpy.frombuffer(self._window.tomemory(), dtype=dtype, count=length)
        self.own[...] = 0  # before the barrier: zeros written later would erase another rank's addition
        self._window.Lock_all()
        group.Barrier()

    @translated
    def read(self, owner: int, target: Array) -> None:
        """Read from the owner's memory by MPI_Get."""
        self._window.Get([target, target.size, self._kind], owner, [0, target.size, self._kind])
        self._window.Flush(owner)

    @translated
    def add(self, owner: int, values: Array, start: int = 0) -> None:
        """Add to the owner's memory by MPI_Accumulate with MPI_SUM."""
        target = [start, values.size, self._kind]
        # Unlike Put, Accumulate is atomic for each element: no concurrent addition is lost.
        self._window.Accumulate([values, values.size, self._kind], owner, target, self._mpi.SUM)
        self._window.Flush(owner)

    @translated
    def free(self) -> None:
        """Unlock and free; collective."""
        self._window.Unlock_all()
        self._window.Free()


def no_passive_progress(group: Communicator) -> str:
    """Return why ranks of other nodes cannot change this MPI's windows while the owner computes; empty if they can.

    Collective. This is tested rather than queried: rank 0 stays out of MPI for a while and checks its memory, to which
    ranks of other nodes add.
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
    if far:  # establishes connections while the owner still takes part
        array.add(0, numpy.ones(1))
    group.barrier()
    # Both additions: the one before the barrier, and the one that is tested.
    expected = 2 * sum(host != hosts[0] for host in hosts)
    if far:
        time.sleep(HEAD_START_S)
        array.add(0, numpy.ones(1))
    arrived = group.allgather_json(group.rank == 0 and _arrives(array.own, expected))[0]
    total = numpy.zeros(1)
    array.read(0, total)
    array.free()
    wrong = [value for value in group.allgather_json(float(total[0])) if value != expected]
    if wrong:
        return f"{group.library} loses one-sided updates ({wrong[0]:g} of {expected} arrived)"
    return "" if arrived else f"{group.library} lets one-sided updates wait until their target calls MPI"


def _arrives(memory: Array, expected: float) -> bool:
    """Whether `memory` reaches `expected` while this process makes no MPI calls."""
    deadline = time.monotonic() + HEAD_START_S + PROBE_S
    while memory[0] < expected and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(memory[0] >= expected)
