"""A user's script on one rank of `hpcdl run`: `python -m hpcdl.scripts.process.script RUN_DIR SCRIPT ARGS...`."""

from __future__ import annotations

import contextlib
import os
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from hpcdl.checkpoint import folders as checkpoints
from hpcdl.checkpoint.background import BackgroundWork, way_in_script
from hpcdl.cluster.environment import placement
from hpcdl.cluster.status import FOLDER
from hpcdl.comm.observed import Observed
from hpcdl.config.schema import ScriptConfig
from hpcdl.core.errors import PACKAGED, HpcdlError, Interrupted, NotFiniteError, StoppedEarly, original
from hpcdl.core.processes.streams import caught
from hpcdl.core.storage.lock import writing
from hpcdl.faults.inject import Injection
from hpcdl.node.accelerators import GpuUse, claimed
from hpcdl.rank.main import supervised
from hpcdl.rank.start import ALONE, leave
from hpcdl.run import rundir
from hpcdl.run.ended import verdict
from hpcdl.run.listing import script_way_back
from hpcdl.scripts.process import session
from hpcdl.scripts.process.evaluations import Evaluations
from hpcdl.scripts.process.exit import (
    called_in,
    exit_code_of,
    exited,
    forks_apart,
    leave_together,
    leaving_in_order,
    show,
    speaks_first,
    users_own,
)
from hpcdl.scripts.process.group import ScriptGroup
from hpcdl.scripts.process.measure import ScriptRun, StepMeter
from hpcdl.scripts.process.undistributed import check_end, nothing_exchanged
from hpcdl.scripts.process.written import WrittenFiles
from hpcdl.supervision import runtime
from hpcdl.supervision.output import print_into
from hpcdl.supervision.watchdog import Limits, Watchdog
from hpcdl.trace.recorder import recording


def main() -> None:
    """Run the rank of a script."""
    run_dir = Path(sys.argv[1]).absolute()  # the script may change the working directory
    script, arguments = sys.argv[2], sys.argv[3:]
    log = print_into(run_dir / FOLDER, (placement() or ALONE).rank)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # mpiexec's never ends on ranks other than 0, which would wait for it

    folder: list[Path] = []

    def body(communicator: Observed, watch: Watchdog) -> None:
        folder.append(watch.folder)
        resolved, _ = rundir.read_as(ScriptConfig, run_dir)
        with writing(run_dir / FOLDER) if communicator.rank == 0 else contextlib.nullcontext():
            execute(script, arguments, resolved.config, run_dir, communicator, watch)

    def on_error(error: BaseException) -> None:
        if not folder or speaks_first(folder[0], verdict(error)[0]):
            show(error, script)
            sys.stderr.flush()
        os.dup2(log, 2)  # keep the MPI library's messages about the job's end out of the script's stderr

    try:
        stall_s = rundir.read_as(ScriptConfig, run_dir)[0].config.safety.stall_timeout
        with caught(lambda _: interrupt(run_dir)):
            exit_code = supervised(body, stall_s, on_error)
    except HpcdlError as error:  # before there is a rank to report it
        sys.stderr.write(f"hpcdl: {error}\n")
        exit_code = error.exit_code
    leave(exit_code)


def interrupt(run_dir: Path) -> NoReturn:
    """Raise the error for a signal that arrives when no hpcdl.State can save."""
    if checkpoints.list_checkpoints(run_dir / checkpoints.FOLDER):
        raise StoppedEarly("stopped by a signal before anything new could be saved; continue with --resume")
    raise Interrupted("stopped by a signal; with hpcdl.State in the script it would have saved what to resume")


def execute(
    script: str, arguments: list[str], config: ScriptConfig, run_dir: Path, communicator: Observed, watch: Watchdog
) -> None:
    """Run `script` as Python itself does, with its own folder first on the path. Collective over all ranks."""
    watch.limits = Limits(stall_s=config.safety.stall_timeout, busy_s=config.safety.busy_timeout)
    watch.hosts = dict(enumerate(communicator.allgather_json(communicator.host)))
    watch.actions.log = lambda text: print(f"hpcdl: {text}", file=sys.stderr)
    communicator.monitor.role = "script"
    injection = Injection(config.safety.inject, communicator.monitor, run_dir)
    communicator = injection.impaired(communicator)
    for name, variable in (("INTRAOP", runtime.INTRA_OP_VARIABLE), ("INTEROP", runtime.INTER_OP_VARIABLE)):
        if variable in os.environ:
            # Before the script imports TensorFlow, which reads them once; what the user has set stays.
            os.environ.setdefault(f"TF_NUM_{name}_THREADS", os.environ[variable])
    way, remarks = way_in_script(config.checkpoint.background, communicator.size)
    work = BackgroundWork(way, communicator.monitor, watch.actions.log)
    run = ScriptRun(run_dir=run_dir, config=config, script=script, meter=StepMeter(config.run.warmup_steps), work=work)
    run.warnings += remarks
    run.warnings += injection.log_lines()
    for text in rundir.changed_script(run_dir, script) if communicator.rank == 0 else []:
        run.warnings.append(text)
        watch.actions.log(f"warning: {text}")
    hosts = list(watch.hosts.values())
    group = ScriptGroup(communicator)
    folder = watch.folder if communicator.size > 1 else None
    last, written = communicator.duplicate(), WrittenFiles()
    here = session.Session(
        communicator=communicator,
        group=group,
        hosts=hosts,
        folder=folder,
        run=run,
        evaluations=Evaluations(lambda: written.number),
    )
    session.adopt(here)
    run.begin(last)
    with recording(injection.trace_beside(config.run.trace), last, run_dir):
        communicator.monitor.doing("running the script")
        # The script imports TensorFlow: whether it computes on the device is known only at the end.
        with injection, GpuUse(claimed()) as gpu:
            with _in_users_words(script), _naming_way_back(run_dir, script, arguments), written.noting():
                called = _execute(script, arguments)
            run.finish_work()
        if communicator.size > 1:
            leave_together(last, watch, called=called)
            for text in (*written.warnings(last, run_dir), *here.last_warnings(last)):
                run.warnings.append(text)
                if last.rank == 0:
                    watch.actions.log(f"warning: {text}")
        check_end()
        if not group.num_collectives and (text := nothing_exchanged(last.size)):
            run.warnings.append(text)
            if last.rank == 0:
                watch.actions.log(f"warning: {text}")
        last.monitor.recorder.quiesced(last, last=True)
    run.warnings = injection.settled(run.warnings)
    run.finish(last, gpu)


def _execute(script: str, arguments: list[str]) -> str:
    """Run the script to its end. Return the function by which it left with code 0, or "" after its last line."""
    sys.argv = [script, *arguments]
    # runpy adds to the path only for a folder or an archive.
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with forks_apart(), leaving_in_order():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if exit_code_of(leaving.code):
            raise _failure(leaving) from leaving
        return called_in(leaving)
    return ""


def _module_name(path: Path) -> str:
    """Return the name of a file of Python in its package."""
    package = [folder.name for folder in path.parents if (folder / "__init__.py").exists()] or [path.parent.name]
    return ".".join([*reversed(package), path.stem])


@contextlib.contextmanager
def _in_users_words(script: str) -> Iterator[None]:
    """Replace an error in a `tf.function` by one with the script's own line and text. Add remedies to Python's."""
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "horovod":
            check = shlex.join(["hpcdl", "run", "--from-horovod", script, "--check"])
            error.msg = f"{error.msg}: hpcdl takes its place; {check} lists the lines to change"
        raise
    except ImportError as error:
        if str(error) == "attempted relative import with no known parent package":
            error.msg = f"{error.msg}: {PACKAGED.format(module=_module_name(Path(script).resolve()))}"
        raise
    except EOFError as error:
        if error.args == ("EOF when reading a line",):  # Python's own words for input()
            error.args = (f"{error.args[0]}: ranks have no standard input; give values as arguments after the script",)
        raise
    except Exception as error:
        script_error = users_own(error)
        if script_error is error:
            raise
        raise script_error from error


@contextlib.contextmanager
def _naming_way_back(run_dir: Path, script: str, arguments: list[str]) -> Iterator[None]:
    """Add to an error about non-finite numbers how to continue from before it."""
    try:
        yield
    except Exception as error:
        cause = original(error)
        if not isinstance(cause, NotFiniteError):
            raise
        raise NotFiniteError(f"{cause}; {script_way_back(run_dir, [script, *arguments])}") from error


def _failure(leaving: SystemExit) -> HpcdlError:
    """Return the error of a script that ends itself with a code. Print its message as Python would."""
    code = exit_code_of(leaving.code)
    if not isinstance(leaving.code, int):
        sys.stderr.write(f"{leaving.code}\n")
    error = HpcdlError(exited(code, called_in(leaving)))
    error.exit_code = code
    return error


if __name__ == "__main__":
    main()
