"""`hpcdl certify`: test which faults the installation survives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.groups import completer
from hpcdl.cli.options import JsonFlag, QuietFlag, names_in
from hpcdl.cli.output import Commentary, print_json, put, say
from hpcdl.core.units import format_seconds

if TYPE_CHECKING:
    from hpcdl.bench.certify import Trial


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: hpcdl certify --strategy ring,async-easgd --tries 3")(certify)


def certify(
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="Nodes of this job that must take part.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", metavar="N", min=3, help="Ranks of each run. [3, or two for each node]"),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            metavar="NAME,NAME",
            help="Strategies. By default ring, ps and async-easgd.",
            autocompletion=completer("strategy"),
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="NAME", help="Only this one, such as 'slow link'; may be repeated."),
    ] = None,
    tries: Annotated[int, typer.Option("--tries", metavar="N", min=1, help="Runs of each fault.")] = 1,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the card and its runs.")] = Path("card"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the card in --out: run what it lacks.")] = False,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> None:
    """Find out which failures this installation survives.

    It injects faults into small trainings, one after another. A card shows which of them continued, and the cost.
    """
    from hpcdl.bench.certify import FAULTS, Plan, document_of, earlier_trials, faults_in, try_out, write_card

    commentary = Commentary(quiet=quiet)
    plan = Plan(
        strategies=names_in(strategy) or ["ring", "ps", "async-easgd"],
        faults=[name for text in fault or () for name in faults_in(text)] or [*FAULTS],
        tries=tries,
        num_ranks=ranks or max(3, 2 * (nodes or 1)),
        out=out,
    )
    num_cases = len(plan.cases())
    earlier = earlier_trials(plan, nodes, resume=resume)
    done = 0
    with commentary.progress("certifying", num_cases) as bar:

        def show(what: str) -> None:
            nonlocal done
            bar.update(done, what)
            done += 1

        trials = try_out(plan, earlier, show, lambda trial: commentary.say(_ended(trial)))
    document = document_of(plan, trials)
    card = write_card(plan, trials)
    if json:
        print_json(document)
    else:
        _show(document, trials)
        commentary.say(f"next: look at {card}, and keep it beside {card.with_name('card.json')}")


def _ended(trial: Trial) -> str:
    """Return one line for a completed trial, so that the result of each is visible during hours of trials."""
    lasted = "" if trial.recover_s is None else f", continued after {format_seconds(trial.recover_s)}"
    cost = f"{lasted}, {trial.steps_lost} steps lost" if trial.struck else ""
    how = f"survived{cost}" if trial.survived else "did not survive" if trial.counts else "never struck: no try"
    return f"{trial.strategy}, {trial.fault}: {how}"


def _show(document: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    """Print the table, then the failed trials and those that were not tried."""
    from hpcdl.bench.certify import HEADINGS, lines_left_out, rows_of

    for row in (HEADINGS, *rows_of(document)):
        put(f"{row[0]:<26}  {row[1]:<14}  {row[2]:<9}  {row[3]:<15}  {row[4]}")
    for trial in trials:
        if not trial.survived:
            say(f"{trial.strategy}, {trial.fault}: {trial.said or 'the fault never struck; --resume tries it again'}")
    for line in lines_left_out(document):
        say(f"not tried: {line}")
