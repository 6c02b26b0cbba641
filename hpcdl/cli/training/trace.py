"""`hpcdl trace`: the parts of the steps of a traced run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, print_table, put, say
from hpcdl.core.errors import UnknownNameError, UsageError

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories of traced runs.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Draw timelines into a page.")]
To = Annotated[
    tuple[str, Path] | None,
    typer.Option("--to", metavar="FORMAT FILE", help="Write for another viewer: perfetto, chrome or otf2 (a folder)."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("trace", epilog="Example: hpcdl trace runs/ring-4 --html trace.html")(trace)


def trace(runs: Runs, html: Html = None, to: To = None, as_json: JsonFlag = False) -> None:
    """Show what happens inside training steps. Which parts overlap, which rank waits for which, and what slows ranks.

    Every run keeps a small trace of its first ranks; hpcdl train --trace keeps more.
    """
    from hpcdl.core.storage.disk import check_output
    from hpcdl.core.storage.files import write_output
    from hpcdl.launch.traced import look_into
    from hpcdl.trace.page import page, tables
    from hpcdl.trace.viewers import VIEWERS

    if len(runs) > 1 and (html is not None or to is not None):
        raise UsageError("--html and --to go with one run only")
    if to is not None and to[0] not in VIEWERS:
        raise UnknownNameError("format of --to", to[0], VIEWERS)
    for target in filter(None, (html, to and to[1])):
        if target.is_dir() or not target.absolute().parent.is_dir():
            raise UsageError(f"cannot write {target}: give a new name in an existing folder")
        check_output(target)
    documents = []
    for run in runs:
        remarks: list[str] = []
        merged, steps, findings = look_into(run, remarks.append)
        for text in remarks:
            say(f"{run}: {text}")
        documents.append(findings.as_json())
        if html is not None:
            write_output(html, page(run.absolute().name, merged, steps, findings))
            say(f"page: {html}")
        if to is not None:
            VIEWERS[to[0]](merged, to[1])
            say(f"for {to[0]}: {to[1]}")
        if as_json:
            continue
        for heading, header, rows in tables(findings):
            put(f"\n{run}: {heading}" if len(runs) > 1 else f"\n{heading}")
            print_table(header, rows)
    if as_json:
        print_json(documents[0] if len(documents) == 1 else {"traces": documents})
