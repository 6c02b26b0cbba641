"""`hpcdl doctor`: what is wrong on this node, before a run finds out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from hpcdl.cli.groups import completer
from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, put, say

MARKS = {"ok": "ok     ", "warning": "warning", "failure": "FAILURE"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: hpcdl doctor --data shards")(doctor)


def doctor(
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Also look at this data folder.")] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="TEXT", help="Network whose profile is looked for.", autocompletion=completer("model")
        ),
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="This check; may be repeated.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Find out what would make a run fail here.

    Python, MPI, scheduler, cores, files, memory, clocks; exit 1 if a run would fail.
    """
    from hpcdl.core.progress import progress
    from hpcdl.doctor.table import CHECKS, FAILURE, WARNING, Subject, examine

    names = only or list(CHECKS)
    for name in names:
        CHECKS.entry(name)
    done = 0
    with progress("checking", len(names)) as bar:

        def told(name: str) -> None:
            nonlocal done
            bar.update(done, name)
            done += 1

        findings = examine(Subject(data=data, model=model), names, told)
    failures = sum(finding.level == FAILURE for finding in findings)
    warnings = sum(finding.level == WARNING for finding in findings)
    if json:
        print_json({"findings": [dataclasses.asdict(finding) for finding in findings], "failures": failures})
    else:
        for finding in findings:
            put(f"{MARKS[finding.level]}  {finding.check:<13}  {finding.text}")
            if finding.remedy:
                put(f"{'':24}-> {finding.remedy}")
        say(
            f"{failures} failure(s), {warnings} warning(s); next: "
            + ("see the remedies" if failures else "hpcdl train")
        )
    if failures:
        raise typer.Exit(1)
