"""Selects the all-reduce that was measured fastest for each size on this machine, and measures it.

Rank 0 reads the table that `hpcdl bench allreduce` or an earlier run left in the user's cache. Without one, all ranks
time the algorithms once, which takes about a second, or several on slow links, and rank 0 saves the result. Every rank
gets rank 0's table, so all choose alike. `Workspace(measure=False)` chooses by size and number of ranks alone: the same
choice in every run.

Rounds and bytes are those of the chosen algorithm.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.collectives.slices import Cost, Workspace, flattened, unseen
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.observed import for_control
from hpcdl.core.errors import CorruptError
from hpcdl.core.paths import user_cache_folder
from hpcdl.core.records.run_record import from_json
from hpcdl.core.storage.files import read_json, write_json

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, Finished


SIZES: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)
"""Sizes in bytes that are measured without a table.

The last is a full bucket: algorithms equally fast at 8 MiB may differ by a third there, on slow links.
"""
TRIES = 20
TIME_LIMIT_S = 0.25
"""The fastest of this many tries counts, as other load on the nodes disturbs it least; and the time limit per size."""
MODELLED = ("recursive-doubling", "halving-doubling", "ring")
"""The algorithms to choose from without a measurement; the first one wins ties."""
LATENCY_S = 10e-6
SECONDS_PER_BYTE = 0.2e-9
"""Typical latency and bandwidth (5 GB/s) of a cluster, for a choice without a measurement."""


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
    memory = workspace or Workspace()
    name = choose(communicator, buffer.nbytes, memory)
    memory.chosen[buffer.nbytes] = name
    COLLECTIVES.load(name)(communicator, buffer, memory, add, finished)
    if workspace is None:
        memory.close()


def cost(num_ranks: int, num_bytes: int, item_bytes: int = 4) -> Cost:
    """Return the cost of the algorithm that is chosen without a measurement."""
    chosen: Cost = _module(choose_by_model(num_ranks, num_bytes)).cost(num_ranks, num_bytes, item_bytes)
    return chosen


def choose(communicator: Communicator, num_bytes: int, workspace: Workspace) -> str:
    """Return the name of the all-reduce for a buffer of this size; all ranks must make a workspace's first call."""
    if not workspace.measure:
        return choose_by_model(communicator.size, num_bytes)
    table = workspace.keep("table", lambda: _agree(communicator))
    return table.best(num_bytes)


def choose_by_model(num_ranks: int, num_bytes: int) -> str:
    """Return the cheapest of MODELLED by rounds and bytes."""

    def seconds(name: str) -> float:
        price: Cost = _module(name).cost(num_ranks, num_bytes)
        return price.rounds * LATENCY_S + price.bytes * SECONDS_PER_BYTE

    return min(MODELLED, key=seconds)


def _agree(communicator: Communicator) -> Timetable:
    """Return rank 0's table on every rank; measure one if it has none."""
    hosts = communicator.allgather_json(communicator.host)
    path = table_file(communicator.library, communicator.size, len(set(hosts)), hosts[0])
    saved_table = load_table(path) if communicator.rank == 0 else None
    (document, *_) = communicator.allgather_json(asdict(saved_table) if saved_table else None)
    if document is not None:
        return from_json(Timetable, document)
    # For control: what measuring sends must not count as a step's exchange.
    table = measure(for_control(communicator), SIZES, repeats=TRIES, of_tries=min, time_limit_s=TIME_LIMIT_S)
    if communicator.rank == 0:
        with contextlib.suppress(OSError):  # without a writable home the next run measures again, which takes a second
            save_table(path, table)
    return table


def _module(name: str) -> Any:
    return importlib.import_module(COLLECTIVES.entry(name).target.partition(":")[0])


SCHEMA = "hpcdl.allreduce/3"
"""Tables of /2 ended at 8 MiB. Those of /1 had medians of three tries, too long under other load on a node."""
CANDIDATES = tuple(name for name in COLLECTIVES if name != "auto")
FEWEST = 2
"""Minimum tries of every algorithm, however long they take."""
HOPELESS = 4.0
"""Where time is limited, an algorithm this many times slower than the best so far is not timed again at that size."""
SMALL_BYTES = 64 << 10
LARGE_BYTES, BEHIND = 16 << 20, 1.5
"""From this size on a call may take a second: an algorithm slower by this factor at the previous size is skipped."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of each algorithm for one size on the slowest rank: of its median try, or of its fastest."""

    bytes: int
    seconds: Mapping[str, float]

    @property
    def best(self) -> str:
        """The fastest algorithm."""
        return min(self.seconds, key=lambda name: self.seconds[name])


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """Rows by size for one MPI library, number of ranks and number of nodes."""

    schema: str = SCHEMA
    library: str
    ranks: int
    nodes: int
    rows: Sequence[Row]

    def best(self, num_bytes: int) -> str:
        """Return the fastest algorithm at the measured size that is nearest by ratio."""

        def distance(row: Row) -> float:
            return max(row.bytes, num_bytes, 1) / max(1, min(row.bytes, num_bytes))

        return min(self.rows, key=distance).best


def measure(
    communicator: Communicator,
    sizes: Sequence[int],
    *,
    names: Sequence[str] = CANDIDATES,
    repeats: int = 3,
    of_tries: Callable[[Sequence[float]], float] = statistics.median,
    time_limit_s: float = float("inf"),
    workspace: Workspace | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Timetable:
    """Time `names` at `sizes` (bytes), in turn; every rank calls it and gets the same table.

    One call of each is a warm-up. `of_tries` reduces `repeats` tries to one number; once a size has taken
    `time_limit_s`, only two tries. Algorithms that are BEHIND skip large sizes. `tick` is called after each size.
    """
    memory = workspace or Workspace()
    rows: list[Row] = []
    for num_bytes in sizes:
        worth = _worth_timing(names, num_bytes, rows)
        samples = time_size(communicator, worth, num_bytes, repeats, memory, time_limit_s)
        rows.append(Row(bytes=num_bytes, seconds={name: of_tries(tries) for name, tries in samples.items()}))
        tick()
    if workspace is None:
        memory.close()
    nodes = len(set(communicator.allgather_json(communicator.host)))
    return Timetable(library=communicator.library, ranks=communicator.size, nodes=nodes, rows=rows)


def time_size(
    communicator: Communicator,
    names: Sequence[str],
    num_bytes: int,
    repeats: int,
    workspace: Workspace,
    time_limit_s: float = float("inf"),
) -> dict[str, list[float]]:
    """Return the seconds of each try of `names`, called in turn: the same on every rank. See `measure`."""
    samples: dict[str, list[float]] = {name: [] for name in names}
    spent_s = 0.0  # the same on every rank, as each sample is
    for repeat in range(repeats + 1):
        if repeat > FEWEST and spent_s > time_limit_s:
            break
        best = min((min(times) for times in samples.values() if times), default=float("inf"))
        for name in samples:
            if repeat > FEWEST and time_limit_s < float("inf") and min(samples[name]) > HOPELESS * best:
                continue
            seconds = _time_once(communicator, name, num_bytes, workspace)
            spent_s += seconds
            if repeat > 0:
                samples[name].append(seconds)
    return samples


def _worth_timing(names: Sequence[str], num_bytes: int, rows: Sequence[Row]) -> Sequence[str]:
    """Return those of `names` that may be the fastest at this size; `rows` are those of earlier sizes."""
    if num_bytes < LARGE_BYTES or not rows:
        return names
    seconds = rows[-1].seconds
    return [name for name in names if name in seconds and seconds[name] <= BEHIND * min(seconds.values())]


def _time_once(communicator: Communicator, name: str, num_bytes: int, workspace: Workspace) -> float:
    """Return the seconds of one call on the slowest rank: the same number on every rank."""
    allreduce = COLLECTIVES.load(name)
    buffer = workspace.scratch("measured", num_bytes // 4, numpy.float32)
    buffer.fill(1)
    communicator.barrier()  # else waiting for the last rank would count as the algorithm's time
    start_s = time.perf_counter()
    allreduce(communicator, buffer, workspace)
    return float(max(communicator.allgather_json(time.perf_counter() - start_s)))


def serves_auto(sizes: Sequence[int]) -> bool:
    """Whether times at these sizes (bytes, ascending) cover every bucket, from small gradients to a full one."""
    return sizes[0] <= SMALL_BYTES and sizes[-1] >= LARGE_BYTES


def table_file(library: str, ranks: int, nodes: int, host: str) -> Path:
    """Return the file of a table: one for each library, shape of job and family of hosts."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{library} {host_family(host)} {ranks} ranks {nodes} nodes").strip("-")
    return user_cache_folder() / "allreduce" / f"{name}.json"


def host_family(host: str) -> str:
    """Return the common name of similar hosts: `cpu012` and `cpu7` have the same."""
    return re.sub(r"\d+", "", host.partition(".")[0])


def load_table(path: Path) -> Timetable | None:
    """Return the table in `path`; None if missing or unusable, since a new measurement replaces it."""
    try:
        document: Any = read_json(path)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            return None
        table = from_json(Timetable, document)
    except (OSError, CorruptError, TypeError, ValueError):
        return None
    usable = table.rows and all(row.seconds and set(row.seconds) <= set(CANDIDATES) for row in table.rows)
    return table if usable else None


def save_table(path: Path, table: Timetable) -> None:
    """Save `table` for later runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(table))
