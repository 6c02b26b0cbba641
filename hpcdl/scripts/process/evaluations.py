"""Find evaluations outside `fit` that gave each rank the numbers of its own samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator

_MOST = 100
"""Evaluations of a script whose results are compared at its end."""
_ALIKE = 1e-3
"""Relative difference of two ranks' results on the same samples."""


class Evaluations:
    """What `model.evaluate` returned outside hpcdl.callbacks(), until the script combines numbers over the ranks."""

    def __init__(self) -> None:
        self._results: list[list[float]] = []

    def add(self, numbers: list[float]) -> None:
        """Note the results of an evaluation that covers this rank's samples alone."""
        if len(self._results) < _MOST:
            self._results.append(numbers)

    def clear(self) -> None:
        """Forget the results so far."""
        self._results.clear()

    def warning(self, communicator: Communicator) -> str:
        """Return the warning that evaluations deserve if all ranks had as many and one differs. Collective."""
        by_rank = communicator.allgather_json(self._results)
        if len({len(row) for row in by_rank}) > 1:  # one rank alone evaluated, which may have all samples
            return ""
        for first, *others in zip(*by_rank, strict=True):
            for rank, other in enumerate(others, 1):
                for one, two in zip(first, other, strict=False):
                    unknown = math.isnan(one) or math.isnan(two)
                    if not unknown and not math.isclose(one, two, rel_tol=_ALIKE, abs_tol=_ALIKE**2):
                        return (
                            f"model.evaluate gave {one:.4g} on rank 0 and {two:.4g} on rank {rank}: each is of that "
                            "rank's samples alone; callbacks=[hpcdl.callbacks()] makes it cover those of all ranks"
                        )
        return ""
