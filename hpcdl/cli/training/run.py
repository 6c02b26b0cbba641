"""`hpcdl run`: a user's own script on many ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from hpcdl.cli.groups import GroupedCommand
from hpcdl.cli.options import ConfigFlag, QuietFlag, SetFlag, TrustFlag, begin, resolved, takes_settings
from hpcdl.cli.output import Commentary, put, say
from hpcdl.cli.training.train import warn_of_affinity
from hpcdl.config.load import Layer
from hpcdl.config.schema import ScriptConfig
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.paths import quoted, typed
from hpcdl.core.units import counted, format_rate


def register(app: typer.Typer) -> None:
    """Add the command; words after the script belong to the script."""
    app.command(
        cls=GroupedCommand,
        context_settings={"allow_interspersed_args": False},
        epilog="Example: hpcdl run --ranks 2 mnist.py --epochs 5",
    )(run)


@takes_settings(ScriptConfig)
def run(
    flags: dict[str, Any],
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Python script that calls hpcdl.init().")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS...", help="The script's own.")] = None,
    prefix: Annotated[bool, typer.Option("--prefix", help="Begin each line with the number of its rank.")] = False,
    undistributed: Annotated[
        bool, typer.Option("--allow-undistributed", help="Let each rank train a model of its own.")
    ] = False,
    from_horovod: Annotated[
        bool, typer.Option("--from-horovod", help="With --check: list what must change in a script for Horovod.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Read SCRIPT and run nothing.")] = False,
    config: ConfigFlag = None,
    set_: SetFlag = None,
    quiet: QuietFlag = False,
    trust: TrustFlag = False,
) -> None:
    """Run your own script on one rank or on many.

    On this node with --ranks N, or as one rank under mpiexec or srun. What follows SCRIPT is the script's.
    """
    if from_horovod or check:
        _check_horovod(script, arguments or [], from_horovod=from_horovod, check=check)
        return
    from hpcdl.launch import script as launch

    settings = resolved(ScriptConfig, "run", flags, config, set_, below=_resumed(flags, trust))
    process = begin(settings, quiet=quiet)
    if process is None or process.rank == 0:
        _warn_of_late_flags(script, arguments or [], flags)
    script_call = launch.Script(path=script, arguments=arguments or [])
    if process is not None:
        if prefix:
            raise UsageError(f"--prefix: {process.launcher} prints what ranks say; use its own (srun -l, mpiexec -l)")
        launch.run_inside(settings, script_call, process, undistributed=undistributed)
        return
    commentary = Commentary(quiet=quiet)
    try:
        run_dir, record = launch.run_script(
            settings, script_call, prefixed=prefix, undistributed=undistributed, log=commentary.say
        )
    except HpcdlError as error:
        if "No module named 'horovod'" in str(error):
            say(f"next: {typed('run', '--from-horovod', script, '--check')}, which lists the lines to change")
        raise
    rate = f"; {format_rate(record.images_per_second, record.counted)}" if record.images_per_second else ""
    warn_of_affinity(record)
    ranks = counted(record.ranks, "rank")
    if record.steps:
        say(f"{quoted(run_dir)}: {counted(record.steps, 'step')} on {ranks}{rate}")
    else:
        say(f"{quoted(run_dir)}: finished on {ranks}; no steps were counted (hpcdl.State counts those of a loop)")


def _warn_of_late_flags(script: Path, arguments: list[str], flags: dict[str, Any]) -> None:
    """Warn of hpcdl's flags behind SCRIPT if the script's text does not name them: the script gets them."""
    if not script.is_file():
        return  # which is refused later
    text = script.read_text(encoding="utf-8", errors="replace").replace("_", "-")
    for name in dict.fromkeys(word.partition("=")[0] for word in arguments):
        ours = name == "-n" or (name.startswith("--") and name[2:] in flags)
        if ours and not re.search(rf"(?:^|[^\w-])-*{name.lstrip('-')}(?![\w-])", text):
            say(
                f"warning: {name} follows {script}, so it is the script's, whose text does not name it; "
                f"for hpcdl, type it before {script}"
            )


def _check_horovod(script: Path, arguments: list[str], *, from_horovod: bool, check: bool) -> None:
    """List what must still change in a script for Horovod; exit code 2 if there is anything."""
    from hpcdl.launch.script import check_script
    from hpcdl.scripts.horovod.changes import changes_in

    extra = [word for word in arguments if word != "--check"]  # it may follow SCRIPT, since nothing is run
    if not from_horovod:
        raise UsageError(
            "--check: only with --from-horovod, and before SCRIPT; type hpcdl run --from-horovod --check SCRIPT"
        )
    if extra or not (check or "--check" in arguments):
        why = f"nothing is run, so leave {' '.join(extra)} out" if extra else "it changes nothing, so add --check"
        raise UsageError(f"--from-horovod: {why}; type hpcdl run --from-horovod {script} --check")
    check_script(script)
    changes = changes_in(script)
    for change in changes:
        put(f"{script}:{change}")
    if changes:
        put(f"{script}: {counted(len(changes), 'line')} to change; then: hpcdl run --ranks 2 {script}")
        raise typer.Exit(2)
    put(f"{script}: nothing is left to change; hpcdl run --ranks 2 {script}")


def _resumed(flags: dict[str, Any], trust: bool) -> list[Layer]:
    """Return the settings of the run to continue with --resume. Raises UsageError without a folder."""
    if not flags["resume"]:
        return []
    if not flags["run-dir"]:  # empty: an unset variable of a script
        raise UsageError("--resume needs to know which run: add --run-dir DIR")
    from hpcdl.run.rundir import check_trusted, resume_layer

    check_trusted(Path(flags["run-dir"]), trust)
    return resume_layer(Path(flags["run-dir"]), ScriptConfig)
