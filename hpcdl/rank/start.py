"""The one way to become a rank: bind the process, join the others, be watched, leave together."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpcdl.cluster.environment import OWN_LAUNCHER, WITHOUT_MPI_VARIABLE, Placement, job_address, placement
from hpcdl.cluster.limits import check_own_node
from hpcdl.cluster.supervise import LAUNCHED_BY_VARIABLE, STATUS_VARIABLE
from hpcdl.comm.observed import Observed, RankMonitor, observe
from hpcdl.core.errors import HpcdlError, StoppedEarly, UsageError
from hpcdl.core.paths import user_cache_folder
from hpcdl.core.processes import lifeline
from hpcdl.core.protocols import Communicator
from hpcdl.core.storage.disk import remove_folder
from hpcdl.run.ended import note_end, one_line, verdict
from hpcdl.supervision import runtime
from hpcdl.supervision.watchdog import Watchdog, watchdog_of, watching

ALONE = Placement(launcher="none", rank=0, size=1, local_rank=0, local_size=1)
FIRST_WORD_S = 10.0
"""A usage error occurs on every rank alike: rank 0 gets this long to print it and to end the job."""
LEAVE_S = 4.0
"""How long a launcher may take to end its ranks after hpcdl's starting process is gone."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Where the ranks of a launcher work: the watchdog's folder, and the run directory if there is one."""

    watch_folder: Path
    run_dir: Path | None = None
    may_speak: Callable[[str], bool] = lambda state: True
    """Whether this rank may print its error, by its final state."""


def join(process: Placement, *, mpi: bool = True, monitor: RankMonitor | None = None) -> Observed:
    """Prepare this process (before TensorFlow is imported) and join the other ranks of its launcher; collective."""
    set_up_process(process.local_rank)
    return observe(communicator_for(process, mpi=mpi), monitor)


@contextlib.contextmanager
def as_rank(
    process: Placement, agree: Callable[[Observed], Joined], *, mpi: bool = True
) -> Iterator[tuple[Observed, Watchdog, Joined]]:
    """Inside, this process is one of the ranks that an external launcher has started; collective.

    `agree` decides with all ranks where they work. An error of one rank ends them all; all of them leave together.
    """
    communicator = join(process, mpi=mpi)
    joined = agree(communicator)
    run_dir = joined.run_dir

    def note(error: BaseException) -> None:
        if run_dir is not None:
            note_end(run_dir, error)

    watchdog = watchdog_of(communicator, joined.watch_folder, note)
    with leaving_together(communicator, run_dir, joined.may_speak), watching(watchdog):
        yield communicator, watchdog, joined
    if not mpi:
        close_rendezvous(process)


def set_up_process(local_rank: int) -> None:
    """Set up affinity, GPU and log level before TensorFlow is imported. From here on this rank ends with its starters.

    These are its parent on this node, and the supervising process if it runs on this node.
    """
    launched_by = os.environ.get(LAUNCHED_BY_VARIABLE, "")
    if launched_by or placement() is not None:  # a script that a user started alone may outlive its shell
        lifeline.end_with_parent()
    lifeline.after_end_of(launched_by, lambda: lifeline.end_in(LEAVE_S))
    runtime.bind(local_rank)
    runtime.claim_device(local_rank)
    runtime.silence()


def communicator_for(process: Placement, *, mpi: bool = True) -> Communicator:
    """Return MPI's world; for one rank a communicator without MPI; with `mpi` false one for control messages only."""
    mpi = mpi and process.launcher != OWN_LAUNCHER and WITHOUT_MPI_VARIABLE not in os.environ
    check_own_node(mpi=mpi and process.size > 1)
    if process.size == 1:
        from hpcdl.comm.threads import alone

        return alone()
    if not mpi:
        from hpcdl.comm.tcp import control_world, make_secret

        if process.rank == 0 and STATUS_VARIABLE not in os.environ:
            make_secret(rendezvous_dir(process))  # under hpcdl's own launcher the starting process has made it
        return control_world(process.rank, process.size, job_address(process), rendezvous_dir(process))
    from hpcdl.comm.mpi.communicator import world

    return world(expected_size=process.size)


def rendezvous_dir(process: Placement) -> Path:
    """Return where ranks without MPI meet: a folder of the run, or one for the scheduler's step in the user's cache."""
    if STATUS_VARIABLE in os.environ:
        return Path(os.environ[STATUS_VARIABLE])
    step = "-".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return user_cache_folder() / "steps" / f"{process.launcher}-{step}"


def close_rendezvous(process: Placement) -> None:
    """Remove this step's meeting folder from the user's cache, if there is one."""
    if process.rank == 0 and process.size > 1 and STATUS_VARIABLE not in os.environ:
        from hpcdl.comm.tcp import RENDEZVOUS_NAMES

        remove_folder(rendezvous_dir(process), RENDEZVOUS_NAMES)


@contextlib.contextmanager
def leaving_together(
    communicator: Observed, run_dir: Path | None = None, speaks: Callable[[str], bool] = lambda state: True
) -> Iterator[None]:
    """Inside, an error of this rank ends the whole job, and all ranks leave an early stop together.

    For ranks that an external launcher has started: the rank that failed first reports on stderr and in the record of
    `run_dir`. `speaks` decides, by its final state, whether this rank may print.
    """
    try:
        yield
    except StoppedEarly as error:
        wait_for_the_others(communicator)
        if communicator.rank == 0:
            if run_dir is not None:
                note_end(run_dir, error)
            raise
        raise StoppedEarly("") from error  # no text: rank 0 speaks for all
    except BaseException as error:
        state, exit_code = verdict(error)
        if run_dir is not None:
            note_end(run_dir, error, message=one_line(error))
        if communicator.size > 1:
            if isinstance(error, UsageError) and communicator.rank > 0:
                time.sleep(FIRST_WORD_S)
            trace = "" if isinstance(error, HpcdlError) else traceback.format_exc()
            if speaks(state):
                sys.stderr.write(f"{trace}hpcdl: rank {communicator.rank} on {communicator.host}: {one_line(error)}\n")
                sys.stderr.flush()  # abort may kill this process at once
            communicator.abort(exit_code)
        raise


def wait_for_the_others(communicator: Observed | None) -> bool:
    """Wait until every rank has stopped: some launchers kill the job when the first rank exits.

    Return whether all have.
    """
    if communicator is None:
        return False
    with contextlib.suppress(HpcdlError):
        surviving(communicator).barrier()
        return True
    return False


def surviving(communicator: Observed) -> Observed:
    """Return the group of the ranks that are not lost."""
    return communicator.survivors() if communicator.failed() else communicator


def leave(exit_code: int) -> NoReturn:
    """End this process without the interpreter's shutdown.

    The shutdown may hang: it destroys TensorFlow's thread pools, which wait for threads that wait for the interpreter's
    lock, while the other ranks wait in MPI_Finalize (docs/decisions/0100).
    """
    # `os._exit` skips the exit functions, one of which writes out a script's last incomplete line.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if "mpi4py.MPI" in sys.modules:
        from hpcdl.comm.mpi.communicator import finalize

        finalize()
    os._exit(exit_code)
