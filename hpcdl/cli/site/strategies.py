"""`hpcdl strategies`: what `--strategy` takes."""

from __future__ import annotations

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, print_table, say


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: hpcdl strategies --json")(strategies)


def strategies(json: JsonFlag = False) -> None:
    """List the parallel strategies.

    With --json also their sources and what goes with them.
    """
    from hpcdl.strategies.table import listed_strategies

    strategies = listed_strategies()
    if json:
        print_json({"strategies": [info.as_json() for info in strategies]})
        return
    print_table(("strategy", "family", "what it does"), [(info.name, info.family, info.summary) for info in strategies])
    say("next: hpcdl train --strategy NAME --model lenet --data DIR --ranks N")
