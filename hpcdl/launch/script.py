"""Start a user's own script on many ranks: first the checks, then the run directory, then the ranks."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.checkpoint.folders import FOLDER as CHECKPOINTS
from hpcdl.checkpoint.folders import list_checkpoints
from hpcdl.cluster import supervise as local
from hpcdl.cluster.environment import Placement
from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.limits import check_node
from hpcdl.cluster.status import FOLDER
from hpcdl.comm.agree import decided
from hpcdl.comm.observed import Observed
from hpcdl.config.load import ResolvedConfig, as_toml_values, flatten
from hpcdl.config.schema import ScriptConfig
from hpcdl.core.errors import UsageError
from hpcdl.core.paths import check_backend, own_program
from hpcdl.core.records.run_record import RunRecord, read_record
from hpcdl.core.units import SAMPLES
from hpcdl.launch.guard import guarded
from hpcdl.launch.relaunch import check_starts_ranks, until_done
from hpcdl.launch.train import (
    check_started_with,
    free_run_dir,
    interruptible,
    plan_under_profile,
    python_of_ranks,
    ranks_on_node,
    with_ranks,
)
from hpcdl.node.machines import read_topology
from hpcdl.run import rundir
from hpcdl.run.code import digests
from hpcdl.run.ended import end_noted
from hpcdl.run.faults import NETWORK, STRUCK_FROM_BESIDE, check_injected
from hpcdl.run.listing import check_going_back
from hpcdl.run.shrink import check_least, check_shrunk
from hpcdl.scripts.process.measure import KERNELS_VARIABLE
from hpcdl.scripts.process.undistributed import ALLOWED_VARIABLE
from hpcdl.strategies.refusals import check_unused
from hpcdl.supervision.output import PREFIXED_VARIABLE, Output
from hpcdl.trace.recorder import collected


@dataclass(frozen=True, kw_only=True)
class Script:
    """A Python file and its command-line arguments."""

    path: Path
    arguments: Sequence[str] = ()


def check_script(path: Path) -> None:
    """Raise UsageError if `path` is not a Python file that every rank can open."""
    if path.is_relative_to("/dev") or path.is_relative_to("/proc"):
        raise UsageError(f"{path} is this process's own, which ranks cannot read; put the script into a file")
    if not path.is_file():
        raise UsageError(f"{path} is {'a folder' if path.is_dir() else 'not there'}; name a file with a Python script")
    if path.suffix == ".ipynb":  # its JSON may also be read as Python, which does nothing
        raise UsageError(f"{path} is a notebook; make a script of it with jupyter nbconvert --to script {path}")
    try:
        ast.parse(path.read_bytes(), str(path))  # bytes: the file may declare its encoding
    except SyntaxError as error:
        raise UsageError(f"{path} is not Python: line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not Python: {error}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _check_words(script: Script) -> None:
    """Raise UsageError if the script's name or an argument is not UTF-8: no record could hold it."""
    names = ["SCRIPT", *(f"argument {number}" for number in range(1, len(script.arguments) + 1))]
    for what, word in zip(names, [str(script.path), *script.arguments], strict=True):
        # Python reads bytes that are not UTF-8 as these (PEP 383).
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UsageError(f"{what}: {word!r} is not UTF-8; rename it, or link to it under such a name")


def _kernels(config: ScriptConfig) -> dict[str, str]:
    """Return the environment variable that passes --fast-kernels to the ranks."""
    return {KERNELS_VARIABLE: config.model.fast_kernels} if config.model.fast_kernels != "off" else {}


def run_script(
    resolved: ResolvedConfig[ScriptConfig],
    script: Script,
    *,
    prefixed: bool,
    undistributed: bool,
    log: Callable[[str], None],
) -> tuple[Path, RunRecord]:
    """Run `script` on the ranks of this node or of this job's nodes, and return its directory and record.

    The output of the ranks is forwarded line by line, `prefixed` with their numbers if asked. Warnings that only the
    record holds are logged at the end. `undistributed`: each rank may train a model of its own.
    """
    check_backend()
    check_script(script.path)
    _check_words(script)
    config = resolved.config
    check_unused(None, flatten(config), resolved.origins)
    with interruptible(config.checkpoint.resume or config.checkpoint.elastic):
        launcher = find_launcher()
        check_shrunk(resolved, launcher)
        check_node(ranks_on_node(launcher, config.run))
        run_dir = _choose_run_dir(resolved, script)
        flags = {PREFIXED_VARIABLE: prefixed, ALLOWED_VARIABLE: undistributed}
        variables = {name: "1" for name, is_set in flags.items() if is_set} | _kernels(config)
        name, topology = script.path.stem, read_topology()
        remarks = plan_under_profile(config.run, name, topology, ranks_on_node(launcher, config.run))[1]
        with rundir.begun(run_dir, _another(config, script), config.checkpoint) as place:
            run_dir = place.run_dir
            facts = _facts(script, run_dir)
            rundir.create(run_dir, resolved, facts)
            for text in remarks:
                log(text)
            output = Output(run_dir / FOLDER, prefixed=prefixed)
            arguments = [str(run_dir), str(script.path), *script.arguments]

            def warn(text: str) -> None:
                log(f"warning: {text}")

            def launch(now: ResolvedConfig[ScriptConfig], environment: Mapping[str, str]) -> None:
                share = ranks_on_node(launcher, now.config.run, environment)
                variables_of_ranks = {**variables, **environment}
                plan = plan_under_profile(now.config.run, name, topology, share, environment=variables_of_ranks)[0]
                with python_of_ranks(launcher, now.config.run, plan) as python:
                    command = own_program("hpcdl.scripts.process.script", *arguments, python=python)
                    local.start(launcher, plan, command, folder=run_dir / FOLDER, tick=output.forward, warn=warn)

            unstarted = functools.partial(_unstarted, resolved, script)
            with end_noted(run_dir, unstarted), guarded(run_dir), collected(run_dir), contextlib.closing(output):
                until_done(launch, launcher, run_dir, resolved, facts, log)
    record = read_record(run_dir)
    for warning in record.warnings:
        if warning not in output.warnings:
            log(f"warning: {warning}")
    return run_dir, record


def _default(script: Script) -> Path:
    return rundir.default_run_dir(script.path.name, "script")


def _another(config: ScriptConfig, script: Script) -> Callable[[], Path] | None:
    """Return what chooses another run directory than one just taken; None if the user named it."""
    return None if config.run.run_dir else functools.partial(_default, script)


def _choose_run_dir(resolved: ResolvedConfig[ScriptConfig], script: Script) -> Path:
    config = resolved.config
    check_injected(resolved, [*STRUCK_FROM_BESIDE, *NETWORK], "not in a script, which can do that itself")
    named = config.run.run_dir
    run_dir = free_run_dir(named) if named else _default(script)
    rundir.check_place(run_dir, config.checkpoint)
    check_going_back(run_dir, config.checkpoint)
    if (run_dir / rundir.CONFIG_FILE).exists():
        began = rundir.read_as(ScriptConfig, run_dir)[1][rundir.SCRIPT]
        if Path(began).name != script.path.name:
            raise UsageError(
                f"--resume: {run_dir} began with {began}, not with {script.path}; choose another --run-dir"
            )
    return run_dir


def _unstarted(resolved: ResolvedConfig[ScriptConfig], script: Script) -> RunRecord:
    """Return the record of a run that ended before its ranks wrote one."""
    ranks = resolved.config.run.ranks
    return RunRecord(
        strategy="script",
        model=script.path.stem,
        data="",
        counted=SAMPLES,
        ranks=ranks,
        workers=ranks,
        batch_per_rank=None,
        global_batch=None,
        config={**as_toml_values(resolved.config), "script": str(script.path)},
    )


def _facts(script: Script, run_dir: Path) -> dict[str, object]:
    """Return the facts for run.toml; the script's digests stay noted as they were when its checkpoints began."""
    resumes = (run_dir / rundir.CONFIG_FILE).exists() and list_checkpoints(run_dir / CHECKPOINTS)
    begun = rundir.read_as(ScriptConfig, run_dir)[1].get(rundir.CODE) if resumes else None
    code = begun or digests([str(script.path)])
    return {rundir.SCRIPT: str(script.path), "arguments": list(script.arguments), rundir.CODE: code}


def run_inside(
    resolved: ResolvedConfig[ScriptConfig], script: Script, process: Placement, *, undistributed: bool
) -> None:
    """Run `script` as one rank of the launcher that started this process. Collective: every rank must call it."""
    check_backend()
    if undistributed:
        os.environ[ALLOWED_VARIABLE] = "1"
    os.environ.update(_kernels(resolved.config))
    from hpcdl.core.processes.streams import caught
    from hpcdl.rank.start import Joined, as_rank
    from hpcdl.scripts.process.exit import speaks_first
    from hpcdl.scripts.process.script import execute, interrupt
    from hpcdl.supervision.watchdog import FOLDER as WATCH_FOLDER

    resolved = with_ranks(resolved, process)
    config = resolved.config
    check_least(resolved)
    check_unused(None, flatten(config), resolved.origins)
    check_starts_ranks(config.checkpoint.elastic, process.launcher)
    check_started_with(config.run, process.launcher)
    with contextlib.ExitStack() as held:

        def decide() -> tuple[str, str]:
            check_script(script.path)
            _check_words(script)
            run_dir = _choose_run_dir(resolved, script)
            run_dir = held.enter_context(rundir.begun(run_dir, _another(config, script), config.checkpoint)).run_dir
            rundir.create(run_dir, resolved, _facts(script, run_dir))
            return str(run_dir), uuid.uuid4().hex

        def agree(communicator: Observed) -> Joined:
            folder, word = decided(communicator, decide)
            run_dir = Path(folder).absolute()  # the script may change the working directory
            watch_folder = run_dir / FOLDER / WATCH_FOLDER / word
            may_speak = functools.partial(speaks_first, watch_folder)
            return Joined(watch_folder=watch_folder, run_dir=run_dir, may_speak=may_speak)

        with as_rank(process, agree) as (communicator, watchdog, joined):
            run_dir = joined.run_dir
            assert run_dir is not None
            with caught(lambda _: interrupt(run_dir)):
                execute(str(script.path), list(script.arguments), config, run_dir, communicator, watchdog)
