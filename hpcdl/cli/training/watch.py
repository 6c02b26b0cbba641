"""`hpcdl watch`: a live view of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdl.cli.output import put, table_lines
from hpcdl.core.processes.streams import unheard
from hpcdl.core.units import format_measure, format_rate, format_seconds

if TYPE_CHECKING:
    from hpcdl.supervision.live import RankNow, RunNow

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of a running run.")]
Once = Annotated[bool, typer.Option("--once", help="Look for as long as ranks take to answer, print, and leave.")]
LOOK_EVERY_S = 1.0
ANSWER_S = 20.0
"""Ranks look for a viewer every 15 s, and every second after one appears."""
BAR = 24
_LETTERS = "icxuo"  # in the order of a step: input, compute, x exchange, update, other
_CLEAR = "\x1b[H\x1b[J"  # to the top left corner, then everything below


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("watch", epilog="Example: hpcdl watch runs/ring-4")(watch)


def watch(run: Run, once: Once = False) -> None:
    """Show live what each rank of a run does. Its speed, its waits and the parts of its steps; Ctrl-C ends the view.

    Works from any node that sees the run directory; without a terminal it prints plain lines.
    """
    from hpcdl.supervision.live import LiveView

    view = LiveView(run)
    began_s = time.monotonic()
    clear = _CLEAR if sys.stdout.isatty() and not once else ""
    try:
        while True:
            snapshot = view.look()
            over = not snapshot.continues()
            answered = bool(snapshot.ranks) and any(rank.shares for rank in snapshot.ranks)
            if not once or over or answered or time.monotonic() - began_s > ANSWER_S:
                sys.stdout.write(clear)
                put("\n".join(lines(snapshot)))
                sys.stdout.flush()
                if once or over or unheard():
                    return
            time.sleep(LOOK_EVERY_S)
    finally:
        view.close()


def lines(now: RunNow) -> Iterator[str]:
    """Yield the view as lines."""
    facts = [now.status, f"step {now.step}" + (f" of {now.num_steps}" if now.num_steps else "")]
    if now.images_per_second:
        facts.append(format_rate(now.images_per_second, now.counted))
    if now.loss is not None:
        facts.append(f"loss {format_measure(now.loss)}")
    if now.seconds_left is not None:
        facts.append(f"{format_seconds(now.seconds_left)} left")
    yield "  ".join(facts)
    if now.ranks:
        header = ("Rank", "Host", "Steps/s", "Parts", "Does", "Waits for")
        yield from table_lines(header, [_row(rank) for rank in now.ranks])
        yield "parts: input, compute, x exchange, update, other; the slowest first"
    if now.num_ranks > len(now.ranks):
        yield f"and {now.num_ranks - len(now.ranks)} ranks more, all faster"


def _row(rank: RankNow) -> tuple[str, ...]:
    rate = "" if rank.steps_per_second is None else f"{rank.steps_per_second:.2f}"
    waits = "; ".join(f"{wait.operation} ({format_seconds(wait.age_s)})" for wait in rank.note.waits[:2])
    return str(rank.note.rank), rank.note.host, rate, bar(rank.shares), rank.note.place, waits


def bar(shares: Sequence[float]) -> str:
    """Return shares as BAR letters in all; the largest remainders fill it up."""
    counts = [int(share * BAR) for share in shares]
    by_rest = sorted(range(len(counts)), key=lambda index: shares[index] * BAR - counts[index], reverse=True)
    for index in by_rest[: max(BAR - sum(counts), 0)]:
        counts[index] += 1
    return "".join(letter * count for letter, count in zip(_LETTERS, counts, strict=False))
