"""`hpcdl run`: a user's own script on many ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hpcdl.cli.groups import GroupedCommand
from hpcdl.cli.options import ConfigFlag, SetFlag, TrustFlag, resolved, takes_settings
from hpcdl.cli.output import say
from hpcdl.config.load import Layer
from hpcdl.config.schema import ScriptConfig
from hpcdl.core.errors import UsageError
from hpcdl.core.units import format_rate


def register(app: typer.Typer) -> None:
    """Add the command; what stands behind the script belongs to the script."""
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
    config: ConfigFlag = None,
    set_: SetFlag = None,
    trust: TrustFlag = False,
) -> None:
    """Run your own script on one rank or on many.

    On this node with --ranks N, or as one rank under mpiexec or srun. What follows SCRIPT is the script's.
    """
    from hpcdl.cluster.environment import placement
    from hpcdl.cluster.modules import go_on_with
    from hpcdl.launch import script as launch

    settings = resolved(ScriptConfig, "run", flags, config, set_, below=_resumed(flags, trust))
    if settings.config.run.module is not None:
        go_on_with(settings.config.run.module, sys.argv[1:])
    words = launch.Script(path=script, arguments=arguments or [])
    place = placement()
    if place is not None:
        if prefix:
            raise UsageError(f"--prefix: {place.launcher} prints what ranks say; use its own (srun -l, mpiexec -l)")
        launch.run_inside(settings, words, place, undistributed=undistributed)
        return
    run_dir, record = launch.run_script(settings, words, prefixed=prefix, undistributed=undistributed, say=say)
    rate = f"; {format_rate(record.images_per_second, record.counted)}" if record.images_per_second else ""
    for warning in record.warnings:
        say(f"warning: {warning}")
    say(f"{run_dir}: {record.steps} steps on {record.ranks} ranks{rate}")


def _resumed(flags: dict[str, Any], trust: bool) -> list[Layer]:
    """With --resume, the settings of the run that goes on; UsageError without a folder to resume from."""
    if not flags["resume"]:
        return []
    if flags["run-dir"] is None:
        raise UsageError("--resume needs to know which run: add --run-dir DIR")
    from hpcdl.run.rundir import check_trusted, resume_layer

    check_trusted(Path(flags["run-dir"]), trust)
    return resume_layer(Path(flags["run-dir"]), ScriptConfig)
