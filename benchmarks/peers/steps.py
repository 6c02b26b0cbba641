"""A step with and without exchange in turn, measured on a peer's rank as `hpcdl bench step` does.

Peers import this in environments without hpcdl, so it uses only the standard library.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

WARMUP_STEPS = 3
LEARNING_RATE = 0.001
"""VGG-19 from random weights diverges at 0.01."""


def take_own_cores(num_ranks: int) -> int:
    """Bind this process to its share of the node's cores, before threads start; return their number."""
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_RANK", "LOCAL_RANK")
    rank = int(next((os.environ[name] for name in names if name in os.environ), "0"))
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // num_ranks)
    first = rank * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])
    return share


def measured(
    kinds: Mapping[str, Callable[[], None]],
    num_steps: int,
    barrier: Callable[[], None],
    slowest: Callable[[float], float],
) -> dict[str, float]:
    """Return median seconds of each kind of step; all ranks begin together, and the last rank's end counts."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(num_steps + WARMUP_STEPS):
        for kind, run in kinds.items():
            barrier()
            began = time.perf_counter()
            run()
            taken = slowest(time.perf_counter() - began)
            if number >= WARMUP_STEPS:
                seconds[kind].append(taken)
    return {kind: statistics.median(taken) for kind, taken in seconds.items()}
