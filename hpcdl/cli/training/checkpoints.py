"""`hpcdl checkpoints`: what a run can go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, print_table, put, say
from hpcdl.core.paths import quoted, typed
from hpcdl.core.units import format_bytes, format_seconds


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: hpcdl checkpoints runs/20260314-lenet-ring")(checkpoints)


def checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    json: JsonFlag = False,
) -> None:
    """List a run's checkpoints, and hold every file against its digest."""
    from hpcdl.core.records.run_state import FINISHED, state_of
    from hpcdl.run.listing import listed, require_whole

    found = listed(run)
    if json:
        rows = [{**vars(item), "path": str(item.path), "whole": item.whole} for item in found]
        print_json({"run": str(run), "checkpoints": rows})
    elif not found:
        put(f"{run} has finished and kept none" if state_of(run) == FINISHED else f"{run} has no checkpoint yet")
    else:
        print_table(
            ("step", "epoch", "age", "size", "level", "state"),
            [
                (
                    str(item.step),
                    "" if item.epoch is None else f"{item.epoch:.2f}",
                    format_seconds(item.age_seconds),
                    format_bytes(item.bytes),
                    item.level,
                    "whole" if item.whole else "damaged",
                )
                for item in found
            ],
        )
    require_whole(found)
    if found and not json:
        say(f"next: continue with --resume --run-dir {quoted(run)}, or {typed('evaluate', run, '--data', 'DIR')}")
