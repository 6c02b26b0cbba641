"""MPI's exceptions become RankError, which names the rank and its node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from hpcdl.core.errors import RankError


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
            raise RankError(
                f"rank {self.rank} on {self.host}: MPI failed in {method.__name__}: {error}",
                rank=self.rank,
                host=self.host,
            ) from error

    return wrapper
