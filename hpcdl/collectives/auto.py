"""The all-reduce that was measured fastest for each size on this machine.

Rank 0 reads the table that `hpcdl bench allreduce` or an earlier run left in the user's cache. Where there is none, all
ranks time the algorithms once, which takes a second or so, several where links are slow, and rank 0 keeps the result.
Every rank gets rank 0's table, so none chooses otherwise. `Workspace(measure=False)` goes by size and number of ranks
alone: the same choice in every run.

Rounds and bytes are those of the chosen algorithm.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpcdl.collectives.measure import Timetable, load_table, measure, save_table, table_file
from hpcdl.collectives.slices import flattened
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.collectives.workspace import Cost, Workspace, unseen
from hpcdl.comm.observed import for_control
from hpcdl.core.records.run_record import from_json

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, Finished

SIZES: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)
"""Bytes that are measured when there is no table. The last is a full bucket: what is as quick at 8 MiB may be slower by
a third there, on slow links."""
TRIES = 20
TIME_LIMIT_S = 0.25
"""The quickest of so many tries counts, which other work on the nodes disturbs least; and how long a size may take."""
MODELLED = ("recursive-doubling", "halving-doubling", "ring")
"""What is chosen from without a measurement; of equals the first."""
LATENCY_S = 10e-6
SECONDS_PER_BYTE = 0.2e-9
"""A cluster's usual latency and bandwidth (5 GB/s), for a choice without a measurement."""


def allreduce(
    communicator: Communicator,
    buffer: Array,
    workspace: Workspace | None = None,
    add: Add | None = None,
    finished: Finished = unseen,
) -> None:
    """Sum `buffer` over the ranks in place."""
    if communicator.size == 1 or buffer.size == 0:
        finished(flattened(buffer))
        return
    kept = workspace or Workspace()
    name = choose(communicator, buffer.nbytes, kept)
    COLLECTIVES.load(name)(communicator, buffer, kept, add, finished)
    if workspace is None:
        kept.close()


def cost(num_ranks: int, num_bytes: int, item_bytes: int = 4) -> Cost:
    """That of the algorithm which is chosen without a measurement."""
    chosen: Cost = _module(choose_by_model(num_ranks, num_bytes)).cost(num_ranks, num_bytes, item_bytes)
    return chosen


def choose(communicator: Communicator, num_bytes: int, workspace: Workspace) -> str:
    """Name of the all-reduce for a buffer of this size; the first call with a workspace is one of all ranks."""
    if not workspace.measure:
        return choose_by_model(communicator.size, num_bytes)
    table = workspace.keep("table", lambda: _agree(communicator))
    return table.best(num_bytes)


def choose_by_model(num_ranks: int, num_bytes: int) -> str:
    """The cheapest of MODELLED by rounds and bytes."""

    def seconds(name: str) -> float:
        price: Cost = _module(name).cost(num_ranks, num_bytes)
        return price.rounds * LATENCY_S + price.bytes * SECONDS_PER_BYTE

    return min(MODELLED, key=seconds)


def _agree(communicator: Communicator) -> Timetable:
    """Rank 0's table on every rank, measured now if it has none."""
    hosts = communicator.allgather_json(communicator.host)
    path = table_file(communicator.library, communicator.size, len(set(hosts)), hosts[0])
    found = load_table(path) if communicator.rank == 0 else None
    (document, *_) = communicator.allgather_json(asdict(found) if found else None)
    if document is not None:
        return from_json(Timetable, document)
    table = measure(for_control(communicator), SIZES, repeats=TRIES, of_tries=min, time_limit_s=TIME_LIMIT_S)
    if communicator.rank == 0:
        with contextlib.suppress(OSError):  # a full or read-only home costs the next run a second, no more
            save_table(path, table)
    return table


def _module(name: str) -> Any:
    return importlib.import_module(COLLECTIVES.entry(name).target.partition(":")[0])
