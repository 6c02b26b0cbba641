"""`hpcdl doctor`: find problems of this node before a run does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdl.cli.groups import completer
from hpcdl.cli.options import JsonFlag, names_in
from hpcdl.cli.output import print_json, print_table, put, say

if TYPE_CHECKING:
    from hpcdl.doctor.survey import NodeAnswer
    from hpcdl.doctor.table import Finding

MARKS = {"ok": "ok     ", "warning": "warning", "failure": "FAILURE"}
MOST_ROWS = 32
"""Rows in the table of `--nodes`: the slowest nodes."""


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
    only: Annotated[list[str] | None, typer.Option("--only", metavar="CHECK,CHECK", help="These checks.")] = None,
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes", metavar="N|all", help="Ask so many nodes of this job instead, and say what differs between them."
        ),
    ] = "",
    json: JsonFlag = False,
) -> None:
    """Find out what would make a run fail here.

    Python, MPI, scheduler, cores, files, memory, clocks; exit 1 if a run would fail. With `--nodes all` each node of
    the job answers for itself: kernel, libraries, memory, links, and a second of work, which finds a slow one.
    """
    from hpcdl.core.errors import UsageError
    from hpcdl.core.progress import progress
    from hpcdl.doctor.nodes import survey
    from hpcdl.doctor.table import CHECKS, FAILURE, Subject, examine

    names = names_in(only) or list(CHECKS)
    for name in names:
        CHECKS.entry(name)
    subject, extra = Subject(data=data, model=model), {}
    if nodes:
        if only:
            raise UsageError("--only goes with checks of this node; --nodes has its own, and compares all")
        with progress("asking the nodes", 1):
            answers, findings = survey(subject, nodes)
        extra = {"nodes": [dataclasses.asdict(answer) for answer in answers]}
        if not json:
            _print_nodes(answers)
    else:
        done = 0
        with progress("checking", len(names)) as bar:

            def show(name: str) -> None:
                nonlocal done
                bar.update(done, name)
                done += 1

            findings = examine(subject, names, show)
    failures = sum(finding.level == FAILURE for finding in findings)
    if json:
        print_json({**extra, "findings": [dataclasses.asdict(finding) for finding in findings], "failures": failures})
    else:
        _print_findings(findings, failures)
    if failures:
        raise typer.Exit(1)


def _print_findings(findings: Sequence[Finding], failures: int) -> None:
    from hpcdl.doctor.table import WARNING

    for finding in findings:
        put(f"{MARKS[finding.level]}  {finding.check:<15}  {finding.text}")
        if finding.remedy:
            put(f"{'':26}-> {finding.remedy}")
    warnings = sum(finding.level == WARNING for finding in findings)
    next_step = "see the remedies" if failures else "hpcdl train --model lenet --data synthetic:mnist --steps 20"
    say(f"{failures} failure(s), {warnings} warning(s); next: {next_step}")


def _print_nodes(answers: Sequence[NodeAnswer]) -> None:
    """Print the slowest nodes first."""
    titles = {
        "gflops": "GFLOP/s",
        "copy-gib-s": "copy GiB/s",
        "memory-gib": "GiB",
        "free-memory-gib": "free",
        "load": "load",
    }
    slowest = sorted(answers, key=lambda answer: answer.numbers.get("gflops", 0.0))[:MOST_ROWS]
    rows = [[answer.host, *(f"{answer.numbers.get(name, 0):.1f}" for name in titles)] for answer in slowest]
    print_table(["node", *titles.values()], rows)
    put()
