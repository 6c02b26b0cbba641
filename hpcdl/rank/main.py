"""What one rank process does: `python -m hpcdl.rank.main RUN_DIR`."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from hpcdl.cluster.deaths import hold_line
from hpcdl.cluster.environment import OWN_LAUNCHER, WITHOUT_MPI_VARIABLE, Placement, job_address, placement
from hpcdl.cluster.limits import check_own_node
from hpcdl.cluster.status import FOLDER, StatusReport, failed_of, report_all, report_left
from hpcdl.cluster.supervise import LAUNCH_VARIABLE, LAUNCHED_BY_VARIABLE, STATUS_VARIABLE
from hpcdl.comm.agree import SilentExit
from hpcdl.comm.observed import Observed, RankMonitor, observe
from hpcdl.core import lifeline
from hpcdl.core.disk import remove_folder
from hpcdl.core.errors import HpcdlError, Interrupted, RankError, StoppedEarly, UsageError, original, printable
from hpcdl.core.lock import writing
from hpcdl.core.paths import user_cache_folder
from hpcdl.core.protocols import Communicator
from hpcdl.core.signals import StopRequest
from hpcdl.core.streams import outlive
from hpcdl.rank.job import run_rank
from hpcdl.run import rundir
from hpcdl.run.ended import note_end
from hpcdl.run.in_place import VARIABLE, shrunk_of
from hpcdl.run.plan import prepare
from hpcdl.supervision import runtime
from hpcdl.supervision.watchdog import FOLDER as WATCH_FOLDER
from hpcdl.supervision.watchdog import STALL_TIMEOUT_S, Actions, Limits, Watchdog, leave_without_lost, watching

ALONE = Placement(launcher="none", rank=0, size=1, local_rank=0, local_size=1)

_LOST_PEER = ("UnavailableError", "AbortedError", "CancelledError")
"""What TensorFlow's own engines raise when another rank is gone, by name: servers run without TensorFlow."""


_RAISED = re.compile(r"\w*(Error|Exception): ")
"""How Python names an error in a traceback."""


def main() -> None:
    """Entry of a training rank."""
    StopRequest().install()
    run_dir = Path(sys.argv[1])

    def body(communicator: Observed, watch: Watchdog) -> None:
        resolved, _ = rundir.read(run_dir)
        with writing(run_dir / FOLDER) if communicator.rank == 0 else contextlib.nullcontext():
            shrunk = shrunk_of(resolved) if VARIABLE in os.environ else None
            run_rank(prepare(resolved), communicator, run_dir, watch=watch, shrunk=shrunk)

    leave(supervised(body, _stall_timeout_s(run_dir)))


def _stall_timeout_s(run_dir: Path) -> float:
    """The run's, before its config is checked: what is wrong with that is told when all ranks are there."""
    try:
        return rundir.read(run_dir)[0].config.safety.stall_timeout
    except HpcdlError:
        return STALL_TIMEOUT_S


def leave(exit_code: int) -> NoReturn:
    """End this process without the interpreter's own way to take itself apart.

    That may never end: it destroys TensorFlow's thread pools, which wait for threads that wait for the interpreter's
    lock, and the other ranks wait in MPI_Finalize (docs/decisions/0100).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if "mpi4py.MPI" in sys.modules:
        from hpcdl.comm.mpi.communicator import finalize

        finalize()
    os._exit(exit_code)


START_S = 60.0
"""Ranks may come up so far apart, however short the time allowed is later."""
FIRST_WORD_S = 10.0
"""What the user handed in is wrong on every rank alike: rank 0 gets this long to say so and to end the job."""


def _show(error: BaseException) -> None:
    if error.__traceback__ is not None:  # else it is the watch's word
        traceback.print_exception(error)


def supervised(
    body: Callable[[Observed, Watchdog], None],
    stall_s: float = STALL_TIMEOUT_S,
    show: Callable[[BaseException], None] = _show,
) -> int:
    """Run `body` on this rank and tell who started it of every way in which it can end; returns the exit code.

    `show` prints what is to be told of an error beside its line.

    From its first moment to its last the rank is watched; until the run sets its own limits, by `stall_s` and no less
    than ranks may come up apart. Where others were left behind MPI cannot end in order: the process then ends without
    it, once all that are left are done.
    """
    outlive("stderr")  # a launcher's log on a full disk must not keep this rank from ending the others
    place = placement() or ALONE
    folder = Path(os.environ[STATUS_VARIABLE])
    launch = os.environ.get(LAUNCH_VARIABLE, "")
    report = StatusReport(folder=folder, rank=place.rank, line=hold_line(launch))
    report.tell("running")
    set_up_process(place.local_rank)
    communicator: Observed | None = None

    def end(error: RankError) -> None:
        show(error)
        report.tell("failed", exit_code=error.exit_code, message=str(error), of=error)
        sys.stderr.write(f"hpcdl: {error}\n")
        if communicator is not None:
            communicator.abort(error.exit_code)
        os._exit(error.exit_code)

    monitor = RankMonitor(place.rank, place.size, os.uname().nodename)
    actions = Actions(end=end, on_lost=partial(report_left, folder), failed=partial(failed_of, folder))
    watch = Watchdog(monitor=monitor, folder=folder / WATCH_FOLDER / launch, actions=actions)
    watch.limits = Limits(stall_s=max(stall_s, START_S))
    with watching(watch):
        try:
            with monitor.waiting_for("starting MPI", hidden=True):
                communicator = observe(communicator_for(place), monitor)
            processes = _met(communicator, watch, folder)
            body(communicator, watch)
            watch.accuses = False
            _done_together(communicator, lambda: report_all(folder, "done", processes))
        except BaseException as error:  # noqa: BLE001  whatever it is, the other ranks must not wait for this one
            state, exit_code = verdict(error)
            tell = partial(report.tell, state, exit_code=exit_code, message=one_line(error), grows=_grows(error))
            tell(filed=None if state != "stopped" else monitor.leads)
            if state == "stopped":
                if not wait_for_the_others(communicator):
                    tell(filed=True)
                return exit_code
            show(error)
            if isinstance(error, SilentExit):
                time.sleep(FIRST_WORD_S)
            if communicator is not None:
                communicator.abort(exit_code)
            return exit_code
    report.tell("done")
    leave_without_lost(communicator)
    return 0


def _grows(error: BaseException) -> bool:
    """Whether this rank has stopped so that more of them can start."""
    found = original(error)
    return isinstance(found, StoppedEarly) and found.grows


def _met(communicator: Observed, watch: Watchdog, folder: Path) -> list[tuple[str, int]]:
    """Host and process of each rank: the watch names hosts from now on, and rank 0 notes that all run."""
    processes: list[tuple[str, int]] = communicator.allgather_json((communicator.host, os.getpid()))
    watch.hosts = {rank: host for rank, (host, _) in enumerate(processes)}
    if communicator.rank == 0:
        report_all(folder, "running", processes)
    return processes


def _left(communicator: Observed) -> Observed:
    """The ranks that are not left behind."""
    return communicator.survivors() if communicator.failed() else communicator


def _done_together(communicator: Observed, note: Callable[[], None]) -> None:
    """Return once all are done and rank 0 has noted it: whatever becomes of a process then is no failure."""
    left = _left(communicator)
    left.barrier()
    if left.rank == 0:
        note()
    with contextlib.suppress(HpcdlError):
        left.barrier()


def wait_for_the_others(communicator: Observed | None) -> bool:
    """Every rank stops at the same step; a launcher that kills the job at the first exit must find all of them done.

    Returns whether it does.
    """
    if communicator is None:
        return False
    with contextlib.suppress(HpcdlError):
        _left(communicator).barrier()
        return True
    return False


@contextlib.contextmanager
def leaving_together(
    communicator: Observed, run_dir: Path | None = None, speaks: Callable[[str], bool] = lambda state: True
) -> Iterator[None]:
    """Inside, an error of this rank ends the whole job, and no rank leaves a run that stops early before the others.

    For ranks that somebody else's launcher has started: the rank that failed first says so on stderr, and in the record
    of `run_dir`. `speaks` says, by the state that it is in, whether this one may.
    """
    try:
        yield
    except StoppedEarly as error:
        wait_for_the_others(communicator)
        if communicator.rank == 0:
            if run_dir is not None:
                note_end(run_dir, error)
            raise
        raise StoppedEarly("") from error
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
                sys.stderr.flush()
            communicator.abort(exit_code)
        raise


LEAVE_S = 4.0
"""How long a launcher's own way to end its ranks may take when hpcdl's starting process is gone."""


def set_up_process(local_rank: int) -> None:
    """What must come before TensorFlow: affinity, GPU, silence; from here on this rank ends with those who started it.

    That is its parent, on this node, and the supervising process, where that is on this node.
    """
    launched_by = os.environ.get(LAUNCHED_BY_VARIABLE, "")
    if launched_by or placement() is not None:  # a script that a user started alone may outlive its shell
        lifeline.end_with_parent()
    lifeline.after_end_of(launched_by, lambda: lifeline.end_in(LEAVE_S))
    runtime.bind(local_rank)
    runtime.claim_gpu(local_rank)
    runtime.silence()


def verdict(error: BaseException) -> tuple[str, int]:
    """A rank's state and exit code after `error`."""
    error = original(error)
    if isinstance(error, StoppedEarly):
        return "stopped", error.exit_code
    if isinstance(error, (RankError, SilentExit)):
        return "bereaved", error.exit_code
    # TensorFlow makes an error of its own of a lost peer that the exchange has met: it keeps the class in its text.
    if type(error).__name__ in _LOST_PEER or f"{RankError.__name__}: " in str(error):
        return "bereaved", 1
    interrupted = Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1
    return "failed", error.exit_code if isinstance(error, HpcdlError) else interrupted


def one_line(error: BaseException) -> str:
    """The line of an error that says most: the first, of TensorFlow's graphs what went wrong inside; with its class."""
    error = original(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[0]
    if text.startswith("Graph execution error"):
        before_node = [line for line in lines if "{{node" not in line]
        text = next((line for line in lines if _RAISED.match(line)), before_node[-1])
    return printable(text if isinstance(error, HpcdlError) else f"{type(error).__name__}: {text}".rstrip(": "))


def communicator_for(place: Placement, *, mpi: bool = True) -> Communicator:
    """MPI's world; for one rank a communicator that needs no MPI; without `mpi` one for control messages alone."""
    mpi = mpi and place.launcher != OWN_LAUNCHER and WITHOUT_MPI_VARIABLE not in os.environ
    check_own_node(mpi=mpi and place.size > 1)
    if place.size == 1:
        from hpcdl.comm.threads.communicator import alone

        return alone()
    if not mpi:
        from hpcdl.comm.tcp.communicator import control_world, make_secret

        if place.rank == 0 and STATUS_VARIABLE not in os.environ:
            make_secret(rendezvous_dir(place))
        return control_world(place.rank, place.size, job_address(place), rendezvous_dir(place))
    from hpcdl.comm.mpi.communicator import world

    return world(expected_size=place.size)


def rendezvous_dir(place: Placement) -> Path:
    """Where ranks without MPI find each other: a folder of the run, or of the scheduler's step in the user's cache."""
    if STATUS_VARIABLE in os.environ:
        return Path(os.environ[STATUS_VARIABLE])
    step = "-".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return user_cache_folder() / "steps" / f"{place.launcher}-{step}"


def close_rendezvous(place: Placement) -> None:
    """Remove the folder in the user's cache in which this step's ranks have met, where there is one."""
    if place.rank == 0 and place.size > 1 and STATUS_VARIABLE not in os.environ:
        from hpcdl.comm.tcp.communicator import RENDEZVOUS_NAMES

        remove_folder(rendezvous_dir(place), RENDEZVOUS_NAMES)


if __name__ == "__main__":
    main()
