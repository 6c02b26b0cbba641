"""`hpcdl jobs` and `hpcdl cancel`: list submitted jobs and their progress, request more workers, end a job."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, print_table, put, say
from hpcdl.core.errors import UsageError
from hpcdl.core.paths import quoted, typed
from hpcdl.core.units import format_measure, format_rate

if TYPE_CHECKING:
    from hpcdl.cluster.batch.jobs import JobView


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command(epilog="Example: hpcdl jobs 4711; hpcdl jobs grow runs/mine")(jobs)
    app.command(epilog="Example: hpcdl cancel 4711")(cancel)


GROW = "grow"


def jobs(
    number: Annotated[
        str | None,
        typer.Argument(metavar="[JOB|grow]", help="One job; by default the newest ones. `grow RUN` asks for workers."),
    ] = None,
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN|JOB]", help="With grow: a run directory, or the number of its job.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="So many of the newest jobs.")] = 10,
    json: JsonFlag = False,
) -> None:
    """Show submitted jobs and how far they are. With grow, a run starts its lost workers again.

    State, progress and the end of the log of each job of this account. `grow` is for runs with --elastic that continue
    with fewer workers: they save, and continue with as many as planned, on what can be used again.
    """
    from hpcdl.cluster.batch import jobs as submitted
    from hpcdl.cluster.batch.systems import InQueue

    if run is not None or number == GROW:
        _grow(number, run, json=json)
        return
    chosen = submitted.known_jobs()[-limit:] if number is None else [submitted.find_job(number)]
    views = [submitted.look(job) for job in chosen]
    if json:
        print_json({"jobs": [dataclasses.asdict(view) for view in views]})
        return
    if not views:
        say("no jobs yet; next: hpcdl submit --nodes 1 -- train --model lenet --data synthetic:mnist --steps 20")
        return
    header = ("job", "name", "state", "run", "nodes", "step", "speed", "loss", "log ends with")
    print_table(header, [_row(view) for view in views])
    for view in views:
        if doubt := submitted.doubt_of(view.job, InQueue(state=view.state, reason=view.reason)):
            say(f"warning: {doubt}")
    last = views[-1].job
    log = quoted(Path(last.folder) / f"log-{last.number}.txt")
    say(f"next: less {log}" + (f"; {typed('report', Path(last.run_dir))}" if last.run_dir else ""))


def _grow(word: str | None, run: str | None, *, json: bool) -> None:
    from hpcdl.cluster.batch.jobs import find_job
    from hpcdl.launch.relaunch import ask_to_grow

    if word != GROW or run is None:
        arguments = " ".join(filter(None, [word, run]))
        raise UsageError(f"hpcdl jobs {arguments}: type `hpcdl jobs grow RUN`, or `hpcdl jobs [JOB]`")
    run_dir = Path(run)
    if not run_dir.is_dir():
        run_dir = Path(find_job(run).run_dir or run)
    ask_to_grow(run_dir)
    if json:
        print_json({"asked": str(run_dir)})
        return
    put(f"asked {quoted(run_dir)} for more workers")
    say(f"next: {typed('watch', run_dir)}; the run itself says what becomes of it")


def cancel(number: Annotated[str, typer.Argument(metavar="JOB", help="Number of the job.")]) -> None:
    """End a job, which is not requeued. A run that had begun can be resumed."""
    from hpcdl.cluster.batch import jobs as submitted
    from hpcdl.cluster.batch.submission import divided
    from hpcdl.core.records.run_record import FINISHED

    job = submitted.find_job(number)
    ended = submitted.cancel(job)
    put(f"job {job.number} had ended before: {ended}" if ended else f"cancelled job {job.number}")
    if ended and submitted.look(job).run_state == FINISHED:
        say(f"next: {typed('report', Path(job.run_dir))}")
    elif job.run_dir:
        own_words, script = divided(job.command)
        command = [*own_words, *([] if "--resume" in own_words else ["--resume"]), *script]
        size = ("--nodes", job.nodes, "--ranks-per-node", job.ranks // job.nodes)
        place = Path(job.working)
        is_here = not job.working or (place.is_dir() and place.samefile(Path()))
        there = "" if is_here else f"cd {quoted(place)} && "
        say(f"next, to continue: {there}{typed('submit', *size, *job.flags, '--', *command)}")


def _row(view: JobView) -> tuple[str, ...]:
    step = "" if view.step is None else f"{view.step}/{view.steps}" if view.steps else str(view.step)
    speed = "" if view.images_per_second is None else format_rate(view.images_per_second, view.counted)
    loss = "" if view.loss is None else format_measure(view.loss)
    tail = view.log_tail if len(view.log_tail) <= 70 else view.log_tail[:67] + "..."
    state = f"{view.state}: {view.reason}" if view.reason else view.state
    return view.job.number, view.job.name, state, view.run_state, str(view.job.nodes), step, speed, loss, tail
