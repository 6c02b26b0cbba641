"""`hpcdl env`: packages of a user's own beside a shared installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, put, say
from hpcdl.core.paths import quoted

commands = typer.Typer(no_args_is_help=True, help="Add packages of your own to hpcdl.")


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(commands, name="env")


@commands.command(epilog="Example: hpcdl env create ~/my-env scikit-learn")
def create(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where it is made; all nodes must see it.")],
    packages: Annotated[
        list[str] | None, typer.Argument(metavar="[PACKAGE]...", help="What pip installs into it.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Make a virtual environment for packages of your own. It sees hpcdl, and all that comes with it.

    pip keeps to the versions of hpcdl's packages there, and refuses by name packages that need others.
    """
    from hpcdl.cluster.own_env import base_of, create_environment

    made = create_environment(folder, packages or [])
    base = base_of(made)
    if json:
        print_json({"folder": str(made), "base": str(base), "packages": packages or []})
        return
    put(f"{made} builds on {base}")
    if not packages:
        say("it has no packages of its own yet: none was named behind the folder")
    say(f"next: source {quoted(made / 'bin' / 'activate')}; pip then adds packages to it, and hpcdl finds them")
