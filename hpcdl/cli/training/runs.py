"""`hpcdl runs | diff | checkpoints`: list runs, compare two of them, and list the checkpoints of one."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, print_table, put, say, table_lines
from hpcdl.core.paths import quoted, typed
from hpcdl.core.units import common_unit, counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from hpcdl.report.runs.listing import ListedRun


COLUMNS = {
    "strategy": "strategy",
    "model": "model",
    "workers": "workers",
    "batch_per_rank": "batch",
    "steps": "steps",
    "accuracy": "accuracy",
    "images_per_second": "{counted}/s",
    "status": "status",
}
"""The columns of the table and their headings; values that all runs share are printed above it."""
FIRST = ("status", "strategy", "workers", "images_per_second", "accuracy")
"""Columns for a narrow terminal; the rest is printed below, in at most MOST_LINES lines."""
MOST_LINES = 3
LONGEST_VALUE = 22
FOLLOW_FROM_FACTS = ("strategy", "model", "ranks", "batch-size", "steps", "data")
"""Settings that the table already shows as facts."""

Folder = Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder of runs.", show_default=True)]
Where = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="CONDITION", help="Keep runs with KEY=VALUE or 'KEY>=X'; may be repeated."),
]
Sort = Annotated[str, typer.Option("--sort", metavar="KEY", help="Order by a column or setting.")]
Reverse = Annotated[bool, typer.Option("--reverse", help="Largest, or latest, first.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command(epilog="Example: hpcdl runs runs --where strategy=ring --sort accuracy --reverse")(runs)
    app.command(epilog="Example: hpcdl diff runs/20260314-lenet-ring runs/20260315-lenet-ps")(diff)
    app.command(epilog="Example: hpcdl checkpoints runs/20260314-lenet-ring")(checkpoints)


def runs(
    folder: Folder = Path("runs"),
    where: Where = None,
    sort: Sort = "started-at",
    reverse: Reverse = False,
    json: JsonFlag = False,
) -> None:
    """List runs and the settings in which they differ."""
    from hpcdl.report.runs.listing import list_runs, ordered, selected, varying_settings

    listed, unreadable = list_runs(folder)
    shown = ordered(selected(listed, where or []), sort, descending=reverse) if listed else []
    for line in unreadable:
        say(f"warning: {line}")
    if json:
        rows = [{"name": run.name, "path": str(run.path), **run.facts, "settings": dict(run.settings)} for run in shown]
        print_json({"runs": rows, "unreadable": unreadable})
        return
    settings = [key for key in varying_settings(shown) if key not in FOLLOW_FROM_FACTS]
    _print_runs(shown, settings)
    say(f"{len(shown)} of {len(listed)} runs" if len(shown) != len(listed) else counted(len(listed), "run"))
    if len(shown) > 1:
        say(f"next: {typed('diff', shown[0].path, shown[-1].path)}, or {typed('report', folder)}")


def _print_runs(shown: Sequence[ListedRun], settings: Sequence[str]) -> None:
    from hpcdl.report.runs.listing import as_text

    screen = shutil.get_terminal_size().columns
    unit = common_unit(run.value("counted") for run in shown if run.value("images_per_second") is not None)
    titles = {key: title.format(counted=unit) for key, title in COLUMNS.items()}
    columns = {title: [as_text(run.value(key)) for run in shown] for key, title in titles.items()}
    steps = titles["steps"]
    columns[steps] = [text if text != "0" else "" for text in columns[steps]]  # none were counted
    columns |= {key: [as_text(run.settings.get(key)) for run in shown] for key in settings}
    common = {title: cells[0] for title, cells in columns.items() if len(shown) > 1 and len(set(cells)) == 1}
    if shared := ", ".join(f"{title} {cell}" for title, cell in common.items() if cell):
        put(textwrap.fill(f"all: {shared}", screen, subsequent_indent="    ", break_on_hyphens=False))
    varying = {title: cells for title, cells in columns.items() if title not in common}
    names = [run.name for run in shown]
    if max(map(len, table_lines(["run", *varying], _rows(names, varying)))) <= screen:
        print_table(["run", *varying], _rows(names, varying))
        return
    first = {titles[key]: varying[titles[key]] for key in FIRST if titles[key] in varying}
    remaining = {title: cells for title, cells in varying.items() if title not in first}
    put("\n".join(_stacked(names, first, remaining, screen)))


def _rows(names: Sequence[str], columns: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    return list(zip(names, *columns.values(), strict=True))


def _stacked(
    names: Sequence[str], first: Mapping[str, Sequence[str]], rest: Mapping[str, Sequence[str]], screen: int
) -> list[str]:
    """Return lines of `screen` characters: a row of the main columns for each run, its other values below.

    A name that leaves no room for its row is printed above it.
    """
    header, *rows = table_lines(["run", *first], _rows(names, first))
    above = max(map(len, [header, *rows])) > screen
    if above:
        header, *rows = table_lines(["", *first], _rows([""] * len(names), first))
    lines = [header]
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        lines += [name, row] if above else [row]
        values = ", ".join(f"{title} {cells[number]}" for title, cells in rest.items() if cells[number])
        lines += textwrap.wrap(
            values, screen, initial_indent="    ", subsequent_indent="    ", max_lines=MOST_LINES, placeholder=" ...",
            break_on_hyphens=False,
        )  # fmt: skip
    return lines


def diff(first: RunArgument, second: RunArgument, json: JsonFlag = False) -> None:
    """Compare two runs: settings, software, then results."""
    from hpcdl.report.runs.listing import differences

    compared = differences(first, second)
    if json:
        print_json(
            {"differences": [dataclasses.asdict(difference) | {"ratio": difference.ratio} for difference in compared]}
        )
        return
    if not compared:
        put("no difference in settings, software or results")
        return
    rows: list[tuple[Any, ...]] = [
        (difference.kind, difference.key, *_short(*map(difference.shown, (difference.first, difference.second))),
         "" if difference.ratio is None else f"x {difference.ratio:.3g}")
        for difference in compared
    ]  # fmt: skip
    put(f"first: {quoted(first)}\nsecond: {quoted(second)}")
    print_table(("kind", "what", "first", "second", "ratio"), rows)
    if any(difference.ratio is not None for difference in compared):
        say("one run each: runs of one setting differ too; `hpcdl report` of three or more of each says by how much")
    say(f"next: {typed('report', first, second, '--out', 'report')}")


def _short(first: str, second: str) -> tuple[str, str]:
    """Return two values shortened for a table: to their ends, or to where they begin to differ if these are equal."""
    shown = [text if len(text) <= LONGEST_VALUE else f"...{text[3 - LONGEST_VALUE :]}" for text in (first, second)]
    if shown[0] == shown[1] and first != second:
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        start = max(0, len(list(alike)) - LONGEST_VALUE // 2)
        cut = [f"{'...' * (start > 0)}{text[start:]}" for text in (first, second)]
        shown = [text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..." for text in cut]
    return shown[0] or "-", shown[1] or "-"


def checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    json: JsonFlag = False,
) -> None:
    """List a run's checkpoints, and check every file."""
    from hpcdl.core.records.run_record import FINISHED, state_of
    from hpcdl.run.listing import listed, require_whole, ways_on

    entries = listed(run)
    if json:
        rows = [{**vars(checkpoint), "path": str(checkpoint.path), "whole": checkpoint.whole} for checkpoint in entries]
        print_json({"run": str(run), "checkpoints": rows})
    elif not entries:
        kept = "has finished and kept none" if state_of(run) == FINISHED else "has no checkpoint yet"
        put(f"{quoted(run)} {kept}")
    else:
        print_table(
            ("step", "epoch", "age", "size", "level", "state"),
            [
                (
                    str(checkpoint.step),
                    "" if checkpoint.epoch is None else f"{checkpoint.epoch:.2f}",
                    format_seconds(checkpoint.age_seconds),
                    format_bytes(checkpoint.bytes),
                    checkpoint.level,
                    "whole" if checkpoint.whole else "damaged",
                )
                for checkpoint in entries
            ],
        )
    require_whole(entries)
    if entries and not json and (commands := ways_on(run)):
        say(f"next: {', or '.join(commands)}")
