"""`hpcdl search`: find good hyper-parameters; trials run side by side, and weak ones stop early."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.options import JsonFlag, QuietFlag, SetFlag, takes_settings
from hpcdl.cli.output import Commentary, print_json, print_table, put, say
from hpcdl.config.search import SearchConfig, load_search
from hpcdl.core.errors import HpcdlError
from hpcdl.core.paths import typed
from hpcdl.core.units import counted

if TYPE_CHECKING:
    from hpcdl.config.search import SearchStudy
    from hpcdl.report.runs.searches import SearchRecord

SearchFile = Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The search; flags override it.")]
Space = Annotated[Path | None, typer.Option("--space", metavar="FILE", help="File whose [space] is searched instead.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the search whose folder is --out; nothing counts twice.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check all, and show a trial's command; start none.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the search. [searches/NAME]")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: hpcdl search search.toml --trials 30")(search)


@takes_settings(SearchConfig)
def search(
    flags: dict[str, Any],
    study: SearchFile,
    space: Space = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    out: Out = None,
    set_: SetFlag = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> None:
    """Find good hyper-parameters.

    Each trial is a fresh `hpcdl train`; its settings are proposed from the results of the others.
    """
    from hpcdl.study.jobs import find_allocation, seconds_for_runs
    from hpcdl.study.search import HyperparameterSearch, check_data, check_search, make_slots, open_search

    wanted = load_search(study, flags, set_, space)
    check_search(wanted)
    check_data(wanted)
    folder = out or Path("searches") / wanted.name
    record = open_search(folder, wanted, resume=resume)
    allocation = find_allocation(os.environ)
    if dry_run:
        _show_plan(wanted, record, len(make_slots(wanted, allocation)), json)
        return
    commentary = Commentary(quiet=quiet)
    with commentary.progress(wanted.name, wanted.plan.trials) as bar:

        def follow(state: SearchRecord, line: str) -> None:
            done = sum(trial.state != "running" for trial in state.trials)
            bar.update(done, line)
            commentary.say(f"[{done}/{wanted.plan.trials}] {line}")

        record = HyperparameterSearch(folder, wanted, record, allocation, follow, seconds_for_runs(os.environ)).run()
    if json:
        print_json(as_document(record))
    else:
        for number, command in zip(record.front, record.commands, strict=True):
            rates = ", ".join(
                f"{name} {value:.4g}"
                for name, value in zip(record.objectives, record.trial(number).values, strict=True)
            )
            put(f"{rates}: {command}")
    for doubt in record.doubts:
        commentary.say(f"warning: {doubt}")
    commentary.say(f"next: {typed('report', folder, '--out', folder / 'report')}")
    if not record.front:
        failed = [trial for trial in record.trials if trial.message]
        why = f"; trial {failed[0].number}: {failed[0].message}" if failed else ""
        raise HpcdlError(f"none of {len(record.trials)} trials finished{why}")


def _show_plan(wanted: SearchStudy, record: SearchRecord, num_slots: int, json: bool) -> None:
    from hpcdl.study.search import command_of, first_of

    plan, command = wanted.plan, command_of(wanted, first_of(wanted))
    if json:
        print_json({
            "name": wanted.name, "trials": plan.trials, "done": len(record.trials), "side_by_side": num_slots,
            "ranks": plan.ranks, "sampler": plan.sampler, "objectives": list(plan.objective),
            "space": {dimension.key: dimension.text for dimension in wanted.space}, "command": command,
        })  # fmt: skip
        return
    done = f", {len(record.trials)} of them started" if record.trials else ""
    put(f"{wanted.name}: {counted(plan.trials, 'trial')} by {plan.sampler} for {', '.join(plan.objective)}{done};"
        f" {num_slots} side by side, {counted(plan.ranks, 'rank')} each")  # fmt: skip
    print_table(("searched", "values"), [(dimension.key, dimension.text) for dimension in wanted.space])
    put(f"such as: {command}")
    say("next: the same command without --dry-run")


def as_document(record: SearchRecord) -> dict[str, Any]:
    """Return the document of --json; `best` is null if no trial finished, `front` is longer for several objectives."""
    front = [
        {
            "number": number,
            "values": dict(record.trial(number).settings),
            "objective": dict(zip(record.objectives, record.trial(number).values, strict=True)),
            "command": command,
        }
        for number, command in zip(record.front, record.commands, strict=True)
    ]
    best = dict(front[0]) if front else None
    if best is not None and len(record.objectives) == 1:
        best["objective"] = record.trial(record.front[0]).values[0]
    return {
        "trials": len(record.trials),
        "best": best,
        "importance": dict(record.importance),
        "warnings": [*record.doubts, *filter(None, [record.importance_doubt])],
        "front": front,
        "results": [vars(trial) for trial in record.trials],
        "seconds": record.seconds,
    }
