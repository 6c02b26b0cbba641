"""`hpcdl examples`: the files for trying things out, copied to where you work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, print_table, put, say


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(epilog="Example: hpcdl examples digits my_model.py")(examples)


def examples(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="What to copy; without any, all are listed.")
    ] = None,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Copy into this folder.")] = Path(),
    json: JsonFlag = False,
) -> None:
    """List the examples that come with hpcdl, or copy some into a folder.

    A file that is there with other content is never replaced.
    """
    from hpcdl.core.pages.examples import copy_examples, list_examples

    if not names:
        found = list_examples()
        if json:
            print_json({"examples": [{"name": item.name, "summary": item.summary} for item in found]})
            return
        print_table(["example", "what it is"], [[item.name, item.summary] for item in found])
        say("next: hpcdl examples NAME copies it here")
        return
    copied = copy_examples(names, to)
    if json:
        print_json({"copied": [str(path) for path in copied]})
        return
    for path in copied:
        put(f"copied: {path}")
