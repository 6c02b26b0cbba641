"""How MPI's calls end: errors that name the rank and its node, waits that sleep."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from hpcdl.core.errors import BrokenGroup, RankError

_EAGER_LOOKS = 20
_PAUSE_STEP_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""A wait for the first of several messages looks this often without a pause, then with pauses that grow."""
_LONGEST_SLEEP_S = 10e-3


def failed_ranks(mpi: Any, group: Any) -> set[int]:
    """Ranks of `group` that MPI knows to be dead, by ULFM; empty where the library has not got it."""
    try:
        dead = group.Get_failed()
        ranks = dead.Translate_ranks(None, group.Get_group())
    except (AttributeError, NotImplementedError, mpi.Exception):
        return set()
    return {int(rank) for rank in ranks}


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def translated(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """For methods of objects with `rank`, `host` and `_mpi`, the module whose Exception is translated."""

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
    """How ULFM says that a group is of no use any more."""
    return mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED


def first_done(
    mpi: Any, handles: Sequence[Any], look: Callable[[], None], check: Callable[[], None] = lambda: None
) -> int:  # fmt: skip
    """Index of the first of MPI's requests that is done; sleeps between looks, because every MPI's own wait spins.

    `look` is called once the pauses are at their longest, `check` before the requests are looked at.
    """
    looks, pause_s = 0, 0.0
    while True:
        check()
        index, done = mpi.Request.Testany(handles)
        if done:
            return max(int(index), 0)  # undefined where all of them were through before: then any will do
        looks += 1
        if looks > _EAGER_LOOKS:
            pause_s = min(pause_s + _PAUSE_STEP_S, _LONGEST_PAUSE_S)
            time.sleep(pause_s)
            if pause_s == _LONGEST_PAUSE_S:
                look()


def asleep(handle: Any) -> None:
    """Return when one of MPI's requests is done, which may be long: who looks for it sleeps more and more between."""
    pause_s = _PAUSE_STEP_S
    while not handle.Test():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_SLEEP_S)
