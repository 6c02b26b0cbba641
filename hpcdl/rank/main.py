"""The work of one rank process: `python -m hpcdl.rank.main RUN_DIR`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hpcdl.cluster.deaths import hold_line
from hpcdl.cluster.environment import Placement, placement
from hpcdl.cluster.status import FOLDER, StatusReport, failed_of, report_all, report_left
from hpcdl.cluster.supervise import LAUNCH_VARIABLE, STATUS_VARIABLE
from hpcdl.comm.agree import SilentExit
from hpcdl.comm.observed import Observed, RankMonitor, observe
from hpcdl.core.errors import HpcdlError, RankError, StoppedEarly, kind_of, original
from hpcdl.core.processes.streams import StopRequest, outlive
from hpcdl.core.storage.lock import writing
from hpcdl.rank.job import run_rank
from hpcdl.rank.start import (
    ALONE,
    FIRST_WORD_S,
    communicator_for,
    leave,
    set_up_process,
    surviving,
    wait_for_the_others,
)
from hpcdl.run import rundir
from hpcdl.run.ended import one_line, verdict
from hpcdl.run.plan import prepare
from hpcdl.run.shrink import VARIABLE, shrunk_of
from hpcdl.supervision.watchdog import FOLDER as WATCH_FOLDER
from hpcdl.supervision.watchdog import STALL_TIMEOUT_S, Actions, Limits, Watchdog, leave_without_lost, watching


def main() -> None:
    """Entry point of a training rank."""
    StopRequest().install()  # first of all: until a handler is there, a signal kills this rank without a report
    run_dir = Path(sys.argv[1])

    def body(communicator: Observed, watch: Watchdog) -> None:
        resolved, _ = rundir.read(run_dir)
        # The next start waits for this lock until rank 0 has ended (`rundir.written`).
        with writing(run_dir / FOLDER) if communicator.rank == 0 else contextlib.nullcontext():
            shrunk = shrunk_of(resolved) if VARIABLE in os.environ else None
            run_rank(prepare(resolved), communicator, run_dir, watch=watch, shrunk=shrunk)

    leave(supervised(body, _stall_timeout_s(run_dir)))


def _stall_timeout_s(run_dir: Path) -> float:
    """Return the run's timeout before its config is checked; errors in the config are reported when all ranks run."""
    try:
        return rundir.read(run_dir)[0].config.safety.stall_timeout
    except HpcdlError:
        return STALL_TIMEOUT_S


START_S = 60.0
"""Ranks may start up to this far apart, even if the timeout is shorter later."""


def _show(error: BaseException) -> None:
    if error.__traceback__ is not None:  # else it is the watchdog's message
        traceback.print_exception(error)


def supervised(
    body: Callable[[Observed, Watchdog], None],
    stall_s: float = STALL_TIMEOUT_S,
    show: Callable[[BaseException], None] = _show,
) -> int:
    """Run `body` on this rank and report every possible end of it to the starting process; returns the exit code.

    `show` prints what should appear beside an error's message.

    The rank is watched from start to end. Until the run sets its own limits the timeout is `stall_s`, but at least the
    time ranks may start apart. If other ranks were lost, MPI cannot finalize: the process then exits without it, once
    all survivors are done.
    """
    outlive("stderr")  # a launcher's log on a full disk must not keep this rank from ending the others
    rank_place = placement() or ALONE
    folder = Path(os.environ[STATUS_VARIABLE]).absolute()  # a script may change its working directory
    launch = os.environ.get(LAUNCH_VARIABLE, "")
    report, reported = StatusReport(folder=folder, rank=rank_place.rank, line=hold_line(launch)), list[str]()
    try:
        report.publish("running")  # signals reach this rank from here on; those that came before are delivered at once
        set_up_process(rank_place.local_rank)
        failed, communicator = _watched(
            body, report, reported, rank_place, folder / WATCH_FOLDER / launch, stall_s, show
        )
    except HpcdlError as error:  # a signal, before the code that ends the other ranks runs
        state, exit_code = verdict(error)
        if not reported:
            report.publish(state, exit_code=exit_code, message=one_line(error))
        return exit_code
    if failed is not None:
        return failed
    assert communicator is not None
    report.publish("done")
    leave_without_lost(communicator)
    return 0


def _watched(
    body: Callable[[Observed, Watchdog], None],
    report: StatusReport,
    reported: list[str],
    process: Placement,
    signs: Path,
    stall_s: float,
    show: Callable[[BaseException], None],
) -> tuple[int | None, Observed | None]:
    """Run `body` under a watchdog with heartbeat files in `signs`. Return the exit code of a failure, and the world.

    `reported` gets the failure's state once the starting process is informed of it.
    """
    folder = report.folder
    communicator: Observed | None = None

    def end(error: RankError) -> None:
        show(error)
        report.publish("failed", exit_code=error.exit_code, message=str(error), of=error)
        sys.stderr.write(f"hpcdl: {error}\n")
        if communicator is not None:
            with contextlib.suppress(HpcdlError):  # a single rank has no others to end
                communicator.abort(error.exit_code)
        # The watchdog's thread calls this, and sys.exit would end that thread alone.
        os._exit(error.exit_code)

    monitor = RankMonitor(process.rank, process.size, os.uname().nodename)
    actions = Actions(end=end, on_lost=partial(report_left, folder), failed=partial(failed_of, folder))
    watch = Watchdog(monitor=monitor, folder=signs, actions=actions)
    watch.limits = Limits(stall_s=max(stall_s, START_S))
    with watching(watch):
        try:
            with monitor.waiting_for("starting MPI", hidden=True):
                communicator = observe(communicator_for(process), monitor)
            processes = _met(communicator, watch, folder)
            body(communicator, watch)
            watch.accuses = False  # this rank is done: the others may take any time to get here
            _done_together(communicator, lambda: report_all(folder, "done", processes))
        except BaseException as error:  # noqa: BLE001  on any error the other ranks must not wait for this one
            state, exit_code = verdict(error)
            reported.append(state)
            publish = partial(
                report.publish, state, exit_code=exit_code, message=one_line(error), grows=_grows(error),
                kind=kind_of(error),
            )  # fmt: skip
            # One file for all: a thousand ranks that stop alike would write a thousand.
            publish(filed=None if state != "stopped" else monitor.leads)
            if state == "stopped":
                if not wait_for_the_others(communicator):
                    publish(filed=True)
                return exit_code, communicator
            show(error)
            if isinstance(error, SilentExit):  # rank 0 has the message, and must not be ended while it prints it
                time.sleep(FIRST_WORD_S)
            if communicator is not None:
                with contextlib.suppress(HpcdlError):  # a single rank has no others to end
                    communicator.abort(exit_code)
            return exit_code, communicator
    return None, communicator


def _grows(error: BaseException) -> bool:
    """Whether this rank stopped so that the run can restart with more ranks."""
    cause = original(error)
    return isinstance(cause, StoppedEarly) and cause.grows


def _met(communicator: Observed, watch: Watchdog, folder: Path) -> list[tuple[str, int]]:
    """Return host and process id of each rank. The watchdog gets the host names, and rank 0 notes that all run."""
    processes: list[tuple[str, int]] = communicator.allgather_json((communicator.host, os.getpid()))
    watch.hosts = {rank: host for rank, (host, _) in enumerate(processes)}
    if communicator.rank == 0:
        report_all(folder, "running", processes)
    return processes


def _done_together(communicator: Observed, note: Callable[[], None]) -> None:
    """Return once all ranks are done and rank 0 has noted it: how a process exits after that is no failure."""
    survivors = surviving(communicator)
    survivors.barrier()
    if survivors.rank == 0:  # between the barriers: all have got here, and none has exited yet
        note()
    with contextlib.suppress(HpcdlError):
        survivors.barrier()


if __name__ == "__main__":
    main()
