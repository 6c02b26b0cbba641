"""How a benchmark gets its ranks: started here, on this node or on those of the job, or by an external launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hpcdl.cluster import supervise as local
from hpcdl.cluster.environment import Placement, placement
from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.launchers.base import ranks_per_node
from hpcdl.cluster.status import FOLDER
from hpcdl.comm.agree import decided
from hpcdl.comm.observed import Observed
from hpcdl.core.errors import CorruptError, Interrupted, RankError
from hpcdl.core.paths import own_program, user_cache_folder
from hpcdl.core.processes.streams import caught
from hpcdl.core.progress import Progress
from hpcdl.core.storage.disk import make_folder, make_private_folder, remove_folder, touch
from hpcdl.core.storage.files import read_json, write_json
from hpcdl.core.units import counted
from hpcdl.launch.train import able_to_meet
from hpcdl.node.machines import read_topology
from hpcdl.node.plan import launch_plan
from hpcdl.node.profile import Settings

REQUEST_FILE, RESULT_FILE, PROGRESS_FILE = "request.json", "result.json", "progress.json"
_REPORT_EVERY_S = 0.5
ReportProgress = Callable[[int, str], None]
"""Receives the number of completed items, and their description."""
Result = TypeVar("Result")


def launched() -> Placement | None:
    """Return this process's placement among the ranks of a launcher; None if it is alone."""
    rank_place = placement()
    return rank_place if rank_place is not None and rank_place.size > 1 else None


def crowded(num_ranks: int) -> str:
    """Return a warning if `num_ranks` on this node would share its processors; empty on the nodes of a job."""
    num_cpus = len(os.sched_getaffinity(0))
    if num_ranks <= num_cpus or launched() is not None or find_launcher().hosts(os.environ):
        return ""
    return (
        f"{num_ranks} ranks share {counted(num_cpus, 'processor')} of this node and wait for each other: it takes long,"
        " and the times show nothing of a larger machine"
    )


def on_fresh_ranks(
    program: str, request: Any, num_ranks: int, bar: Progress, *, settings: Settings | None = None, mpi: bool = True
) -> Any:
    """Start ranks that run `python -m PROGRAM` on `request`; return the result of rank 0.

    They are spread evenly over the nodes of the job, or are all on this node; without `mpi` they connect over TCP.
    """
    launcher = find_launcher()
    hosts = launcher.hosts(os.environ)
    plan = launch_plan(read_topology(), settings, num_ranks, ranks_per_node(hosts, num_ranks))
    with _folder_of_ranks(hosts) as folder:
        write_json(folder / REQUEST_FILE, request)

        def tick() -> None:
            # The file is absent until rank 0 has something to report.
            with contextlib.suppress(OSError, CorruptError):
                bar.update(*read_json(folder / PROGRESS_FILE))

        plan = able_to_meet(plan, folder / FOLDER, mpi=mpi)
        local.start(launcher, plan, own_program(program, str(folder)), folder=folder / FOLDER, mpi=mpi, tick=tick)
        return read_json(folder / RESULT_FILE)


@contextlib.contextmanager
def _folder_of_ranks(hosts: Sequence[str]) -> Iterator[Path]:
    """Yield a folder visible to all ranks; remove it unless an error message names it."""
    # Other nodes do not see this node's /tmp.
    base = user_cache_folder() / "steps" if len(hosts) > 1 else Path(tempfile.gettempdir())
    make_folder(base)
    folder, pointed_at = make_private_folder("hpcdl-bench-", base), False
    try:
        yield folder.path
    except RankError as error:
        if error.exit_code == Interrupted.exit_code:
            raise Interrupted("stopped by Ctrl-C or a signal; nothing is left to continue with") from error
        pointed_at = str(folder.path) in str(error)
        raise
    finally:
        if not pointed_at:
            folder.remove()


def as_started(
    process: Placement, check: Callable[[], object], body: Callable[[Observed], Result], *, mpi: bool = True
) -> Result:
    """Run `body` as one of the ranks that a launcher has started, after rank 0's `check` has passed."""
    from hpcdl.rank.start import Joined, as_rank

    def decide() -> str:
        check()
        return uuid.uuid4().hex

    def agree(group: Observed) -> Joined:
        return Joined(watch_folder=user_cache_folder() / "steps" / decided(group, decide))

    with as_rank(process, agree, mpi=mpi) as (group, watchdog, _):
        result = body(group)
    if process.rank == 0:
        remove_folder(watchdog.folder, ".+")  # its name is unique to this start
    return result


def rank_program(body: Callable[[Any, Observed, ReportProgress], Any]) -> NoReturn:
    """Run a whole rank process: `body` gets the request; what it returns on rank 0, as JSON, is the result."""
    from hpcdl.rank.main import supervised
    from hpcdl.rank.start import leave

    folder = Path(sys.argv[1])
    request = read_json(folder / REQUEST_FILE)

    def stop(number: int) -> None:
        raise Interrupted("stopped by a signal")

    def on_rank(group: Observed, watch: object) -> None:
        reported_s = 0.0

        def on_progress(done: int, what: str) -> None:
            nonlocal reported_s
            if group.rank == 0 and time.monotonic() - reported_s > _REPORT_EVERY_S:
                reported_s = time.monotonic()
                touch(folder / PROGRESS_FILE, json.dumps([done, what]).encode())  # without waiting for a disk

        result = body(request, group, on_progress)
        if group.rank == 0:
            write_json(folder / RESULT_FILE, result)

    with caught(stop, (signal.SIGTERM,)):  # from the start: it may come as soon as the rank has reported itself
        code = supervised(on_rank)
    leave(code)
